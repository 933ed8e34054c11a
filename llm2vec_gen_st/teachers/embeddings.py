"""Teacher embeddings with a cache on disk: nothing is computed twice, also after a crash."""

from __future__ import annotations

import hashlib
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path

import numpy as np
from sentence_transformers import SentenceTransformer
from tqdm.auto import tqdm

from llm2vec_gen_st.backbone import Backbone
from llm2vec_gen_st.teachers.sources import Teacher, load_teacher

_PATIENCE = 60.0


def teacher_embeddings(
    texts: Sequence[str],
    teacher: str | SentenceTransformer | Teacher,
    *,
    backbone: Backbone | None = None,
    cache: str | Path | None = None,
    batch_size: int = 64,
    progress: bool = True,
) -> np.ndarray:
    """Embed responses with a teacher, each distinct text once.

    Args:
        texts: N responses.
        teacher: ``"self"``, a name or directory of a SentenceTransformer, a loaded one, or any
            :class:`~llm2vec_gen_st.teachers.sources.Teacher`.
        backbone: The frozen LLM, needed for ``"self"``.
        cache: SQLite file that keeps embeddings, keyed by teacher and text; ``None`` for no cache.
        batch_size: Texts embedded at once; each finished batch is committed to the cache.
        progress: Whether a progress bar is shown.

    Returns:
        (N, D) float32.

    Raises:
        FloatingPointError: If an embedding is not finite; names the text's position.
        OSError: If the cache cannot be read or written; names it, and what to do.
    """
    source = load_teacher(teacher, backbone) if isinstance(teacher, str | SentenceTransformer) else teacher
    keys = [_key(source.key, text) for text in texts]
    if cache is not None:
        Path(cache).parent.mkdir(parents=True, exist_ok=True)
    with _opened(cache) as store:
        store.execute("CREATE TABLE IF NOT EXISTS embeddings (key TEXT PRIMARY KEY, vector BLOB NOT NULL)")
        known = _read(store, keys)
        todo = {key: position for position, key in enumerate(keys) if key not in known}
        ordered = sorted(todo.items(), key=lambda item: len(texts[item[1]]))
        with tqdm(total=len(ordered), desc="teacher", unit="text", disable=not progress) as bar:
            for start in range(0, len(ordered), batch_size):
                batch = ordered[start : start + batch_size]
                vectors = source.embed([texts[position] for _, position in batch]).astype(np.float32)
                bad = np.flatnonzero(~np.isfinite(vectors).all(axis=1))
                if len(bad):
                    raise FloatingPointError(
                        f"The teacher's embedding of text {batch[int(bad[0])][1]} is not finite; "
                        "nothing of its batch was kept."
                    )
                with store:
                    store.executemany(
                        "INSERT OR REPLACE INTO embeddings VALUES (?, ?)",
                        [(key, vector.tobytes()) for (key, _), vector in zip(batch, vectors, strict=True)],
                    )
                known.update({key: vector for (key, _), vector in zip(batch, vectors, strict=True)})
                bar.update(len(batch))
    return np.stack([known[key] for key in keys]) if keys else np.zeros((0, 0), np.float32)


@contextmanager
def _opened(cache: str | Path | None) -> Iterator[sqlite3.Connection]:
    try:
        # Several processes may write their shares into one file.
        with closing(sqlite3.connect(":memory:" if cache is None else str(cache), timeout=_PATIENCE)) as store:
            yield store
    except sqlite3.DatabaseError as error:
        raise OSError(
            f"{cache}, which keeps the teacher's embeddings, could not be used ({error}). Make room if the disk is "
            "full; if the file is damaged, delete it, and its embeddings are computed again."
        ) from error


def _key(teacher: str, text: str) -> str:
    return hashlib.sha256(f"{teacher}\0{text}".encode("utf-8", "surrogatepass")).hexdigest()


def _read(store: sqlite3.Connection, keys: Sequence[str]) -> dict[str, np.ndarray]:
    wanted = list(dict.fromkeys(keys))
    found: dict[str, np.ndarray] = {}
    for start in range(0, len(wanted), 500):
        chunk = wanted[start : start + 500]
        marks = ",".join("?" * len(chunk))
        rows = store.execute(f"SELECT key, vector FROM embeddings WHERE key IN ({marks})", chunk)
        found.update({key: np.frombuffer(vector, dtype=np.float32) for key, vector in rows})
    return found
