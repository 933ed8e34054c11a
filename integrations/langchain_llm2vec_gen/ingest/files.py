"""Which files there are to index: those named, and those in the folders named."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

TEXT_ENDINGS = (".txt", ".md")
ROW_ENDINGS = (".jsonl", ".jsonl.gz", ".csv", ".parquet")
ENDINGS = (*TEXT_ENDINGS, *ROW_ENDINGS)


@dataclass(frozen=True)
class FoundFiles:
    """The files to index, in a fixed order, and what else the folders hold.

    Args:
        files: Every file once, under the path it was found by.
        skipped: Files of other kinds inside the folders: how many by ending (``""`` for none).
    """

    files: tuple[Path, ...]
    skipped: Mapping[str, int]


def ending(path: Path) -> str | None:
    """The ending that says how a file is read; None for a kind that is not known.

    Example:
        >>> ending(Path("a/Notes.MD")), ending(Path("rows.jsonl.gz")), ending(Path("a.pdf"))
        ('.md', '.jsonl.gz', None)
    """
    name = path.name.lower()
    return next((known for known in sorted(ENDINGS, key=len, reverse=True) if name.endswith(known)), None)


def find_files(paths: Iterable[str | Path]) -> FoundFiles:
    """Files and the files in folders, folders within folders included.

    The order is that of the paths given, and by name within a folder. A file that several paths lead to is taken once,
    by the first of them. Inside folders, hidden files and folders are left out, links to folders are not followed, and
    files of other kinds are counted.

    Args:
        paths: Files and folders.

    Returns:
        The files found and the kinds left out.

    Raises:
        FileNotFoundError: If a path does not exist.
        ValueError: If a file named here is of another kind, if a file's name is not valid text, or if there are no
            paths.

    Example:
        >>> import tempfile
        >>> folder = Path(tempfile.mkdtemp())
        >>> for name in ("b.txt", "a.md", ".hidden.txt", "c.pdf"):
        ...     _ = (folder / name).write_text("text")
        >>> found = find_files([folder])
        >>> [path.name for path in found.files], dict(found.skipped)
        (['a.md', 'b.txt'], {'.pdf': 1})
    """
    if isinstance(paths, str | os.PathLike):
        raise ValueError(f"Give a list of paths, not the single path {str(paths)!r}.")
    chosen: dict[Path, Path] = {}
    skipped: Counter[str] = Counter()
    given = [Path(path) for path in paths]
    if not given:
        raise ValueError("There are no paths to index; name at least one file or folder.")
    for path in given:
        if path.is_dir():
            for inside in _walk(path):
                if ending(inside) is not None and inside.is_file():
                    chosen.setdefault(inside.resolve(), _readable_name(inside))
                else:
                    skipped[inside.suffix.lower()] += 1
        elif not path.exists():
            raise FileNotFoundError(f"{path}: there is no such file or folder.")
        elif ending(path) is None or not path.is_file():
            raise ValueError(f"{path}: unknown kind of file; known endings are {', '.join(ENDINGS)}.")
        else:
            chosen.setdefault(path.resolve(), _readable_name(path))
    return FoundFiles(tuple(chosen.values()), dict(sorted(skipped.items())))


def _walk(folder: Path) -> Iterator[Path]:
    def stop(error: OSError) -> None:
        raise error  # os.walk would leave the folder out without a word

    for parent, folders, names in os.walk(folder, onerror=stop):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in sorted(names):
            if not name.startswith("."):
                yield Path(parent) / name


def _readable_name(path: Path) -> Path:
    try:
        str(path).encode("utf-8")
    except UnicodeEncodeError:
        raise ValueError(f"{str(path)!r}: the name is not valid UTF-8 and cannot be stored; rename the file.") from None
    return path
