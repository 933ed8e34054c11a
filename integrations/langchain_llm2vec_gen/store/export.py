"""A store's documents as a Parquet file."""

from __future__ import annotations

import json
from pathlib import Path

from langchain_llm2vec_gen.store.database import Database
from llm2vec_gen_st.corpus.encoder import FINGERPRINT_KEY
from llm2vec_gen_st.extras import require
from llm2vec_gen_st.files import write_atomically
from llm2vec_gen_st.text import without_lone_surrogates


def export_parquet(database: Database, path: Path) -> int:
    """Write all documents to a Parquet file: ``id``, ``text``, ``metadata`` (JSON) and ``embedding``.

    Lone surrogates in a text, which Parquet cannot hold, become U+FFFD.

    Args:
        database: The store's file.
        path: The Parquet file.

    Returns:
        Number of documents written.

    Raises:
        MissingExtraError: If pyarrow is not installed.
    """
    pyarrow = require("pyarrow", extra="train", why="exporting to Parquet")
    parquet = require("pyarrow.parquet", extra="train", why="exporting to Parquet")

    count = 0

    def write(temporary: Path) -> None:
        nonlocal count
        with database.reading() as snapshot:
            dimension = snapshot.dimension
            schema = pyarrow.schema(
                [
                    *((name, pyarrow.string()) for name in ("id", "text", "metadata")),
                    ("embedding", pyarrow.list_(pyarrow.float32(), dimension)),
                ],
                metadata={FINGERPRINT_KEY: (snapshot.setting("embedding") or "").encode()},
            )
            with parquet.ParquetWriter(temporary, schema) as writer:
                for documents, vectors in snapshot.documents_with_vectors():
                    columns = [
                        pyarrow.array([document.id for document in documents]),
                        pyarrow.array([without_lone_surrogates(document.text) for document in documents]),
                        pyarrow.array([json.dumps(document.metadata) for document in documents]),
                        pyarrow.FixedSizeListArray.from_arrays(pyarrow.array(vectors.reshape(-1)), dimension),
                    ]
                    writer.write_table(pyarrow.Table.from_arrays(columns, schema=schema))
                    count += len(documents)

    write_atomically(path, write)
    return count
