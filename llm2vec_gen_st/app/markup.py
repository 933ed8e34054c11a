"""What a computation has found so far, as markup; every text in it is escaped."""

from __future__ import annotations

from html import escape

from llm2vec_gen_st.app.reading import Hit, Reading, Step, cosine
from llm2vec_gen_st.interpret.pages import lens_scale, lens_table, safe_lines

STYLE = """
.lvg {
    --lvg-quiet: color-mix(in srgb, var(--body-text-color) 68%, transparent);
    font-size: 14px; line-height: 1.45; color: var(--body-text-color);
}
.lvg-head { display: flex; flex-wrap: wrap; align-items: baseline; gap: 0 1em; }
.lvg-head h1 { font-size: 1.5em; font-weight: 600; margin: 0; }
.lvg-head p, .lvg .lvg-note { color: var(--lvg-quiet); margin: 0; }
.lvg-status { min-height: 1.5em; }
.lvg-error { color: #b3261e; font-weight: 600; }
.lvg-busy::before {
    content: ""; display: inline-block; width: .8em; height: .8em; margin-right: .5em; border-radius: 50%;
    border: 2px solid var(--border-color-primary); border-top-color: var(--color-accent);
    animation: lvg-turn 1s linear infinite;
}
@keyframes lvg-turn { to { transform: rotate(1turn); } }
.lvg-columns { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(480px, 100%), 1fr)); gap: 0 28px; }
.lvg-columns article { display: grid; grid-template-rows: subgrid; grid-row: span 4; max-width: 60rem; }
.lvg-columns section, .lvg-columns header { min-width: 0; }
.lvg-columns h2 { font-size: 1.15em; font-weight: 600; margin: 0 0 .2em; overflow-wrap: anywhere; }
.lvg-columns h3 {
    font-size: .8em; font-weight: 600; letter-spacing: .04em; text-transform: uppercase; margin: 1.6em 0 .4em;
    color: var(--lvg-quiet);
}
.lvg-columns blockquote {
    margin: 0; padding: .5em .9em; min-height: 3.4em; white-space: pre-line; overflow-wrap: anywhere;
    border-left: 3px solid var(--color-accent); background: var(--background-fill-secondary);
}
.lvg table { border-collapse: collapse; }
.lvg-lens > table { width: 100%; table-layout: fixed; }
.lvg td, .lvg th { border: 1px solid var(--border-color-primary); padding: .2em .45em; text-align: left; }
.lvg th { font-weight: 500; color: var(--lvg-quiet); }
.lvg-lens > table th:first-child { width: 3.4em; }
.lvg td { overflow: hidden; text-overflow: ellipsis; white-space: nowrap; }
.lvg .token { cursor: help; }
.lvg-key { display: flex; flex-wrap: wrap; align-items: center; gap: .3em 1em; margin-top: .5em; font-size: .85em; }
.lvg-columns ol { list-style: none; margin: 0; padding: 0; }
.lvg-columns li { display: grid; grid-template-columns: 3.6em 1fr; padding: .5em 0; }
.lvg-columns li + li { border-top: 1px solid var(--border-color-primary); }
.lvg-columns li p { margin: 0; white-space: pre-line; overflow-wrap: anywhere; }
.lvg-columns cite { font-style: normal; font-size: .85em; color: var(--lvg-quiet); }
.lvg-score { font-variant-numeric: tabular-nums; color: var(--lvg-quiet); }
"""
_METRICS = {"cosine": "cosine", "ip": "inner product", "l2": "negative distance"}


def head_markup(about: str) -> str:
    """The page's title, and what it runs on."""
    return f'<div class="lvg lvg-head"><h1>What an embedding holds</h1><p>{safe_lines(about)}</p></div>'


def status_markup(step: Step) -> str:
    """What is being computed; behind the last step, how near two queries are."""
    if step.doing is not None:
        return f'<div class="lvg lvg-status lvg-busy" role="status">{escape(step.doing)} …</div>'
    near = f"Cosine of the two embeddings: {cosine(*step.readings):.3f}" if len(step.readings) == 2 else ""
    return f'<div class="lvg lvg-status lvg-done" role="status">{near}</div>'


def error_markup(message: str) -> str:
    """A sentence that says what is wrong."""
    return f'<div class="lvg lvg-status lvg-error" role="alert">{safe_lines(message)}</div>'


def readings_markup(step: Step, metric: str) -> str:
    """A column a query: decoded text, lens, and passages.

    Args:
        step: What is there so far.
        metric: The store's.
    """
    columns = "".join(_column(reading, metric) for reading in step.readings)
    return f'<div class="lvg lvg-columns">{columns}</div>'


def _column(reading: Reading, metric: str) -> str:
    cut = '<p class="lvg-note">The query is too long; the model reads its beginning.</p>' if reading.cut else ""
    decoded = "…" if reading.decoded is None else safe_lines(reading.decoded) or "(nothing)"
    lens = "…" if reading.tokens is None else _lens(reading)
    passages = "…" if reading.hits is None else _passages(reading.hits)
    return (
        f"<article><header><h2>{safe_lines(reading.text)}</h2>{cut}</header>"
        f"<section><h3>Decoded from the embedding</h3><blockquote>{decoded}</blockquote></section>"
        f"<section><h3>Logit lens: likeliest tokens at each compression token</h3>{lens}</section>"
        f"<section><h3>Nearest passages ({_METRICS[metric]})</h3>{passages}</section></article>"
    )


def _lens(reading: Reading) -> str:
    if not reading.tokens:
        return '<p class="lvg-note">No token is left without stop words and the query\'s own words.</p>'
    return (
        f'<div class="lvg-lens">{lens_table(reading.tokens)}<div class="lvg-key">{lens_scale()}'
        '<p class="lvg-note">Without stop words and the query\'s own words; numbers on hover.</p></div></div>'
    )


def _passages(hits: tuple[Hit, ...]) -> str:
    if not hits:
        return '<p class="lvg-note">The store is empty.</p>'
    items = (
        f'<li><span class="lvg-score">{hit.score:.3f}</span><div><p>{safe_lines(hit.text)}</p>'
        f"<cite>{safe_lines(hit.source)}</cite></div></li>"
        for hit in hits
    )
    return f"<ol>{''.join(items)}</ol>"
