"""Masks and positions that a `KVCache` is given: what they hide is hidden, or they are refused in one line."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from driver import CLOSE, SMALL, numbers
from transformers import AutoConfig, AutoModelForImageTextToText, PreTrainedModel
from zoo import SIZES, generated, inputs, random_model

from kvbench import KVCache
from kvbench.config import ConfigError

LENGTH, PADDING = 60, 12
IMAGE = 250  # the token that stands for a patch of an image


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return random_model("llama")


def ids_of(*seeds: int, length: int = LENGTH) -> torch.Tensor:
    return torch.tensor([numbers(length, seed) for seed in seeds])


def mask_of(rows: int, columns: int, *hidden: tuple[int, int, int]) -> torch.Tensor:
    """Ones, but from the second of each three numbers to the third in the row that the first one names."""
    mask = torch.ones(rows, columns, dtype=torch.int64)
    for row, first, last in hidden:
        mask[row, first:last] = 0
    return mask


# -- after the prompt --------------------------------------------------------------------------------------------------

PADDED = (1, 0, PADDING)


@pytest.mark.parametrize("width", [1, 9])
@pytest.mark.parametrize(
    ("hidden", "words"),
    [
        ([PADDED, (0, 20, 50)], "hides column 20 of row 0"),
        ([PADDED, (0, 0, 10)], "hides column 0 of row 0"),
        ([PADDED, (1, 30, 31)], "hides column 30 of row 1"),
        ([(1, 0, PADDING + 5)], f"hides column {PADDING} of row 1"),
        ([(1, 0, PADDING - 5)], "without the prompt's padding"),
        ([(1, 1, PADDING + 1)], "without the prompt's padding"),  # as many, but others
        ([], "without the prompt's padding"),
        ([PADDED, (0, LENGTH, LENGTH + 1)], f"hides column {LENGTH} of row 0, a new token"),
    ],
)
@pytest.mark.parametrize("method", ["full", "snapkv"])
def test_a_mask_that_changes_after_the_prompt_is_refused_and_changes_nothing(
    model: PreTrainedModel, method: str, hidden: Any, words: str, width: int
) -> None:
    ids, prompt = ids_of(3, 4, length=LENGTH + width), mask_of(2, LENGTH, PADDED)
    cache, other = (KVCache(model, method, SMALL) for _ in range(2))
    for each in (cache, other):
        model(ids[:, :LENGTH], attention_mask=prompt, past_key_values=each)
    right, wrong = mask_of(2, LENGTH + width, PADDED), mask_of(2, LENGTH + width, *hidden)
    with pytest.raises(ValueError, match=f"attention_mask.*{words}") as refusal:
        model(ids[:, LENGTH:], attention_mask=wrong, past_key_values=cache)
    assert "\n" not in str(refusal.value)
    after = (model(ids[:, LENGTH:], attention_mask=right, past_key_values=each).logits for each in (cache, other))
    assert torch.equal(*after)


def test_so_is_one_that_changes_between_the_chunks_of_a_prompt(model: PreTrainedModel) -> None:
    ids = ids_of(3)
    for first, second in (((0, 0, 0), (0, 45, 50)), ((0, 0, 8), (0, 0, 12)), ((0, 0, 8), (0, 0, 0))):
        cache = KVCache(model, "quest", SMALL, prompt_length=LENGTH)
        model(ids[:, :40], attention_mask=mask_of(1, 40, first), past_key_values=cache)
        with pytest.raises(ValueError, match="attention_mask"):
            model(ids[:, 40:], attention_mask=mask_of(1, LENGTH, second), past_key_values=cache)


@pytest.mark.parametrize("shape", [(1, 1, 1, LENGTH + 1), (1, 1), (1, LENGTH), (3, LENGTH + 1), None])
def test_a_mask_of_another_form_is_refused(model: PreTrainedModel, shape: Any) -> None:
    mask = {"full_attention": None} if shape is None else torch.ones(shape)
    cache = KVCache(model, "full", None)
    model(ids_of(3), past_key_values=cache)
    with pytest.raises(ValueError, match=rf"attention_mask=.*expected \[1, {LENGTH + 1}\]"):
        model(ids_of(3, length=1), attention_mask=mask, past_key_values=cache)


@pytest.mark.parametrize("dtype", [torch.bool, torch.float32, torch.int32])
def test_a_mask_of_any_type_shows_what_is_not_zero(model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Whole numbers above one, which some give to tell packed texts apart, hide nothing in transformers either."""
    ids, cache = ids_of(3, 4, length=LENGTH + 3), KVCache(model, "full", None)
    logits = []
    for columns in (LENGTH, LENGTH + 1, LENGTH + 3):
        mask = (2 * mask_of(2, columns, PADDED)).to(dtype)
        mask[:, 30:40] = 1
        new = ids[:, cache.get_seq_length() : columns]
        logits.append(model(new, attention_mask=mask, past_key_values=cache).logits)
    theirs = model(ids, attention_mask=mask_of(2, LENGTH + 3, PADDED)).logits
    ours = torch.cat(logits, dim=1)
    for row, first in ((0, 0), (1, PADDING)):
        assert (ours[row, first:] - theirs[row, first:]).abs().max() <= CLOSE * theirs.abs().max()


