"""What a folder says about how its content was made, so that nothing made differently is mixed in."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from llm2vec_gen_st.files import write_json


def claim(path: Path, manifest: Mapping[str, Any], *, holds: str, unsaid: Mapping[str, Any] | None = None) -> None:
    """Say how the content of a folder is made, or agree with what was said before.

    Args:
        path: File of the manifest, inside the folder.
        manifest: What JSON can hold.
        holds: What the folder holds, for messages.
        unsaid: Values that are meant where an older manifest does not have them.

    Raises:
        ValueError: If it was made differently (names what differs), or the file is damaged.

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp()) / "made.json"
        >>> claim(path, {"size": 1}, holds="parts")
        >>> claim(path, {"size": 1}, holds="parts")
        >>> read_manifest(path)
        {'size': 1}
    """
    if not path.exists():
        try:
            write_json(path, manifest, replace=False)
            return
        except FileExistsError:
            pass  # another process was faster
    refuse_difference(path.parent, holds, {**_flat(unsaid or {}), **_flat(read_manifest(path))}, manifest)


def read_manifest(path: Path) -> dict[str, Any]:
    """A manifest's content.

    Raises:
        FileNotFoundError: If it is not there.
        ValueError: If it is damaged.
    """
    try:
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(
            f"{path}: damaged ({error}). Put it back from a copy, or delete the folder {path.parent} and start again."
        ) from error
    return found


def refuse_difference(folder: Path, holds: str, found: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    """Compare what a folder's manifest says with what is wanted.

    Args:
        folder: The folder.
        holds: What it holds, for messages.
        found: What its manifest says.
        wanted: What JSON can hold; entries of objects inside it are compared one by one.

    Raises:
        ValueError: If they differ; names each key with both values.

    Example:
        >>> refuse_difference(Path("out"), "responses", {"batch": {"size": 2}}, {"batch": {"size": 3}})
        Traceback (most recent call last):
        ...
        ValueError: out holds responses made differently (batch.size: 2 there, 3 now). Repeat the first command, or
        choose another folder.
    """
    old, new = _flat(found), _flat(json.loads(json.dumps(wanted)))
    different = {key: (old.get(key), value) for key, value in new.items() if old.get(key) != value}
    if different:
        described = "; ".join(f"{key}: {before!r} there, {now!r} now" for key, (before, now) in different.items())
        raise ValueError(
            f"{folder} holds {holds} made differently ({described}). Repeat the first command, or choose another "
            "folder."
        )


def _flat(values: Mapping[str, Any]) -> dict[str, Any]:
    """Entries of nested objects under their joined keys."""
    found: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            found |= {f"{key}.{inner}": entry for inner, entry in _flat(value).items()}
        else:
            found[key] = value
    return found
