"""What a turn of a conversation costs with a kept KVCache, and what it costs to read the whole
again.

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

METHODS = ("full", "snapkv", "quest", "icecache", "pariskv")


def main() -> None:
    """Time every turn of a conversation for each method."""
    parser = command_line(__doc__)
    parser.add_argument("--model", default=str(ASSETS / "tiny"), help="a folder, or a hub id")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--methods", nargs="+", default=METHODS)
    parser.add_argument("--budget", type=int, default=256)
    parser.add_argument("--context", type=int, default=4096, help="tokens of the first prompt")
    parser.add_argument("--turns", type=int, default=10, help="after the first")
    parser.add_argument("--turn", type=int, default=64, help="tokens of a turn")
    parser.add_argument("--answer", type=int, default=16, help="tokens of an answer")
    arguments = parser.parse_args()

    model = AutoModelForCausalLM.from_pretrained(arguments.model, dtype=arguments.dtype).eval()
    tokenizer = AutoTokenizer.from_pretrained(arguments.model)
    talks = {name: talk(model, tokenizer, name, arguments) for name in arguments.methods}
    print_result(
        {
            **vars(arguments),
            "model": Path(arguments.model).name,
            "kept_s": {name: reused for name, (reused, _, _) in talks.items()},
            "again_s": {name: again for name, (_, again, _) in talks.items()},
            "ratio": {
                name: sum(again[1:]) / sum(reused[1:]) for name, (reused, again, _) in talks.items()
            },
            "same_tokens": {name: same for name, (_, _, same) in talks.items()},
        }
    )


def talk(
    model: Any, tokenizer: Any, name: str, arguments: argparse.Namespace
) -> tuple[list[float], list[float], int]:
    """Seconds of each turn with the cache kept and with a new one, and how many turns were answered
    alike.
    """
    random = torch.Generator().manual_seed(0)

    def random_ids(tokens: int) -> torch.Tensor:
        return torch.randint(3, len(tokenizer), (1, tokens), generator=random)

    def cache() -> KVCache:
        return KVCache(model, name, arguments.budget, tokenizer=tokenizer)

    reused, same = cache(), 0
    times: tuple[list[float], list[float]] = [], []
    ids = random_ids(arguments.context)
    for _ in range(arguments.turns + 1):
        answers = []
        for seconds, current in zip(times, (reused, cache()), strict=True):
            start = time.process_time()
            answers.append(
                model.generate(
                    ids,
                    attention_mask=torch.ones_like(ids),
                    past_key_values=current,
                    max_new_tokens=arguments.answer,
                    min_new_tokens=arguments.answer,
                    do_sample=False,
                )
            )
            seconds.append(time.process_time() - start)
        same += torch.equal(*answers)
        ids = torch.cat([answers[0], random_ids(arguments.turn)], dim=1)
    return *times, same


if __name__ == "__main__":
    main()
