"""A directory made once from a file and kept on disk, so that the packaged base model is dequantized only once."""

from __future__ import annotations

import errno
import functools
import hashlib
import json
import logging
import os
import shutil
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import transformers
from filelock import FileLock
from safetensors import SafetensorError

logger = logging.getLogger(__name__)

MANIFEST = "manifest.json"
# To be raised whenever the files are written differently, so that older entries are passed over.
_FORMAT = 1
_CHUNK_BYTES = 1 << 20
_PATIENCE_S = 300
# From 4 bits a weight to 32.
_GROWTH = 8


def cache_folder() -> Path:
    """Folder of all entries; it may be deleted at any time, and entries are then made again when next needed.

    Returns:
        ``$LLM2VEC_GEN_CACHE``, else ``$XDG_CACHE_HOME/llm2vec-gen``, else ``~/.cache/llm2vec-gen``.

    Raises:
        RuntimeError: If the user's home directory is needed and not known.

    Example:
        >>> from unittest.mock import patch
        >>> with patch.dict(os.environ, {"LLM2VEC_GEN_CACHE": "/data/cache"}):
        ...     cache_folder().as_posix()
        '/data/cache'
    """
    ours = os.environ.get("LLM2VEC_GEN_CACHE")
    if ours:
        return Path(ours).expanduser()
    shared = os.environ.get("XDG_CACHE_HOME", "")
    # By its specification, a relative path in this variable counts for nothing.
    return (Path(shared) if os.path.isabs(shared) else Path.home() / ".cache") / "llm2vec-gen"


def cached_directory(source: Path, write: Callable[[Path], None]) -> Path | None:
    """The directory that ``write`` makes from a file: written by the first process to ask, then only verified.

    An entry belongs to the SHA-256 of the source file and to the version of transformers. Every call hashes the source
    and all files of the entry (0.4 s of one core for 0.6 GB) and compares them with the entry's manifest, so an entry
    that was damaged, cut short or added to is never used: it is made again, with a warning. Only one process at a
    time writes, under a lock that ends with the process; others wait for its entry. The entry is written under
    another name, flushed to disk and renamed in one step, so a killed process leaves nothing that is taken for one.

    Args:
        source: The file that the directory is made from.
        write: Given an empty directory, writes all files into it; must give the same for the same source.

    Returns:
        The directory, to be read only; ``None``, after one warning, if it could not be written or read. The source
        is then still there to be used itself.

    Example:
        >>> import tempfile
        >>> from unittest.mock import patch
        >>> source = Path(tempfile.mkdtemp()) / "source"
        >>> _ = source.write_text("a")
        >>> with patch.dict(os.environ, {"LLM2VEC_GEN_CACHE": str(source.parent / "cache")}):
        ...     entry = cached_directory(source, lambda folder: (folder / "upper").write_text("A") and None)
        >>> (entry / "upper").read_text()
        'A'
    """
    try:
        folder = cache_folder()
        digest = _sha256(source)
        about = {"format": _FORMAT, "transformers": transformers.__version__, "source": digest}
        entry = folder / f"v{_FORMAT}-transformers-{transformers.__version__}-{digest}"
        if not _is_intact(entry, about):
            folder.mkdir(parents=True, exist_ok=True)
            with FileLock(folder / ".lock", timeout=_PATIENCE_S):
                # Another process may have written it meanwhile.
                if not _is_intact(entry, about):
                    _make(entry, about, write, space=_GROWTH * source.stat().st_size)
        return entry
    except (OSError, RuntimeError, SafetensorError) as error:
        _warn_once(
            f"{source.name} is read anew by every process, which takes longer, because no copy of it can be kept: "
            f"{type(error).__name__}: {error}. Set LLM2VEC_GEN_CACHE to a folder that can be written."
        )
        return None


@functools.cache
def _warn_once(message: str) -> None:
    logger.warning(message)


def _make(entry: Path, about: Mapping[str, Any], write: Callable[[Path], None], *, space: int) -> None:
    """Write an entry; the caller holds the lock."""
    if entry.exists():
        logger.warning("The files in %s are not those that were written there; they are made again.", entry)
        shutil.rmtree(entry)
    # Whoever wrote these held the lock and no longer does.
    for leftover in entry.parent.glob("*.tmp"):
        shutil.rmtree(leftover)
    if shutil.disk_usage(entry.parent).free < space:
        raise OSError(errno.ENOSPC, f"less than {space / 1e6:.0f} MB are free", str(entry.parent))
    temporary = entry.with_name(f"{entry.name}.tmp")
    temporary.mkdir()
    try:
        write(temporary)
        manifest = temporary / MANIFEST
        manifest.write_bytes(_manifest(temporary, about))
        for path in _files(temporary):
            # Weights are written for their owner only; an entry may serve several users.
            shutil.copymode(manifest, path)
            _flush(path)
        _flush(temporary)
        os.replace(temporary, entry)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    _flush(entry.parent)


def _is_intact(entry: Path, about: Mapping[str, Any]) -> bool:
    try:
        return (entry / MANIFEST).read_bytes() == _manifest(entry, about)
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
        return False


def _manifest(directory: Path, about: Mapping[str, Any]) -> bytes:
    """The manifest of the files as they are now, to be written, or to be compared whole with the one written."""
    paths = [path for path in _files(directory) if path != directory / MANIFEST]
    # Hashing leaves the interpreter to other threads, and the weights are in several files.
    with ThreadPoolExecutor(max_workers=min(4, os.cpu_count() or 1)) as pool:
        digests = list(pool.map(_sha256, paths))
    names = [path.relative_to(directory).as_posix() for path in paths]
    return (json.dumps({**about, "files": dict(zip(names, digests, strict=True))}, indent=2) + "\n").encode()


def _files(directory: Path) -> list[Path]:
    return sorted(path for path in directory.rglob("*") if not path.is_dir())


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as handle:
        while chunk := handle.read(_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def _flush(path: Path) -> None:
    """Have a file, or the names in a directory, on disk before anything that follows."""
    if path.is_dir():
        if not hasattr(os, "O_DIRECTORY"):
            return  # Windows cannot, and need not.
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        return
    with open(path, "r+b") as handle:
        os.fsync(handle.fileno())
