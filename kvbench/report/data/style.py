"""How a method looks wherever it is drawn: one label, colour, marker and line for each.

The colours of families are Okabe and Ito's and Paul Tol's, which colour-blind readers distinguish;
further members have lighter and darker ones. No two methods share a colour and a marker, in any
picture, so that it can be read in grey as well.
"""

from __future__ import annotations

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
# Hues of a family of methods, and lighter and darker ones for its further members.
GREEN, GREEN_DARK, GREEN_LIGHT = "#009E73", "#00624A", "#6CC7AC"  # trees of pages
BLUE, BLUE_DARK, BLUE_LIGHT = "#0072B2", "#00406B", "#6E93C4"  # pages by a bound
VERMILION, VERMILION_DARK, VERMILION_LIGHT = "#D55E00", "#983A00", "#F09A5B"  # votes of a window
PURPLE, PURPLE_DARK = "#CC79A7", "#93457A"  # sinks and recent tokens
ORANGE, ORANGE_DARK, ORANGE_LIGHT = "#E69F00", "#A87400", "#F5C766"  # codes of ParisKV
SKY, SKY_DARK = "#56B4E9", "#2A86BA"  # chunks of text
WINE, WINE_LIGHT = "#882255", "#B4628C"  # compressed, and fetched again
INDIGO, INDIGO_LIGHT, INDIGO_PALE = "#332288", "#6A5ACD", "#9C92DE"  # codes, clusters, means
OLIVE, OLIVE_DARK = "#999933", "#66661A"  # evict as they generate
BROWN, BROWN_LIGHT = "#8C564B", "#B98A7E"  # guess queries, or repeat the context
TEAL, TEAL_LIGHT = "#44AA99", "#8BCFC3"  # keys alone

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
    "pqcache": Style("PQCache", INDIGO, "d"),
    "h2o": Style("H2O", OLIVE, "<"),
    "random": Style("Random", GREY, "X", ":"),
    "rocketkv": Style("RocketKV", BLUE_DARK, "X"),
    "expected_attention": Style("Expected Attention", BROWN, "o"),
    "kvzip": Style("KVzip", BROWN, "s"),
    "triattention": Style("TriAttention", BROWN, "^"),
    "attention_matching": Style("Attention Matching", BROWN_LIGHT, "D"),
    "keydiff": Style("KeyDiff", TEAL, "v"),
    "pyramidkv": Style("PyramidKV", VERMILION_DARK, ">"),
    "magicpig": Style("MagicPIG", INDIGO_LIGHT, "X"),
    "omnikv": Style("OmniKV", INDIGO_PALE, "D"),
    "arkvale": Style("ArkVale", BLUE_LIGHT, "s"),
    "shadowkv": Style("ShadowKV", INDIGO, "s"),
    "clusterkv": Style("ClusterKV", INDIGO_LIGHT, "o"),
    "raas": Style("RaaS", OLIVE_DARK, "v"),
    "razor": Style("RazorAttention", PURPLE_DARK, "X"),
    "retroinfer": Style("RetroInfer", INDIGO_PALE, "p"),
    "freekv": Style("FreeKV", INDIGO, "P"),
    "twilight_quest": Style("Twilight, Quest", BLUE_DARK, "D"),
    "twilight_topk": Style("Twilight, top-k", BLUE_DARK, "P", ":"),
    "socket": Style("SOCKET", INDIGO_LIGHT, "^"),
    "cake": Style("CAKE", VERMILION_DARK, "P"),
    "adakv_snapkv": Style("AdaKV", VERMILION_LIGHT, "D", "--"),
    "squeeze": Style("SqueezeAttention", PURPLE_DARK, "h"),
    "scope": Style("SCOPE", OLIVE_DARK, "<"),
    "rkv": Style("R-KV", OLIVE_DARK, "D"),
    "knorm": Style("Key norm", TEAL, "o"),
    "lagkv": Style("LagKV", TEAL, "^"),
    "curdkv": Style("CurDKV", TEAL, "D"),
    "compactor": Style("Compactor", BROWN, "D"),
    "qfilter": Style("Q-Filters", TEAL, "p"),
    "vattention": Style("vAttention", INDIGO_LIGHT, "s"),
    "lru": Style("LRU", GREY, "v"),
    "tova": Style("TOVA", OLIVE, "o"),
    "duo": Style("DuoAttention", PURPLE_DARK, "s"),
    "think": Style("ThinK", VERMILION_LIGHT, "o", ":"),
    "icecache_reuse": Style("IceCache-reuse", GREEN_DARK, "d", "--"),
    "icecache_plus": Style("IceCache+", GREEN_LIGHT, "X", ":"),
    "icecache_code": Style("IceCache-code", GREEN_DARK, "s", "-."),
    "quest_structure": Style("Quest-structure", BLUE_LIGHT, "o", "--"),
    "pariskv_aligned": Style("ParisKV-aligned", ORANGE_DARK, "<", "--"),
    "pariskv_adaptive": Style("ParisKV-adaptive", ORANGE_LIGHT, ">", ":"),
    "lychee_plus": Style("LycheeCluster+", SKY_DARK, "P", ":"),
    "racc_code": Style("RACC-code", WINE_LIGHT, "H", "--"),
    "racc_paper": Style("RACC-paper", WINE_LIGHT, "8", ":"),
    "snapkv_racc": Style("SnapKV + RACC", WINE, "s", "-."),
    "pyramidkv_racc": Style("PyramidKV + RACC", WINE, ">", "-."),
    "kvzap": Style("KVzap", BROWN_LIGHT, "o"),
    "kvzap_threshold": Style("KVzap, threshold", BROWN_LIGHT, "^", ":"),
    "kvzip_plus": Style("KVzip+", BROWN_LIGHT, "P", "--"),
    "adakv_expected_attention": Style("Expected Attention, AdaKV", BROWN_LIGHT, "X", "--"),
    "h2o_prompt": Style("H2O, prompt", OLIVE_DARK, ">", "--"),
    "snapkv_decode": Style("SnapKV, decode", VERMILION_DARK, "d", ":"),
    "knorm_decode": Style("Key norm, decode", TEAL_LIGHT, "8", ":"),
    "tova_decode": Style("TOVA, decode", OLIVE_DARK, "8", ":"),
    "expected_attention_decode": Style("Expected Attention, decode", BROWN_LIGHT, "8", ":"),
    "keydiff_decode": Style("KeyDiff, decode", TEAL_LIGHT, "v", ":"),
    "keydiff_blocks": Style("KeyDiff, blocks", TEAL_LIGHT, "s", "--"),
}
# Of a user's own methods, which have markers that no shipped method has.
COLOURS = (BLUE, VERMILION, GREEN, PURPLE, ORANGE, SKY, WINE, INDIGO, OLIVE, BROWN, TEAL)
MARKERS = "1234+x|"

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
    number = zlib.crc32(plain.encode())
    marker = MARKERS[number // len(COLOURS) % len(MARKERS)]
    if parents:
        parent = STYLES[max(parents, key=len)]
        return replace(parent, label=method, marker=marker, line="-.")
    # matplotlib leaves what begins with _ out of legends
    label = f" {method}" if method.startswith("_") else method
    return Style(label, COLOURS[number % len(COLOURS)], marker)


def styles_of(methods: Iterable[str]) -> dict[str, Style]:
    """The styles of methods that stand in one picture, the same as in all others.

    Only where the names of a user's own methods lead to one look has the later another marker.
    """
    styles: dict[str, Style] = {}
    for method in in_order(methods):
        style = style_of(method)
        taken = {(other.colour, other.marker) for other in styles.values()}
        markers = (style.marker, *MARKERS)
        free = (marker for marker in markers if (style.colour, marker) not in taken)
        styles[method] = replace(style, marker=next(free, style.marker))
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
