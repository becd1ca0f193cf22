"""The looks of methods in figures."""

from __future__ import annotations

import pytest

from kvbench.cli import demo
from kvbench.config import choices
from kvbench.report.data.style import STYLES, style_of, styles_of


def test_no_two_methods_share_a_colour_and_a_marker():
    looks = [(style.colour, style.marker) for style in STYLES.values()]
    assert len(looks) == len(set(looks))


def test_every_method_of_the_house_has_a_style_and_a_name_of_its_own():
    assert choices("method").keys() - STYLES.keys() == set()
    assert len({style.label for style in STYLES.values()}) == len(STYLES)


@pytest.mark.parametrize(
    "methods",
    [
        ["full", "quest", "clusterkv", "pqcache", "arkvale", "snapkv", "snapkv_racc", "mine"],
        ["icecache", "icecache_code", "icecache_plus", "icecache_reuse", "h2o", "knorm", "quest_mine", "newest"],
    ],
)
def test_in_one_picture_no_two_methods_share_a_colour_or_a_marker(methods):
    styles = styles_of(methods)
    for of in ("colour", "marker"):
        assert len({getattr(style, of) for style in styles.values()}) == len(methods)
    assert styles[methods[0]].colour == style_of(methods[0]).colour, "the first has its own"


def test_where_there_are_more_methods_than_colours_no_two_look_alike():
    methods = [*STYLES, "mine", "newest"]
    assert len({(style.colour, style.marker) for style in styles_of(methods).values()}) == len(methods)


@pytest.mark.parametrize("name", ["streaming_llm", "StreamingLLM", "Streaming-LLM", "SLM"])
def test_a_method_looks_the_same_by_every_name(name):
    assert style_of(name) is STYLES["streaming_llm"]


def test_an_unknown_preset_takes_its_family_s_colour_and_its_own_name():
    style = style_of("quest_mine")
    assert (style.label, style.colour) == ("quest_mine", STYLES["quest"].colour)
    assert style.line != STYLES["quest"].line


def test_an_unknown_method_always_looks_the_same_and_never_like_full_attention():
    assert style_of("newest") == style_of("newest")
    assert style_of("newest").colour != STYLES["full"].colour


def test_the_demo_s_methods_keep_their_looks():
    assert {name: (style_of(name).colour, style_of(name).marker) for name in demo.METHODS} == {
        "full": ("#000000", "*"),
        "topk": ("#999999", "P"),
        "pariskv": ("#E69F00", "v"),
        "lychee": ("#56B4E9", "p"),
        "icecache": ("#009E73", "D"),
        "quest": ("#0072B2", "o"),
        "snapkv": ("#D55E00", "s"),
        "streaming_llm": ("#CC79A7", "^"),
    }
