"""What mkdocs adds to the pages of `docs/` as it builds them (`make docs`).

Pages that stand elsewhere in the checkout, pictures of `results/`, the help of every command and
the settings of each method. None of it is written down twice, so that none can be out of date.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import importlib
import io
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from kvbench.cli.commands import COMMANDS
from kvbench.cli.main import main as kvbench
from kvbench.config import choices, conf_dir, method_config

ROOT = Path(__file__).resolve().parents[1]
METHODS = ROOT / "docs" / "methods"
# pages of the site by the file of the checkout that they are
ELSEWHERE = {
    "README.md": "index.md",
    "CHANGELOG.md": "changes.md",
    "CONTRIBUTING.md": "contributing.md",
    "kvbench/README.md": "harness.md",
    "methods/README.md": "methods/index.md",
    "results/FINDINGS.md": "results/index.md",
    "results/README.md": "results/archives.md",
}
SOURCES = {page: source for source, page in ELSEWHERE.items()}
PICTURES = "pictures"
LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\[\]]*\])*)\]\(([^)\s]+)\)")
FENCES = re.compile(r"(^```.*?^```)", re.DOTALL | re.MULTILINE)
SETTING = re.compile(r"^(\w+):\s*([^#]*?)\s*(?:#\s*(.*))?$", re.MULTILINE)
# keys of a method's YAML file that are no options
NO_OPTIONS = {
    "_target_",
    "name",
    "about",
    "defaults",
    "minimum",
    "preset",
    "published_dense_layers",
}
NO_OPTIONS |= {"valid", "version"}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that are not in `docs/`, and the pictures."""
    for source, page in ELSEWHERE.items():
        files.append(File.generated(config, page, abs_src_path=str(ROOT / source)))
    for picture in (ROOT / "results").glob("*.png"):
        files.append(
            File.generated(config, f"{PICTURES}/{picture.name}", abs_src_path=str(picture))
        )
    made = {"reference/commands.md": commands, "reference/settings.md": settings}
    for page, make in made.items():
        files.append(File.generated(config, page, content=make()))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Lead the links of a checkout to pages of the site, and end a method's page with its facts."""
    uri = page.file.src_uri
    source = SOURCES.get(uri, f"docs/{uri}")
    parts = FENCES.split(markdown)
    parts[::2] = [LINK.sub(functools.partial(_link, source, uri), part) for part in parts[::2]]
    text = "".join(parts)
    presets = presets_of(METHODS / Path(uri).name) if uri.startswith("methods/") else []
    return "\n\n".join([text, *map(facts, presets), *map(docstring, modules_of(presets))])


def _link(source: str, uri: str, match: re.Match[str]) -> str:
    """A link as the site has it; of one that leads to a file outside the site, the words."""
    mark, label, target = match.groups()
    path, _, anchor = target.partition("#")
    if "://" in target or not path:
        return match[0]
    file = os.path.normpath(os.path.join(os.path.dirname(source), path))
    if file.startswith("docs/"):
        page = file.removeprefix("docs/")
    elif file.startswith("results/") and file.endswith(".png"):
        page = f"{PICTURES}/{Path(file).name}"
    elif file in ELSEWHERE:
        page = ELSEWHERE[file]
    else:
        return label
    relative = os.path.relpath(page, os.path.dirname(uri) or ".")
    return f"{mark}[{label}]({relative}{'#' * bool(anchor)}{anchor})"


# -- methods ---------------------------------------------------------------------------------------


def presets_of(page: Path) -> list[str]:
    """The presets that a method's page describes, each in a paragraph that begins with its name."""
    if not page.is_file():
        return []
    names = re.findall(r"(?<=\n\n)`(\w+)` ", page.read_text(encoding="utf-8"))
    return [name for name in dict.fromkeys(names) if name in choices("method")]


