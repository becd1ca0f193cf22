"""What a turn of a conversation costs with a kept KVCache, and with the whole read again.

One conversation for each method: a long first prompt of random tokens, then turns of equal length,
each with an answer of fixed length. Every turn goes through `model.generate` twice, one after the
other: with the cache of the turns before it, and with a new one. Times are of the processor, all
threads together, so that other work disturbs them little. The answers of both are compared; those
of methods that choose by the prompt may differ.

Prints one JSON object as its last line:
  kept_s, again_s       by method, CPU seconds of each turn
  ratio                 by method, of the sums over all turns but the first: again over kept
  same_tokens           by method, turns whose answers are the same
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import torch
from bench import command_line, print_result
from transformers import AutoModelForCausalLM, AutoTokenizer

from kvbench import KVCache
from kvbench.config import ASSETS

RESULT = ("kept_s", "again_s", "ratio", "same_tokens")
METHODS = ("full", "snapkv", "quest", "icecache", "pariskv")


def main() -> None:
    """Time every turn of a conversation for each method."""
    parser = command_line(
        __doc__,
        model=(str(ASSETS / "tiny"), "a folder, or a hub id"),
        dtype="float32",
        methods=list(METHODS),
        budget=256,
        context=(4096, "tokens of the first prompt"),
        turns=(10, "after the first"),
        turn=(64, "tokens of a turn"),
        answer=(16, "tokens of an answer"),
    )
    arguments = parser.parse_args()

    model = AutoModelForCausalLM.from_pretrained(arguments.model, dtype=arguments.dtype).eval()
    tokenizer = AutoTokenizer.from_pretrained(arguments.model)
    talks = {name: talk(model, tokenizer, name, arguments) for name in arguments.methods}
    print_result(
        {
            **vars(arguments),
            "model": Path(arguments.model).name,
            **{key: {name: turns[key] for name, turns in talks.items()} for key in RESULT},
        }
    )


def talk(model: Any, tokenizer: Any, name: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """What the module's docstring names, of one method."""
    random = torch.Generator().manual_seed(0)

    def random_ids(tokens: int) -> torch.Tensor:
        return torch.randint(3, len(tokenizer), (1, tokens), generator=random)

    def cache() -> KVCache:
        return KVCache(model, name, arguments.budget, tokenizer=tokenizer)

    reused, same = cache(), 0
    kept_s, again_s = list[float](), list[float]()
    length = {"max_new_tokens": arguments.answer, "min_new_tokens": arguments.answer}
    ids = random_ids(arguments.context)
    for _ in range(arguments.turns + 1):
        answers = []
        for seconds, current in ((kept_s, reused), (again_s, cache())):
            start = time.process_time()
            inputs = {"attention_mask": torch.ones_like(ids), "past_key_values": current}
            answers.append(model.generate(ids, **inputs, **length, do_sample=False))
            seconds.append(time.process_time() - start)
        same += torch.equal(*answers)
        ids = torch.cat([answers[0], random_ids(arguments.turn)], dim=1)
    ratio = sum(again_s[1:]) / sum(kept_s[1:])
    return {"kept_s": kept_s, "again_s": again_s, "ratio": ratio, "same_tokens": same}


if __name__ == "__main__":
    main()
