"""What pytest itself needs: few threads and the dummy models."""

from __future__ import annotations

import copy
import functools
import gc
import itertools
import os
import pickle
import time
import zlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from driver import ACCOUNTINGS, MAPS, METHODS, MODELS, Case, scores_of
from hydra._internal import config_loader_impl as hydra
from hydra.core.plugins import Plugins
from hydra.plugins.config_source import ConfigResult, ConfigSource
from hypothesis import settings
from omegaconf import DictConfig

from kvbench.backends.hf.loading import Loaded, load
from kvbench.config import conf_dir, read_choice, shipped
from kvbench.measure import machine

# These models are so small that waking a second thread costs more than it brings, here and in the processes that tests
# start; those that do wait for others do so asleep, since the tests themselves run in several processes.
torch.set_num_threads(1)
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

# An example may be the one that compiles or loads something, on a machine that others use as well.
settings.register_profile("kvbench", deadline=None)
settings.load_profile("kvbench")


# Of the tests that every method goes through, each meets every 13th preset in the quick suite and the others in the
# slow one; and one in so many, half of them quick, meets a method with other options than its preset's, so that all of
# these are met, each by other tests. A preset that stands on another one's file meets each test under one accounting,
# and the next under the other. KVBENCH_EVERY_VARIANT=1: all tests meet all of them.
PRESET_EVERY = 13  # odd: every other preset has the other accounting
VARIANT_EVERY = 1 if os.environ.get("KVBENCH_EVERY_VARIANT") else 4
PRESETS = [case.id for case in METHODS if case.id == case.name and case.file is None]
VARIANTS = [case.id for case in METHODS if case.id != case.name]
DERIVED = [name for name in PRESETS if "defaults" in read_choice(conf_dir() / "method" / f"{name}.yaml")]


@pytest.hookimpl(tryfirst=True)  # before what is marked slow is left out
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Which tests run, and in which order.

    The longest start first: no worker is left with them when the others have ended. After them come those that read
    what is shipped, or make a site of it, once a worker.
    """
    passed_over = {item for item in items if _turn(item, VARIANTS) % VARIANT_EVERY or _met_otherwise(item)}
    config.hook.pytest_deselected(items=list(passed_over))
    items[:] = [item for item in items if item not in passed_over]
    for item in items:
        later = _turn(item, PRESETS) % PRESET_EVERY or _turn(item, VARIANTS) % (2 * VARIANT_EVERY)
        if later:
            item.add_marker(pytest.mark.slow)
    long = ("test_slurm", "test_own_method", "test_the_smoke_run_learns", "the_site_of_the_runs_that_come")
    of_shipped = ("test_claims", "test_numbers", "test_site.py")

    def names_any(item: pytest.Item, names: tuple[str, ...]) -> bool:
        return any(name in item.nodeid for name in names)

    items.sort(key=lambda item: [not names_any(item, names) for names in (long, of_shipped)])


def _turn(item: pytest.Item, ids: list[str]) -> int:
    """A number of a test and the method it meets, neighbours for methods that stand beside each other in `ids`."""
    case = getattr(item, "callspec", None) and item.callspec.params.get("case")  # type: ignore[attr-defined]
    if not isinstance(case, Case) or case.id not in ids:
        return 0
    return zlib.crc32(item.originalname.encode()) + ids.index(case.id)  # type: ignore[attr-defined]


def _met_otherwise(item: pytest.Item) -> bool:
    """Whether a test meets this preset, which stands on another one, under the other accounting."""
    turn = _turn(item, DERIVED)
    if not turn or VARIANT_EVERY == 1:
        return False
    accounting = item.callspec.params.get("accounting")  # type: ignore[attr-defined]
    return accounting is not None and (turn + ACCOUNTINGS.index(accounting)) % 2 > 0


def pytest_collection_finish() -> None:
    """Libraries and tests outlive every test: a run that collects garbage before it is timed need not look at them."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def read_once() -> Iterator[None]:
    """Have each file of conf read once: Hydra reads and parses its own anew for each config that it composes."""
    sources = Plugins.instance().discover(ConfigSource)
    files: Any = next(source for source in sources if source.scheme() == "file")  # type: ignore[attr-defined]
    load, held = files.load_config, dict[Any, bytes]()

    def loaded(source: ConfigSource, config_path: str) -> ConfigResult:
        file = Path(source.path, f"{config_path.removesuffix('.yaml')}.yaml")
        if not file.is_file():
            return load(source, config_path)
        found = file.stat()
        key = (source.path, source.provider, config_path, found.st_mtime_ns, found.st_size)
        if key not in held:
            held[key] = pickle.dumps(load(source, config_path))
        return pickle.loads(held[key])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(files, "load_config", loaded)
        yield


