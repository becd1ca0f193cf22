"""What a loaded model and its tokenizer are called, where only their names are needed: in
annotations.
"""

from transformers import PreTrainedModel as Model
from transformers import PreTrainedTokenizerBase as Tokenizer

__all__ = ["Model", "Tokenizer"]
