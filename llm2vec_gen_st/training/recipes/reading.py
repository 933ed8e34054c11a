"""Recipes as files: JSON objects of a recipe's fields, each perhaps on top of another recipe."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from llm2vec_gen_st.modules.config import read_json_object
from llm2vec_gen_st.training.recipes.recipe import Recipe

FOLDER = Path(__file__).parent
SUFFIX = ".json"
EXTENDS = "extends"
COMMENT = "comment"
RECORDED = "recipe"


def shipped_names() -> list[str]:
    """Names of the recipes that come with this package."""
    return sorted(path.stem for path in FOLDER.glob(f"*{SUFFIX}"))


def load_recipe(name_or_path: str | Path) -> Recipe:
    """A recipe by its name, or of a file of your own.

    A file holds a JSON object with fields of :class:`Recipe`; fields that it leaves out are those of the recipe that
    it ``extends`` (a name, or another file, which ends in ``.json`` and is looked for beside it), or else the defaults.
    ``comment`` is for its readers. ``training/recipe.json`` of a trained student is such a file too.

    Args:
        name_or_path: Name of a shipped recipe, or a path that ends in ``.json``.

    Returns:
        The recipe.

    Raises:
        ValueError: If there is no such recipe, or its file is not what it should be; names the file.

    Example:
        >>> load_recipe("qwen3-4b").base, load_recipe("qwen3-4b").learning_rate
        ('Qwen/Qwen3-4B', 0.0003)
    """
    return _read(_place(str(name_or_path), Path()), ())


def _place(reference: str, beside: Path) -> Path:
    """File that a reference stands for."""
    if reference.endswith(SUFFIX):
        return beside / reference
    if reference not in shipped_names():
        raise ValueError(
            f"Unknown recipe {reference!r}; known are {shipped_names()}. A recipe of your own is a file that ends in "
            f"{SUFFIX}."
        )
    return FOLDER / f"{reference}{SUFFIX}"


def _read(path: Path, above: tuple[Path, ...]) -> Recipe:
    above = (*above, path.resolve())
    content = read_json_object(path)
    if isinstance(content.get(RECORDED), dict):
        content = _recorded(content)
    extended, comment = content.pop(EXTENDS, None), content.pop(COMMENT, "")
    if not isinstance(comment, str) or not isinstance(extended, str | None):
        raise ValueError(f"{path}: {EXTENDS!r} and {COMMENT!r} must be texts.")
    start = Recipe()
    if extended is not None:
        place = _place(extended, path.parent)
        if place.resolve() in above:
            circle = " -> ".join(file.name for file in (*above, place))
            raise ValueError(f"{path}: recipes extend each other in a circle: {circle}.")
        start = _read(place, above)
    try:
        return start.with_overrides(content)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def _recorded(record: dict[str, Any]) -> dict[str, Any]:
    """Fields of the recipe in the record that a run leaves behind, which names base and teacher apart."""
    return {**record[RECORDED], **{key: record.get(key) for key in ("base", "teacher")}}
