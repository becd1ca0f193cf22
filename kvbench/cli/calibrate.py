"""`kvbench calibrate`: what methods that treat a model's heads differently need to know of them,
made once.

The file lies under `$KVBENCH_HOME` (default: the user's cache folder) from then on, where every run
of the model finds it; or where `--out` says, for `method.heads=FILE`.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from kvbench.config import ConfigError, bind_methods

DEFAULT = "razor"
USAGE = "kvbench calibrate [model=MODEL] [key=value ...] [--out FILE]"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    parser = argparse.ArgumentParser(
        "kvbench calibrate", USAGE, "Measures what each head of a model looks for, once."
    )
    parser.add_argument(
        "words", nargs="*", metavar="key=value", help="as for a run: model, model.path, seed, dtype"
    )
    parser.add_argument(
        "--out", type=Path, metavar="FILE", help="where to write (default: where runs find it)"
    )
    flags = parser.parse_args(arguments)
    try:
        print(calibrated(flags.words, flags.out))
    except ConfigError as error:
        print(f"kvbench calibrate: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("kvbench calibrate: stopped; nothing was written", file=sys.stderr)
        return 130
    return 0


def calibrated(words: Sequence[str], out: Path | None = None) -> Path:
    """Calibrate the model that these words of a command line choose; returns the file.

    Raises
    ------
    ConfigError
        a word is wrong, the method needs no calibration, or the model cannot be loaded.
    """
    from kvbench.cli.compose import composed
    from kvbench.cli.words import refuse_twice
    from kvbench.models.heads import Calibration, kind_of, user_folder

    bind_methods()
    refuse_twice(words)
    chosen = [] if any(word.startswith("method=") for word in words) else [f"method={DEFAULT}"]
    # no task is run: prompts that fit any window
    config = composed("task=passkey", "task.lengths=[64]", *chosen, *words, here=False)
    kind = kind_of(config.method)
    if kind is None:
        raise ConfigError(
            f"method={config.method.name}: nothing of it is calibrated; expected a method that"
            f" measures a model first, as {DEFAULT} or kvzap"
        )
    from kvbench.backends.hf.loading import load
    from kvbench.measure.calibration import calibrate, measured

    loaded = load(config.model, config.device, config.dtype, config.seed)
    calibrator = config.method.build().calibrator()
    if calibrator is None:
        numbers, procedure = calibrate(loaded, config.seed)
    else:
        numbers, procedure = measured(loaded, calibrator)
    weights = config.model.source.weights(config.seed)
    file = out or user_folder(kind) / f"{loaded.name}.json"
    try:
        Calibration(loaded.name, weights, procedure, numbers).write(file)
    except OSError as error:
        raise ConfigError(
            f"{file}: {error.strerror}; expected a file to write (--out, or $KVBENCH_HOME)"
        ) from error
    return file
