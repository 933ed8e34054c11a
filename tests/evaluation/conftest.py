"""Small folders in the layouts that evaluation reads, and a model whose scores can be worked out by hand."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("mteb")

from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import BoW

ANIMALS = ("bear", "bee", "seal", "whale", "fox", "owl")
THINGS = ("ice", "honey", "river", "sea", "forest", "night")


class Files:
    """Writes files in the layouts that evaluation reads."""

    @staticmethod
    def jsonl(path: Path, rows: Iterable[dict[str, Any]]) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        text = "".join(json.dumps(row) + "\n" for row in rows)
        if path.suffix == ".gz":
            path.write_bytes(gzip.compress(text.encode()))
        else:
            path.write_text(text, encoding="utf-8")

    @staticmethod
    def qrels(path: Path, rows: Iterable[tuple[str, str, int]]) -> None:
        lines = ["query-id\tcorpus-id\tscore", *("\t".join(map(str, row)) for row in rows)]
        path.write_text("\n".join(lines) + "\n", encoding="utf-8")

    @classmethod
    def retrieval(cls, folder: Path) -> None:
        """Query i asks for animal i, which passage i is about."""
        cls.jsonl(folder / "queries.jsonl", ({"_id": f"q{i}", "text": name} for i, name in enumerate(ANIMALS)))
        passages = ({"_id": f"d{i}", "title": name, "text": THINGS[i]} for i, name in enumerate(ANIMALS))
        cls.jsonl(folder / "corpus.jsonl.gz", passages)
        cls.qrels(folder / "qrels.tsv", ((f"q{i}", f"d{i}", 1) for i in range(len(ANIMALS))))

    @classmethod
    def sts(cls, folder: Path) -> None:
        pairs = [
            ("bear bee", "bear bee", 5.0),
            ("bear bee", "bear seal", 2.5),
            ("fox", "owl", 0.0),
            ("fox", "fox owl", 3),
        ]
        rows = ({"sentence1": one, "sentence2": other, "score": score} for one, other, score in pairs)
        cls.jsonl(folder / "test.jsonl", rows)

    @classmethod
    def labelled(cls, path: Path, copies: int = 2) -> None:
        rows = [{"text": f"{name} {name}", "label": "animal"} for name in ANIMALS]
        rows += [{"text": f"{name} night", "label": "thing"} for name in THINGS]
        cls.jsonl(path, rows * copies)


@pytest.fixture(scope="session")
def files() -> type[Files]:
    return Files


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """One folder of each kind, named after it."""
    root = tmp_path / "data"
    Files.sts(root / "sts")
    pairs = [("bear", "bear", 1), ("bear", "fox", 0), ("owl", "owl night", 1), ("ice", "sea", 0)]
    rows = ({"sentence1": one, "sentence2": other, "label": label} for one, other, label in pairs)
    Files.jsonl(root / "pairs" / "test.jsonl", rows)
    Files.labelled(root / "classification" / "test.jsonl", copies=1)
    Files.labelled(root / "classification" / "train.jsonl.gz")
    Files.labelled(root / "clustering" / "test.jsonl.gz")
    candidates = [{"query": name, "positive": [f"{name} ice"], "negative": ["sea", "river"]} for name in ANIMALS]
    Files.jsonl(root / "reranking" / "test.jsonl", candidates)
    Files.retrieval(root / "retrieval")
    return root


@pytest.fixture
def words() -> SentenceTransformer:
    """Counts the words above, and knows no others: instructions leave it cold."""
    return SentenceTransformer(modules=[BoW([*ANIMALS, *THINGS])], device="cpu")
