"""Plots of results, as PNG."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from llm2vec_gen_st.extras import require
from llm2vec_gen_st.files import write_atomically

_DPI = 150
# There are ten colours; the next ten models get another marker or hatch.
_MARKERS = ("o", "^", "s")
_HATCHES = ("", "///", "...")


def plot_bars(path: Path, means: Mapping[str, Mapping[str, float]], models: Sequence[str]) -> Path:
    """Grouped bars: a group a category, a bar a model.

    Args:
        path: The PNG file.
        means: Category to model to score in %.
        models: Order and colours of the bars.

    Returns:
        The file.
    """
    figure, axes = _figure(width=min(16.0, max(6.0, 0.5 + 0.22 * len(means) * (len(models) + 1.5))))
    width = 0.85 / len(models)
    for number, model in enumerate(models):
        places = [
            group + (number - (len(models) - 1) / 2) * width for group, row in enumerate(means.values()) if model in row
        ]
        heights = [row[model] for row in means.values() if model in row]
        bars = axes.bar(
            places, heights, width * 0.92, label=model, color=_colour(number), hatch=_HATCHES[number // 10 % 3]
        )
        axes.bar_label(bars, fmt="%.1f", fontsize=6, padding=2, rotation=90 if width < 0.25 else 0)
    axes.set_xticks(range(len(means)), [_wrapped(name) for name in means], fontsize=8)
    axes.set_ylabel("score in %")
    axes.margins(y=0.15)
    axes.axhline(0, color="black", linewidth=0.6)
    return _save(path, figure, axes, legend=True)


def plot_changes(path: Path, tasks: Mapping[str, Mapping[str, float]], models: Sequence[str], baseline: str) -> Path:
    """Scatter of tasks: the baseline's score across, the other models' up; above the diagonal is better.

    Args:
        path: The PNG file.
        tasks: Task to model to score in %.
        models: Order and colours.
        baseline: Name of the model compared with.

    Returns:
        The file.
    """
    figure, axes = _figure(width=6.0, height=5.5)
    shown = []
    for number, model in enumerate(models):
        pairs = [(row[baseline], row[model]) for row in tasks.values() if baseline in row and model in row]
        if model == baseline or not pairs:
            continue
        shown += [value for pair in pairs for value in pair]
        axes.scatter(
            *zip(*pairs, strict=True), s=22, alpha=0.8, label=model, color=_colour(number), marker=_marker(number)
        )
    low, high = (min(shown), max(shown)) if shown else (0.0, 100.0)
    edge = 0.05 * max(high - low, 1.0)
    axes.plot([low - edge, high + edge], [low - edge, high + edge], color="grey", linewidth=0.8, zorder=0)
    axes.set_xlabel(f"score of {baseline} in %")
    axes.set_ylabel("score in %")
    axes.set_title(f"Tasks; above the line: better than {baseline}", fontsize=9)
    return _save(path, figure, axes, legend=bool(shown))


def plot_sizes(path: Path, averages: Mapping[str, float], sizes: Mapping[str, int], models: Sequence[str]) -> Path:
    """Scatter of models: parameters across, average over tasks up.

    Args:
        path: The PNG file.
        averages: Model to average in %.
        sizes: Model to number of parameters; those without any are left out.
        models: Order and colours.

    Returns:
        The file.
    """
    figure, axes = _figure(width=6.0)
    for number, model in enumerate(models):
        if model in averages and sizes[model] > 0:
            size = sizes[model] / 1e6
            axes.scatter(size, averages[model], s=36, label=model, color=_colour(number), marker=_marker(number))
    axes.set_xscale("log")
    for which in (axes.xaxis.set_major_formatter, axes.xaxis.set_minor_formatter):
        which("{x:g}")
    axes.tick_params(axis="x", which="both", labelrotation=30, labelsize=8)
    axes.margins(0.15)
    axes.set_xlabel("parameters in millions")
    axes.set_ylabel("average over tasks in %")
    return _save(path, figure, axes, legend=True)


def _colour(number: int) -> str:
    return f"C{number % 10}"


def _marker(number: int) -> str:
    return _MARKERS[number // 10 % 3]


def _wrapped(name: str) -> str:
    """A name in short lines, broken between words, also those of PairClassification."""
    return textwrap.fill(re.sub(r"(?<=[a-z])(?=[A-Z])", " ", name), 14)


def _figure(*, width: float, height: float = 4.0) -> tuple[Any, Any]:
    # Without pyplot: that would pick a window system, and keep figures open.
    figure = require("matplotlib.figure", extra="mteb", why="a plot").Figure(
        figsize=(width, height), dpi=_DPI, layout="constrained"
    )
    return figure, figure.add_subplot()


def _save(path: Path, figure: Any, axes: Any, *, legend: bool) -> Path:
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", linewidth=0.3)
    axes.set_axisbelow(True)
    if legend:
        figure.legend(loc="outside lower center", ncols=3, fontsize=7, frameon=False)
    write_atomically(path, lambda temporary: figure.savefig(temporary, format="png"))
    return path
