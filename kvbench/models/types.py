"""Names of a loaded model's and a tokenizer's class, for annotations alone."""

from transformers import PreTrainedModel as Model
from transformers import PreTrainedTokenizerBase as Tokenizer

__all__ = ["Model", "Tokenizer"]
