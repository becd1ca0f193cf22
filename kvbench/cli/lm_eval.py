"""`kvbench lm-eval`: the tasks of EleutherAI's lm-evaluation-harness with any method, by lm-eval's
own command line.

Here is what needs neither torch nor lm-eval: which keys of a run say what generates, checked before
lm-eval reads its tasks. `kvbench.cli.lm_eval_model` generates.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import traceback
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from itertools import takewhile
from typing import Any

from kvbench.backends.protocol import GREEDY
from kvbench.backends.run_config import RunConfig
from kvbench.cli.checks import check_setup, read_config
from kvbench.cli.compose import compose_request, loader_of, run_of
from kvbench.cli.greedy import refuse_settings
from kvbench.cli.threads import wait_briefly
from kvbench.cli.words import refuse_twice
from kvbench.config import ConfigError, bind_methods, first_line, show
from kvbench.models import hub
from kvbench.runs.identity import run_id
from kvbench.runs.versions import versions_of

REQUIRED_PACKAGES = ("lm_eval", "accelerate")
MODEL = "kvbench.cli.lm_eval_model:KVBenchLM"

# Keys of a run that say what generates; all others are of tasks and results, which are lm-eval's
# here.
KEYS = {
    *("model", "method", "budget", "kv", "protocol", "seed"),
    *("device", "dtype", "attention", "threads", "memory_check", "cuda_graphs"),
}
LM_EVAL_KEYS = {
    "task": "--tasks",
    "protocol.chat": "--apply_chat_template",
    "protocol.question": "nothing: the last token of a context is always read through the method",
    **{f"protocol.{key}": "nothing: answers are greedy" for key in GREEDY},
    "results_dir": "--output_path",
    "batch": "--batch_size",
}
# whose errors may be of a network
CLIENTS = ("huggingface_hub", "httpx", "requests", "urllib3", "datasets")

USAGE = """\
kvbench lm-eval [key=value ...] [--method NAME] [--budget C] [--model-path FOLDER]
                --tasks TASK,... [lm-eval's options]
"""


def main(arguments: Sequence[str]) -> int:
    """Run lm-eval's own command line with the model `kvbench`; returns the exit code.

    Raises
    ------
    ConfigError
        what cannot run, before a model is loaded.
    """
    parser = argparse.ArgumentParser(
        "kvbench lm-eval",
        usage=USAGE,
        description="EleutherAI's lm-evaluation-harness with any KV-cache method.",
        epilog=(
            "lm-eval's options are those of `lm_eval run --help`: --tasks, --limit, --num_fewshot,"
            " --batch_size, --apply_chat_template, --output_path, --include_path, ..."
        ),
        allow_abbrev=False,
    )
    parser.add_argument("--method", metavar="NAME", help="of conf/method, as in method=NAME")
    parser.add_argument(
        "--budget", metavar="C", help="tokens (256), a fraction of the prompt (0.1), or null"
    )
    parser.add_argument(
        "--model-path", metavar="FOLDER", help="a folder or a hub id, as in model.path=FOLDER"
    )
    parser.add_argument(
        "--config-dir", metavar="FOLDER", help="with your own FOLDER/method/NAME.yaml"
    )
    parser.add_argument(
        "--use_cache", "-c", metavar="FILE", help="keep answers, each model's and method's apart"
    )
    words = list(takewhile(lambda word: not word.startswith("-"), arguments))
    args, theirs = parser.parse_known_args(arguments[len(words) :])
    refuse_missing()
    settings = dict(_setting(word) for word in words)
    flags = {
        "method": args.method,
        "budget": args.budget,
        "pretrained": args.model_path,
        "config_dir": args.config_dir,
    }
    chosen = {key: value for key, value in flags.items() if value is not None}
    refuse_twice(
        [
            *words,
            *(f"{'model.path' if key == 'pretrained' else key}={chosen[key]}" for key in chosen),
        ]
    )
    settings |= chosen
    refuse_named_otherwise(theirs)
    config = setup_config(settings)
    if args.use_cache:
        theirs += ["--use_cache", cache_of(args.use_cache, config)]
    wait_briefly()
    device = settings.pop("device", "auto")  # which lm-eval hands to its models by itself
    return _hand_to_lm_eval(settings, device, theirs)


def cache_of(file: str, config: RunConfig) -> str:
    """The file of answers of what generates, its code and weights: lm-eval keeps those of all its
    models alike.
    """
    what = {
        "config": {
            key: value
            for key, value in config.resolved.items()
            if key not in ("threads", "memory_check", "cuda_graphs")
        },
        "versions": versions_of(config),
        "weights": config.model.source.content(config.seed),
    }
    return f"{file}-{run_id(what)}"


def refuse_named_otherwise(words: Sequence[str]) -> None:
    """Refuse lm-eval's own ways to say what generates: answers are kept by what kvbench was told.

    Raises
    ------
    ConfigError
        names the option.
    """
    for word in words:
        if word.startswith(("--model", "-M", "-a")):
            option = word.partition("=")[0]
            raise ConfigError(
                f"lm-eval {option}: kvbench names its model itself; expected --method, --budget or"
                " key=value"
            )


def refuse_missing() -> None:
    """Refuse to go on without lm-eval.

    Raises
    ------
    ConfigError
        says how to install it.
    """
    missing = [package for package in REQUIRED_PACKAGES if find_spec(package) is None]
    if missing:
        raise ConfigError(f"lm-eval: needs {' and '.join(missing)}; pip install 'kvbench[lm-eval]'")


def _setting(word: str) -> tuple[str, str]:
    if "=" not in word:
        raise ConfigError(
            f"lm-eval {word}: expected key=value before the options, as in method=quest"
        )
    key, value = word.split("=", 1)
    return key, value


def setup_config(settings: Mapping[str, Any]) -> RunConfig:
    """The checked config of what generates; its task is nobody's.

    Parameters
    ----------
    settings
        values by the keys of a run, such as "method" and "protocol.accounting"; `pretrained`, as
        lm-eval's models call it, is `model.path`, and `config_dir` the folder of a user's own
        methods.

    Raises
    ------
    ConfigError
        as the command line would say it, and for a key that does not say what generates.
    """
    settings = dict(settings)
    config_dir = settings.pop("config_dir", None)
    if "pretrained" in settings:
        settings["model.path"] = settings.pop("pretrained")
    for key, value in settings.items():
        whose = next(
            (
                theirs
                for name, theirs in LM_EVAL_KEYS.items()
                if key == name or key.startswith(f"{name}.")
            ),
            None,
        )
        if whose or key.partition(".")[0] not in KEYS:
            right = (
                f"here that is {whose}" if whose else f"expected keys of {', '.join(sorted(KEYS))}"
            )
            raise ConfigError(f"lm-eval {key}={show(value)}: {right}")
    bind_methods()
    request = compose_request(
        loader_of(config_dir), "config", [_word(*item) for item in settings.items()], multirun=False
    )
    config = read_config(run_of(request.config))
    check_setup(config)
    return config


def _word(key: str, value: Any) -> str:
    """A setting as one would type it, in the quotes that Hydra asks for around what is no plain
    value.
    """
    text = show(value)
    if not isinstance(value, str) or re.fullmatch(r"[\w.:/~+-]*|\[.*\]|\{.*\}", text):
        return f"{key}={text}"
    escaped = text.replace("\\", "\\\\").replace("'", "\\'")
    return f"{key}='{escaped}'"


def _is_of_network(error: BaseException | None) -> bool:
    """Whether an error, or what it came from, is one of a connection."""
    while error is not None:
        if (
            isinstance(error, ConnectionError)
            or type(error).__module__.partition(".")[0] in CLIENTS
        ):
            return True
        error = error.__cause__ or error.__context__
    return False


def _hand_to_lm_eval(settings: Mapping[str, Any], device: str, options: Sequence[str]) -> int:
    from lm_eval._cli import HarnessCLI
    from lm_eval.api.registry import model_registry
    from lm_eval.utils import setup_logging

    if "kvbench" not in model_registry:
        model_registry.register("kvbench", target=MODEL)
    setup_logging()
    sys.argv = [
        "lm-eval",
        "run",
        "--model",
        "kvbench",
        "--model_args",
        json.dumps(settings),
        "--device",
        device,
    ]
    sys.argv += options
    command = HarnessCLI()
    try:
        parsed = command.parse_args()
        if parsed.gen_kwargs:
            refuse_settings(parsed.gen_kwargs)
        command.execute(parsed)
    except ValueError as error:
        # what lm-eval's own check of its options says, such as an unknown task: it has no model yet
        if traceback.extract_tb(error.__traceback__)[-1].filename.endswith("evaluate_config.py"):
            raise ConfigError(
                f"lm-eval: {first_line(error)}; see lm_eval ls tasks, lm_eval run --help"
            ) from error
        raise
    except Exception as error:  # of a dataset, which lm-eval fetches by itself
        if _is_of_network(error) and (reason := hub.out_of_reach()):
            raise ConfigError(
                f"lm-eval: {first_line(error)} ({reason}); expected a network, or the task's data"
                " in the hub's cache"
            ) from error
        raise
    return 0
