"""Which settings of a generation leave it greedy: those of lm-eval's tasks, and those that a
model's folder ships.

lm-eval's `hf` model heeds them all, and kvbench generates from the model's own logits: what would
make another text is refused by its name.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvbench.config import ConfigError, first_line

# What a greedy text does not depend on, and what lm-eval itself sees to.
UNREAD = {
    *(
        "temperature",
        "top_k",
        "top_p",
        "min_p",
        "top_h",
        "typical_p",
        "epsilon_cutoff",
        "eta_cutoff",
    ),
    *("early_stopping", "length_penalty", "renormalize_logits", "use_cache"),
    *("until", "max_gen_toks"),
}
# What it depends on, and the value that leaves it greedy; None: no value but none.
GREEDY = {
    "do_sample": False,
    "num_beams": 1,
    "num_return_sequences": 1,
    "guidance_scale": 1.0,
    "repetition_penalty": 1.0,
    "encoder_repetition_penalty": 1.0,
    "no_repeat_ngram_size": 0,
    "encoder_no_repeat_ngram_size": 0,
    "min_length": 0,
    "min_new_tokens": 0,
    "remove_invalid_values": False,
    **dict.fromkeys(("bad_words_ids", "suppress_tokens", "begin_suppress_tokens", "sequence_bias")),
    **dict.fromkeys(
        ("forced_eos_token_id", "exponential_decay_length_penalty", "watermarking_config")
    ),
    **dict.fromkeys(("stop_strings", "max_time", "token_healing", "penalty_alpha", "dola_layers")),
}
WHY = "kvbench generates greedily from the model's own logits, by no such setting"


def refuse_settings(settings: Mapping[str, Any]) -> None:
    """Refuse settings of a text of lm-eval's with which it would be another than the greedy one,
    and unknown ones.

    Raises
    ------
    ConfigError
        names the first.
    """
    from lm_eval.models.utils import normalize_gen_kwargs

    try:
        normal = normalize_gen_kwargs(dict(settings))
    except (TypeError, ValueError) as error:  # a length or a temperature that is no number
        raise ConfigError(f"--gen_kwargs: {first_line(error)}") from error
    if (length := normal["max_gen_toks"]) < 1:
        raise ConfigError(f"--gen_kwargs max_gen_toks={length}: expected 1 or more")
    for key, value in normal.items():
        greedy = GREEDY.get(key)
        if key not in UNREAD and value not in (None, greedy):
            right = "leave it out" if greedy is None else f"use {key}={greedy}"
            name = key if key in settings else "temperature"  # by which lm-eval decides to sample
            raise ConfigError(f"--gen_kwargs {name}={settings[name]!r}: {WHY}; {right}")


def refuse_shipped(shipped: Any, model: str, settings: Mapping[str, Any] | None = None) -> None:
    """Refuse what a model's generation config asks for where the settings of a text, greedy ones,
    say nothing else.

    Raises
    ------
    ConfigError
        names the first.
    """
    overridden = {"do_sample", *(settings or ())}
    for key, greedy in GREEDY.items():
        value = getattr(shipped, key, None)
        if key not in overridden and value not in (None, greedy):
            right = (
                "take it out"
                if greedy is None
                else f"--gen_kwargs {key}={greedy} turns it off, for hf too"
            )
            raise ConfigError(f"generation_config.json of {model}: {key}={value!r}: {WHY}; {right}")
