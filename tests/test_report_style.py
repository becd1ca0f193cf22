"""The looks of methods in figures."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from kvbench.cli import demo
from kvbench.config import choices
from kvbench.memory.kinds import KINDS
from kvbench.report.data.style import STYLES, style_of, styles_of
from kvbench.report.figures.latency import PARTS, SPARE_LOOKS
from kvbench.report.figures.points import kv_style


def test_no_two_methods_share_a_colour_and_a_marker():
    looks = [(style.colour, style.marker) for style in STYLES.values()]
    assert len(looks) == len(set(looks))


def test_every_method_of_the_house_has_a_style_and_a_name_of_its_own():
    assert choices("method").keys() - STYLES.keys() == set()
    assert len({style.label for style in STYLES.values()}) == len(STYLES)


def test_a_method_looks_the_same_in_every_picture_and_no_two_look_alike_in_one():
    methods = [*STYLES, "quest_mine", "mine", "newest", "another"]
    styles = styles_of(methods)
    assert all(styles[name] == STYLES[name] for name in STYLES)
    assert len({(style.colour, style.marker) for style in styles.values()}) == len(methods)


def test_those_that_a_picture_takes_first_differ_for_colour_blind_readers():
    """By five steps or more of lightness and hue (CIE76) for eyes without one of the cones (Machado et al. 2009)."""
    names = ["full", "topk", "icecache", "quest", "snapkv", "streaming_llm", "pariskv", "lychee", "racc", "h2o"]
    for seen in (np.eye(3), *BLIND):
        places = [lab(seen @ linear(STYLES[name].colour)) for name in names]
        pairs = itertools.combinations(zip(names, places, strict=True), 2)
        near = [(one, other) for (one, here), (other, there) in pairs if np.linalg.norm(here - there) < 5]
        assert near == []


# what a colour is without red, and without green cones: linear RGB
BLIND = (
    np.array([[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]]),
    np.array([[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]]),
)


def linear(colour: str) -> np.ndarray:
    parts = np.array([int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)])
    return np.where(parts <= 0.04045, parts / 12.92, ((parts + 0.055) / 1.055) ** 2.4)


def lab(rgb: np.ndarray) -> np.ndarray:
    """CIE L*a*b* of linear sRGB under D65."""
    to_xyz = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])
    x, y, z = np.cbrt(np.clip(to_xyz @ rgb, 0, None) / np.array([0.9505, 1.0, 1.089]))
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


def test_parts_of_a_step_and_kinds_of_codes_have_colours_of_their_own():
    of_methods = {style.colour for style in STYLES.values()}
    parts = {colour for colour, _ in (*PARTS.values(), *SPARE_LOOKS)}
    kinds = {kv_style(kind).colour for kind in KINDS["device"]}
    assert not of_methods & parts and not of_methods & kinds
    assert len({(kv_style(kind).colour, kv_style(kind).marker) for kind in KINDS["device"]}) == len(KINDS["device"])


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
