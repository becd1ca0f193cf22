"""Every causal architecture of transformers as a small random model: does kvbench run it?

Writes docs/reference/architectures.md. To run means that full attention through a `KVCache` gives
the logits that transformers gives without one, within `CLOSE` of the largest, of a left-padded
batch: of its prompt and decode steps, of a later turn, of that turn in a copy of the cache, and of
the prompt in chunks. What does not run is refused, and the page has the message.

    python scripts/architectures.py            # all of them: two minutes on a core
    python scripts/architectures.py qwen3_next # some, printed alone
"""

from __future__ import annotations

import sys
import textwrap
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from kvbench import KVCache
from kvbench.config import ConfigError, first_line
from kvbench.models.card import ModelCard

PAGE = Path(__file__).resolve().parents[1] / "docs" / "reference" / "architectures.md"
CLOSE = (
    1e-4  # of the largest logit: sums over other orders, through layers that enlarge differences
)
PROMPT, PADDING, NEW, TURN, CHUNK = 60, 17, 8, 12, 25
VOCABULARY = 260
PAD = 258

HEAD = """# Architectures

Every causal language model of transformers {version}, {all} of them, as a small random model
(`python scripts/architectures.py` writes this page): {runs} give under full attention through a
`KVCache` the logits that transformers gives, within 1e-4 of the largest, for the prompt of a
left-padded batch and its decode steps, for a later turn, for that turn in a copy of the cache, and
for the prompt in chunks; {parts} do so in part. The others are refused before anything is computed,
with the message that stands here. "No small model": transformers itself does not run the one that
the script makes.

*Layers*: what transformers' cache holds of them. A method acts on those of full attention (`full`,
`hybrid`); windows, states of linear attention and convolutions stay transformers'.

| architecture | layers | equal to transformers | why not the rest |
|---|---|---|---|
"""

