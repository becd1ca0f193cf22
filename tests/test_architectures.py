"""Architectures of transformers, tiny and random, each against transformers itself: what the page says of them."""

from __future__ import annotations

import re

import pytest
import transformers
from architectures import PAGE, Trial, random_model, small_config, trial
from driver import slow

from kvbench.backends.hf.cache import KVCache
from kvbench.config import ConfigError

TEXT = PAGE.read_text()
ROWS = dict(re.findall(r"^\| `([\w-]+)` \| [^|]* \| ([^|]*) \|", TEXT, re.M))
METHODS = ["snapkv", "quest", "streaming_llm", "icecache"]
WHOLE = 500  # a budget of more than every text here
# attention that scales its queries itself; its own attention; states; states that are forgotten
QUICK = ["opt", "bloom", "qwen3_next", "jamba"]
EACH = [(name, method) for name, ran in ROWS.items() for method in METHODS if ran == "all"]
QUICK_METHODS = [("phi", "streaming_llm")]  # rotary positions of a part of each key
of_this_release = pytest.mark.skipif(
    f"transformers {transformers.__version__}," not in TEXT, reason="the page is of another release of transformers"
)


def without_numbers(line: str) -> str:
    return re.sub(r"\d[\d.e-]*", "#", line)


@of_this_release
@pytest.mark.parametrize("name", [*QUICK, *slow(*(name for name in ROWS if name not in QUICK))])
def test_an_architecture_comes_to_what_the_page_says(name: str) -> None:
    assert without_numbers(trial(name).line()) in map(without_numbers, TEXT.splitlines())


@pytest.mark.parametrize(
    ("name", "method"), [*QUICK_METHODS, *slow(*(each for each in EACH if each not in QUICK_METHODS))]
)
def test_a_method_with_room_for_everything_generates_what_transformers_generates(name: str, method: str) -> None:
    made = Trial(random_model(small_config(name)))
    try:
        stages = made.stages(method, WHOLE)
    except ConfigError as error:  # no key can be turned to another position
        assert method == "streaming_llm" and "positions=original" in str(error)
        stages = made.stages(method, WHOLE, positions="original")
    for stage in stages.values():
        stage()


@pytest.mark.parametrize("name", ["diffllama", *slow("bloom", "doge", "mamba", "recurrent_gemma")])
def test_a_refused_model_stays_as_it_was(name: str) -> None:
    model = random_model(small_config(name))
    before = model.config._attn_implementation
    with pytest.raises(ConfigError) as refusal:
        KVCache(model, "full", None, dense_layers=())
    assert type(model).__name__.removesuffix("ForCausalLM") in str(refusal.value) and "\n" not in str(refusal.value)
    assert model.config._attn_implementation == before
