"""A model and its tokenizer: from the hub, from a folder, or with random weights in a named shape.

`load` takes the composed `model` group of a run, which `kvbench.models.hub` explains. Every refusal
comes before weights are read, as one line that names the key, the value and what would be right.
The model comes back in eval mode, without gradients, and with kvbench's attention, which computes
sdpa until a `KVCache` is handed over.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from tokenizers import Tokenizer, decoders, pre_tokenizers, processors
from tokenizers.models import BPE
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GgufConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)
from transformers.utils import find_adapter_config_file
from transformers.utils.logging import (
    disable_progress_bar,
    get_verbosity,
    set_verbosity,
    set_verbosity_error,
)

from kvbench.backends.hf import spread
from kvbench.backends.hf.fused import fuse
from kvbench.backends.hf.hooks import NAME
from kvbench.backends.hf.layers import card_of
from kvbench.backends.hf.model import refuse_custom_attention, use_kvbench_attention
from kvbench.config import ConfigError, first_line
from kvbench.models import hub
from kvbench.models.card import ModelCard
from kvbench.models.digests import fingerprint
from kvbench.models.folder import stop_ids, tensor_types
from kvbench.models.gguf import read_header
from kvbench.models.prompts import is_panic, tokenizing

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

# Byte b is token id b; the three specials follow.
BOS = "<bos>"
EOS = "<eos>"
PAD = "<pad>"
BYTE_VOCABULARY = 256 + 3


# Called with the tokenizer before weights are read; what it raises ends the load.
TryOut = Callable[[PreTrainedTokenizerBase], object]


@dataclass(frozen=True)
class Loaded:
    """A model ready to run.

    Attributes
    ----------
    model
        in eval mode, no gradients, `attn_implementation="kvbench"`.
    tokenizer
        the model's own, or `byte_tokenizer()` beside random weights.
    name
        the model's name in results.
    revision
        the hub's commit, "folder-<hash>", "gguf-<hash>", what a fetched folder states, or
        "dummy-<seed>".
    card
        what its config says.
    stop_ids
        every token id that ends a generation.
    dense_layers
        layers that stay dense under `protocol.dense_layers=auto`.
    unfused
        why its layers are transformers' own; None: see `kvbench.backends.hf.fused`.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    name: str
    revision: str
    card: ModelCard
    stop_ids: tuple[int, ...]
    dense_layers: tuple[int, ...]
    unfused: str | None = "not asked for"

    @property
    def device(self) -> torch.device:
        """Where it runs, of several devices the first."""
        return self.model.device

    @property
    def devices(self) -> int:
        """How many devices it lies on."""
        return spread.devices_under(self.model)

    @property
    def dtype(self) -> torch.dtype:
        """Of its weights."""
        return self.model.dtype


class Described(NamedTuple):
    """A pretrained model before its weights are read.

    Attributes
    ----------
    where_from
        a folder or a hub id.
    settings
        with which transformers' classes read it, its commit among them.
    config
        transformers' config of it.
    card, tokenizer, revision
        as of `Loaded`.
    """

    where_from: str
    settings: dict[str, Any]
    config: PreTrainedConfig
    card: ModelCard
    tokenizer: PreTrainedTokenizerBase
    revision: str


def load(
    model: Mapping[str, Any] | hub.ModelConfig,
    device: str = "auto",
    dtype: str = "auto",
    seed: int = 0,
    try_out: TryOut = lambda tokenizer: None,
) -> Loaded:
    """The model that the `model` group of a run asks for.

    Parameters
    ----------
    model
        the group, or a mapping with its keys.
    device
        "auto" (CUDA where there is one), "cpu", "cuda", "cuda:N".
    dtype
        "auto" (bfloat16 on CUDA and where `quick_in_bfloat16`, float32 elsewhere), or a key of
        `DTYPES`.
    seed
        of random weights.
    try_out
        see `TryOut`.

    Raises
    ------
    ConfigError
        no such folder, hub id not reachable, no such device or dtype, or an unsupported model; or
        its layers cannot be fused as `model.fused` says.
    """
    config = hub.ModelConfig.of(model)
    if config.device_map is None:
        where = device_of(device)
        loaded = _load(config, where, dtype_of(dtype, where), seed, try_out)
    else:
        gpus = spread.devices_for(config.device_map)
        loaded = _load(config, torch.device("cpu"), dtype_of(dtype, gpus[0]), seed, try_out)
        spread.spread(loaded.model, spread.places_of(loaded.model, config.device_map, gpus))
    return replace(loaded, unfused=fuse(loaded.model, config.fused))