# What sizes become wherever a config has one of this name.
SIZES: dict[str, Any] = {
    **dict.fromkeys(
        ("hidden_size", "n_embd", "d_model", "word_embed_proj_dim", "embedding_size"), 64
    ),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "n_inner", "shared_intermediate_size"), 96),
    **dict.fromkeys(
        (
            "num_hidden_layers",
            "n_layer",
            "num_layers",
            "n_layers",
            "decoder_layers",
            "encoder_layers",
        ),
        4,
    ),
    **dict.fromkeys(("num_attention_heads", "n_head", "num_heads", "n_heads"), 4),
    **dict.fromkeys(("head_dim", "attention_head_dim", "global_head_dim"), 16),
    **dict.fromkeys(("num_key_value_heads", "num_global_key_value_heads"), 2),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "max_seq_len"), 1024),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(
        ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "top_k"), 2
    ),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 32),
    **dict.fromkeys(("n_group", "topk_group", "n_shared_experts", "first_k_dense_replace"), 1),
    **dict.fromkeys(("sliding_window", "attention_chunk_size"), 24),
    "vocab_size": VOCABULARY,
    "kv_lora_rank": 16,
    "q_lora_rank": 24,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "index_n_heads": 2,
    "index_head_dim": 16,
    "index_topk": 16,
    **dict.fromkeys(("linear_num_key_heads", "linear_num_value_heads"), 4),
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim"), 16),
    **dict.fromkeys(("mamba_n_heads", "mamba_num_heads", "n_mamba_heads"), 8),
    **dict.fromkeys(("mamba_d_head", "mamba_head_dim", "mamba_d_state", "ssm_state_size"), 16),
    **dict.fromkeys(("mamba_n_groups", "n_groups", "mamba_ngroups"), 1),
    "lru_width": 64,
    "initializer_range": 0.2,
    "is_decoder": True,
    "use_mamba_kernels": False,
    "tie_word_embeddings": False,  # tied, random weights repeat the last token
    "pad_token_id": PAD,
    "bos_token_id": 256,
    "eos_token_id": None,
}
# What a family needs beside them; of a part of a config, by its model_type.
WINDOWED = {"sliding_window": 24, "layer_types": ["sliding_attention", "full_attention"] * 2}
MIXED = ["linear_attention", "full_attention"] * 2
EXPERTS = {"num_experts": 4, "n_routed_experts": 4, "n_shared_experts": 1}
CHANGES: dict[str, dict[str, Any]] = {
    "afmoe": {"num_dense_layers": 1, **WINDOWED},
    "cohere_compass_text": {
        **WINDOWED,
        "rope_parameters": {
            kind: {"rope_type": "default", "rope_theta": 1e4}
            for kind in ("full_attention", "sliding_attention")
        },
    },
    "cpmant": {"dim_ff": 96, "dim_head": 16},
    "ctrl": {"dff": 96},
    "dots1": EXPERTS,
    "dots3_note_text": {"per_layer_config": None},
    "falcon_h1": {"mamba_d_ssm": 128},
    "gemma2": {"query_pre_attn_scalar": 100, "attn_logit_softcapping": 1.5},
    "gemma3_text": {**WINDOWED, "query_pre_attn_scalar": 100},
    "gemma3n_text": {
        **WINDOWED,
        "num_kv_shared_layers": 2,
        "hidden_size_per_layer_input": 16,
        "vocab_size_per_layer_input": VOCABULARY,
        "intermediate_size": [96] * 4,
        "activation_sparsity_pattern": [0.0] * 4,
    },
    "gemma4_text": {
        **WINDOWED,
        "num_kv_shared_layers": 2,
        "hidden_size_per_layer_input": 16,
        "vocab_size_per_layer_input": VOCABULARY,
    },
    "gpt_neo": {"attention_types": [[["global"], 4]]},
    "gpt_oss": {**WINDOWED, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}},
    "gptj": {"rotary_dim": 8},
    "granite": {"attention_multiplier": 0.1},
    "bailing_hybrid": {"layer_types": MIXED, "n_group": 1, "topk_group": 1, "num_experts": 4},
    "bamba": {"attn_layer_indices": [1, 3]},
    "codegen": {"rotary_dim": 8},
    "granitemoehybrid": {"layer_types": MIXED},
    "inkling2_text": {
        "swa_num_attention_heads": 4,
        "swa_num_key_value_heads": 2,
        "swa_head_dim": 16,
    },
    "inkling_text": {
        "swa_num_attention_heads": 4,
        "swa_num_key_value_heads": 2,
        "swa_head_dim": 16,
        "local_layer_ids": [0, 2],
    },
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "kimi_linear": {
        "layer_types": MIXED,
        "num_experts": 4,
        "n_routed_experts": 4,
        "linear_head_dim": 16,
        "linear_num_heads": 4,
    },
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    "longcat_flash": {"ffn_hidden_size": 96, "expert_ffn_hidden_size": 32, "zero_expert_num": 2},
    "mamba2": {"num_heads": 8},
    "ministral": WINDOWED,
    "mistral": {"sliding_window": None},
    "qwen4_exp_text": {
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 16,
        "indexer_budget": 16,
        "indexer_compress_ratio": 4,
        "ngram_vocab_size_base": 300,
        "hc_lowrank": 16,
    },
    "reformer": {"axial_pos_embds": False},
    "roc_bert": {"pronunciation_embed_dim": 64, "shape_embed_dim": 64, "shape_vocab_size": 300},
    **dict.fromkeys(("plbart", "whisper"), {"decoder_attention_heads": 4}),
    "vaultgemma": {"attn_logit_softcapping": 1.5},
    "xlm": {"emb_dim": 64},
    "xmod": {"default_language": "en_XX"},
    "zamba2": {"layers_block_type": ["linear_attention", "hybrid"] * 2},
    "zaya": {"num_experts_per_tok": 1, "router_hidden_size": 32},
}
EVEN_IF_UNSAID = {
    "head_dim",
    "num_key_value_heads",
    "num_experts_per_tok",
}  # None: as many as follow from other sizes


WIDTH = 110  # of a cell of the table
STAGES = ("prompt", "copy", "turn", "chunks")


class Row(NamedTuple):
    """An architecture in the table.

    Attributes
    ----------
    name
        transformers' `model_type`.
    kinds
        of its layers' caches, as its config object says.
    ran
        those of `STAGES` that gave transformers' logits.
    reason
        why the others did not; "": all did.
    """

    name: str
    kinds: tuple[str, ...]
    ran: tuple[str, ...]
    reason: str

    def line(self) -> str:
        """Its row of the page, with the message as far as it says why."""
        kinds = ", ".join(kind.removesuffix("_attention") for kind in dict.fromkeys(self.kinds))
        ran = "all" if self.ran == STAGES else ", ".join(self.ran) or "-"
        why = self.reason.partition(";")[0].translate({ord("|"): "/", ord("`"): None})
        why = textwrap.shorten(why, WIDTH, placeholder=" ...")
        return f"| `{self.name}` | {kinds or '-'} | {ran} | {why} |"


def small_config(name: str) -> PreTrainedConfig:
    """The config of an architecture with small sizes, those of its parts too."""
    return AutoConfig.for_model(name, **_small(AutoConfig.for_model(name), name))