def facts(name: str) -> str:
    """What a preset's YAML file and the page on budgets say of it."""
    text = (conf_dir() / "method" / f"{name}.yaml").read_text(encoding="utf-8")
    content, preset = yaml.safe_load(text), method_config(name)
    capacity = "its own sizes" if preset.preset is None else f"C = {preset.preset}"
    lines = [
        f"## `method={name}`",
        f"*{choices('method')[name]}.* Class `{preset.target}`; without `budget=`, {capacity}.",
        _budget(name),
        *(f"Options are those of `{base}`, but for:" for base in content.get("defaults", [])[:1]),
        _options(text, content.get("valid") or {}),
    ]
    return "\n\n".join(filter(None, lines))


def _options(text: str, valid: Mapping[str, Any]) -> str:
    """A table of the options in a YAML file; "" without any."""
    rows = [
        [f"`method.{name}`", f"`{default}`", about, _valid(valid.get(name))]
        for name, default, about in SETTING.findall(text.replace("|", r"\|"))
        if name not in NO_OPTIONS and default
    ]
    return _table(["option", "default", "what it is", "valid"], rows) if rows else ""


def modules_of(presets: Sequence[str]) -> list[str]:
    """The files of the presets' classes, each once."""
    return [*dict.fromkeys(_file(method_config(name).target) for name in presets)]


def docstring(file: str) -> str:
    """What a module says of itself."""
    text = ast.get_docstring(ast.parse((ROOT / file).read_text(encoding="utf-8"))) or ""
    return f"## `{file}`\n\n{text}"


def _budget(name: str) -> str:
    """What C counts, from the two tables of the page on budgets."""
    page = (METHODS / "budgets.md").read_text(encoding="utf-8")
    lines = [line for line in page.splitlines() if line.startswith(f"| `{name}` |")]
    published, unified = ([cell.strip() for cell in line.split("|")[2:-1]] for line in lines)
    rows = (["as published", *published], ["unified", unified[0], "nothing", unified[1]])
    return _table(["accounting", "C", "outside C", "least C"], rows)


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    return "\n".join(f"| {' | '.join(row)} |" for row in [head, ["---"] * len(head), *rows])


def _valid(rule: Any) -> str:
    """A rule of `valid:` in words."""
    if isinstance(rule, list):
        return ", ".join(f"`{str(value).lower()}`" for value in rule)
    return ", ".join(
        key if value is True else f"{key.replace('_', ' ')} {value}"
        for key, value in (rule or {}).items()
    )


def _file(target: str) -> str:
    """The file of the module that a class is in."""
    module = target.rpartition(".")[0].replace(".", "/")
    return f"{module}.py" if (ROOT / f"{module}.py").is_file() else f"{module}/__init__.py"


# -- the command line ------------------------------------------------------------------------------


def commands() -> str:
    """The help of `kvbench`, and of each command."""
    parts = ["# Commands", "What `--help` prints.", "## kvbench", _fenced(_help(kvbench))]
    for name, (place, about) in COMMANDS.items():
        module, function = place.split(":")
        command = getattr(importlib.import_module(module), function)
        parts += [f"## kvbench {name}", f"{about[0].upper()}{about[1:]}.", _fenced(_help(command))]
    return "\n\n".join(parts)


def settings() -> str:
    """The keys that every run has, and those of each task."""
    parts = [
        "# Settings of a run",
        "`conf/config.yaml`: every key can be set on the command line as `key=value`. Those of a"
        " method stand on [its page](../methods/index.md).",
        _fenced((conf_dir() / "config.yaml").read_text(encoding="utf-8"), "yaml"),
    ]
    for name, about in choices("task").items():
        text = (conf_dir() / "task" / f"{name}.yaml").read_text(encoding="utf-8")
        parts += [f"## `task={name}`", f"{about}.", _fenced(text, "yaml")]
    return "\n\n".join(parts)


def _help(command: Any) -> str:
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.suppress(SystemExit):
        command(["--help"])
    return printed.getvalue()


def _fenced(text: str, language: str = "text") -> str:
    return f"```{language}\n{text.strip()}\n```"