def _load(
    config: hub.ModelConfig,
    where: torch.device,
    kind: torch.dtype,
    seed: int,
    try_out: TryOut,
) -> Loaded:
    source = config.source
    if source.path is None:
        return _random(source, config.config or {}, where, kind, seed, try_out)
    if source.gguf is not None:
        model, tokenizer = read_gguf(source.gguf, kind, source.name, try_out)
        return _loaded(model.to(where), tokenizer, source, fingerprint([source.gguf], "gguf"))
    return _pretrained(source, where, kind, try_out)


def _random(
    source: hub.ModelSource,
    shape: Mapping[str, Any],
    device: torch.device,
    dtype: torch.dtype,
    seed: int,
    try_out: TryOut,
) -> Loaded:
    values, name = copy.deepcopy(dict(shape)), source.name
    if values["vocab_size"] < BYTE_VOCABULARY:
        raise ConfigError(
            f"model.config.vocab_size={values['vocab_size']}: bytes need {BYTE_VOCABULARY} or more"
        )
    tokenizer = byte_tokenizer()
    # A shape's own special ids belong to a vocabulary that is not here.
    values |= {
        f"{key}_token_id": getattr(tokenizer, f"{key}_token_id") for key in ("bos", "eos", "pad")
    }
    refused = f"model.config of {name}: transformers refuses it: "
    with _explained(lambda error: refused + error[:300]):
        model_config = AutoConfig.for_model(**values)
    config_card(model_config, name)
    try_out(tokenizer)
    # from_config builds each weight in its dtype on its device: no float32 copy of a large shape on
    # the host.
    arguments: dict[str, Any] = {"dtype": dtype, "attn_implementation": NAME}
    with _explained(lambda error: refused + error[:300]), _seeded(seed, device), device:
        model = AutoModelForCausalLM.from_config(model_config, **arguments)
    return _loaded(model, tokenizer, source, f"dummy-{seed}")


def config_card(model_config: PreTrainedConfig, name: str) -> ModelCard:
    """The card of a model that kvbench runs.

    Raises
    ------
    ConfigError
        it would run it wrong, by its config or by its class; names the model and why.
    """
    card = ModelCard.of_config(model_config, f"{name}: ")
    card.refuse_unsupported(name)
    kind = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(model_config), None)
    if isinstance(kind, type):
        refuse_custom_attention(kind, name)
    return card


@contextlib.contextmanager
def _seeded(seed: int, device: torch.device) -> Iterator[None]:
    cuda = (
        [torch.cuda.current_device() if device.index is None else device.index]
        if device.type == "cuda"
        else []
    )
    with torch.random.fork_rng(devices=cuda):
        torch.manual_seed(seed)
        yield


def describe(source: hub.ModelSource, try_out: TryOut = lambda tokenizer: None) -> Described:
    """What a folder or the hub says of a model there.

    Raises
    ------
    ConfigError
        no such folder, hub id not reachable, or an unsupported model.
    """
    folder, path = source.folder, str(source.path)
    where_from = path if folder is None else str(folder)
    # else transformers asks, and takes any "y" of stdin's
    settings: dict[str, Any] = {"trust_remote_code": False}
    if folder is None:
        hub.refuse_out_of_reach(path)
        # Without network the cache answers at once, where the hub's library would first try for
        # half a minute.
        settings["local_files_only"] = hub.out_of_reach() is not None
    else:
        stated = ModelCard.of(hub.config_in(folder, path), f"{source.name}: ")
        stated.refuse_unsupported(source.name)
    with _explained(_unreadable(path)):
        model_config = AutoConfig.from_pretrained(where_from, **settings)
        if folder is None and find_adapter_config_file(
            path, local_files_only=settings["local_files_only"]
        ):
            hub.refuse_adapter(path)
    card = config_card(model_config, source.name)
    where = folder or _snapshot(path)
    if folder is None:
        # the weights are of the commit that the results will name
        settings["revision"] = where.name
    revision = (
        where.name if folder is None and hub.is_as_downloaded(where) else hub.revision_of(where)
    )
    if not sys.stderr.isatty():
        disable_progress_bar()  # in a log file every step of the bar would be a line
    with _explained(_unreadable(path)), _silent():
        tokenizer = AutoTokenizer.from_pretrained(where_from, **settings)
        _refuse_unfit(tokenizer, path)
    with tokenizing(path):
        try_out(tokenizer)
    return Described(where_from, settings, model_config, card, tokenizer, revision)


