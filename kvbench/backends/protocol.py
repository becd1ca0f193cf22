"""The protocol of a run: all that changes a score and is not the method, the budget or the task's
own data.

Two results may stand in one table only if their protocols have the same digest. Imports no torch.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Literal, get_args

from kvbench.config import ConfigError

if TYPE_CHECKING:
    from kvbench.budget import Accounting
    from kvbench.models.types import Tokenizer
    from kvbench.tasks import Sample

Chat = Literal["auto", "on", "off"]
Generated = Literal["free", "counted"]
Question = Literal["with", "after", "decode"]

# How tokens are drawn by default. A run id holds what is otherwise, and else nothing: greedy runs
# keep theirs.
COLDEST = 1e-6  # temperature: logits divided by much less are no longer finite
GREEDY: dict[str, float] = {"temperature": 0.0, "top_p": 1.0, "top_k": 0, "samples": 1}


@dataclass(frozen=True)
class Protocol:
    """How a run is counted and prompted.

    Attributes
    ----------
    accounting
        how the budget counts, "paper" (the published rule) or "unified" (everything attended is
        inside).
    dense_layers
        layers that attend everything: "auto" (the model's conf), "method" (the published set of the
        method), or true layer indices, kept sorted.
    chat
        use the tokenizer's chat template: "on", "off", or "auto", where the task asks for it and
        there is one.
    prefill_chunk
        prompt tokens prefilled at a time, None = all at once.
    question
        when the question is read: "with" the context, before a method compresses; "after" it has,
        all tokens at once, as a later turn of a conversation; or then token by token, as "decode"
        steps through the method.
    generated
        "free", generated tokens stay outside the budget where a method's published rule leaves
        them; "counted", they count for every method.
    temperature
        of the softmax that tokens are drawn from; 0: the likeliest is taken.
    top_p
        the fewest likeliest tokens with this probability together are drawn from.
    top_k
        so many likeliest tokens are drawn from; 0: all.
    samples
        answers to each prompt, all from one prefill.

    Raises
    ------
    ConfigError
        a value outside these, named by its key.
    """

    accounting: Accounting = "paper"
    dense_layers: Literal["auto", "method"] | Sequence[int] = "auto"
    chat: Chat = "auto"
    prefill_chunk: int | None = None
    question: Question = "with"
    generated: Generated = "free"
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    samples: int = 1

    def __post_init__(self) -> None:
        _check_choice("protocol.accounting", self.accounting, ("paper", "unified"))
        _check_choice("protocol.question", self.question, get_args(Question))
        _check_choice("protocol.generated", self.generated, get_args(Generated))
        _check_choice("protocol.chat", self.chat, get_args(Chat))
        if self.prefill_chunk is not None and (
            not _is_int(self.prefill_chunk) or self.prefill_chunk < 1
        ):
            raise ConfigError(
                f"protocol.prefill_chunk={self.prefill_chunk!r}: a number of tokens, 1 or more, or"
                " null"
            )
        if self.dense_layers not in ("auto", "method"):
            object.__setattr__(self, "dense_layers", _layers(self.dense_layers))
        self._check_drawing()

    def _check_drawing(self) -> None:
        """How tokens are drawn; 1 and 1.0 are one protocol."""
        if not _is_real(self.temperature) or not (
            self.temperature == 0 or COLDEST <= self.temperature < math.inf
        ):
            raise ConfigError(
                f"protocol.temperature={self.temperature!r}: 0 (greedy), or {COLDEST:g} and more,"
                " such as 0.6"
            )
        if not _is_real(self.top_p) or not 0 < self.top_p <= 1:
            raise ConfigError(
                f"protocol.top_p={self.top_p!r}: a probability above 0, 1 at most (all tokens)"
            )
        if not _is_int(self.top_k) or self.top_k < 0:
            raise ConfigError(
                f"protocol.top_k={self.top_k!r}: a number of tokens, 1 or more, or 0 (all)"
            )
        if not _is_int(self.samples) or self.samples < 1:
            raise ConfigError(
                f"protocol.samples={self.samples!r}: a number of answers to each prompt, 1 or more"
            )
        object.__setattr__(self, "temperature", float(self.temperature))
        object.__setattr__(self, "top_p", float(self.top_p))
        needless = next((key for key, value in self.drawn().items() if key != "temperature"), None)
        if needless and not self.temperature:
            raise ConfigError(
                f"protocol.{needless}={getattr(self, needless)}: nothing is drawn with"
                " protocol.temperature=0; set a temperature, such as 0.6"
            )

    def drawn(self) -> dict[str, float]:
        """How tokens are drawn, where that is not greedily: the fields of `GREEDY` with other
        values than there.
        """
        return {
            key: getattr(self, key) for key, value in GREEDY.items() if getattr(self, key) != value
        }

    def digest(self) -> str:
        """12 hex digits, the same for equal protocols in any process and version."""
        values = {
            key: value for key, value in asdict(self).items() if key not in GREEDY
        } | self.drawn()
        if (question := values.pop("question")) == "after":
            values["question"] = question
        # its name when there were two of them: old digests hold
        values["question_as_decode"] = question == "decode"
        return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:12]

    def dense_layers_of(
        self, auto: Sequence[int], published: Sequence[int], layers: int
    ) -> tuple[int, ...]:
        """The true indices of the dense layers of a model, sorted.

        Parameters
        ----------
        auto
            what the model's conf names.
        published
            what the method was published with.
        layers
            number of layers of the model.

        Raises
        ------
        ConfigError
            one of them is not a layer of the model.
        """
        choices = {"auto": auto, "method": published}
        chosen = (
            choices[self.dense_layers] if isinstance(self.dense_layers, str) else self.dense_layers
        )
        dense = _layers(chosen)
        outside = [layer for layer in dense if not 0 <= layer < layers]
        if outside:
            where = "" if dense == self.dense_layers else f" ({self.dense_layers})"
            raise ConfigError(
                f"protocol.dense_layers={list(dense)}{where}: the model has layers 0 to"
                f" {layers - 1}, not {outside}"
            )
        return dense

    def uses_chat(self, sample: Sample, tokenizer: Tokenizer) -> bool:
        """Whether the prompt of `sample` goes through the chat template; "auto": where the
        benchmark does and can.
        """
        if self.chat == "auto":
            return bool(sample.chat and tokenizer.chat_template)
        return self.chat == "on"

    def check_chat(self, tokenizer: Tokenizer) -> None:
        """Refuse a tokenizer that cannot do what `chat` asks for.

        Raises
        ------
        ConfigError
            chat is "on" and there is no template; "auto" then means a raw prompt (base models).
        """
        if self.chat == "on" and not tokenizer.chat_template:
            raise ConfigError(
                "protocol.chat=on: this model's tokenizer has no chat template; use auto or off"
            )


def _layers(values: object) -> tuple[int, ...]:
    if isinstance(values, str) or not isinstance(values, Sequence) or not all(map(_is_int, values)):
        raise ConfigError(
            f"protocol.dense_layers={values!r}: auto, method, or a list of layer indices"
        )
    return tuple(sorted(set(values)))


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_real(value: object) -> bool:
    return _is_int(value) or isinstance(value, float)


def _check_choice(key: str, value: object, choices: Sequence[str]) -> None:
    if value not in choices:
        raise ConfigError(f"{key}={value!r}: one of {', '.join(choices)}")