@pytest.fixture(scope="session", autouse=True)
def maps_of_any_width() -> Iterator[None]:
    """Maps of hidden states fit one width: models of others are given random ones for the file that `METHODS` names."""
    module = import_module("kvbench.backends.hf.model")
    of_file = module.head_scores_of

    def get(model: Any, method: Any) -> Any:
        return scores_of(model) if method.needs.head_scores == MAPS else of_file(model, method)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "head_scores_of", get)
        yield


@pytest.fixture(scope="session", autouse=True)
def composed_once() -> Iterator[None]:
    """Have the files of each choice merged once: Hydra merges them for each config, and most differ in values alone."""
    list_files, merge_files = hydra.create_defaults_list, hydra.ConfigLoaderImpl._compose_config_from_defaults_list
    lists, merged = dict[Any, Any](), dict[str, bytes]()

    def only_kvbenchs(repo: Any) -> bool:
        return [source.path for source in repo.get_sources() if source.scheme() == "file"] == [str(conf_dir())]

    def listed(repo: Any, overrides_list: list[Any], **more: Any) -> Any:
        chosen = [one for one in overrides_list if repo.group_exists(one.key_or_group)]
        if not only_kvbenchs(repo) or any(isinstance(one.value(), dict) for one in chosen):
            return list_files(repo=repo, overrides_list=overrides_list, **more)
        key = (*(one.input_line for one in chosen), *more.items())
        if key not in lists:
            lists[key] = list_files(repo=repo, overrides_list=overrides_list, **more)
        values = [one for one in overrides_list if one not in chosen and not one.is_sweep_override()]
        return replace(lists[key], config_overrides=values)

    def merge(loader: Any, defaults: list[Any], repo: Any) -> DictConfig:
        if not only_kvbenchs(repo):
            return merge_files(loader, defaults=defaults, repo=repo)
        key = repr(defaults)
        if key not in merged:
            merged[key] = pickle.dumps(merge_files(loader, defaults=defaults, repo=repo))
        return pickle.loads(merged[key])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hydra, "create_defaults_list", listed)
        patch.setattr(hydra.ConfigLoaderImpl, "_compose_config_from_defaults_list", merge)
        yield


@pytest.fixture
def ticking(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock that goes on by a millisecond whenever it is read, so that a time says how often that was."""
    readings = itertools.count()
    monkeypatch.setattr(time, "perf_counter", lambda: next(readings) / 1e3)


@pytest.fixture(scope="session")
def shipped_verdicts() -> list[Any]:
    """Every claim as the shipped runs decide it, which takes seconds."""
    return import_module("kvbench.report.claims.page").judged(None, [])


@pytest.fixture
def nothing_shipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A test's own runs alone are judged and drawn: those that kvbench ships take seconds."""
    monkeypatch.setattr("kvbench.report.claims.page.SHIPPED", tmp_path / "none")
    monkeypatch.setattr(import_module("kvbench.report.site.pictures"), "_of_shipped", lambda name: b"")


# -- models ------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def dummies() -> Callable[[str], Loaded]:
    """The dummy models by name, each loaded once."""

    @functools.cache
    def get(name: str) -> Loaded:
        config = shipped("model", name)
        assert config is not None
        return load(config, device="cpu", dtype="float32")

    return get


@pytest.fixture(scope="session", params=MODELS)
def loaded(request: pytest.FixtureRequest, dummies: Callable[[str], Loaded]) -> Loaded:
    """Each dummy model in turn."""
    return dummies(request.param)


@pytest.fixture(scope="session")
def tiny(dummies: Callable[[str], Loaded]) -> Loaded:
    """The dummy Llama."""
    return dummies("dummy-tiny")


@pytest.fixture
def any_model(case: Case, request: pytest.FixtureRequest, dummies: Callable[[str], Loaded]) -> Loaded:
    """A dummy model for each method and accounting, the next one for the next: all are met, each pair in one."""
    accounting = request.getfixturevalue("accounting") if "accounting" in request.fixturenames else ACCOUNTINGS[0]
    models = MODELS[:-1] if case.name.startswith("knorm") else MODELS  # keys of an untrained Qwen3 have one norm
    return dummies(models[(METHODS.index(case) + ACCOUNTINGS.index(accounting)) % len(models)])


@pytest.fixture(scope="session")
def sdpa() -> Callable[[Loaded], torch.nn.Module]:
    """The same weights under transformers' own sdpa attention, which no line of kvbench touches."""
    copies: dict[str, torch.nn.Module] = {}

    def get(loaded: Loaded) -> torch.nn.Module:
        if loaded.name not in copies:
            copies[loaded.name] = copy.deepcopy(loaded.model)
            copies[loaded.name].set_attn_implementation("sdpa")
        return copies[loaded.name]

    return get


@pytest.fixture(scope="session", autouse=True)
def undisturbed() -> Iterator[None]:
    """Tests run beside each other; nothing that they time was disturbed, unless they say so."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(machine, "STAT", Path("/proc/there is none"))
        yield
