"""Claims about a stranger's model folder: it is data, and whatever is wrong with it is one line, at once."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from words import configs

from kvbench.backends.hf.loading import load, stop_ids_of
from kvbench.cli.checks import check
from kvbench.config import ConfigError, shipped
from kvbench.runs.sweep import run

Damage = Callable[[Path], Any]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("whole") / "model"
    loaded = load(shipped("model", "dummy-tiny") or {}, "cpu")
    loaded.model.save_pretrained(path)
    loaded.tokenizer.save_pretrained(path)
    return path


@pytest.fixture
def folder(whole: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(whole, tmp_path / "model"))


def words(folder: Path) -> list[str]:
    task = ["task=passkey", "task.lengths=[400]", "task.positions=1", "task.limit=1", "method=full"]
    return [f"model.path={folder}", *task, f"results_dir={folder.parent / 'results'}"]


def refusal(folder: Path, load_it: bool = True) -> str:
    """What a run is refused with: as it is checked, as its model is loaded, or as its first prompt becomes tokens."""
    [config] = configs(*words(folder))
    with pytest.raises(ConfigError) as caught:
        checked = check(config)
        assert load_it, "the check has let it through"
        run(checked)
    line = str(caught.value)
    assert "\n" not in line and len(line) < 400
    return line


def replaced(name: str, by: Callable[[Path], object]) -> Damage:
    def damage(folder: Path) -> None:
        (folder / name).unlink(missing_ok=True)
        by(folder / name)

    return damage


def edited(name: str, **keys: Any) -> Damage:
    def damage(folder: Path) -> None:
        (folder / name).write_text(json.dumps({**json.loads((folder / name).read_text()), **keys}))

    return damage


READ = [
    *("config.json", "generation_config.json", "kvbench.json", "adapter_config.json", "preprocessor_config.json"),
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja"),
    *("model.safetensors", "pytorch_model.bin", "model.safetensors.index.json"),
]


@pytest.mark.parametrize("kind", [os.mkfifo, Path.mkdir, lambda file: file.symlink_to("/dev/zero")])
def test_what_is_read_is_a_regular_file(folder: Path, kind: Callable[[Path], object]) -> None:
    for name in READ:
        copy_of = Path(shutil.copytree(folder, folder.parent / f"no-{name}"))
        replaced(name, kind)(copy_of)
        assert f"{name} is no regular file" in refusal(copy_of, load_it=False)


@pytest.mark.parametrize(
    "damage, words",
    [
        (lambda folder: os.truncate(folder / "config.json", 10**10), "config.json has 10000000000 bytes"),
        (lambda folder: os.truncate(folder / "tokenizer.json", 10**10), "tokenizer.json has 10000000000 bytes"),
        (replaced("model.safetensors", lambda file: file.symlink_to("nowhere")), "model.safetensors cannot be read"),
        (replaced("model.safetensors", lambda file: sparse(file, 9 * 10**9, 10**10)), "is no safetensors file"),
        (edited("config.json", num_hidden_layers=6.5), "num_hidden_layers=6.5: expected a whole number"),
        (edited("config.json", num_hidden_layers="4"), "num_hidden_layers=4: expected a whole number"),
        (edited("config.json", sliding_window="x"), "sliding_window=x: expected a whole number"),
        (edited("config.json", max_window_layers=1.5), "max_window_layers=1.5: expected a whole number"),
        (edited("config.json", layer_types=5), "layer_types=5: expected a list"),
        (edited("config.json", layer_types=[["a"]] * 4), "layer_types=[[a],[a],[a],[a]]: expected a list"),
        (edited("generation_config.json", eos_token_id="x"), "generation_config.json: eos_token_id=x"),
        (edited("generation_config.json", eos_token_id=[[1]]), "generation_config.json: eos_token_id=[[1]]"),
        (edited("generation_config.json", eos_token_id=2.5), "generation_config.json: eos_token_id=2.5"),
        (replaced("generation_config.json", lambda file: file.write_text("{")), "generation_config.json cannot be"),
    ],
)
def test_what_cannot_be_is_refused_before_a_model_is_loaded(folder: Path, damage: Damage, words: str) -> None:
    damage(folder)
    line = refusal(folder, load_it=False)
    assert words in line and str(folder) in line


def sparse(file: Path, header: int, size: int) -> None:
    """A safetensors file that says its header is so long."""
    file.write_bytes(header.to_bytes(8, "little"))
    os.truncate(file, size)


def test_weights_that_an_index_puts_elsewhere_are_missing(folder: Path) -> None:
    load_into(folder, lambda held, file: torch.save(held, file))
    (folder / "pytorch_model.bin").rename(folder.parent / "elsewhere.bin")
    (folder / "x.bin").touch()
    (folder / "pytorch_model.bin.index.json").write_text('{"weight_map": {"a": "../elsewhere.bin"}}')
    assert "../elsewhere.bin is missing, which pytorch_model.bin.index.json names" in refusal(folder, load_it=False)


def load_into(folder: Path, save: Callable[[dict[str, torch.Tensor], Path], object]) -> None:
    held = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    save(held, folder / "pytorch_model.bin")


@pytest.mark.parametrize("pickled", [False, True])
@pytest.mark.parametrize("kind", [torch.int16, torch.bool])
def test_weights_that_are_whole_numbers_are_refused(folder: Path, kind: torch.dtype, pickled: bool) -> None:
    held = load_file(folder / "model.safetensors")
    held["model.norm.weight"] = held["model.norm.weight"].to(kind)
    save_file(held, folder / "model.safetensors", {"format": "pt"})
    if pickled:
        load_into(folder, torch.save)
    assert "model.norm.weight is of " in refusal(folder)


def test_weights_in_eight_bytes_or_in_torchs_own_file_are_read(folder: Path) -> None:
    held = load_file(folder / "model.safetensors")
    save_file({name: value.double() for name, value in held.items()}, folder / "model.safetensors", {"format": "pt"})
    load_into(folder, torch.save)
    [config] = configs(*words(folder))
    assert run(check(config))["scores"]


def tokenizer_with(change: Callable[[dict[str, Any]], object]) -> Damage:
    def damage(folder: Path) -> None:
        tokenizer = json.loads((folder / "tokenizer.json").read_text())
        change(tokenizer)
        (folder / "tokenizer.json").write_text(json.dumps(tokenizer))

    return damage


TOKEN = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": False}
UNKNOWN = [{"SpecialToken": {"id": "[X]", "type_id": 0}}]
SPLIT = {"type": "Split", "pattern": {"Regex": "(x+x+)+y"}, "behavior": "Isolated", "invert": False}


@pytest.mark.parametrize(
    "change, words",
    [
        (lambda own: own["added_tokens"].append({"id": 999, "content": "the", **TOKEN}), "and the model has 259"),
        (lambda own: own.update(pre_tokenizer=SPLIT), "drops the question"),
        (lambda own: own.update(model={"type": "Unigram", "vocab": [["a", -1.0]], "unk_id": None}), "cannot read"),
        (lambda own: own.update(normalizer={"type": "Precompiled", "precompiled_charsmap": "AAAA"}), "Precompiled"),
        (
            lambda own: own.update(
                post_processor={"type": "TemplateProcessing", "single": UNKNOWN, "pair": [], "special_tokens": {}}
            ),
            "cannot read",
        ),
        (
            lambda own: own.update(normalizer={"type": "Replace", "pattern": {"Regex": "[\\s\\S]"}, "content": ""}),
            "makes no tokens",
        ),
    ],
)
def test_a_tokenizer_that_cannot_read_or_is_another_models_is_one_line(
    folder: Path, change: Callable[[dict[str, Any]], object], words: str, capfd: pytest.CaptureFixture[str]
) -> None:
    tokenizer_with(change)(folder)
    assert words in refusal(folder)
    assert "panicked" not in capfd.readouterr().err


def test_stop_tokens_that_are_none_name_their_file() -> None:
    class Config:
        eos_token_id: Any = None

    class Other:
        eos_token_id: Any = "x"

    with pytest.raises(ConfigError, match=r"^config.json: eos_token_id=x: "):
        stop_ids_of(Config(), Other())