def _pretrained(
    source: hub.ModelSource, device: torch.device, dtype: torch.dtype, try_out: TryOut
) -> Loaded:
    described, path = describe(source, try_out), str(source.path)
    with _explained(_unreadable(path)):
        model, loading_info = AutoModelForCausalLM.from_pretrained(
            described.where_from,
            config=described.config,
            dtype=dtype,
            attn_implementation=NAME,
            output_loading_info=True,
            ignore_mismatched_sizes=True,
            **described.settings,
        )
    _refuse_random_weights(loading_info, path)
    _refuse_unread(loading_info, model, path)
    if getattr(described.config, "quantization_config", None) is None:
        with _explained(_unreadable(path)):
            _refuse_whole_numbers(source.folder or _snapshot(path), model, path)
    return _loaded(model.to(device), described.tokenizer, source, described.revision)


def _refuse_random_weights(
    loading_info: Mapping[str, Any], path: str, shape: str = "config.json"
) -> None:
    """Refuse weights that do not fit config.json, where transformers goes on with random ones.

    Parameters
    ----------
    loading_info
        transformers' `output_loading_info`.
    path
        what messages call the model.
    shape
        which weights there are.
    """
    for name, there, expected in sorted(map(tuple, loading_info["mismatched_keys"])):
        raise ConfigError(
            f"model.path={path}: {name} has the shape {list(there)} where {shape} makes it"
            f" {list(expected)}"
        )
    if missing := sorted(loading_info["missing_keys"]):
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise ConfigError(
            f"model.path={path}: its weights are without {missing[0]}{more}, which are in {shape}"
        )


def _refuse_unread(loading_info: Mapping[str, Any], model: PreTrainedModel, path: str) -> None:
    """Refuse weights that are not read though they belong to what config.json has.

    Those of layers after its last, or of a part whose other weights are read.

    Weights of other parts, such as a head, or layers for predicting several tokens, are nobody's
    loss.

    Parameters
    ----------
    loading_info, path
        as of `_refuse_random_weights`.
    """
    parts = {name.rpartition(".")[0] for name, _ in model.named_parameters()}
    unread = sorted(
        name
        for name in loading_info["unexpected_keys"]
        if (part := name.rpartition(".")[0]) in parts or _first(part) in parts
    )
    if unread:
        more = f" and {len(unread) - 1} more" if len(unread) > 1 else ""
        raise ConfigError(
            f"model.path={path}: its weights hold {unread[0]}{more}, for which config.json has no"
            " place"
        )


def _refuse_whole_numbers(folder: Path, model: PreTrainedModel, path: str) -> None:
    """Refuse weights that are whole numbers or booleans, which transformers takes unscaled.

    Parameters
    ----------
    folder
        of the files; what of them the model has no weight for is passed over.
    model, path
        as of `_refuse_unread`.
    """
    prefix = f"{model.base_model_prefix}."
    names = {
        short
        for name, _ in model.named_parameters()
        for short in (name, name.removeprefix(prefix), prefix + name)
    }
    for file, tensor, kind in [*tensor_types(folder), *_pickled_types(folder)]:
        if tensor in names and not kind.startswith(("F", "BF", "float", "bfloat")):
            raise ConfigError(
                f"model.path={path}: {file}: {tensor} is of {kind}; expected weights that are no"
                " whole numbers, or a quantization_config in config.json"
            )


def _pickled_types(folder: Path) -> Iterator[tuple[str, str, str]]:
    """As `tensor_types`, of the weights of a folder that has them in torch's own files alone."""
    for file in (
        () if any(folder.glob("*.safetensors")) else sorted(folder.glob("pytorch_model*.bin"))
    ):
        for name, tensor in torch.load(file, map_location="meta", weights_only=True).items():
            yield file.name, name, str(tensor.dtype).removeprefix("torch.")


def _first(part: str) -> str:
    """The same part of the first layer."""
    return re.sub(r"\.\d+\.", ".0.", part, count=1)


