"""What a finished run leaves behind: its recipe, its log, and a picture of its losses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from llm2vec_gen_st.files import write_atomically, write_rows


def write_log(folder: Path, history: list[dict[str, Any]]) -> None:
    """Write the trainer's log as JSON lines, and draw it if matplotlib is installed.

    Args:
        folder: Where ``log.jsonl`` and ``loss.png`` go.
        history: The host's ``state.log_history``.
    """
    write_rows(folder / "log.jsonl", history)
    try:
        import matplotlib
    except ImportError:
        return
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4), constrained_layout=True)
    for key, label in (
        ("loss", "total"),
        ("reconstruction", "reconstruction"),
        ("alignment", "alignment"),
        ("eval_loss", "held-out total"),
    ):
        points = [(row["step"], row[key]) for row in history if key in row]
        if points:
            axes.plot(*zip(*points, strict=True), label=label, marker="o" if key == "eval_loss" else None)
    axes.set(xlabel="step", ylabel="loss", title="Training losses")
    axes.legend()
    axes.grid(alpha=0.3)
    write_atomically(folder / "loss.png", lambda path: figure.savefig(path, dpi=120, format="png"))
    pyplot.close(figure)
