"""Requests of 1k to 8k tokens in vLLM, with a method and with vLLM's own attention.

Runs where vLLM is (`make setup-vllm`); one engine serves all arms in turns, with the same model,
memory and scheduler:

    .venv-vllm/bin/python scripts/bench_serving.py --methods quest

The prompts of a batch are spread evenly over `--lengths` and arrive at once; those of batch 1,
four, one after the other. So a time to the first token has the wait for those before it in it, and
a time per token the chunks of prompts that are read between two of its steps, as in a server.

Prints one JSON object as its last line; by batch, of "vllm" and of each method:
  tokens_per_s                       generated tokens over the time of the whole batch
  ttft_s_p50, ttft_s_p95             over the requests of all rounds
  tpot_ms_p50, tpot_ms_p95           likewise
  ttft_s, tpot_ms                    of each request, round after round
  tokens_per_s_ratio, ttft_ratio, tpot_ratio    over those of "vllm", of medians; of the methods
                                                alone
and attended_mean (entries per KV head and step in sparse layers) of each method, and threads,
settings.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import sys
import time
from dataclasses import asdict
from typing import Any

from bench import command_line, print_result, say

from kvbench.cli.threads import wait_briefly

wait_briefly()  # as a run does, before torch is loaded
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "4")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"

import torch  # noqa: E402

from kvbench.backends.vllm.plan import Plan, vllm_options  # noqa: E402
from kvbench.config import ConfigError, fetched_folder  # noqa: E402

VLLM = "vllm"
ALONE = 4  # requests of batch 1, one after the other


def requests_of(batch: int, shortest: int, longest: int) -> list[list[int]]:
    """Prompts of lengths spread evenly, in an order of no meaning."""
    count = batch if batch > 1 else ALONE
    lengths = [shortest + (longest - shortest) * place // (count - 1) for place in range(count)]
    rng = random.Random(0)
    rng.shuffle(lengths)
    return [rng.choices(range(1000, 30_000), k=length) for length in lengths]


class VllmEngine:
    """One vLLM engine, whose requests run a method or none.

    Parameters
    ----------
    given
        of the command line.
    """

    def __init__(self, arguments: argparse.Namespace) -> None:
        options = vllm_options("full", None)  # frees no prompts: arms share the engine
        from vllm import LLM, SamplingParams

        self.how = SamplingParams(max_tokens=1 + arguments.steps, temperature=0, ignore_eos=True)
        self.steps = arguments.steps
        self.llm = LLM(
            str(fetched_folder(arguments.model)),
            dtype=arguments.dtype,
            max_model_len=arguments.lengths[1] + 1 + arguments.steps,
            max_num_batched_tokens=arguments.chunk,
            max_num_seqs=max(arguments.batches),
            enforce_eager=True,
            enable_prefix_caching=False,
            disable_log_stats=False,
            **options,
        )

    def under(self, plan: Plan | None) -> None:
        """Requests from now on run this."""
        self.llm.collective_rpc("kvbench_run", args=(plan and asdict(plan),))

    def times(self, prompts: list[list[int]], batch: int) -> dict[str, Any]:
        """Seconds to the first token and ms a token of each request, and tokens a second of all."""
        start, noted = time.perf_counter(), []
        for group in [prompts] if batch > 1 else [[prompt] for prompt in prompts]:
            requests = [{"prompt_token_ids": prompt} for prompt in group]
            noted += [
                output.metrics for output in self.llm.generate(requests, self.how, use_tqdm=False)
            ]
        seconds = time.perf_counter() - start
        return {
            "ttft_s": [metrics.first_token_latency for metrics in noted],
            "tpot_ms": [
                1e3 * (metrics.last_token_ts - metrics.first_token_ts) / self.steps
                for metrics in noted
            ],
            "tokens_per_s": len(prompts) * (1 + self.steps) / seconds,
        }

    def attended(self) -> float:
        """Entries attended, in the mean over requests."""
        audits = self.llm.collective_rpc("kvbench_reports")[0].values()
        return statistics.mean(audit["attended_mean"] for audit in audits)

    def measured(
        self, arms: dict[str, Plan | None], batch: int, options: argparse.Namespace
    ) -> dict[str, Any]:
        """Each arm's numbers of one batch, round after round in turns."""
        prompts = requests_of(batch, *options.lengths)
        turns: dict[str, list[dict[str, Any]]] = {name: [] for name in arms}
        attended = {}
        for _ in range(options.rounds):
            for name, plan in arms.items():
                self.under(plan)
                self.times([prompts[0][:300]], 1)  # of which nothing is counted
                self.under(plan)
                turns[name].append(self.times(prompts, batch))
                if plan is not None:
                    attended[name] = self.attended()
                say(f"{batch} {name} {turns[name][-1]['tokens_per_s']:.2f} tokens a second")
        reports = {name: summary(rounds) for name, rounds in turns.items()}
        for method, entries in attended.items():
            ratios = over(reports[method], reports[VLLM])
            reports[method] |= {**ratios, "attended_mean": entries}
        return reports


def summary(turns: list[dict[str, Any]]) -> dict[str, Any]:
    """One arm's numbers over its rounds."""
    report: dict[str, Any] = {
        "tokens_per_s": statistics.median(turn["tokens_per_s"] for turn in turns)
    }
    for name in ("ttft_s", "tpot_ms"):
        every = torch.tensor([value for turn in turns for value in turn[name]], dtype=torch.float64)
        for percent in (50, 95):
            report[f"{name}_p{percent}"] = float(every.quantile(percent / 100))
        report[name] = every.tolist()
    return report


def over(first: dict[str, Any], other: dict[str, Any]) -> dict[str, float]:
    """Ratios of one arm over another."""
    pairs = {
        "tokens_per_s_ratio": "tokens_per_s",
        "ttft_ratio": "ttft_s_p50",
        "tpot_ratio": "tpot_ms_p50",
    }
    return {ratio: first[name] / other[name] for ratio, name in pairs.items()}


def main() -> None:
    """Measure and print."""
    parser = command_line(
        __doc__,
        model=("smollm2-135m-instruct", "one that kvbench.cli.fetch has fetched"),
        dtype=("bfloat16", "", ("float32", "bfloat16")),
        methods=["quest"],
        budget=256,
        batches=[1, 4, 16],
        steps=(32, "tokens of a request after its first"),
        chunk=(2048, "tokens of one forward pass"),
        rounds=1,
    )
    ends = "of the shortest and longest prompt"
    parser.add_argument("--lengths", type=int, nargs=2, default=[1024, 8000], help=ends)
    options = parser.parse_args()
    try:
        arms = {VLLM: None, **{method: Plan(method, options.budget) for method in options.methods}}
        engine = VllmEngine(options)
    except ConfigError as error:
        sys.exit(f"bench_serving: {error}")
    result = {str(batch): engine.measured(arms, batch, options) for batch in options.batches}
    print_result({**result, "threads": torch.get_num_threads(), "settings": vars(options)})


if __name__ == "__main__":
    main()
