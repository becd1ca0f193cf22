"""Write made JSON documents, each a text for `task=fidelity task.texts=FOLDER`.

    python scripts/json_texts.py records

Records with facts in some of them, those that `scripts/bench_lychee.py` asks about, in its two layouts by turns.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from bench_lychee import LAYOUTS, document

from kvbench.backends.hf.loading import load
from kvbench.cli.compose import composed


def main() -> None:
    """Make them, write them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where the .txt files go")
    parser.add_argument("--model", default="smollm2-135m-instruct", help="of conf/model, whose tokens are counted")
    parser.add_argument("--texts", type=int, default=24, help="documents")
    parser.add_argument("--tokens", type=int, default=4600, help="of each, about")
    arguments = parser.parse_args()
    loaded = load(composed(f"model={arguments.model}")["model"], device="cpu")
    arguments.folder.mkdir(parents=True, exist_ok=True)
    for number in range(arguments.texts):
        layout = list(LAYOUTS)[number % len(LAYOUTS)]
        text, _, _ = document(layout, arguments.tokens, number, loaded)
        name = f"{layout}-{number // len(LAYOUTS)}.txt"
        (arguments.folder / name).write_text(text[text.index("[") :], encoding="utf-8")


if __name__ == "__main__":
    main()
