"""Pages of HTML that stand alone: styles inside, no script, nothing loaded, every text escaped."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING

from llm2vec_gen_st.files import write_atomically
from llm2vec_gen_st.interpret.logit_lens import LensToken
from llm2vec_gen_st.interpret.shown import COLOURS, classes, grouped, printable, shade, shown_token

if TYPE_CHECKING:
    from llm2vec_gen_st.interpret.idea_map import IdeaMap, MapPoint
    from llm2vec_gen_st.interpret.latent_lens import ContextMatch

_STYLE = """
body { font: 14px/1.4 system-ui, sans-serif; margin: 2em; color: #222; background: #fff; }
h2 { font-size: 1.1em; margin: 2em 0 .4em; overflow-wrap: anywhere; }
p { max-width: 60em; white-space: pre-line; overflow-wrap: anywhere; }
table { border-collapse: collapse; margin-bottom: 1em; }
td, th { padding: .3em .6em; border: 1px solid #ddd; text-align: left; }
th { font-weight: 600; background: #f6f6f6; }
th[rowspan] { vertical-align: top; }
.token { max-width: 12em; overflow: hidden; text-overflow: ellipsis; white-space: nowrap; cursor: help; }
mark { background: #ffe08a; }
figure { display: inline-block; margin: 0 1.5em 1em 0; }
figcaption { margin-bottom: .4em; }
small { display: block; color: #555; }
circle { stroke-width: 1.5; cursor: help; }
circle:hover { r: 8px; }
.key { display: inline-block; padding: 0 .6em; }
.swatch { display: inline-block; width: .7em; height: .7em; border: 2px solid; border-radius: 50%; margin-right: .3em; }
"""
_SIZE, _EDGE = 520, 14


def write_lens_page(
    path: str | Path,
    tokens: Sequence[LensToken],
    *,
    decoded: Sequence[str] | None = None,
    contexts: Sequence[ContextMatch] = (),
) -> Path:
    """A page with each text's lens: a table a text, darker where likelier, numbers shown on hover.

    Args:
        path: The HTML file.
        tokens: From :func:`~llm2vec_gen_st.interpret.logit_lens`.
        decoded: What each text's embedding says, by the text's number.
        contexts: Nearest contexts of the same texts, shown beneath.

    Returns:
        The file.
    """
    parts = [lens_scale()]
    matches = {group[0].input: group for group in grouped(contexts, [match.input for match in contexts])}
    for group in grouped(tokens, [token.input for token in tokens]):
        number = group[0].input
        parts.append(f"<h2>{_safe(group[0].text)}</h2>")
        if decoded is not None:
            parts.append(f"<p>Decoded from its embedding: <q>{safe_lines(decoded[number])}</q></p>")
        parts.append(lens_table(group))
        if number in matches:
            parts.append(_contexts_table(matches[number]))
    return _write(Path(path), "What the compression tokens hold", parts)


def write_map_page(path: str | Path, found: IdeaMap) -> Path:
    """A page with a map an encoder, side by side; the text and class of a point are shown on hover.

    Args:
        path: The HTML file.
        found: From :func:`~llm2vec_gen_st.interpret.idea_map`.

    Returns:
        The file.
    """
    names = classes([point.label for point in found.points])
    marks = {name: _mark(number) for number, name in enumerate(names)}
    keys = [
        f'<span class="key"><span class="swatch" style="background:{fill};border-color:{edge}"></span>'
        f"{_safe(name)}</span>"
        for name, (fill, edge) in marks.items()
    ]
    figures = [
        f"<figure><figcaption><strong>{_safe(separation.encoder)}</strong>"
        f"<small>silhouette {separation.silhouette:.3f}, neighbours of the same class "
        f"{separation.neighbour_agreement:.1%}</small></figcaption>"
        f"{_scatter([point for point in found.points if point.encoder == separation.encoder], marks)}"
        f"<small>across: first component ({separation.explained[0]:.0%} of the variance); "
        f"up: second component ({separation.explained[1]:.0%})</small></figure>"
        for separation in found.separation
    ]
    return _write(Path(path), "Texts on the map of two encoders", [*figures, f"<p>{''.join(keys)}</p>"])


def lens_table(tokens: Sequence[LensToken]) -> str:
    """One text's lens as markup: a row a compression token, ranks across, darker where likelier, numbers on hover.

    Args:
        tokens: Tokens of one text, from :func:`~llm2vec_gen_st.interpret.logit_lens`.
    """
    ranks = max(token.rank for token in tokens)
    head = "".join(f"<th>{rank}</th>" for rank in range(1, ranks + 1))
    rows = []
    for group in grouped(tokens, [token.position for token in tokens]):
        cells = "".join(map(_cell, group))
        rows.append(f"<tr><th>c{group[0].position + 1}</th>{cells}</tr>")
    return f"<table><tr><th>rank</th>{head}</tr>{''.join(rows)}</table>"


def _cell(token: LensToken) -> str:
    background, colour = shade(token.probability)
    hover = f"{token.token!r}, id {token.token_id}, logit {token.logit:.3f}, probability {token.probability:.5f}"
    return (
        f'<td class="token" style="background:{background};color:{colour}" title="{_safe(hover)}">'
        f"{_safe(shown_token(token.token))}</td>"
    )


def _contexts_table(matches: Sequence[ContextMatch]) -> str:
    rows = []
    for group in grouped(matches, [match.position for match in matches]):
        name = f'<th rowspan="{len(group)}">c{group[0].position + 1}</th>'
        for match in group:
            before, token, after = match.parts
            sentence = f"{_safe(before)}<mark>{_safe(token)}</mark>{_safe(after)}"
            rows.append(f"<tr>{name}<td>{match.similarity:.3f}</td><td>{sentence}</td></tr>")
            name = ""
    head = "<tr><th></th><th>cosine</th><th>nearest contexts</th></tr>"
    return f"<table>{head}{''.join(rows)}</table>"


def lens_scale() -> str:
    """The key to :func:`lens_table`'s shades, as markup."""
    cells = []
    for probability in (0.001, 0.01, 0.05, 0.1, 0.25, 0.5, 1.0):
        background, colour = shade(probability)
        cells.append(f'<td style="background:{background};color:{colour}">{probability:g}</td>')
    return f"<table><tr><th>probability</th>{''.join(cells)}</tr></table>"


def _mark(number: int) -> tuple[str, str]:
    """Colours of a class's points inside and at the edge: when all colours are used, hollow ones, then pale ones."""
    colour, turn = COLOURS[number % len(COLOURS)], number // len(COLOURS)
    return (colour if turn == 0 else "#ffffff" if turn == 1 else f"{colour}55"), colour


def _scatter(points: Sequence[MapPoint], marks: dict[str, tuple[str, str]]) -> str:
    across, up = [point.x for point in points], [point.y for point in points]
    circles = []
    for point in points:
        fill, edge = marks[point.label]
        circles.append(
            f'<circle cx="{_place(point.x, across):.1f}" cy="{_SIZE - _place(point.y, up):.1f}" r="5" fill="{fill}" '
            f'stroke="{edge}"><title>{_safe(f"{point.label}: {point.text}")}</title></circle>'
        )
    frame = f'<rect width="{_SIZE}" height="{_SIZE}" fill="#fbfbfb" stroke="#ddd"/>'
    return f'<svg width="{_SIZE}" height="{_SIZE}" viewBox="0 0 {_SIZE} {_SIZE}">{frame}{"".join(circles)}</svg>'


def _place(value: float, values: Sequence[float]) -> float:
    low, high = min(values), max(values)
    share = 0.5 if low == high else (value - low) / (high - low)
    return _EDGE + share * (_SIZE - 2 * _EDGE)


def _safe(text: str) -> str:
    return escape(printable(text), quote=True)


def safe_lines(text: str) -> str:
    r"""A text that may have several lines as markup; the style has to keep the lines apart (``white-space: pre-line``).

    Example:
        >>> safe_lines("a < b\r\nc")
        'a &lt; b\nc'
    """
    return "\n".join(map(_safe, text.strip().splitlines()))


def _write(path: Path, title: str, parts: Sequence[str]) -> Path:
    page = (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        f"<title>{escape(title)}</title><style>{_STYLE}</style></head>\n<body><h1>{escape(title)}</h1>\n"
        + "\n".join(parts)
        + "\n</body></html>\n"
    )
    write_atomically(path, lambda temporary: temporary.write_text(page, encoding="utf-8") and None)
    return path
