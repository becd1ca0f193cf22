"""Texts as a model reads them: raw, or as the user's message in its chat template.

Imports no torch.

A template is a stranger's program. It runs in a process of its own
(`kvbench.backends.hf.template_worker`), which ends where it takes too long, and whatever it ends in
is one line that names the model's folder.
"""

from __future__ import annotations

import functools
import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvbench.config import ConfigError, first_line

if TYPE_CHECKING:
    from kvbench.models.types import Tokenizer

WORKER = "kvbench.backends.hf.template_worker"
SECONDS = 5  # of the processor's time for one text
MEMORY = 1 << 30  # bytes
# characters that a template may put around a text; the longest system prompts have some 20,000
MARGIN = 1 << 20

# Templates that print the date (gpt-oss, SmolLM3, Mistral Small; Llama's has a name of its own for
# it), and Qwen3's choice of whether to think: left free, a prompt changes with the day or the
# release. The date is the one that Llama 3.1's template falls back to.
TODAY = "2024-07-26"
SETTINGS = {"date_string": "26 Jul 2024", "enable_thinking": False}

Content = str | list[dict[str, str]]
PROBE = "What is this?"


@contextmanager
def tokenizing(path: str) -> Iterator[None]:
    """Turn what the compiled code of a tokenizer raises into one line.

    It raises `Exception` itself, or panics.

    Raises
    ------
    ConfigError
        names `path`.
    """
    try:
        yield
    except BaseException as error:
        if type(error) is Exception or is_panic(error):
            raise ConfigError(
                f"model.path={path}: its tokenizer cannot read a text: {first_line(error)}"
            ) from error
        raise


def is_panic(error: BaseException) -> bool:
    """Whether an error is a panic of compiled Rust code, which is no `Exception`."""
    return type(error).__name__ == "PanicException"


def raw_ids(text: str, tokenizer: Tokenizer) -> list[int]:
    """Token ids of a text that is to go on.

    What the tokenizer puts before it, such as BOS, is among them; what it puts after it is not.
    """
    ids: list[int] = list(tokenizer(text, verbose=False)["input_ids"])
    return ids[: len(ids) - appended(tokenizer)]


def appended(tokenizer: Tokenizer) -> int:
    """How many tokens a tokenizer puts after a text, as those of embedding models do with EOS."""
    whole, plain = (
        list(tokenizer("a", add_special_tokens=added, verbose=False)["input_ids"])
        for added in (True, False)
    )
    size = len(plain)
    starts = [at for at in range(len(whole) - size + 1) if whole[at : at + size] == plain]
    return len(whole) - starts[-1] - size if plain and starts else 0


def chat_text(text: str, tokenizer: Tokenizer) -> str:
    """A user's message in the chat template of a tokenizer, up to where the answer begins.

    Templates of models that see pictures take a message in parts, and drop one that is a text: they
    are given parts.

    Raises
    ------
    ConfigError
        the template fails, takes too much time or memory, or leaves out or changes the text.
    """
    failures = []
    for content in (text, [{"type": "text", "text": text}]):
        reply = _rendered(content, len(text), tokenizer)
        if text.strip() in reply.get("text", ""):
            return reply["text"]
        failures.append(reply.get("error", "leaves out or changes the user's text"))
        if reply.get("stopped"):
            break
    raise ConfigError(
        f"model.path={tokenizer.name_or_path}: its chat template{_file(tokenizer)} {failures[0]};"
        " expected one that keeps a user's text, or protocol.chat=off"
    )


def treatment(tokenizer: Tokenizer, chat: bool) -> dict[str, Any]:
    """What is done to a tokenizer's prompts and not to most others': part of a run's identity.

    {} for most.

    Parameters
    ----------
    tokenizer
        of the model.
    chat
        prompts may go through its chat template.
    """
    template = str(tokenizer.chat_template or "") if chat else ""
    in_parts = re.search("""['"]text['"]""", template) and PROBE not in _rendered(
        PROBE, len(PROBE), tokenizer
    ).get("text", "")
    return {
        **({"day": TODAY} if "strftime_now" in template else {}),
        **({"parts": True} if in_parts else {}),
        **({"left_out": count} if (count := appended(tokenizer)) else {}),
    }


def _file(tokenizer: Tokenizer) -> str:
    """Where in its folder a tokenizer's template stands, for a message; "": it is no folder."""
    names = ("chat_template.jinja", "chat_template.json", "tokenizer_config.json")
    return next(
        (f" ({name})" for name in names if Path(tokenizer.name_or_path, name).is_file()), ""
    )


def _rendered(content: Content, characters: int, tokenizer: Tokenizer) -> Mapping[str, str]:
    """The "text" of a template, or the "error" in which it ended.

    "stopped": its process ended with it.
    """
    try:
        template = tokenizer.get_chat_template()
    except ValueError as error:  # several, none of which is the default
        return {"error": f"cannot be chosen: {first_line(error)}"}
    request = {
        "template": template,
        "messages": [{"role": "user", "content": content}],
        "today": TODAY,
        "most": 2 * characters + MARGIN,
        "settings": {**tokenizer.special_tokens_map, **SETTINGS},
    }
    reply = _worker(os.getpid()).ask(json.dumps(request, default=str))
    return {
        key: value if key == "text" else " ".join(value.split())[:300].rstrip(".")
        for key, value in reply.items()
    }


class TemplateWorker:
    """The process that renders; a new one where the last has ended.

    It ends with the one that asks it.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[str] | None = None

    def ask(self, request: str) -> dict[str, str]:
        """The answer to a request, a line of JSON."""
        with self._lock:
            process = self._running()
            assert process.stdin is not None and process.stdout is not None
            try:
                process.stdin.write(f"{request}\n")
                process.stdin.flush()
                if answer := process.stdout.readline():
                    return dict(json.loads(answer))
            except BrokenPipeError:
                pass
            except BaseException:  # a key pressed: the answer to come is to no later request
                process.kill()
                self.close()
                raise
            self.close()
            if process.returncode == -signal.SIGPROF:
                return {"error": f"takes more than {SECONDS} s", "stopped": "by the clock"}
            return {
                "error": f"ended its process (exit code {process.returncode})",
                "stopped": "by itself",
            }

    def _running(self) -> subprocess.Popen[str]:
        if self._process is None or self._process.poll() is not None:
            self.close()
            # Where Python finds kvbench and transformers here it does so there, and nothing of the
            # machine shows.
            same = {"PYTHONPATH": os.pathsep.join(sys.path), "PYTHONHASHSEED": "0", "TZ": "UTC"}
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", WORKER, str(SECONDS), str(MEMORY)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
                encoding="utf-8",
                env={**os.environ, **same, "OPENBLAS_NUM_THREADS": "1"},
                start_new_session=True,  # a key pressed to stop the run is not for it
            )
        return self._process

    def close(self) -> None:
        """End the process."""
        process, self._process = self._process, None
        if process is not None:
            process.communicate()


@functools.cache
def _worker(process: int) -> TemplateWorker:
    """The one of a process: a fork has another."""
    return TemplateWorker()