def test_packed_sequences_are_refused(model: PreTrainedModel) -> None:
    positions = torch.cat([torch.arange(30), torch.arange(30)])[None]
    with pytest.raises(ValueError, match="position_ids: .*packed"):
        model(ids_of(3), position_ids=positions, past_key_values=KVCache(model, "full", None))


# -- masks that are not causal everywhere ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def sees_images() -> PreTrainedModel:
    """Gemma 3, in which the tokens of an image see each other both ways."""
    text = {**SIZES, "layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": 512}
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}
    vision = {**sizes, "patch_size": 4, "image_size": 16, "model_type": "siglip_vision_model"}
    tokens = {"image_token_index": IMAGE, "mm_tokens_per_image": 16}
    config = AutoConfig.for_model("gemma3", text_config=text, vision_config=vision, **tokens)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return AutoModelForImageTextToText.from_config(config).eval().requires_grad_(False)


@pytest.mark.parametrize("method", ["full", "snapkv"])
def test_an_image_whose_tokens_see_each_other_both_ways_is_refused(sees_images: PreTrainedModel, method: str) -> None:
    ids = torch.tensor([[9, *[IMAGE] * 16, *numbers(20)]])
    given = {"pixel_values": torch.rand(1, 3, 16, 16), "token_type_ids": (ids == IMAGE).long()}
    cache = KVCache(sees_images, method, SMALL, dense_layers=())
    with pytest.raises(ConfigError, match="gemma3.*not causal.*image") as refusal:
        sees_images.generate(ids, **given, past_key_values=cache, max_new_tokens=2)
    assert "\n" not in str(refusal.value)


def test_text_that_such_a_model_reads_is_generated_from_as_ever(sees_images: PreTrainedModel) -> None:
    text, cache = ids_of(3), KVCache(sees_images, "full", None)
    options = {"token_type_ids": torch.zeros_like(text), "attention_mask": torch.ones_like(text), "do_sample": False}
    expected = sees_images.generate(text, **options, max_new_tokens=4)
    assert torch.equal(sees_images.generate(text, **options, max_new_tokens=4, past_key_values=cache), expected)


def test_a_mask_of_a_window_that_no_layer_is_given_is_none_of_the_cache_s() -> None:
    """Qwen2-MoE makes one of width 0."""
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    model = random_model("qwen2_moe", shared_expert_intermediate_size=32, **experts)
    assert generated(model, inputs(2), KVCache(model, "full", None)) == generated(model, inputs(2))


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_a_causal_model_made_to_look_both_ways_is_refused(family: str) -> None:
    model = random_model(family)
    cache = KVCache(model, "quest", SMALL)
    model.config.is_causal = False
    with pytest.raises(ConfigError, match=f"{family}: .*not causal"):
        model(ids_of(3), past_key_values=cache)
    with pytest.raises(ConfigError, match=rf"{family} has bidirectional attention \(is_causal=false\)"):
        KVCache(model)
    model.config.is_causal = True
    model(ids_of(3), past_key_values=cache)  # nothing of the refused pass is left
    assert cache.get_seq_length() == LENGTH
