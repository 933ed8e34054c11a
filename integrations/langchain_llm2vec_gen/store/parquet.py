"""Documents with their vectors from Parquet files, streamed into a store."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from langchain_llm2vec_gen.store.database import Database
from langchain_llm2vec_gen.store.errors import StoreError
from langchain_llm2vec_gen.store.inputs import as_ids, as_json, as_texts, as_vectors
from langchain_llm2vec_gen.store.writing import Writer
from llm2vec_gen_st.corpus import finished_parts
from llm2vec_gen_st.corpus.encoder import FINGERPRINT_KEY
from llm2vec_gen_st.corpus.plan import MANIFEST
from llm2vec_gen_st.extras import require
from llm2vec_gen_st.files import parquet_errors, pyarrow_parquet

_ROWS_AT_ONCE = 8192
_OWN = ("id", "text", "metadata", "embedding")


def add_parquet(database: Database, writer: Writer, path: Path, *, partial: bool, verify_embedding: bool) -> int:
    """Stream documents into a store; see :meth:`FaissStore.add_parquet`.

    Each batch of rows is one transaction. Rows that the store has already, as they are, are passed over, so that the
    same call again after a crash writes only what is missing.
    """
    files = _files(path, partial)
    _refuse_repeated_ids(files)
    if verify_embedding:
        _agree_on_embedding(database, files)
    count = 0
    for file in files:
        first = 0
        for batch in _batches(file):
            where = f"{file}, rows {first} to {first + batch.num_rows - 1}"
            try:
                count += _add(database, writer, batch)
            except (ValueError, TypeError) as error:
                raise StoreError(f"{where}: {error}") from error
            first += batch.num_rows
    return count


def _files(path: Path, partial: bool) -> list[Path]:
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise FileNotFoundError(f"{path}: there is no such file or folder.")
    if (path / MANIFEST).exists():
        return finished_parts(path, partial=partial)
    found = sorted(file for file in path.glob("*.parquet") if not file.name.startswith("."))
    if not found:
        raise FileNotFoundError(f"{path}: the folder holds no .parquet file.")
    return found


def _refuse_repeated_ids(files: list[Path]) -> None:
    """No document may take the place of another of the same import; of each id eight bytes are kept."""
    hashes = [np.fromiter((hash(name) for name in ids), np.int64, len(ids)) for _, _, ids in _ids(files)]
    ordered = np.sort(np.concatenate(hashes)) if hashes else np.zeros(0, np.int64)
    # Different ids may have the same hash, so the few that may come twice are compared.
    suspects = set(ordered[1:][ordered[1:] == ordered[:-1]].tolist())
    seen: dict[str, str] = {}
    for file, first, ids in _ids(files) if suspects else ():
        for row, name in enumerate(ids, first):
            if hash(name) in suspects:
                if name in seen:
                    raise StoreError(
                        f"{file}, row {row}: the id {name!r} comes twice, first in {seen[name]}. Nothing was written; "
                        "ids tell documents apart, so give each its own."
                    )
                seen[name] = f"{file}, row {row}"


def _ids(files: list[Path]) -> Iterator[tuple[Path, int, list[str]]]:
    """Files, the first row of a batch in them, and the batch's ids."""
    for file in files:
        first = 0
        for batch in _batches(file, ["id"]):
            ids = batch.column(0).to_pylist()
            if None in ids:
                raise StoreError(f"{file}, row {first + ids.index(None)}: there is no id. Nothing was written.")
            yield file, first, [str(name) for name in ids]
            first += len(ids)


