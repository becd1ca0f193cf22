"""vLLM itself with kvbench's methods: `make test-vllm` runs this in an environment of its own."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

import pytest
from test_vllm_requests import Checked

pytest.importorskip("vllm", reason="vLLM lives in an environment of its own: make test-vllm")
os.environ.update(VLLM_CPU_KVCACHE_SPACE="1", VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_LOGGING_LEVEL="ERROR")

from vllm import LLM, SamplingParams

from kvbench.backends.vllm.plan import Plan, vllm_options
from kvbench.config import ASSETS, ConfigError

STEPS = 8


class Served:
    """A vLLM in this process, whose worker runs one method after the other."""

    def __init__(self, dtype: str, **settings: Any) -> None:
        self.llm = LLM(
            str(ASSETS / "tiny"),
            dtype=dtype,
            enforce_eager=True,
            max_num_seqs=8,
            max_num_batched_tokens=256,
            **{"max_model_len": 1024, "enable_prefix_caching": False, **settings},
            **vllm_options("full", None),
        )

    def under(self, plan: Plan | None) -> Checked | None:
        """From now on this method runs, and every pass is checked; None: vLLM's own attention."""

        def switch(wrapper: Any) -> Checked | None:
            worker = wrapper.worker
            worker.kvbench_run(plan and asdict(plan))
            worker._requests = None if plan is None else worker._begun(plan)
            return worker._requests

        self.llm.reset_prefix_cache()
        return self.llm.collective_rpc(switch)[0]

    def tokens(self, prompts: list[list[int]], steps: int = STEPS, batch: int = 8) -> list[list[int]]:
        """What follows each prompt, greedily, so many of them at once."""
        how = SamplingParams(max_tokens=steps, temperature=0, ignore_eos=True)
        asked = [{"prompt_token_ids": prompt} for prompt in prompts]
        groups = [asked[at : at + batch] for at in range(0, len(asked), batch)]
        made = [one for group in groups for one in self.llm.generate(group, how, use_tqdm=False)]
        return [list(one.outputs[0].token_ids) for one in made]


def prompts(*lengths: int) -> list[list[int]]:
    return [random.Random(length).choices(range(300, 4000), k=length) for length in lengths]


@pytest.fixture(scope="module", autouse=True)
def checked() -> Iterator[None]:
    """The worker's requests are held, each in every pass, against itself alone."""
    with pytest.MonkeyPatch.context() as patch:
        from kvbench.backends.vllm import worker

        patch.setattr(worker, "Requests", Checked)
        yield


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def served(request: pytest.FixtureRequest, checked: None) -> Iterator[Served]:
    yield from _served(request.param)


@pytest.fixture(scope="module")
def crowded(checked: None) -> Iterator[Served]:
    """Room for some of the requests alone, and prompts that begin alike are found again."""
    room = {"num_gpu_blocks_override": 11, "block_size": 32, "max_model_len": 256}
    yield from _served("float32", **room, enable_prefix_caching=True)


def _served(dtype: str, **settings: Any) -> Iterator[Served]:
    from vllm.distributed import cleanup_dist_env_and_memory

    served = Served(dtype, **settings)
    yield served
    served.llm.llm_engine.engine_core.shutdown()
    cleanup_dist_env_and_memory()


@pytest.mark.parametrize("batch", [1, 8])
def test_full_attention_makes_the_tokens_that_vllm_makes(served: Served, batch: int) -> None:
    asked = prompts(*range(300, 240, -2))  # in chunks of 256
    served.under(None)
    expected = served.tokens(asked, batch=batch)
    served.under(Plan("full", None))
    assert served.tokens(asked, batch=batch) == expected


@pytest.mark.parametrize("method", ["quest", "topk", "streaming_llm", "snapkv", "lychee"])
def test_a_batch_selects_what_each_request_selects_alone(served: Served, method: str) -> None:
    requests = served.under(Plan(method, 64, dense_layers=(0,)))
    assert requests is not None
    served.tokens(prompts(300, 70, 33))
    assert requests.decoded == 3 * (STEPS - 1)


@pytest.mark.parametrize("method", ["full", "quest", "streaming_llm"])
def test_requests_without_room_are_preempted_and_none_leaves_anything_to_another(crowded: Served, method: str) -> None:
    requests = crowded.under(Plan(method, 48, dense_layers=(0,)))
    assert requests is not None
    first, *others = prompts(70, 61, 97, 80)
    crowded.tokens([first, *others, first[:64] + others[0]], steps=60)
    assert len(requests.alone) == 5 and requests.decoded > 60
    again = crowded.under(Plan(method, 48, dense_layers=(0,)))
    assert again is not None
    alone = crowded.tokens([first], steps=30)
    assert crowded.tokens([first], steps=30) == alone, "found in the cache, a prompt is attended alike"


def test_what_the_engine_cannot_give_is_refused_before_the_model_is_read() -> None:
    with pytest.raises(ConfigError, match="enable_prefix_caching=True: snapkv reads the prompt's last queries"):
        LLM(str(ASSETS / "tiny"), dtype="float32", enforce_eager=True, max_model_len=1024, **vllm_options("snapkv"))
