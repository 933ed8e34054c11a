"""The index's file beside the store: which one is valid is written in the store, so both change in one step."""

from __future__ import annotations

import hashlib
import json
import logging
import secrets
from dataclasses import asdict, dataclass
from pathlib import Path

from langchain_llm2vec_gen.store.transactions import Snapshot, Transaction
from langchain_llm2vec_gen.store.vector_index import VectorIndex
from llm2vec_gen_st.files import write_atomically

logger = logging.getLogger(__name__)

_SETTING = "index_file"
_FORMAT = 1
_NAME_BYTES = 4


@dataclass(frozen=True)
class IndexFile:
    """What the store says of its index's file.

    Args:
        name: Its name, beside the store.
        sha256: Of its bytes.
        last_row: The highest row number in it.
        trained_on: Vectors that it was trained on.
        index: Its kind.
        metric: What it measures.
        format: Version of this record.
    """

    name: str
    sha256: str
    last_row: int
    trained_on: int
    index: str
    metric: str
    format: int = _FORMAT


def write_index(store: Path, transaction: Transaction, index: VectorIndex) -> None:
    """Write the main index beside the store and make it the valid one; none is valid if there is no main index."""
    if not index.main_size:
        transaction.set(_SETTING, None)
        return
    name = f"{store.name}.{secrets.token_hex(_NAME_BYTES)}.faiss"
    path = store.with_name(name)
    write_atomically(path, index.write)
    kind = index.kind
    record = IndexFile(name, _sha256(path), index.main_last_row, index.trained_on, kind.name, kind.metric)
    transaction.set(_SETTING, json.dumps(asdict(record)))


def drop_other_files(store: Path, snapshot: Snapshot) -> None:
    """Delete index files beside the store that are not the valid one.

    Args:
        store: The store's file.
        snapshot: A transaction, which keeps other processes from writing an index file meanwhile.
    """
    record = _record(snapshot)
    # The digits are spelled out: "corpus.*" would also match the index of a store that is named "corpus.old".
    ours = f"{_escaped(store.name)}.{'[0-9a-f]' * 2 * _NAME_BYTES}.faiss"
    # The second are half-written ones, of processes that were killed.
    for path in (*store.parent.glob(ours), *store.parent.glob(f".{ours}.*.tmp")):
        if record is None or path.name != record.name:
            path.unlink(missing_ok=True)


def read_index(store: Path, snapshot: Snapshot, index: VectorIndex, *, mapped: bool) -> bool:
    """Fill an index from the valid file, if there is one and it is sound.

    Args:
        store: The store's file.
        snapshot: What the reader sees of the store.
        index: An empty index.
        mapped: Whether the file is mapped into memory, instead of read.

    Returns:
        Whether it was filled; if not, it has to be built from the store's vectors.
    """
    record = _record(snapshot)
    if record is None:
        return False
    path = store.with_name(record.name)
    try:
        if record.format != _FORMAT:
            raise ValueError(f"it is of format {record.format}")
        if (record.index, record.metric) != (index.kind.name, index.kind.metric):
            raise ValueError(f"it is of kind {record.index!r} with metric {record.metric!r}")
        if _sha256(path) != record.sha256:
            raise ValueError("it is not the file that was written")
        index.read(path, snapshot.rows(up_to=record.last_row), record.trained_on, mapped=mapped)
    except FileNotFoundError:
        logger.warning("%s: the index file is missing; it is built anew from the store's vectors.", path)
        return False
    except ValueError as error:
        logger.warning("%s: %s; the index is built anew from the store's vectors.", path, error)
        return False
    return True


def is_replaced(store: Path, old: Snapshot, new: Snapshot) -> bool:
    """Whether an old snapshot names an index file that is gone, because a newer one has taken its place since."""
    before, after = _record(old), _record(new)
    return before is not None and before != after and not store.with_name(before.name).exists()


def index_size(store: Path, snapshot: Snapshot) -> int:
    """Bytes of the valid index file; 0 if there is none."""
    record = _record(snapshot)
    path = None if record is None else store.with_name(record.name)
    return path.stat().st_size if path is not None and path.exists() else 0


def _record(snapshot: Snapshot) -> IndexFile | None:
    text = snapshot.setting(_SETTING)
    return None if text is None else IndexFile(**json.loads(text))


def _escaped(name: str) -> str:
    return "".join(f"[{character}]" if character in "*?[" else character for character in name)


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as handle:
        while block := handle.read(1 << 22):
            digest.update(block)
    return digest.hexdigest()
