"""JSON files of a checkpoint that hold exactly the keys they should, with values of the right kind."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sentence_transformers.base.modules import Module

from llm2vec_gen_st.load_options import LoadOptions
from llm2vec_gen_st.modules.tensors import CheckpointError

# JSON values by what they are called in messages. A boolean is an int to Python, not to a reader of the file.
_KINDS: dict[str, Any] = {
    "text": lambda value: isinstance(value, str),
    "a boolean": lambda value: isinstance(value, bool),
    "a whole number": lambda value: type(value) is int and abs(value) < 2**63,
    "a number": lambda value: isinstance(value, int | float) and not isinstance(value, bool),
    "an object": lambda value: isinstance(value, dict),
    "a list of texts": lambda value: isinstance(value, list) and all(isinstance(item, str) for item in value),
    "a list of whole numbers": lambda value: isinstance(value, list) and all(type(item) is int for item in value),
    "null": lambda value: value is None,
}


def find_file(module: type[Module], checkpoint: str, name: str, subfolder: str, options: LoadOptions) -> Path:
    """A file of a checkpoint, in its directory or on the hub.

    Args:
        module: The module that reads it.
        checkpoint: Directory or hub id.
        name: Name of the file.
        subfolder: Folder inside the checkpoint.
        options: Hub options.

    Returns:
        Its place.

    Raises:
        CheckpointError: If there is no such file; names it.
    """
    path = module.load_file_path(checkpoint, name, subfolder=subfolder, **options.hub)
    if path is None:
        raise CheckpointError(f"{checkpoint}: the file {Path(subfolder, name)} is missing.")
    return Path(path)


def read_json(path: Path) -> Any:
    """Read a JSON file.

    Args:
        path: The file.

    Returns:
        Its value.

    Raises:
        CheckpointError: If it is missing or not valid JSON; names it.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise CheckpointError(f"{path} is missing.") from error
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} could not be read as JSON: {error}") from error


def read_json_object(path: Path) -> dict[str, Any]:
    """Read a JSON file that holds an object; as :func:`read_json`."""
    value = read_json(path)
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: expected a JSON object, found {type(value).__name__}.")
    return value


def check_fields(
    where: str, content: Mapping[str, Any], required: Mapping[str, str], optional: Mapping[str, str] | None = None
) -> None:
    """Check the keys of a JSON object, and the kinds of their values.

    Args:
        where: The file, and the key that holds the object, for the message.
        content: The object.
        required: Key to kind of every entry that must be there (``"text"``, ``"a whole number or null"``, ...).
        optional: Key to kind of entries that may be there.

    Raises:
        CheckpointError: If a key is missing or not known, or a value is of another kind; names them all.

    Example:
        >>> check_fields("a.json", {"size": "3"}, {"size": "a whole number"})
        Traceback (most recent call last):
        llm2vec_gen_st.modules.tensors.CheckpointError: a.json: 'size' must be a whole number, found '3'.
    """
    known = {**required, **(optional or {})}
    problems = [f"the key {key!r} is missing" for key in required if key not in content]
    problems += [f"the key {key!r} is not known" for key in content if key not in known]
    problems += [
        f"{key!r} must be {known[key]}, found {str(value)[:80]!r}"
        for key, value in content.items()
        if key in known and not any(_KINDS[kind](value) for kind in known[key].split(" or "))
    ]
    if problems:
        raise CheckpointError(f"{where}: " + "; ".join(problems) + ".")
