"""Parquet parts stream into a store: nothing twice, nothing of another model, and again after any crash."""

from __future__ import annotations

import json
import shutil
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from langchain_llm2vec_gen import FaissStore, LLM2VecGenEmbeddings
from langchain_llm2vec_gen.store import StoreError, parquet

from llm2vec_gen_st import LLM2VecGen
from llm2vec_gen_st.corpus import encode_corpus
from llm2vec_gen_st.testing import tiny_model

TEXTS = [f"{animal} {number}" for number, animal in enumerate(["bears", "bees", "seals"] * 5)]


@pytest.fixture(scope="module")
def parts(student: LLM2VecGen, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An encoded corpus of 15 passages in 4 parts, with texts and two columns of metadata."""
    folder = tmp_path_factory.mktemp("parts")
    rows = [{"id": f"d{n}", "text": text, "year": 2000 + n, "tags": [n]} for n, text in enumerate(TEXTS)]
    (folder / "corpus.jsonl").write_text("\n".join(map(json.dumps, rows)))
    keep = ["text", "year", "tags"]
    return encode_corpus(student, folder / "corpus.jsonl", folder / "v", rows_per_part=4, keep=keep, progress=False)


def table(path: Path, columns: dict[str, Any]) -> Path:
    pyarrow.parquet.write_table(pyarrow.table(columns), path)
    return path


def contents(store: FaissStore) -> dict[str, Any]:
    vectors = store.vectors(store.ids())
    return {
        str(document.id): (document.page_content, document.metadata, vector.tolist())
        for document, vector in zip(store.documents(), vectors, strict=True)
    }


def test_an_encoded_corpus_is_searched_as_if_the_store_had_embedded_it(
    student: LLM2VecGen, parts: Path, tmp_path: Path
) -> None:
    embeddings = LLM2VecGenEmbeddings(student)
    with FaissStore(tmp_path / "a", embeddings) as store, FaissStore(tmp_path / "b", embeddings) as other:
        assert store.add_parquet(parts) == 15
        assert len(store) == 15
        other.add_texts(TEXTS, [{"year": 2000 + n, "tags": [n]} for n in range(15)], ids=[f"d{n}" for n in range(15)])
        for query in ("bears", "bees", "what is a seal?"):
            found, expected = (each.similarity_search_with_score(query, k=5) for each in (store, other))
            assert [document for document, _ in found] == [document for document, _ in expected]
            np.testing.assert_allclose([score for _, score in found], [score for _, score in expected], atol=1e-5)
        assert store.similarity_search("bees", k=20, filter={"year": {"$gte": 2013}})[0].metadata["year"] >= 2013


def test_again_writes_only_what_is_missing_or_has_changed(student: LLM2VecGen, parts: Path, tmp_path: Path) -> None:
    with FaissStore(tmp_path / "store", LLM2VecGenEmbeddings(student)) as store:
        assert store.add_parquet(parts / "part-000001.parquet") == 4
        assert store.add_parquet(parts) == 11
        before = contents(store)
        assert store.add_parquet(parts) == 0
        assert contents(store) == before
        store.add_texts(["other words"], ids=["d3"])
        store.delete(["d7"])
        assert store.add_parquet(parts) == 2
        assert contents(store) == before
    with FaissStore(tmp_path / "store", LLM2VecGenEmbeddings(student)) as store:
        assert contents(store) == before


@pytest.mark.parametrize("batch", [1, 2, 3])
def test_a_crash_in_any_batch_loses_and_doubles_nothing(
    student: LLM2VecGen, parts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, batch: int
) -> None:
    whole = tmp_path / "whole"
    with FaissStore(whole) as store:
        store.add_parquet(parts)
        expected = contents(store)
    monkeypatch.setattr(parquet, "_ROWS_AT_ONCE", 3)
    store = FaissStore(tmp_path / "broken")
    add, calls = store._writer.add, 0

    def dies(*arguments: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls > batch:
            raise KeyboardInterrupt
        return add(*arguments)

    monkeypatch.setattr(store._writer, "add", dies)
    with pytest.raises(KeyboardInterrupt):
        store.add_parquet(parts)
    store._database.close()  # as a killed process leaves it: the index is not saved
    with FaissStore(tmp_path / "broken", LLM2VecGenEmbeddings(student)) as store:
        there = len(store)
        assert 0 < there < 15
        assert store.add_parquet(parts) == 15 - there
        assert contents(store) == expected
        assert len(store.similarity_search("bees", k=99)) == 15


def test_missing_and_damaged_parts_are_named(parts: Path, tmp_path: Path) -> None:
    folder = tmp_path / "v"
    shutil.copytree(parts, folder)
    (folder / "part-000002.parquet").unlink()
    with FaissStore(tmp_path / "store") as store:
        with pytest.raises(ValueError, match=r"1 of 4 parts are missing, the first is part-000002\.parquet"):
            store.add_parquet(folder)
        assert store.add_parquet(folder, partial=True) == 11
        torn = folder / "part-000001.parquet"
        torn.write_bytes(torn.read_bytes()[:-9])
        with pytest.raises(ValueError, match=r"part-000001\.parquet: not a readable parquet file .*Delete the file"):
            store.add_parquet(folder, partial=True)


def test_vectors_of_another_model_or_dimension_are_refused(
    student: LLM2VecGen, parts: Path, tmp_path: Path, toy: Callable[..., Any]
) -> None:
    theirs = LLM2VecGenEmbeddings(student).fingerprint
    other = LLM2VecGenEmbeddings(tiny_model(seed=1))
    with FaissStore(tmp_path / "a", other) as store:
        with pytest.raises(StoreError, match=f"{theirs}.*{other.fingerprint}.*verify_embedding=False"):
            store.add_parquet(parts)
        assert len(store) == 0
        assert store.add_parquet(parts, verify_embedding=False) == 15
    with FaissStore(tmp_path / "b", toy(dimension=8)) as store:
        store.add_texts(["a"], ids=["a"])
        with pytest.raises(StoreError, match=r"part-000000\.parquet, rows 0 to 3: .*8 dimensions, the ones given 48"):
            store.add_parquet(parts, verify_embedding=False)
        assert store.ids() == ["a"]
    with FaissStore(tmp_path / "c") as store:
        store.add_parquet(parts)
    with pytest.raises(StoreError, match=theirs):
        FaissStore(tmp_path / "c", other)
    wrong_instruction = LLM2VecGenEmbeddings(student, document_prompt_name="query")
    with pytest.raises(StoreError, match=theirs):
        FaissStore(tmp_path / "c", wrong_instruction)
    FaissStore(tmp_path / "c", LLM2VecGenEmbeddings(student)).close()


def test_an_exported_store_comes_back_as_it_was(student: LLM2VecGen, parts: Path, tmp_path: Path) -> None:
    with FaissStore(tmp_path / "a", LLM2VecGenEmbeddings(student)) as store:
        store.add_parquet(parts)
        store.export_parquet(tmp_path / "all.parquet")
        expected = contents(store)
    with FaissStore(tmp_path / "b", LLM2VecGenEmbeddings(student)) as store:
        assert store.add_parquet(tmp_path / "all.parquet") == 15
        assert contents(store) == expected
    with FaissStore(tmp_path / "c", LLM2VecGenEmbeddings(tiny_model(seed=1))) as store, pytest.raises(StoreError):
        store.add_parquet(tmp_path / "all.parquet")


@pytest.mark.parametrize(
    "kind",
    [pyarrow.list_(pyarrow.float32()), pyarrow.large_list(pyarrow.float64()), pyarrow.list_(pyarrow.float16(), 2)],
)
def test_files_of_others_are_read_with_their_columns(tmp_path: Path, kind: Any) -> None:
    number = kind.value_type.to_pandas_dtype()
    table(
        tmp_path / "other.parquet",
        {
            "id": [1, 2],
            "embedding": pyarrow.array([list(np.array(row, number)) for row in ([0, 1], [1, 0])], kind),
            "text": ["north", None],
            "metadata": [{"year": 1}, {"year": 2}],
            "url": ["a", None],
        },
    )
    with FaissStore(tmp_path / "store") as store:
        assert store.add_parquet(tmp_path) == 2
        assert contents(store) == {
            "1": ("north", {"year": 1, "url": "a"}, [0.0, 1.0]),
            "2": ("", {"year": 2}, [1.0, 0.0]),
        }


@pytest.mark.parametrize(
    ("columns", "said"),
    [
        ({"id": ["a"]}, "there is no column 'embedding'; it has id"),
        ({"embedding": [[1.0]]}, "there is no column 'id'"),
        ({"id": ["a", None], "embedding": [[1.0], [1.0]]}, "row 1: there is no id"),
        ({"id": ["a", "b"], "embedding": [[1.0], [1.0, 2.0]]}, "Row 1 of them has an embedding of another length"),
        (
            {"id": ["a", "b"], "embedding": [[1.0], None]},
            "Row 1 of them has an embedding of another length than row 0, or",
        ),
        ({"id": ["a"], "embedding": [[]]}, "Row 0 of them has no embedding"),
        ({"id": ["a"], "embedding": [[float("nan")]]}, "Embedding 0 has a value that is not a finite"),
        ({"id": ["a"], "embedding": [[1.0]], "metadata": ["[1]"]}, "metadata that are not an object"),
        ({"id": ["a"], "embedding": [[1.0]], "text": [3]}, "Text 0 is not a text"),
    ],
    ids=str,
)
def test_a_file_that_does_not_fit_is_named_with_its_rows(tmp_path: Path, columns: dict[str, Any], said: str) -> None:
    path = table(tmp_path / "odd.parquet", columns)
    with FaissStore(tmp_path / "store") as store:
        with pytest.raises(StoreError, match=rf"odd\.parquet.*{said}"):
            store.add_parquet(path)
        assert len(store) == 0
        for wrong in (tmp_path / "nowhere", tmp_path / "empty"):
            (tmp_path / "empty").mkdir(exist_ok=True)
            with pytest.raises(FileNotFoundError):
                store.add_parquet(wrong)


@pytest.mark.parametrize("files", [["aba"], ["ab", "ca"], ["ab", "cd", "bb"]], ids=str)
@pytest.mark.parametrize("same_hash", [False, True])
def test_an_id_that_comes_twice_is_refused_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: list[str], same_hash: bool
) -> None:
    """In whatever batch or file: else the later document would take the place of the earlier one."""
    monkeypatch.setattr(parquet, "_ROWS_AT_ONCE", 1)
    if same_hash:
        monkeypatch.setattr(parquet, "hash", lambda name: 7, raising=False)
    for number, ids in enumerate(files):
        table(tmp_path / f"{number}.parquet", {"id": list(ids), "embedding": [[float(n)] for n in range(len(ids))]})
    twice = next(name for name in "ab" if "".join(files).count(name) > 1)
    with FaissStore(tmp_path / "store") as store:
        with pytest.raises(
            StoreError, match=rf"{len(files) - 1}\.parquet, row \d: the id '{twice}' comes twice, first in"
        ):
            store.add_parquet(tmp_path)
        assert len(store) == 0


def test_files_are_streamed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parquet, "_ROWS_AT_ONCE", 100)
    count, width = 4000, 256
    vectors = pyarrow.array(np.random.default_rng(0).normal(size=count * width).astype(np.float32))
    path = tmp_path / "many.parquet"
    columns = {
        "id": [str(n) for n in range(count)],
        "embedding": pyarrow.FixedSizeListArray.from_arrays(vectors, width),
    }
    pyarrow.parquet.write_table(pyarrow.table(columns), path, row_group_size=500)
    del vectors, columns
    with FaissStore(tmp_path / "store", index="flat") as store:
        store._follower.follow = lambda *_: None  # type: ignore[method-assign]  # the index is not what is measured
        tracemalloc.start()
        try:
            assert store.add_parquet(path) == count
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        store._follower.unsaved = 0
    assert peak < count * width * 4 / 4
