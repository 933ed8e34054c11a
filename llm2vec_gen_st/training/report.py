"""What a finished run leaves behind: its log, and a picture of its losses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from llm2vec_gen_st.extras import require
from llm2vec_gen_st.files import write_atomically, write_rows

PARTS = ("alignment", "reconstruction", "margin")


def write_log(folder: Path, history: list[dict[str, Any]]) -> None:
    """Write the trainer's log as JSON lines, and draw it.

    Args:
        folder: Where ``log.jsonl`` and ``loss.png`` go.
        history: The host's ``state.log_history``.
    """
    write_rows(folder / "log.jsonl", history)
    figures = require("matplotlib.figure", extra="train", why="the picture of the losses")
    shown = [part for part in PARTS if any(part in row for row in history)]
    figure = figures.Figure(figsize=(5.5 * max(1, len(shown)), 3.6), layout="constrained")
    for number, part in enumerate(shown, 1):
        points = [(row["step"], row[part]) for row in history if part in row]
        axes = figure.add_subplot(1, len(shown), number)
        axes.plot(*zip(*points, strict=True), color=f"C{number - 1}")
        axes.set(xlabel="step", ylabel="loss, weighted", title=part.capitalize())
        axes.grid(alpha=0.3)
    write_atomically(folder / "loss.png", lambda path: figure.savefig(path, dpi=120, format="png"))
