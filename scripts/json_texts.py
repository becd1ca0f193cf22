"""Write made JSON documents, each a text for `task=fidelity task.texts=FOLDER`.

    python scripts/json_texts.py records

Records with facts in some of them, those that `scripts/bench_lychee.py` asks about, in its two
layouts by turns.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

from bench import command_line

from kvbench.backends.hf.loading import Loaded, load
from kvbench.cli.compose import composed
from kvbench.tasks.ruler import prose
from kvbench.tasks.ruler.needles import Needles, draw

FACTS = Needles("essay", "words", "numbers", 1, 1, 1, prose.words)
LAYOUTS = {"objects": ("{\n  ", ",\n  ", "\n}"), "lines": ("{", ", ", "}")}


def document(layout: str, tokens: int, seed: int, loaded: Loaded) -> tuple[str, str, str]:
    """JSON records, four of which hold a fact; the question for one, and its answer."""
    rng = random.Random(f"{layout}/{seed}")
    opens, between, closes = LAYOUTS[layout]
    words, keys = draw("words", 60, rng), draw("words", 4, rng)
    values = [str(rng.randrange(10**6, 10**7)) for _ in keys]

    def record(**fields: Any) -> str:
        fields = {"id": rng.randrange(1000), **fields}
        pairs = (f"{json.dumps(key)}: {json.dumps(value)}" for key, value in fields.items())
        return opens + between.join(pairs) + closes

    facts = zip(keys, values, strict=True)
    records = [record(note=FACTS.needle(key, value)) for key, value in facts]
    remaining = tokens - len(loaded.tokenizer(",\n".join(records))["input_ids"])
    while True:
        more = record(name=rng.choice(words), size=rng.randrange(100), tags=rng.sample(words, 2))
        remaining -= len(loaded.tokenizer(",\n" + more)["input_ids"])
        if remaining < 0:
            break
        records.append(more)
    rng.shuffle(records)
    queried = rng.randrange(4)
    frame, question = FACTS.asking([keys[queried]])
    text = frame.partition("{context}")[0] + "[\n" + ",\n".join(records) + "\n]"
    return text, "\n" + question, values[queried]


def main() -> None:
    """Make them, write them."""
    parser = command_line(
        __doc__,
        model=("smollm2-135m-instruct", "of conf/model, whose tokens are counted"),
        texts=(24, "documents"),
        tokens=(4600, "of each, about"),
    )
    parser.add_argument("folder", type=Path, help="where the .txt files go")
    arguments = parser.parse_args()
    loaded = load(composed(f"model={arguments.model}").model, device="cpu")
    arguments.folder.mkdir(parents=True, exist_ok=True)
    for number in range(arguments.texts):
        layout = list(LAYOUTS)[number % len(LAYOUTS)]
        text = document(layout, arguments.tokens, number, loaded)[0]
        name = f"{layout}-{number // len(LAYOUTS)}.txt"
        (arguments.folder / name).write_text(text[text.index("[") :], encoding="utf-8")


if __name__ == "__main__":
    main()
