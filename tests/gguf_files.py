"""Writes tiny GGUF files, for tests: a random model of transformers, in the names and the layout of llama.cpp."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from kvbench.backends.hf.loading import byte_tokenizer

SIZE = 512  # of the vocabulary: the 256 bytes, two specials, one pair of letters, and unused ones


def random_model(kind: str = "llama", **changes: Any) -> PreTrainedModel:
    """A model of two layers with random weights, in float32 with transformers' own attention."""
    shape = {
        "vocab_size": SIZE,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 256,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "bos_token_id": 256,
        "eos_token_id": 257,
    }
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **{**shape, **changes}), dtype=torch.float32)
    for name, weight in model.named_parameters():
        if "norm" not in name:
            torch.nn.init.normal_(weight, std=0.2)  # wide enough for positions to matter
    return model.eval()


def write_gguf(
    path: Path,
    model: PreTrainedModel,
    keys: Mapping[str, Any] | None = None,
    tensors: Mapping[str, np.ndarray] | None = None,
    arch: str = "llama",
) -> Path:
    """Write a model as GGUF, with these metadata keys and tensors more or in place of its own; a None takes one out."""
    config = model.config
    metadata: dict[str, Any] = {
        f"{arch}.context_length": config.max_position_embeddings,
        f"{arch}.embedding_length": config.hidden_size,
        f"{arch}.block_count": config.num_hidden_layers,
        f"{arch}.feed_forward_length": config.intermediate_size,
        f"{arch}.rope.dimension_count": config.head_dim,
        f"{arch}.rope.freq_base": 10000.0,
        f"{arch}.attention.head_count": config.num_attention_heads,
        f"{arch}.attention.head_count_kv": config.num_key_value_heads,
        f"{arch}.attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        f"{arch}.vocab_size": config.vocab_size,
        **(keys or {}),
    }
    writer = gguf.GGUFWriter(path, arch)
    writer.add_name("tiny")
    for key, value in metadata.items():
        _add(writer, key, value)
    symbols = byte_tokenizer().convert_ids_to_tokens(list(range(256)))
    tokens = [*symbols] + ["<bos>", "<eos>", "ab"] + [f"<unused{n}>" for n in range(SIZE - 259)]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([1] * 256 + [3] * 2 + [1] + [5] * (SIZE - 259))
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(256)
    writer.add_eos_token_id(257)
    for name, weight in {**_weights(model, arch), **(tensors or {})}.items():
        if weight is not None:
            writer.add_tensor(name, weight)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if value is None:
        return
    add = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
    add.get(type(value), writer.add_array)(key, value)


def _weights(model: PreTrainedModel, arch: str) -> dict[str, np.ndarray]:
    """The weights under llama.cpp's names; Llama's queries and keys in its order of rotary pairs,
    Gemma's norms as the factors that they are."""
    config, found = model.config, {}
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[arch.upper()], config.num_hidden_layers)
    for name, weight in model.state_dict().items():
        stem, suffix = name.rsplit(".", 1)
        data = weight.float().numpy()
        if arch == "gemma3" and "norm" in stem:
            data = data + 1
        if arch == "llama" and stem.endswith(("q_proj", "k_proj")) and suffix == "weight":
            heads = config.num_attention_heads if "q_proj" in stem else config.num_key_value_heads
            data = data.reshape(heads, 2, -1, data.shape[1]).swapaxes(1, 2).reshape(data.shape)
        if name != "lm_head.weight" or not config.tie_word_embeddings:
            found[f"{names.get_name(stem)}.{suffix}"] = np.ascontiguousarray(data)
    return found
