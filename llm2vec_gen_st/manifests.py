"""What a folder says about how its content was made, so that nothing made differently is mixed in."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
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
    found = _filled(read_manifest(path), unsaid or {})
    # What is said no more was said of something else.
    refuse_difference(path.parent, holds, found, {**dict.fromkeys(found), **manifest})


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
    said = json.loads(json.dumps(wanted))
    different = {name: pair for key in said for name, pair in _differences(key, found.get(key), said[key])}
    if different:
        described = "; ".join(f"{key}: {before!r} there, {now!r} now" for key, (before, now) in different.items())
        raise ValueError(
            f"{folder} holds {holds} made differently ({described}). Repeat the first command, or choose another "
            "folder."
        )


def _filled(found: Mapping[str, Any], unsaid: Mapping[str, Any]) -> dict[str, Any]:
    """What was found, with values for what it does not say, inside objects too."""
    inner = {
        key: _filled(value, unsaid[key])
        for key, value in found.items()
        if isinstance(value, Mapping) and isinstance(unsaid.get(key), Mapping)
    }
    return {**unsaid, **found, **inner}


def _differences(key: str, before: Any, now: Any) -> Iterator[tuple[str, tuple[Any, Any]]]:
    """Keys under which two values differ, those inside objects joined by dots, with both values."""
    if isinstance(before, Mapping) and isinstance(now, Mapping):
        for inner in {**now, **before}:
            yield from _differences(f"{key}.{inner}", before.get(inner), now.get(inner))
    elif before != now:
        yield key, (before, now)