def read_gguf(
    file: Path, dtype: torch.dtype, name: str = "", try_out: TryOut = lambda tokenizer: None
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The model and the tokenizer in a GGUF file.

    Its weights are dequantised, its rotary positions scaled as it says.

    Parameters
    ----------
    file
        to read.
    dtype
        of the weights.
    name
        what messages call the model; "": the file's.
    try_out
        see `TryOut`.

    Raises
    ------
    ConfigError
        transformers cannot read it, or lacks the packages to; or what it reads is not what the file
        says, or a model that kvbench would run wrong.
    """
    if not sys.stderr.isatty():
        disable_progress_bar()
    header = read_header(file)
    where_from = {"pretrained_model_name_or_path": str(file.parent), "gguf_file": file.name}
    unreadable = f"model.path={file}: cannot be read as GGUF: "
    with _explained(lambda error: unreadable + error), _read_once(file):
        with _silent(), tokenizing(str(file)):
            tokenizer = AutoTokenizer.from_pretrained(**where_from)
            _refuse_unfit(tokenizer, str(file))
        config = AutoConfig.from_pretrained(**where_from)
        if rope := header.with_scaling(config):
            config.rope_parameters = rope
        header.refuse_dropped(config)
        config_card(config, name or file.name)
        with tokenizing(str(file)):
            try_out(tokenizer)
        model, loading_info = AutoModelForCausalLM.from_pretrained(
            **where_from,
            config=config,
            quantization_config=GgufConfig(gguf_file=file.name, dequantize=True),
            dtype=dtype,
            output_loading_info=True,
        )
        read = _tensors_read(model, header.arch)
    _refuse_random_weights(loading_info, str(file), "the file's keys")
    header.refuse_unread(read)
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config  # it is not any more, and could not be saved
    return model, tokenizer


@contextlib.contextmanager
def _read_once(file: Path) -> Iterator[None]:
    """Have transformers read the header of a GGUF file once.

    It parses the header three times, and lists the names that tensors may have for every module of
    the model, which takes most of the time.

    Raises
    ------
    ConfigError
        it lacks the packages to read one.
    """
    originals = {}
    try:
        import gguf as package

        for name in ("GGUFReader", "get_tensor_name_map"):
            originals[name] = getattr(package, name)
            setattr(package, name, functools.cache(originals[name]))
        yield
    except ImportError as error:
        raise ConfigError(
            f"model.path={file}: needs gguf and accelerate; pip install 'kvbench[models]'"
        ) from error
    finally:
        for name, function in originals.items():
            setattr(package, name, function)


def _tensors_read(model: PreTrainedModel, arch: str) -> set[str]:
    """Names of the tensors of a GGUF file that transformers reads into a model."""
    from transformers.modeling_gguf_pytorch_utils import (
        TENSOR_PROCESSORS,
        TensorProcessor,
        get_gguf_hf_weights_map,
    )

    processor = TENSOR_PROCESSORS.get(arch, TensorProcessor)(config=model.config.to_dict())
    return set(get_gguf_hf_weights_map(model, processor))


@contextlib.contextmanager
def _explained(message: Callable[[str], str]) -> Iterator[None]:
    """Turn whatever transformers raises into one line, and silence its warnings.

    What matters of these is refused.

    Parameters
    ----------
    message
        makes the line of the first one of the error.
    """
    verbosity = get_verbosity()
    set_verbosity_error()
    try:
        yield
    except (ConfigError, MemoryError, torch.OutOfMemoryError):
        raise
    except BaseException as error:
        if not isinstance(error, Exception) and not is_panic(error):
            raise
        raise ConfigError(message(first_line(error))) from error
    finally:
        set_verbosity(verbosity)


def _unreadable(path: str) -> Callable[[str], str]:
    """The message that a folder or a hub id cannot be read, by the first line of the error."""
    if Path(path).expanduser().is_dir():
        return lambda error: f"model.path={path}: not a usable model folder: {error}"
    return lambda error: (
        f"model.path={path}: no such folder, and neither the hub nor its local cache gave it "
        f"({error.rstrip('.')}); without network, use model.path=FOLDER"
    )


@contextlib.contextmanager
def _silent() -> Iterator[None]:
    """Keep compiled code, which panics in several lines of its own, from writing to stderr."""
    saved_stderr = os.dup(2)
    try:
        with open(os.devnull, "wb") as nowhere:
            os.dup2(nowhere.fileno(), 2)
        yield
    finally:
        os.dup2(saved_stderr, 2)
        os.close(saved_stderr)


# letters, digits, marks, spaces, and characters of several bytes
TEXT = "The year is 1984:\n\té, 北京 🙂"


def _refuse_unfit(tokenizer: PreTrainedTokenizerBase, path: str) -> None:
    """Refuse a tokenizer that reads no text, or nothing of one, before a task meets it.

    Raises
    ------
    ConfigError
        names the folder.
    """
    with tokenizing(path):
        ids = tokenizer(TEXT, add_special_tokens=False)["input_ids"]
        tokenizer.decode(tokenizer(TEXT)["input_ids"])
    if not ids:
        raise ConfigError(
            f"model.path={path}: its tokenizer makes no tokens of {TEXT!r}; expected one that reads"
            " texts"
        )


def _loaded(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    source: hub.ModelSource,
    revision: str,
) -> Loaded:
    model = model.eval().requires_grad_(False)
    use_kvbench_attention(model)
    return Loaded(
        model=model,
        tokenizer=tokenizer,
        name=source.name,
        revision=revision,
        card=card_of(model),
        stop_ids=stop_ids_of(model.generation_config, model.config, tokenizer),
        dense_layers=source.dense_layers,
    )


STOPS_IN = ("generation_config.json", "config.json", "tokenizer_config.json")


def stop_ids_of(*sources: Any) -> tuple[int, ...]:
    """The tokens that end a generation.

    They are those of the first of generation config, config and tokenizer that names any.
    """
    # Chat models list several in their generation config and only one in the other two places.
    for place, source in zip(STOPS_IN, sources, strict=False):
        if ids := stop_ids(getattr(source, "eos_token_id", None), f"{place}: "):
            return ids
    return ()


def _snapshot(hub_id: str) -> Path:
    """Where the cache keeps the commit whose config.json was just read: a folder of its name."""
    folder = hub.cached_folder(hub_id)
    assert folder is not None, f"{hub_id}: its config.json was read but is not in the cache"
    return folder


def device_of(device: str) -> torch.device:
    """The device that a run's `device` means here.

    Raises
    ------
    ConfigError
        there is no such device.
    """
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        parsed = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise ConfigError(
            f"device={device}: no such device; expected auto, cpu, cuda or cuda:N"
        ) from error
    if parsed.type == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if count == 0:
            raise ConfigError(
                f"device={device}: torch sees no CUDA device here; use device=cpu or device=auto"
            )
        if (parsed.index or 0) >= count:
            raise ConfigError(
                f"device={device}: expected cuda:N with N below {count}, the devices torch sees"
                " here"
            )
    return parsed


def dtype_of(dtype: str, device: torch.device) -> torch.dtype:
    """The type that a run's `dtype` means on a device.

    Raises
    ------
    ConfigError
        it is none of `DTYPES`.
    """
    if dtype == "auto":
        return torch.bfloat16 if device.type == "cuda" or quick_in_bfloat16() else torch.float32
    if dtype not in DTYPES:
        raise ConfigError(f"dtype={dtype}: expected auto, {', '.join(DTYPES)}")
    return DTYPES[dtype]


def quick_in_bfloat16() -> bool:
    """Whether this CPU multiplies bfloat16 matrices in tiles (AMX).

    There a prefill takes a third of float32's time.

    With AVX512_BF16 alone both take the same, and without it bfloat16 takes twice as long or more.
    Arm: not measured.
    """
    return bool(torch.cpu.get_capabilities().get("amx_bf16", False))


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer that needs no files: byte b is id b, then <bos>, <eos>, <pad>.

    Decoding gives back any text exactly.

    <bos> goes before a text unless `add_special_tokens=False`. The specials have no spelling: a
    text that holds "<eos>" is five bytes. Padding is on the left.
    """
    # Byte-level BPE writes bytes as printable characters; the ones that are not printable move up
    # after 255.
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    moved = (byte for byte in range(256) if byte not in printable)
    symbols = {byte: chr(byte) for byte in printable} | {
        byte: chr(256 + n) for n, byte in enumerate(moved)
    }
    backend = Tokenizer(BPE(vocab={symbol: byte for byte, symbol in symbols.items()}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([BOS, EOS, PAD])
    backend.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A $B", special_tokens=[(BOS, backend.token_to_id(BOS))]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token=BOS,
        eos_token=EOS,
        pad_token=PAD,
        padding_side="left",
        split_special_tokens=True,
        clean_up_tokenization_spaces=False,
    )
