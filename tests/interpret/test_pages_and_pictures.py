"""Pages and pictures: everything is in them, no text becomes markup, and any text can be drawn."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from matplotlib.image import imread

from llm2vec_gen_st.interpret import (
    ContextMatch,
    IdeaMap,
    LensToken,
    MapPoint,
    Separation,
    draw_lens,
    draw_map,
    write_lens_page,
    write_map_page,
)
from llm2vec_gen_st.interpret.shown import depth, printable, shade, shown_token

NASTY = st.one_of(
    st.text(max_size=20),
    st.sampled_from(
        [
            "<script>alert(1)</script>",
            '" onmouseover="x',
            "'><b>",
            "&lt;",
            "]]>",
            "-->",
            "$x_$",
            "\x00",
            "\ud800",
            "$\\frac$",
        ]
    ),
)
PROBABILITIES = st.floats(0, 1)


class Page(HTMLParser):
    """Tags, attributes and texts of a page, outside its style."""

    def __init__(self, path: Path) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.text = ""
        self._open: list[str] = []
        self.unclosed: list[str] = []
        self.feed(path.read_text(encoding="utf-8"))
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs
        if tag not in ("meta", "rect"):
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        if not self._open or self._open[-1] != "style":
            self.text += data

    @property
    def titles(self) -> list[str]:
        return [value or "" for name, value in self.attributes if name == "title"]


def lens_tokens(texts: list[str], tokens: list[str], probabilities: list[float]) -> list[LensToken]:
    return [
        LensToken(number, text, position, rank, 7, token, 1.25, probability)
        for number, text in enumerate(texts)
        for position in range(2)
        for rank, (token, probability) in enumerate(zip(tokens, probabilities, strict=True), 1)
    ]


def a_map(texts: list[str], labels: list[str]) -> IdeaMap:
    points = [
        MapPoint(encoder, text, label, float(number), float(number**2))
        for encoder in ("mean pooling", "LLM2Vec-Gen")
        for number, (text, label) in enumerate(zip(texts, labels, strict=True))
    ]
    separation = [Separation(encoder, 0.125, 0.75, (0.5, 0.25)) for encoder in ("mean pooling", "LLM2Vec-Gen")]
    return IdeaMap(points, separation)


@given(text=NASTY, tokens=st.lists(NASTY, min_size=1, max_size=4), decoded=NASTY, sentence=NASTY, data=st.data())
@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_no_text_becomes_markup_in_a_lens_page(
    tmp_path: Path, text: str, tokens: list[str], decoded: str, sentence: str, data: st.DataObject
) -> None:
    probabilities = [data.draw(PROBABILITIES) for _ in tokens]
    start = data.draw(st.integers(0, len(sentence)))
    match = ContextMatch(0, text, 1, 1, 0.5, 3, sentence[start:], sentence, start, len(sentence))
    path = write_lens_page(
        tmp_path / "lens.html", lens_tokens([text], tokens, probabilities), decoded=[decoded], contexts=[match]
    )
    page = Page(path)
    assert set(page.tags) == {
        "html", "head", "meta", "title", "style", "body", "h1", "h2", "p", "q", "table", "tr", "th", "td", "mark",
    }  # fmt: skip
    assert {name for name, _ in page.attributes} == {"lang", "charset", "style", "class", "title", "rowspan"}
    for expected in (text, sentence, *decoded.strip().splitlines()):
        assert printable(expected) in page.text
    assert len(page.titles) == 2 * len(tokens)
    for token, title in zip(tokens * 2, page.titles, strict=True):
        assert title.startswith(printable(repr(token)))
        assert "id 7, logit 1.250, probability 0." in title or "probability 1." in title
        assert shown_token(token) in page.text


@given(texts=st.lists(NASTY, min_size=2, max_size=4), label=NASTY)
@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_no_text_becomes_markup_in_a_map_page(tmp_path: Path, texts: list[str], label: str) -> None:
    labels = [label, *["other"] * (len(texts) - 1)]
    page = Page(write_map_page(tmp_path / "map.html", a_map(texts, labels)))
    assert page.tags.count("circle") == 2 * len(texts)
    assert page.tags.count("svg") == 2
    assert not {"script", "b", "img"} & set(page.tags)
    assert not any(name.startswith("on") for name, _ in page.attributes)
    for text, its_label in zip(texts, labels, strict=True):
        assert page.text.count(printable(f"{its_label}: {text}")) >= 2
    places = [float(value or "nan") for name, value in page.attributes if name in ("cx", "cy")]
    assert all(0 <= place <= 520 for place in places)


def test_every_class_has_a_look_of_its_own(tmp_path: Path) -> None:
    labels = [f"class {number}" for number in range(30)]
    content = write_map_page(tmp_path / "map.html", a_map(["text"] * 30, labels)).read_text(encoding="utf-8")
    looks = re.findall(r'r="5" (fill="[^"]*" stroke="[^"]*")><title>(class \d+)', content)
    assert len(looks) == 60
    assert len(set(looks)) == len({look for look, _ in looks}) == 30


def test_pages_load_nothing(tmp_path: Path) -> None:
    write_lens_page(tmp_path / "lens.html", lens_tokens(["a"], ["b"], [0.5]))
    write_map_page(tmp_path / "map.html", a_map(["a", "b", "c"], ["x", "x", "y"]))
    for name in ("lens.html", "map.html"):
        content = (tmp_path / name).read_text(encoding="utf-8")
        assert not re.search(r"https?:|src=|href=|url\(|@import|<script|<link", content)


@given(tokens=st.lists(NASTY, min_size=1, max_size=3), text=NASTY, label=NASTY)
@settings(max_examples=8, suppress_health_check=[HealthCheck.function_scoped_fixture])
@pytest.mark.filterwarnings("ignore:Glyph:UserWarning")
@pytest.mark.filterwarnings("ignore:Matplotlib currently does not support:UserWarning")
def test_any_text_can_be_drawn(tmp_path: Path, tokens: list[str], text: str, label: str) -> None:
    draw_lens(tmp_path / "lens.png", lens_tokens([text], tokens, [0.5] * len(tokens)))
    draw_map(tmp_path / "map.png", a_map([text, "b", "c"], [label, label, "other"]))
    for name in ("lens.png", "map.png"):
        assert (tmp_path / name).read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


def test_a_lens_has_a_panel_a_text_and_likelier_cells_are_darker(tmp_path: Path) -> None:
    one = imread(draw_lens(tmp_path / "one.png", lens_tokens(["a"], ["b", "c"], [0.9, 0.01])))
    two = imread(draw_lens(tmp_path / "two.png", lens_tokens(["a", "b"], ["b", "c"], [0.9, 0.01])))
    assert two.shape[1] == one.shape[1]
    assert two.shape[0] == pytest.approx(2 * one.shape[0], abs=2)

    def dark(image: Any) -> int:
        return int((image[..., :3].sum(axis=2) < 1.2).sum())

    pale = imread(draw_lens(tmp_path / "pale.png", lens_tokens(["a"], ["b", "c"], [0.02, 0.01])))
    assert dark(one) > 2 * dark(pale)
    with pytest.raises(ValueError, match="no tokens to draw"):
        draw_lens(tmp_path / "none.png", [])


def test_a_map_shows_every_class_in_both_panels(tmp_path: Path) -> None:
    texts, labels = [str(number) for number in range(6)], ["x", "y", "z"] * 2
    image = imread(draw_map(tmp_path / "map.png", a_map(texts, labels)))[..., :3]
    middle = image.shape[1] // 2
    for colour in ((0x00, 0x72, 0xB2), (0xD5, 0x5E, 0x00), (0x00, 0x9E, 0x73)):
        # Drawn at 0.8 over white.
        near = np.abs(image - (0.8 * np.array(colour) / 255 + 0.2)).max(axis=2) < 0.02
        assert near[:, :middle].sum() > 50
        assert near[:, middle:].sum() > 50


@given(PROBABILITIES, PROBABILITIES)
def test_shades_grow_with_the_probability_and_text_stays_readable(one: float, other: float) -> None:
    low, high = sorted((one, other))
    assert 0 <= depth(low) <= depth(high) <= 1

    def light(colour: str) -> int:
        return sum(int(colour[place : place + 2], 16) for place in (1, 3, 5))

    assert light(shade(low)[0]) >= light(shade(high)[0])
    assert abs(light(shade(one)[0]) - light(shade(one)[1])) > 250


@given(st.text())
def test_what_is_shown_can_be_seen_and_stays_on_one_line(token: str) -> None:
    shown = shown_token(token)
    assert shown
    assert shown.isprintable()
    assert shown.strip(" ")
    assert len(shown_token(token, 5)) <= 5