def _agree_on_embedding(database: Database, files: list[Path]) -> None:
    with database.reading() as snapshot:
        ours = snapshot.setting("embedding")
    known = ours
    for file in files:
        with parquet_errors(file):
            theirs = ((pyarrow_parquet().read_schema(file).metadata or {}).get(FINGERPRINT_KEY) or b"").decode() or None
        if None not in (known, theirs) and known != theirs:
            raise StoreError(
                f"{file}: its vectors were made by the embedding {theirs}, and those of {database.path} by {known}; "
                "they cannot be compared. Nothing was written; give vectors of the same model and instructions, or "
                "verify_embedding=False if you know better."
            )
        known = known or theirs
    if known != ours:
        with database.changing() as transaction:
            transaction.set("embedding", known)


def _batches(file: Path, columns: list[str] | None = None) -> Iterator[Any]:
    with parquet_errors(file), pyarrow_parquet().ParquetFile(file, page_checksum_verification=True) as opened:
        names = opened.schema_arrow.names
        if missing := [name for name in ("id", "embedding") if name not in names]:
            raise StoreError(f"{file}: there is no column {missing[0]!r}; it has {', '.join(names)}.")
        yield from (batch for batch in opened.iter_batches(_ROWS_AT_ONCE, columns=columns) if batch.num_rows)


def _add(database: Database, writer: Writer, batch: Any) -> int:
    columns = {name: batch.column(name).to_pylist() for name in batch.schema.names if name != "embedding"}
    rows = range(batch.num_rows)
    ids, _ = as_ids([str(name) for name in columns["id"]], len(rows))
    texts = as_texts([text or "" for text in columns.get("text", [""] * len(rows))])
    objects = [_metadata(row, columns) for row in rows]
    metadatas = as_json(objects, len(rows))
    vectors = as_vectors(_matrix(batch.column("embedding")))
    same = _same(database, ids, texts, metadatas, vectors)
    changed = [row for row in rows if ids[row] not in same]
    if not changed:
        return 0
    writer.add(
        [ids[row] for row in changed],
        True,
        [texts[row] for row in changed],
        [metadatas[row] for row in changed],
        vectors[changed],
    )
    return len(changed)


def _metadata(row: int, columns: dict[str, list[Any]]) -> dict[str, Any]:
    found = columns["metadata"][row] if "metadata" in columns else None
    if isinstance(found, str):
        found = json.loads(found)
    if not isinstance(found, dict | None):
        raise ValueError(f"Row {row} of them has metadata that are not an object: {str(found)[:80]!r}.")
    others = {name: values[row] for name, values in columns.items() if name not in _OWN and values[row] is not None}
    return {**(found or {}), **others}


def _matrix(column: Any) -> np.ndarray:
    """A column of lists of N times D numbers as (N, D)."""
    compute = require("pyarrow.compute", extra="train", why="a .parquet file")
    lengths = np.asarray(compute.list_value_length(column).to_numpy(zero_copy_only=False), dtype=np.float64)
    if len(odd := np.flatnonzero(lengths != lengths[0])):
        raise ValueError(f"Row {int(odd[0])} of them has an embedding of another length than row 0, or none.")
    if not lengths[0] > 0:
        raise ValueError("Row 0 of them has no embedding.")
    values: np.ndarray = column.flatten().to_numpy(zero_copy_only=False)
    return values.reshape(len(column), -1)


def _same(database: Database, ids: list[str], texts: list[str], metadatas: list[str], vectors: np.ndarray) -> set[str]:
    """Ids of the documents that the store has already, with this text, these metadata and this vector."""
    with database.reading() as snapshot:
        known = snapshot.rows_of(ids)
        if not known or snapshot.dimension != vectors.shape[1]:
            return set()
        ascending = np.array(sorted(known.values()), dtype=np.int64)
        documents = snapshot.documents(ascending.tolist())
        stored = dict(zip(ascending.tolist(), snapshot.vectors(ascending, snapshot.dimension), strict=True))
    return {
        name
        for row, name in enumerate(ids)
        if name in known
        and documents[known[name]].text == texts[row]
        and documents[known[name]].metadata == json.loads(metadatas[row])
        and np.array_equal(stored[known[name]], vectors[row])
    }
