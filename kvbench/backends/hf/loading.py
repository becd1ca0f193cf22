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
from dataclasses import dataclass
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
from kvbench.backends.hf.hooks import NAME
from kvbench.backends.hf.model import refuse_custom_attention, use_kvbench_attention
from kvbench.config import ConfigError, first_line
from kvbench.models import gguf, hub
from kvbench.models.digests import fingerprint
from kvbench.models.folder import stop_ids, tensor_types
from kvbench.models.prompts import is_panic, tokenizing
from kvbench.models.support import refuse_unsupported, window

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

# Byte b is token id b; the three specials follow.
BOS, EOS, PAD = "<bos>", "<eos>", "<pad>"
BYTE_VOCABULARY = 256 + 3


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
    window
        tokens the positions reach, as `support.window` counts them; None: the model sets no limit.
    stop_ids
        every token id that ends a generation.
    dense_layers
        layers that stay dense under `protocol.dense_layers=auto`.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    name: str
    revision: str
    window: int | None
    stop_ids: tuple[int, ...]
    dense_layers: tuple[int, ...]

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

    @property
    def layers(self) -> int:
        """How many it has."""
        count: int = self.model.config.get_text_config().num_hidden_layers
        return count

    @property
    def vocabulary(self) -> int:
        """How many tokens it knows."""
        count: int = self.model.config.get_text_config().vocab_size
        return count


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
    tokenizer, revision
        as of `Loaded`.
    """

    where_from: str
    settings: dict[str, Any]
    config: PreTrainedConfig
    tokenizer: PreTrainedTokenizerBase
    revision: str


def load(
    config: Mapping[str, Any],
    device: str = "auto",
    dtype: str = "auto",
    seed: int = 0,
    try_out: Callable[[PreTrainedTokenizerBase], None] = lambda tokenizer: None,
) -> Loaded:
    """The model that the `model` group of a run asks for.

    Parameters
    ----------
    config
        plain mapping with name, path (hub id, folder or None), weights ("pretrained" or "dummy"),
        dense_layers, config (transformers' config of the shape, used for random weights) and
        device_map (see `kvbench.backends.hf.spread`; absent or None: one device).
    device
        "auto" (CUDA where there is one), "cpu", "cuda", "cuda:N".
    dtype
        "auto" (bfloat16 on CUDA and where `quick_in_bfloat16`, float32 elsewhere), or a key of
        `DTYPES`.
    seed
        of random weights.
    try_out
        called with the tokenizer before weights are read; what it raises ends the load.

    Raises
    ------
    ConfigError
        no such folder, hub id not reachable, no such device or dtype, or an unsupported model.
    """
    if (device_map := config.get("device_map")) is None:
        where = device_of(device)
        return _load(config, where, dtype_of(dtype, where), seed, try_out)
    gpus = spread.devices_for(device_map)
    loaded = _load(config, torch.device("cpu"), dtype_of(dtype, gpus[0]), seed, try_out)
    spread.spread(loaded.model, spread.places_of(loaded.model, device_map, gpus))
    return loaded


def _load(
    config: Mapping[str, Any],
    where: torch.device,
    kind: torch.dtype,
    seed: int,
    try_out: Callable[[PreTrainedTokenizerBase], None],
) -> Loaded:
    if config["weights"] not in ("pretrained", "dummy"):
        raise ConfigError(f"model.weights={config['weights']}: expected pretrained or dummy")
    source = hub.source_of(config)
    if source.path is None:
        return _random(source, config["config"], where, kind, seed, try_out)
    if source.gguf is not None:
        model, tokenizer = read_gguf(
            source.gguf, kind, lambda config: _refuse_unsupported(config, source.name), try_out
        )
        return _loaded(model.to(where), tokenizer, source, fingerprint([source.gguf], "gguf"))
    return _pretrained(source, source.path, where, kind, try_out)


def _random(
    source: hub.ModelSource,
    shape: Mapping[str, Any],
    device: torch.device,
    dtype: torch.dtype,
    seed: int,
    try_out: Callable[[PreTrainedTokenizerBase], None],
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
    with _shape_explained(name):
        model_config = AutoConfig.for_model(**values)
    _refuse_unsupported(model_config, name)
    try_out(tokenizer)
    # from_config builds each weight in its dtype on its device: no float32 copy of a large shape on
    # the host.
    with _shape_explained(name), _seeded(seed, device), device:
        model = AutoModelForCausalLM.from_config(
            model_config, dtype=dtype, attn_implementation=NAME
        )
    return _loaded(model, tokenizer, source, f"dummy-{seed}")


def _refuse_unsupported(model_config: PreTrainedConfig, name: str) -> None:
    """Refuse a model that kvbench would run wrong, by its config and by its class.

    Raises
    ------
    ConfigError
        names the model and why.
    """
    refuse_unsupported(model_config.to_dict(), name)
    kind = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(model_config), None)
    if isinstance(kind, type):
        refuse_custom_attention(kind, name)


@contextlib.contextmanager
def _shape_explained(name: str) -> Iterator[None]:
    """Turn what transformers raises at a shape into one line; each version raises others."""
    try:
        yield
    except (MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        reason = first_line(error)[:300]
        raise ConfigError(f"model.config of {name}: transformers refuses it: {reason}") from error


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


def describe(
    source: hub.ModelSource,
    path: str,
    try_out: Callable[[PreTrainedTokenizerBase], None] = lambda tokenizer: None,
) -> Described:
    """What a folder or the hub says of the model there, `source.path`; for `try_out` see `load`.

    Raises
    ------
    ConfigError
        no such folder, hub id not reachable, or an unsupported model.
    """
    folder = source.folder
    where_from = path if folder is None else str(folder)
    # else transformers asks, and takes any "y" of stdin's
    settings: dict[str, Any] = {"trust_remote_code": False}
    if folder is None:
        hub.refuse_out_of_reach(path)
        # Without network the cache answers at once, where the hub's library would first try for
        # half a minute.
        settings["local_files_only"] = hub.out_of_reach() is not None
    else:
        refuse_unsupported(hub.config_in(folder, path), source.name)
    with _explained(path):
        model_config = AutoConfig.from_pretrained(where_from, **settings)
        if folder is None and find_adapter_config_file(
            path, local_files_only=settings["local_files_only"]
        ):
            hub.refuse_adapter(path)
    _refuse_unsupported(model_config, source.name)
    where = folder or _snapshot(path)
    if folder is None:
        # the weights are of the commit that the results will name
        settings["revision"] = where.name
    revision = (
        where.name if folder is None and hub.is_as_downloaded(where) else hub.revision_of(where)
    )
    if not sys.stderr.isatty():
        disable_progress_bar()  # in a log file every step of the bar would be a line
    with _explained(path), _silent():
        tokenizer = AutoTokenizer.from_pretrained(where_from, **settings)
        _refuse_unfit(tokenizer, path)
    with tokenizing(path):
        try_out(tokenizer)
    return Described(where_from, settings, model_config, tokenizer, revision)


def _pretrained(
    source: hub.ModelSource,
    path: str,
    device: torch.device,
    dtype: torch.dtype,
    try_out: Callable[[PreTrainedTokenizerBase], None],
) -> Loaded:
    described = describe(source, path, try_out)
    with _explained(path):
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
        with _explained(path):
            _refuse_whole_numbers(source.folder or _snapshot(path), model, path)
    return _loaded(model.to(device), described.tokenizer, source, described.revision)


def _refuse_random_weights(
    loading_info: Mapping[str, Any], path: str, shape: str = "config.json"
) -> None:
    """Refuse weights that are not those of config.json, in whose place transformers goes on with
    random ones.

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
    """Refuse weights that belong to what config.json has: of layers after its last, or of a part
    whose others are read.

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
    """Refuse weights that are whole numbers or true and false, which transformers takes as they
    are, scaled by nothing.

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
    file: Path,
    dtype: torch.dtype,
    check: Callable[[PreTrainedConfig], None] = lambda config: None,
    try_out: Callable[[PreTrainedTokenizerBase], None] = lambda tokenizer: None,
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The model and the tokenizer in a GGUF file, its weights dequantised and its rotary positions
    scaled as it says.

    Parameters
    ----------
    file
        to read.
    dtype
        of the weights.
    check, try_out
        called with config and tokenizer before weights are read; what they raise ends the load.

    Raises
    ------
    ConfigError
        transformers cannot read it, or lacks the packages to; or what it reads is not what the file
        says.
    """
    if not sys.stderr.isatty():
        disable_progress_bar()
    header = gguf.read_header(file)
    where_from = {"pretrained_model_name_or_path": str(file.parent), "gguf_file": file.name}
    try:
        with _read_once():
            with _silent(), tokenizing(str(file)):
                tokenizer = AutoTokenizer.from_pretrained(**where_from)
                _refuse_unfit(tokenizer, str(file))
            config = AutoConfig.from_pretrained(**where_from)
            if rope := gguf.with_scaling(header, config):
                config.rope_parameters = rope
            gguf.refuse_dropped(header, config)
            check(config)
            with tokenizing(str(file)):
                try_out(tokenizer)
            quantised = GgufConfig(gguf_file=file.name, dequantize=True)
            model, loading_info = AutoModelForCausalLM.from_pretrained(
                **where_from,
                config=config,
                quantization_config=quantised,
                dtype=dtype,
                output_loading_info=True,
            )
            read = _tensors_read(model, header.arch)
    except ImportError as error:
        raise ConfigError(
            f"model.path={file}: needs gguf and accelerate; pip install 'kvbench[models]'"
        ) from error
    except (ConfigError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # whatever a damaged file makes of the parser
        raise ConfigError(
            f"model.path={file}: cannot be read as GGUF: {first_line(error)}"
        ) from error
    _refuse_random_weights(loading_info, str(file), "the file's keys")
    gguf.refuse_unread(header, read)
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config  # it is not any more, and could not be saved
    return model, tokenizer


@contextlib.contextmanager
def _read_once() -> Iterator[None]:
    """While transformers reads a GGUF file, keep what it would work out again: it parses the file's
    header three times, and lists the names that tensors may have for every module of the model,
    which takes most of the time.
    """
    import gguf as package

    originals = {name: getattr(package, name) for name in ("GGUFReader", "get_tensor_name_map")}
    try:
        for name, function in originals.items():
            setattr(package, name, functools.cache(function))
        yield
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
def _explained(path: str) -> Iterator[None]:
    """Turn what transformers raises while it reads `path` into one line, whatever damaged files
    make of it.

    Its own warnings are left out: what matters of them is refused.
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
        if Path(path).expanduser().is_dir():
            raise ConfigError(
                f"model.path={path}: not a usable model folder: {first_line(error)}"
            ) from error
        raise ConfigError(
            f"model.path={path}: no such folder, and neither the hub nor its local cache gave it "
            f"({first_line(error).rstrip('.')}); without network, use model.path=FOLDER"
        ) from error
    finally:
        set_verbosity(verbosity)


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
        window=window(model.config.to_dict()),
        stop_ids=stop_ids_of(model.generation_config, model.config, tokenizer),
        dense_layers=source.dense_layers,
    )


STOPS_IN = ("generation_config.json", "config.json", "tokenizer_config.json")


def stop_ids_of(*sources: Any) -> tuple[int, ...]:
    """The tokens that end a generation, by the first of generation config, config and tokenizer
    that names any.
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
    """Whether this CPU multiplies bfloat16 matrices in tiles (AMX): there a prefill takes a third
    of float32's time.

    With AVX512_BF16 alone both take the same, and without it bfloat16 takes twice as long or more.
    Arm: not measured.
    """
    return bool(torch.cpu.get_capabilities().get("amx_bf16", False))


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer that needs no files: byte b is id b, then <bos>, <eos>, <pad>; decoding gives
    back any text exactly.

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
