"""Bringing a store up to date with files: only what changed is embedded."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from tqdm.auto import tqdm

from langchain_llm2vec_gen.ingest.chunks import Chunk, Chunker, source_key
from langchain_llm2vec_gen.ingest.files import find_files
from langchain_llm2vec_gen.ingest.records import read_records

if TYPE_CHECKING:
    from langchain_llm2vec_gen.store import FaissStore

_COMPARED_AT_ONCE = 1024
_CHUNK_ID = re.compile(r"([0-9a-f]{16})-[0-9a-f]{32}-[1-9][0-9]*")


@dataclass(frozen=True)
class IndexReport:
    """What indexing did.

    Args:
        files: Files read.
        added: Chunks embedded and added.
        unchanged: Chunks that the store had; not embedded again, though their metadata may be new.
        removed: Chunks deleted because their source holds them no longer.
        skipped: Files of unknown kinds inside the folders, by ending.
    """

    files: int
    added: int
    unchanged: int
    removed: int
    skipped: Mapping[str, int] = field(default_factory=dict)


def index_files(
    store: FaissStore,
    paths: Iterable[str | Path],
    *,
    column: str | None = None,
    chunk_size: int = 1200,
    chunk_overlap: int = 150,
    batch_size: int = 64,
    progress: bool = True,
) -> IndexReport:
    """Cut files into chunks and bring the store up to date with them.

    A chunk that the store has from the same file is not embedded again; if its place, its row's columns or the path by
    which the file was found changed, its metadata is replaced. A chunk that its source holds no longer is deleted,
    after the source's new chunks are in. Chunks are added in batches, so a call that was interrupted goes on where it
    was when it is made again. Sources that this call does not read are left as they are, those whose file is gone
    included, and so are documents that were added in other ways.

    Args:
        store: The store.
        paths: Files and folders, see :func:`~langchain_llm2vec_gen.ingest.find_files`.
        column: Column of the text in ``.jsonl``, ``.csv`` and ``.parquet`` files.
        chunk_size: Longest chunk, in characters.
        chunk_overlap: Characters that neighbouring chunks may share.
        batch_size: Chunks embedded and added at once.
        progress: Whether to show a progress bar over the files' bytes.

    Returns:
        The counts.

    Raises:
        ValueError: If a path or a row cannot be read; names it. What was added before stays.
        FileNotFoundError: If a path does not exist.
        MissingExtraError: If langchain-text-splitters is not installed, or pyarrow for a ``.parquet`` file.
    """
    if batch_size < 1:
        raise ValueError(f"batch_size is {batch_size}; it must be at least 1.")
    chunker = Chunker(chunk_size=chunk_size, chunk_overlap=chunk_overlap)
    found = find_files(paths)
    update = _Update(store, found.files, batch_size)
    sizes = [path.stat().st_size for path in found.files]
    with tqdm(total=sum(sizes), unit="B", unit_scale=True, desc="indexing", disable=not progress) as bar:
        done = 0
        for path, size in zip(found.files, sizes, strict=True):
            for chunk, position in chunker.chunks(path, read_records(path, column)):
                update.put(chunk)
                bar.update(done + min(position, size) - bar.n)
            update.end_source(path)
            done += size
            bar.update(done - bar.n)
        update.flush()
    return IndexReport(len(found.files), update.added, update.unchanged, update.removed, found.skipped)


class _Update:
    """Collects what has to change, and changes it a batch at a time."""

    def __init__(self, store: FaissStore, sources: Iterable[Path], batch_size: int) -> None:
        self._store, self._batch_size = store, batch_size
        # One pass over the ids: looking each source up by its metadata would go through the whole store each time.
        self._old: dict[str, set[str]] = {source_key(source): set() for source in sources}
        for id_ in store.ids():
            if (match := _CHUNK_ID.fullmatch(id_)) and match[1] in self._old:
                self._old[match[1]].add(id_)
        self._new: list[Chunk] = []
        self._known: list[Chunk] = []
        self._outdated: list[str] = []
        self.added = self.unchanged = self.removed = 0

    def put(self, chunk: Chunk) -> None:
        """Take a chunk of a source."""
        old = self._old[chunk.id.partition("-")[0]]
        if chunk.id in old:
            old.discard(chunk.id)
            self._known.append(chunk)
        else:
            self._new.append(chunk)
        if len(self._new) >= self._batch_size or len(self._known) >= _COMPARED_AT_ONCE:
            self.flush()

    def end_source(self, source: Path) -> None:
        """Have the chunks deleted that the source holds no longer, once its new ones are in."""
        self._outdated += sorted(self._old.pop(source_key(source)))

    def flush(self) -> None:
        """Write what was collected."""
        if self._new:
            self._store.add_texts(
                [chunk.text for chunk in self._new],
                [chunk.metadata for chunk in self._new],
                ids=[chunk.id for chunk in self._new],
                batch_size=self._batch_size,
            )
        self._renew_metadata()
        if self._outdated:
            self._store.delete(self._outdated)
        self.added += len(self._new)
        self.unchanged += len(self._known)
        self.removed += len(self._outdated)
        self._new, self._known, self._outdated = [], [], []

    def _renew_metadata(self) -> None:
        stored = {document.id: document.metadata for document in self._store.get_by_ids([c.id for c in self._known])}
        changed = [chunk for chunk in self._known if stored.get(chunk.id) != chunk.metadata]
        if changed:
            self._store.add_embeddings(
                [chunk.text for chunk in changed],
                self._store.vectors([chunk.id for chunk in changed]),
                [chunk.metadata for chunk in changed],
                ids=[chunk.id for chunk in changed],
            )
