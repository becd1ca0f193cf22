"""What was measured of a model's heads: JSON files which `kvbench calibrate` writes, one of a kind.

A model's are those of its weights.

A table that comes from elsewhere, one number a head, is read from a .tsv file: a line for each
layer, tabs between. Those of models that need no hub lie in `kvbench/assets/KIND`, a user's under
`$KVBENCH_HOME/KIND`. Imports no torch.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvbench.config import ASSETS, ConfigError, MethodConfig, first_line, home, shipped
from kvbench.models import hub

if TYPE_CHECKING:
    from kvbench.method import HeadScores, Shape

AUTO = "auto"
KINDS = ("heads", "surrogate", "filters")  # options of methods that name a file, and its folder

TABLE = ".tsv"
FACTS = ("model", "weights", "procedure")
NUMBERS = ("echo", "induction", "query_means", "query_sizes")


@dataclass(frozen=True)
class Calibration:
    """What `kvbench calibrate` has measured of a model.

    Attributes
    ----------
    model
        its name.
    weights
        which weights, by `ModelSource.weights`; None: not known.
    procedure
        how it was measured.
    numbers
        fields of `kvbench.method.HeadScores`, as nested tuples.
    """

    model: str
    weights: str | None
    procedure: dict[str, Any]
    numbers: dict[str, Any]

    @property
    def scores(self) -> HeadScores:
        """As methods are given them."""
        from kvbench.method import HeadScores

        return HeadScores(**self.numbers)

    @property
    def digest(self) -> str:
        """12 hex digits of the scores, for run ids."""
        return hashlib.sha256(json.dumps([*self.numbers.values()]).encode()).hexdigest()[:12]

    def write(self, file: Path) -> None:
        """Write it as JSON, a line for each layer's scores."""
        lines = [f'  "{name}": {json.dumps(getattr(self, name))}' for name in FACTS]
        for name, layers in self.numbers.items():
            rows = ",\n    ".join(map(json.dumps, layers))
            lines.append(f'  "{name}": [\n    {rows}\n  ]')
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


def kind_of(method: MethodConfig) -> str | None:
    """Which kind of calibration a method reads, or None."""
    return next((kind for kind in KINDS if kind in method.options), None)


def user_folder(kind: str) -> Path:
    """Where `kvbench calibrate` puts a user's."""
    return home() / kind


def read(file: Path, kind: str = KINDS[0]) -> Calibration:
    """The calibration of a kind in a file.

    Raises
    ------
    ConfigError
        it is none.
    """
    try:
        text = file.read_text(encoding="utf-8")
        loaded = _of_table(file.name, text) if file.suffix == TABLE else _of_json(json.loads(text))
        _refuse_other_kind(loaded.numbers, kind)
        return loaded
    except FileNotFoundError as error:
        raise ConfigError(
            f"method.{kind}={file}: no such file; expected one of kvbench calibrate"
        ) from error
    except (OSError, LookupError, OverflowError, RecursionError, TypeError, ValueError) as error:
        raise ConfigError(
            f"method.{kind}={file}: no head scores: {first_line(error)}; expected a file of kvbench"
            " calibrate, or a table of numbers (.tsv), a line for each layer"
        ) from error


def _refuse_other_kind(numbers: dict[str, Any], kind: str) -> None:
    if kind != KINDS[0]:
        numbers[kind]  # a LookupError names it
        return
    heads = [[len(layer) for layer in numbers[name]] for name in NUMBERS[:2]]
    if heads[0] != heads[1] or len(set(heads[0])) != 1:
        raise ValueError("echo and induction are not a number for each layer and KV head")


def _of_table(name: str, text: str) -> Calibration:
    rows = [map(float, line.split()) for line in text.splitlines()]
    table = tuple(tuple(min(1.0, max(0.0, score)) for score in row) for row in rows)
    return Calibration(name, None, {}, dict(zip(NUMBERS, (table, table, (), ()), strict=True)))


def _of_json(saved: Any) -> Calibration:
    numbers = {name: _floats(saved[name]) for name in saved if name not in FACTS}
    return Calibration(saved["model"], saved["weights"], saved["procedure"], numbers)


def _floats(numbers: Any) -> Any:
    return tuple(map(_floats, numbers)) if isinstance(numbers, list) else float(numbers)


def calibration_of(
    source: hub.ModelSource, choice: str, words: str, seed: int = 0, kind: str = KINDS[0]
) -> Calibration | None:
    """The calibration of a model; None where its weights are not on this machine yet.

    Parameters
    ----------
    source
        the model.
    choice
        "auto", or a file.
    words
        what `kvbench calibrate` takes to make it, for messages.
    seed
        of random weights.
    kind
        which of its files.

    Raises
    ------
    ConfigError
        there is none, or the file is of another model.
    """
    weights = source.weights(seed)
    if choice != AUTO:
        loaded = read(Path(choice).expanduser(), kind)
        if None not in (weights, loaded.weights) and loaded.weights != weights:
            raise ConfigError(
                f"method.{kind}={choice}: made of {loaded.model} ({loaded.weights}), and the model"
                f" is {source.name} ({weights}); kvbench calibrate {words} makes its own"
            )
        return loaded
    if weights is None:
        return None
    for folder in (user_folder(kind), ASSETS / kind):
        for file in sorted(folder.glob("*.json")):
            if (loaded := read(file, kind)).weights == weights:
                return loaded
    raise ConfigError(
        f"method.{kind}=auto: {source.name} is not calibrated; kvbench calibrate {words} does that,"
        " once"
    )


def calibration_for(model: hub.ModelConfig, method: MethodConfig, seed: int) -> Calibration | None:
    """The calibration of a model that a method needs by an option of one of the `KINDS`.

    None: it needs none, or the weights are not on this machine yet.

    Raises
    ------
    ConfigError
        as `calibration_of`.
    """
    kind = kind_of(method)
    choice = None if kind is None else method.options[kind]
    if kind is None or not isinstance(choice, str):
        return None
    original = shipped("model", model.name)
    words, source = f"model={model.name}", model.source
    if source.name != model.name or original is None:
        words = f"model.path={source.path}"
    elif source.path is None and original["path"] is not None:
        words += " model.weights=dummy"
    if kind != KINDS[0]:
        words = f"method={method.name} {words}"
    return calibration_of(source, choice, words, seed, kind)


def refuse_other_shape(scores: HeadScores, shape: Shape, kind: str) -> None:
    """Refuse scores of a kind that are of a model with other layers or heads.

    Raises
    ------
    ValueError
        says what they are of.
    """
    by_head = scores.echo if kind == "heads" else getattr(scores, kind)
    layers, heads = len(by_head), len(by_head[0]) if by_head else 0
    if (layers, heads) != (shape.layers, shape.kv_heads):
        raise ValueError(
            f"method.{kind}: scores of {layers} layers of {heads} KV heads, and the model has"
            f" {shape.layers} of {shape.kv_heads}; kvbench calibrate makes its own"
        )
    mean_shape = (
        (len(scores.query_means[0]), len(scores.query_means[0][0])) if scores.query_means else None
    )
    if mean_shape not in (None, (shape.query_heads, shape.head_dim)):
        raise ValueError(
            f"method.heads: mean queries of {mean_shape[0]} heads of {mean_shape[1]} dims, and"
            f" the model has {shape.query_heads} of {shape.head_dim}; kvbench calibrate makes"
            " its own"
        )