def _small(config: PreTrainedConfig, name: str) -> dict[str, Any]:
    known, changes = config.to_dict(), CHANGES.get(name, {})
    sizes = {
        key: size
        for key, size in SIZES.items()
        if key in known and (known[key] is not None or key in EVEN_IF_UNSAID)
    }
    if known.get("kv_lora_rank"):  # as many keys and values as queries come of one latent vector
        sizes |= {"num_key_value_heads": 4, "head_dim": 8}
    parts = {key: getattr(config, key, None) for key in config.sub_configs}
    small = {
        key: {"model_type": part.model_type, **_small(part, part.model_type)}
        for key, part in parts.items()
        if part is not None
    }
    return {**sizes, **small, "eos_token_id": None, "pad_token_id": PAD, **changes}


def random_model(config: PreTrainedConfig) -> PreTrainedModel:
    """A random model: matrices drawn at a deviation of 0.2, norms about 1."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        try:
            model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
        except ValueError:  # transformers has no other of these
            model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
        for parameter in model.parameters():
            if parameter.ndim > 1:
                torch.nn.init.normal_(parameter, std=0.2)
            else:
                parameter.data += 0.1 * torch.randn_like(parameter)
    return model.eval().requires_grad_(False)


class Trial:
    """What transformers alone generates of two texts, the second padded, and of a turn after it."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model, rng = model, torch.Generator().manual_seed(1)
        self.prompt = torch.randint(4, 250, (2, PROMPT), generator=rng)
        self.prompt[1, :PADDING] = PAD
        turn = torch.randint(4, 250, (2, TURN), generator=rng)
        out = self._generated(self.prompt)
        self.first, self.asked = torch.stack(out.logits), torch.cat([out.sequences, turn], dim=1)
        later = self._generated(self.asked, past_key_values=out.past_key_values)
        self.second = torch.stack(later.logits)

    def _generated(self, ids: Tensor, **options: Any) -> Any:
        """All tokens, and the logits that chose the new ones, NEW times [B, V]."""
        mask = torch.ones_like(ids)
        mask[1:, :PADDING] = 0
        options |= {"max_new_tokens": NEW, "do_sample": False, "pad_token_id": PAD}
        options |= {"output_logits": True, "return_dict_in_generate": True}
        return self.model.generate(ids, attention_mask=mask, **options)

    def refuse_other(self, ids: Tensor, expected: Tensor, cache: KVCache, **options: Any) -> None:
        """Refuse a cache with which other logits come out.

        Raises
        ------
        AssertionError
            says how far off they are.
        """
        logits = torch.stack(self._generated(ids, past_key_values=cache, **options).logits)
        off = float((logits - expected).abs().max() / expected.abs().max().clamp(min=1))
        assert off < CLOSE, f"logits are {off:.2g} off"

    def stages(
        self, method: str = "full", budget: int | None = None, **options: Any
    ) -> dict[str, Callable[[], None]]:
        """What is tried, in this order: each refuses logits that are not transformers'."""
        make = partial(KVCache, self.model, method, budget, dense_layers=(), **options)
        cache, pieces = make(), make(prompt_length=PROMPT)
        turn = partial(self.refuse_other, self.asked, self.second)
        return {
            "prompt": partial(self.refuse_other, self.prompt, self.first, cache),
            "copy": lambda: turn(cache.copy()),
            "turn": lambda: turn(cache),
            "chunks": lambda: self.refuse_other(
                self.prompt, self.first, pieces, prefill_chunk_size=CHUNK
            ),
        }


def trial(name: str) -> Row:
    """What an architecture comes to."""
    kinds: tuple[str, ...] = ()
    ran, reason = [], ""
    try:
        config = small_config(name)
        kinds = ModelCard.of_config(config).layer_kinds
        model = random_model(config)
        KVCache(model, "full", None)
        made = Trial(model)
    except ConfigError as error:
        return Row(name, kinds, (), first_line(error).partition(": ")[2])
    except Exception as error:
        return Row(name, kinds, (), f"no small model of it: {_words(error)}")
    stages = made.stages()
    for stage in STAGES:
        try:
            stages[stage]()
            ran.append(stage)
        except (ConfigError, AssertionError) as error:
            reason = reason or first_line(error)
    return Row(name, kinds, tuple(ran), reason)


def _words(error: Exception) -> str:
    return f"{type(error).__name__}: {first_line(error)[:120]}"


def page(rows: Sequence[Row]) -> str:
    """The whole page."""
    some = [row for row in rows if row.ran]
    head = HEAD.format(
        version=transformers.__version__,
        all=len(rows),
        runs=sum(not row.reason for row in rows),
        parts=sum(bool(row.reason) for row in some),
    )
    return head + "\n".join(row.line() for row in rows) + "\n"


def main(names: Sequence[str]) -> None:
    """Print the rows of some architectures, or write the page of all."""
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    rows = []
    for name in names or sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES):
        rows.append(trial(name))
        print(rows[-1].line(), flush=True)
    if not names:
        PAGE.write_text(page(rows))


if __name__ == "__main__":
    main(sys.argv[1:])
