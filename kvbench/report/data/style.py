"""How a method looks wherever it is drawn: one label, colour, marker and line for each.

Colours are Okabe and Ito's and Paul Tol's, which colour-blind readers distinguish; no two methods
share a colour and a marker, so a picture can be read in grey as well. There are more methods than
colours: in one picture those that share one get others (`styles_of`).
"""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Iterable
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Style:
    """How a method is drawn.

    Attributes
    ----------
    label
        its name as published.
    colour
        hexadecimal RGB.
    marker
        matplotlib's letter for it.
    line
        matplotlib's line style; presets of a method differ in it.
    """

    label: str
    colour: str
    marker: str
    line: str = "-"


BLACK = "#000000"
GREY = "#999999"
GREEN = "#009E73"
BLUE = "#0072B2"
VERMILION = "#D55E00"
PURPLE = "#CC79A7"
ORANGE = "#E69F00"
SKY = "#56B4E9"
WINE = "#882255"
INDIGO = "#332288"
OLIVE = "#999933"
BROWN = "#8C564B"

COLOURS = (GREEN, BLUE, VERMILION, ORANGE, PURPLE, SKY, WINE, OLIVE, INDIGO, BROWN, GREY)
MARKERS = "osD^vPX<>phd8H"

# A picture that has no room for all shows those that come first.
STYLES = {
    "full": Style("Full", BLACK, "*"),
    "topk": Style("Top-k", GREY, "P"),
    "icecache": Style("IceCache", GREEN, "D"),
    "quest": Style("Quest", BLUE, "o"),
    "snapkv": Style("SnapKV", VERMILION, "s"),
    "streaming_llm": Style("StreamingLLM", PURPLE, "^"),
    "pariskv": Style("ParisKV", ORANGE, "v"),
    "lychee": Style("LycheeCluster", SKY, "p"),
    "racc": Style("RACC", WINE, "h"),
    "pqcache": Style("PQCache", BROWN, "d"),
    "h2o": Style("H2O", OLIVE, "<"),
    "random": Style("Random", GREY, "X", ":"),
    "rocketkv": Style("RocketKV", BLUE, "X"),
    "expected_attention": Style("Expected Attention", OLIVE, "o"),
    "kvzip": Style("KVzip", BROWN, "s"),
    "triattention": Style("TriAttention", WINE, "o"),
    "attention_matching": Style("Attention Matching", SKY, "o"),
    "keydiff": Style("KeyDiff", SKY, "v"),
    "pyramidkv": Style("PyramidKV", INDIGO, ">"),
    "magicpig": Style("MagicPIG", INDIGO, "X"),
    "omnikv": Style("OmniKV", OLIVE, "D"),
    "arkvale": Style("ArkVale", BROWN, "o"),
    "shadowkv": Style("ShadowKV", GREY, "s"),
    "clusterkv": Style("ClusterKV", BLUE, "d"),
    "raas": Style("RaaS", VERMILION, "v"),
    "razor": Style("RazorAttention", PURPLE, "X"),
    "retroinfer": Style("RetroInfer", SKY, "D"),
    "freekv": Style("FreeKV", OLIVE, "P"),
    "twilight_quest": Style("Twilight, Quest", INDIGO, "o"),
    "twilight_topk": Style("Twilight, top-k", INDIGO, "P", ":"),
    "socket": Style("SOCKET", BROWN, "^"),
    "cake": Style("CAKE", VERMILION, "P"),
    "adakv_snapkv": Style("AdaKV", VERMILION, "D", "--"),
    "squeeze": Style("SqueezeAttention", GREY, "h"),
    "scope": Style("SCOPE", BLUE, "<"),
    "rkv": Style("R-KV", WINE, "v"),
    "knorm": Style("Key norm", ORANGE, "o"),
    "lru": Style("LRU", GREY, "v"),
    "tova": Style("TOVA", PURPLE, "o"),
    "duo": Style("DuoAttention", ORANGE, "s"),
    "think": Style("ThinK", GREEN, "o", ":"),
    "icecache_reuse": Style("IceCache-reuse", GREEN, "d", "--"),
    "icecache_plus": Style("IceCache+", GREEN, "X", ":"),
    "icecache_code": Style("IceCache-code", GREEN, "s", "-."),
    "quest_structure": Style("Quest-structure", BLUE, "s", "--"),
    "pariskv_aligned": Style("ParisKV-aligned", ORANGE, "<", "--"),
    "pariskv_adaptive": Style("ParisKV-adaptive", ORANGE, ">", ":"),
    "lychee_plus": Style("LycheeCluster+", SKY, "P", ":"),
    "racc_code": Style("RACC-code", WINE, "H", "--"),
    "racc_paper": Style("RACC-paper", WINE, "8", ":"),
    "snapkv_racc": Style("SnapKV + RACC", VERMILION, "H", "-."),
    "pyramidkv_racc": Style("PyramidKV + RACC", INDIGO, "h", "-."),
    "kvzip_plus": Style("KVzip+", BROWN, "P", "--"),
    "adakv_expected_attention": Style("Expected Attention, AdaKV", OLIVE, "X", "--"),
    "h2o_prompt": Style("H2O, prompt", OLIVE, ">", "--"),
    "snapkv_decode": Style("SnapKV, decode", VERMILION, "d", ":"),
    "knorm_decode": Style("Key norm, decode", ORANGE, "8", ":"),
    "tova_decode": Style("TOVA, decode", PURPLE, "8", ":"),
    "expected_attention_decode": Style("Expected Attention, decode", OLIVE, "8", ":"),
    "keydiff_decode": Style("KeyDiff, decode", SKY, "8", ":"),
    "keydiff_blocks": Style("KeyDiff, blocks", SKY, "s", "--"),
}

