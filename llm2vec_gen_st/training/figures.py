"""Figures of a grid: a curve over numbers, as the paper draws suffix sizes; bars over names, as it draws teachers."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path

from llm2vec_gen_st.extras import require
from llm2vec_gen_st.files import write_atomically

_LOWER_IS_BETTER = "nats a token"


def plot_axis(
    path: Path,
    axis: str,
    values: Sequence[str],
    scores: Mapping[str, Sequence[float | None]],
    *,
    reference: Sequence[bool] = (),
) -> Path:
    """Draw the scores of one axis of a grid, one panel a score.

    Args:
        path: The PNG file.
        axis: What is varied.
        values: N values.
        scores: Name of a score to its N values; ``None`` where there is none.
        reference: Which of the values are the reference's.

    Returns:
        The file.
    """
    figures = require("matplotlib.figure", extra="train", why="the figures of a grid")
    shown = {name: row for name, row in scores.items() if any(value is not None for value in row)}
    figure = figures.Figure(figsize=(4.0 * max(1, len(shown)), 3.6), dpi=150, layout="constrained")
    numbers = [float(value) for value in values] if all(_is_number(value) for value in values) else None
    is_reference = list(reference) or [False] * len(values)
    for number, (name, row) in enumerate(shown.items(), 1):
        panel = figure.add_subplot(1, len(shown), number)
        colour = f"C{number - 1}"
        if numbers is not None:
            known = sorted((place, value) for place, value in zip(numbers, row, strict=True) if value is not None)
            panel.plot(*zip(*known, strict=True), marker="o", color=colour)
            panel.set_xticks(sorted(numbers), [f"{place:g}" for place in sorted(numbers)])
            marked = [
                (place, value)
                for place, value, this in zip(numbers, row, is_reference, strict=True)
                if this and value is not None
            ]
            if marked:
                panel.scatter(
                    *zip(*marked, strict=True), s=110, facecolors="none", edgecolors="black", label="reference"
                )
                panel.legend(frameon=False, fontsize=8)
        else:
            places = [place for place, value in enumerate(row) if value is not None]
            heights = [value for value in row if value is not None]
            bars = panel.bar(
                places, heights, 0.65, color=colour,
                edgecolor=["black" if is_reference[place] else colour for place in places],
                linewidth=[1.4 if is_reference[place] else 0.0 for place in places],
            )  # fmt: skip
            panel.bar_label(bars, fmt="%.2f", fontsize=8, padding=2)
            panel.set_xticks(range(len(values)), [textwrap.fill(value, 16) for value in values], fontsize=8)
            panel.set_xlim(-0.6, len(values) - 0.4)
            panel.margins(y=0.12)
        panel.set_title(f"{name} ({'lower' if name == _LOWER_IS_BETTER else 'higher'} is better)", fontsize=9)
        panel.set_xlabel("suffix tokens" if axis == "suffix" else axis)
        panel.grid(axis="y", linewidth=0.3)
        panel.set_axisbelow(True)
        panel.spines[["top", "right"]].set_visible(False)
    write_atomically(path, lambda temporary: figure.savefig(temporary, format="png"))
    return path


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
