"""Pictures of what the lenses and the map found, as PNG."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llm2vec_gen_st.extras import require
from llm2vec_gen_st.files import write_atomically
from llm2vec_gen_st.interpret.logit_lens import LensToken
from llm2vec_gen_st.interpret.shown import COLOURS, classes, depth, grouped, printable, shortened, shown_token

if TYPE_CHECKING:
    from llm2vec_gen_st.interpret.idea_map import IdeaMap

_DPI = 150
_MARKERS = ("o", "^", "s", "D", "v", "P")
_CELL_CHARACTERS = 12
_TITLE_CHARACTERS = 13  # above a column


def draw_lens(path: str | Path, tokens: Sequence[LensToken]) -> Path:
    """A heat map a text: compression tokens across, ranks down, darker where likelier.

    Args:
        path: The PNG file.
        tokens: From :func:`~llm2vec_gen_st.interpret.logit_lens`.

    Returns:
        The file.

    Raises:
        ValueError: If there are no tokens to draw.
    """
    groups = grouped(tokens, [token.input for token in tokens])
    if not groups:
        raise ValueError("There are no tokens to draw.")
    columns = max(token.position for token in tokens) + 1
    rows = max(token.rank for token in tokens)
    figure = _figure(1.6 + 0.95 * columns, len(groups) * (0.9 + 0.3 * rows))
    colormaps = require("matplotlib", extra="mteb", why="a picture").colormaps
    colours = require("matplotlib.colors", extra="mteb", why="a picture")
    scale = colours.PowerNorm(0.5, vmin=0.0, vmax=1.0)
    panels = figure.subplots(len(groups), 1, squeeze=False)[:, 0]
    for axes, group in zip(panels, groups, strict=True):
        values = [[float("nan")] * columns for _ in range(rows)]
        for token in group:
            values[token.rank - 1][token.position] = token.probability
            axes.text(
                token.position,
                token.rank - 1,
                shown_token(token.token, _CELL_CHARACTERS),
                ha="center",
                va="center",
                fontsize=7,
                color="white" if depth(token.probability) > 0.5 else "black",
                # Else a token such as "$" is read as the start of a formula.
                parse_math=False,
            )
        image = axes.imshow(values, cmap=colormaps["Blues"], norm=scale, aspect="auto")
        axes.set_xticks(range(columns), [f"c{number}" for number in range(1, columns + 1)], fontsize=8)
        axes.set_yticks(range(rows), [str(rank) for rank in range(1, rows + 1)], fontsize=8)
        axes.tick_params(length=0)
        title = shortened(printable(group[0].text.strip()), _TITLE_CHARACTERS * columns)
        axes.set_title(title, fontsize=9, loc="left", parse_math=False)
        axes.set_ylabel("rank", fontsize=8)
    panels[-1].set_xlabel("compression token", fontsize=8)
    key = figure.colorbar(image, ax=list(panels), ticks=[0.01, 0.05, 0.1, 0.25, 0.5, 1.0], aspect=40)
    key.set_label("probability", fontsize=8)
    key.ax.tick_params(labelsize=8)
    return _save(Path(path), figure)


def draw_map(path: str | Path, found: IdeaMap) -> Path:
    """Two panels, one an encoder, with a point a text, coloured by class.

    Args:
        path: The PNG file.
        found: From :func:`~llm2vec_gen_st.interpret.idea_map`.

    Returns:
        The file.
    """
    names = classes([point.label for point in found.points])
    figure = _figure(4.4 * len(found.separation), 4.6 + 0.2 * (1 + (len(names) - 1) // 4))
    panels = figure.subplots(1, len(found.separation), squeeze=False)[0]
    for axes, separation in zip(panels, found.separation, strict=True):
        for number, name in enumerate(names):
            points = [point for point in found.points if (point.encoder, point.label) == (separation.encoder, name)]
            axes.scatter(
                [point.x for point in points],
                [point.y for point in points],
                s=24,
                alpha=0.8,
                linewidths=0.4,
                edgecolors="white",
                color=COLOURS[number % len(COLOURS)],
                marker=_MARKERS[number // len(COLOURS) % len(_MARKERS)],
            )
        axes.set_title(
            f"{separation.encoder}\nsilhouette {separation.silhouette:.3f}, "
            f"neighbours of the same class {separation.neighbour_agreement:.1%}",
            fontsize=9,
        )
        axes.set_xlabel(f"first component ({separation.explained[0]:.0%} of the variance)", fontsize=8)
        axes.set_ylabel(f"second component ({separation.explained[1]:.0%})", fontsize=8)
        axes.set_xticks([])
        axes.set_yticks([])
        axes.spines[["top", "right"]].set_visible(False)
    legend = figure.legend(
        panels[0].collections,
        [shortened(printable(name), 24) for name in names],
        loc="outside lower center",
        ncols=min(4, len(names)),
        fontsize=8,
        frameon=False,
    )
    for text in legend.get_texts():
        text.set_parse_math(False)
    return _save(Path(path), figure)


def _figure(width: float, height: float) -> Any:
    # Without pyplot: that would pick a window system, and keep figures open.
    return require("matplotlib.figure", extra="mteb", why="a picture").Figure(
        figsize=(width, height), dpi=_DPI, layout="constrained"
    )


def _save(path: Path, figure: Any) -> Path:
    write_atomically(path, lambda temporary: figure.savefig(temporary, format="png"))
    return path
