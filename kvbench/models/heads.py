"""Scores of a model's heads, a JSON file each, which `kvbench calibrate` writes.

A model's are those of its weights.

A table that comes from elsewhere, one number a head, is read from a .tsv file: a line for each
layer, tabs between. Those of models that need no hub lie in `kvbench/assets/heads`, a user's under
`$KVBENCH_HOME/heads`. Imports no torch.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvbench.config import ASSETS, ConfigError, first_line, home, shipped
from kvbench.models import hub

if TYPE_CHECKING:
    from kvbench.method import HeadScores, Shape

AUTO = "auto"

TABLE = ".tsv"
NUMBERS = ("echo", "induction", "query_means", "query_sizes")

Scores = tuple[tuple[float, ...], ...]  # [layers][Hkv]


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
    echo, induction, query_means, query_sizes
        see `kvbench.method.HeadScores`.
    """

    model: str
    weights: str | None
    procedure: dict[str, Any]
    echo: Scores
    induction: Scores
    query_means: tuple[Scores, ...] = ()
    query_sizes: tuple[Scores, ...] = ()

    @property
    def scores(self) -> HeadScores:
        """As methods are given them."""
        from kvbench.method import HeadScores

        return HeadScores(*self._numbers)

    @property
    def digest(self) -> str:
        """12 hex digits of the scores, for run ids."""
        return hashlib.sha256(json.dumps(self._numbers).encode()).hexdigest()[:12]

    @property
    def _numbers(self) -> tuple[Any, ...]:
        return self.echo, self.induction, self.query_means, self.query_sizes

    def write(self, file: Path) -> None:
        """Write it as JSON, a line for each layer's scores."""
        facts = {"model": self.model, "weights": self.weights, "procedure": self.procedure}
        lines = [f'  "{name}": {json.dumps(value)}' for name, value in facts.items()]
        for name, layers in zip(NUMBERS, self._numbers, strict=True):
            rows = ",\n    ".join(map(json.dumps, layers))
            lines.append(f'  "{name}": [\n    {rows}\n  ]')
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


def user_folder() -> Path:
    """Where `kvbench calibrate` puts a user's."""
    return home() / "heads"


def read(file: Path) -> Calibration:
    """The calibration in a file.

    Raises
    ------
    ConfigError
        it is none.
    """
    try:
        text = file.read_text(encoding="utf-8")
        loaded = _of_table(file.name, text) if file.suffix == TABLE else _of_json(json.loads(text))
        heads = [[len(layer) for layer in part] for part in (loaded.echo, loaded.induction)]
        if heads[0] != heads[1] or len(set(heads[0])) != 1:
            raise ValueError("echo and induction are not a number for each layer and KV head")
        return loaded
    except FileNotFoundError as error:
        raise ConfigError(
            f"method.heads={file}: no such file; expected one of kvbench calibrate"
        ) from error
    except (OSError, LookupError, OverflowError, RecursionError, TypeError, ValueError) as error:
        raise ConfigError(
            f"method.heads={file}: no head scores: {first_line(error)}; expected a file of kvbench"
            " calibrate, or a table of numbers (.tsv), a line for each layer"
        ) from error


def _of_table(name: str, text: str) -> Calibration:
    rows = [map(float, line.split()) for line in text.splitlines()]
    table = tuple(tuple(min(1.0, max(0.0, score)) for score in row) for row in rows)
    return Calibration(name, None, {}, table, table)


def _of_json(saved: Any) -> Calibration:
    numbers: dict[str, Any] = {
        name: tuple(tuple(map(float, row)) for row in saved[name]) for name in NUMBERS[:2]
    }
    for name in NUMBERS[2:]:
        layers = (tuple(tuple(map(float, head)) for head in layer) for layer in saved[name])
        numbers[name] = tuple(layers)
    return Calibration(saved["model"], saved["weights"], saved["procedure"], **numbers)


def calibration_of(
    source: hub.ModelSource, choice: str, words: str, seed: int = 0
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

    Raises
    ------
    ConfigError
        there is none, or the file is of another model.
    """
    weights = source.weights(seed)
    if choice != AUTO:
        loaded = read(Path(choice).expanduser())
        if None not in (weights, loaded.weights) and loaded.weights != weights:
            raise ConfigError(
                f"method.heads={choice}: made of {loaded.model} ({loaded.weights}), and the model"
                f" is {source.name} ({weights}); kvbench calibrate {words} makes its own"
            )
        return loaded
    if weights is None:
        return None
    for folder in (user_folder(), ASSETS / "heads"):
        for file in sorted(folder.glob("*.json")):
            if (loaded := read(file)).weights == weights:
                return loaded
    raise ConfigError(
        f"method.heads=auto: {source.name} is not calibrated; kvbench calibrate {words} does that,"
        " once"
    )


def calibration_for(model: hub.ModelConfig, choice: object, seed: int) -> Calibration | None:
    """The calibration of a model that a method needs by its option `heads`, the choice.

    None: it needs none, or the weights are not on this machine yet.

    Raises
    ------
    ConfigError
        as `calibration_of`.
    """
    if not isinstance(choice, str):
        return None
    original = shipped("model", model.name)
    words, source = f"model={model.name}", model.source
    if source.name != model.name or original is None:
        words = f"model.path={source.path}"
    elif source.path is None and original["path"] is not None:
        words += " model.weights=dummy"
    return calibration_of(source, choice, words, seed)


def refuse_other_shape(scores: HeadScores, shape: Shape) -> None:
    """Refuse scores of a model that has other layers or heads.

    Raises
    ------
    ValueError
        says what they are of.
    """
    layers, heads = len(scores.echo), len(scores.echo[0])
    if (layers, heads) != (shape.layers, shape.kv_heads):
        raise ValueError(
            f"method.heads: scores of {layers} layers of {heads} KV heads, and the model has"
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
