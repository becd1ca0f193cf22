"""How a method looks wherever it is drawn: one label, colour, marker and line for each, in the house and in the papers.

Colours are Okabe and Ito's and Paul Tol's, which colour-blind readers distinguish; no two methods share a colour and a
marker, so a picture can be read in grey as well. A preset has its method's colour.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Style:
    """How a method is drawn.

    Attributes:
        label: its name as published.
        colour: hexadecimal RGB.
        marker: matplotlib's letter for it.
        line: matplotlib's line style; presets of a method differ in it.
    """

    label: str
    colour: str
    marker: str
    line: str = "-"


BLACK, GREY, GREEN, BLUE, VERMILION = "#000000", "#999999", "#009E73", "#0072B2", "#D55E00"
PURPLE, ORANGE, SKY, WINE, INDIGO, OLIVE, BROWN = (
    "#CC79A7", "#E69F00", "#56B4E9", "#882255", "#332288", "#999933", "#8C564B",
)  # fmt: skip

# The house's own methods have a colour each; the papers' other baselines share those with other markers.
STYLES = {
    "full": Style("Full", BLACK, "*"),
    "topk": Style("Top-k", GREY, "P"),
    "icecache": Style("IceCache", GREEN, "D"),
    "icecache_reuse": Style("IceCache-reuse", GREEN, "d", "--"),
    "icecache_plus": Style("IceCache+", GREEN, "X", ":"),
    "icecache_code": Style("IceCache-code", GREEN, "s", "-."),
    "quest": Style("Quest", BLUE, "o"),
    "quest_structure": Style("Quest-structure", BLUE, "s", "--"),
    "snapkv": Style("SnapKV", VERMILION, "s"),
    "streaming_llm": Style("StreamingLLM", PURPLE, "^"),
    "pariskv": Style("ParisKV", ORANGE, "v"),
    "pariskv_aligned": Style("ParisKV-aligned", ORANGE, "<", "--"),
    "pariskv_adaptive": Style("ParisKV-adaptive", ORANGE, ">", ":"),
    "lychee": Style("LycheeCluster", SKY, "p"),
    "lychee_plus": Style("LycheeCluster+", SKY, "P", ":"),
    "racc": Style("RACC", WINE, "h"),
    "racc_code": Style("RACC-code", WINE, "H", "--"),
    "racc_paper": Style("RACC-paper", WINE, "8", ":"),
    "snapkv_racc": Style("SnapKV + RACC", VERMILION, "H", "-."),
    "pyramidkv_racc": Style("PyramidKV + RACC", INDIGO, "h", "-."),
    "pyramidkv": Style("PyramidKV", INDIGO, ">"),
    "h2o": Style("H2O", OLIVE, "<"),
    "h2o_prompt": Style("H2O-prompt", OLIVE, ">", "--"),
    "pqcache": Style("PQCache", BROWN, "d"),
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
    "keydiff": Style("KeyDiff", SKY, "v"),
    "expected_attention": Style("Expected Attention", OLIVE, "o"),
    "adakv_expected_attention": Style("Expected Attention, AdaKV", OLIVE, "X", "--"),
    "squeeze": Style("SqueezeAttention", GREY, "h"),
    "scope": Style("SCOPE", BLUE, "<"),
    "rkv": Style("R-KV", WINE, "v"),
    "random": Style("Random", GREY, "X", ":"),
    "knorm": Style("Key norm", ORANGE, "o"),
    "lru": Style("LRU", GREY, "v"),
    "tova": Style("TOVA", PURPLE, "o"),
    "kvzip": Style("KVzip", BROWN, "s"),
    "kvzip_plus": Style("KVzip+", BROWN, "P", "--"),
    "attention_matching": Style("Attention Matching", SKY, "o"),
    "triattention": Style("TriAttention", WINE, "o"),
    "duo": Style("DuoAttention", ORANGE, "s"),
    "rocketkv": Style("RocketKV", BLUE, "X"),
    "think": Style("ThinK", GREEN, "o", ":"),
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

    An unknown name, of a user's own method or a preset, takes the style of the known method it begins with under a
    label and line of its own, or else a colour and a marker that follow from the name alone.
    """
    plain = _plain(method)
    known = _BY_NAME.get(plain)
    if known is not None:
        return known
    parents = [name for name in STYLES if method.startswith(f"{name}_")]
    if parents:
        return replace(STYLES[max(parents, key=len)], label=method, line="-.")
    number = zlib.crc32(plain.encode())
    colours = list(dict.fromkeys(style.colour for style in STYLES.values() if style.colour != BLACK))
    label = f" {method}" if method.startswith("_") else method  # matplotlib leaves what begins with _ out of legends
    return Style(label, colours[number % len(colours)], "<>8H"[number // len(colours) % 4])


def _plain(name: str) -> str:
    return "".join(letter for letter in name.lower() if letter.isalnum() or letter == "+")


_BY_NAME = {_plain(name): style for name, style in STYLES.items()}
_BY_NAME |= {_plain(style.label): style for style in STYLES.values()}
_BY_NAME |= {alias: STYLES[name] for alias, name in ALIASES.items()}