# Other spellings, in the papers' tables and in the house.
ALIASES = {
    "fullattention": "full",
    "fullkv": "full",
    "slm": "streaming_llm",
    "skv": "snapkv",
    "okv": "omnikv",
    "mpg": "magicpig",
    "pqc": "pqcache",
    "akv": "arkvale",
    "ice": "icecache",
    "icer": "icecache_reuse",
    "lycheecluster": "lychee",
    "razorattention": "razor",
    "cakekv": "cake",
    "squeezeattention": "squeeze",
    "squeezeattn": "squeeze",
    "twilight": "twilight_quest",
    "magicpig++": "magicpig",
}


def style_of(method: str) -> Style:
    """The style of a method by any of its names ("streaming_llm", "StreamingLLM", "SLM").

    An unknown name, of a user's own method or a preset, takes the style of the known method it
    begins with under a label and line of its own, or else a colour and a marker that follow from
    the name alone.
    """
    plain = _plain(method)
    style = _BY_NAME.get(plain)
    if style is not None:
        return style
    parents = [name for name in STYLES if method.startswith(f"{name}_")]
    if parents:
        return replace(STYLES[max(parents, key=len)], label=method, line="-.")
    number = zlib.crc32(plain.encode())
    # matplotlib leaves what begins with _ out of legends
    label = f" {method}" if method.startswith("_") else method
    return Style(
        label, COLOURS[number % len(COLOURS)], MARKERS[number // len(COLOURS) % len(MARKERS)]
    )


def styles_of(methods: Iterable[str]) -> dict[str, Style]:
    """The styles of methods that stand in one picture.

    No two share a colour, nor a marker, while there are others; then no two share both. The first
    in the order of `STYLES` has its own, a user's method takes what the others leave.
    """
    looks = {method: style_of(method) for method in in_order(methods)}
    styles: dict[str, Style] = {}
    first_by_colour: dict[str, Style] = {}  # the first of each colour
    for style in looks.values():
        first_by_colour.setdefault(style.colour, style)
    spare = itertools.chain(
        (colour for colour in COLOURS if colour not in first_by_colour), itertools.cycle(COLOURS)
    )
    for method, style in looks.items():
        if first_by_colour[style.colour] is not style:
            style = replace(style, colour=next(spare))
        crowded = len(styles) >= len(MARKERS)
        taken = {
            other.marker for other in styles.values() if not crowded or other.colour == style.colour
        }
        if style.marker in taken:
            style = replace(style, marker=next(marker for marker in MARKERS if marker not in taken))
        styles[method] = style
    return styles


def in_order(methods: Iterable[str]) -> list[str]:
    """Methods in the order of `STYLES`, then a user's own by their names."""
    places = {name: place for place, name in enumerate(STYLES)}
    return sorted(set(methods), key=lambda name: (places.get(name, len(places)), name))


def _plain(name: str) -> str:
    return "".join(letter for letter in name.lower() if letter.isalnum() or letter == "+")


_BY_NAME = {_plain(name): style for name, style in STYLES.items()}
_BY_NAME |= {_plain(style.label): style for style in STYLES.values()}
_BY_NAME |= {alias: STYLES[name] for alias, name in ALIASES.items()}
