"""Files to documents: what is found, how it is read and cut, and that only changes are embedded."""

from __future__ import annotations

import csv
import datetime
import decimal
import gzip
import hashlib
import json
import os
import signal
import subprocess
import sys
import tracemalloc
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from langchain_core.embeddings import Embeddings
from langchain_llm2vec_gen import FaissStore
from langchain_llm2vec_gen.ingest import IndexReport, find_files, index_files
from langchain_llm2vec_gen.ingest.chunks import Chunker
from langchain_llm2vec_gen.ingest.records import read_records


class Counting(Embeddings):
    """Vectors from a hash of the text; remembers what it embedded."""

    model = "counting"

    def __init__(self) -> None:
        self.seen: list[str] = []

    def embed_documents(self, texts: list[str]) -> list[list[float]]:
        self.seen += texts
        return [[byte / 255 for byte in hashlib.sha256(text.encode()).digest()[:8]] for text in texts]

    def embed_query(self, text: str) -> list[float]:
        return self.embed_documents([text])[0]

    def taken(self) -> list[str]:
        seen, self.seen = self.seen, []
        return seen


@pytest.fixture
def embedding() -> Counting:
    return Counting()


@pytest.fixture
def store(tmp_path: Path, embedding: Counting) -> FaissStore:
    return FaissStore(tmp_path / "corpus.store", embedding)


@pytest.fixture
def docs(tmp_path: Path) -> Path:
    folder = tmp_path / "docs"
    folder.mkdir()
    return folder


def index(store: FaissStore, *paths: Path, **options: Any) -> IndexReport:
    return index_files(store, paths, progress=False, **options)


def counts(report: IndexReport) -> tuple[int, int, int]:
    return report.added, report.unchanged, report.removed


# Finding


def test_folders_are_searched_in_a_fixed_order_and_hidden_files_are_left_out(docs: Path) -> None:
    names = ["b.txt", "a/z.MD", "a/y.jsonl.gz", "c.csv", "d.parquet", "e.jsonl", ".hidden.txt", ".git/x.txt", "f.pdf"]
    for name in [*names, "g", "h.pdf"]:
        (docs / name).parent.mkdir(exist_ok=True)
        (docs / name).write_text("x")
    (docs / "gone.txt").symlink_to(docs / "nowhere.txt")
    (docs / "again.txt").symlink_to(docs / "b.txt")
    found = find_files([docs, docs / "b.txt"])
    order = ["again.txt", "c.csv", "d.parquet", "e.jsonl", "a/y.jsonl.gz", "a/z.MD"]
    assert [path.relative_to(docs).as_posix() for path in found.files] == order
    assert dict(found.skipped) == {"": 1, ".pdf": 2, ".txt": 1}
    assert find_files([docs / "c.csv", docs]).files[0] == docs / "c.csv"
    assert find_files([str(docs / ".hidden.txt")]).files == (docs / ".hidden.txt",)


def test_paths_that_cannot_be_indexed_are_named(docs: Path) -> None:
    (docs / "f.pdf").write_text("x")
    with pytest.raises(ValueError, match=r"f\.pdf: unknown kind of file; known endings are \.txt"):
        find_files([docs / "f.pdf"])
    with pytest.raises(FileNotFoundError, match=r"none\.txt"):
        find_files([docs / "none.txt"])
    with pytest.raises(ValueError, match="no paths"):
        find_files([])
    with pytest.raises(ValueError, match="single path"):
        find_files(str(docs))
    (docs / os.fsdecode(b"\xff.txt")).write_text("x")
    with pytest.raises(ValueError, match=r"udcff.*rename"):
        find_files([docs])


# Reading

ROWS = [
    {"text": "Polar bears, on\nice.", "year": 2021, "tags": ["a"], "none": None},
    {"text": "", "year": 2, "tags": [], "none": None},
    {"text": "河流 🌊", "year": -1, "tags": ["é"], "none": None},
]


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.jsonl.gz", "rows.parquet", "rows.csv"])
@pytest.mark.parametrize("column", ["text", "passage", "content", "document", "body", "mine"])
def test_rows_become_texts_and_their_other_columns_metadata(docs: Path, name: str, column: str) -> None:
    path = docs / name
    rows = [{column if key == "text" else key: value for key, value in row.items()} for row in ROWS]
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    if name.endswith("jsonl"):
        path.write_text("\ufeff" + lines.replace("\n", "\n\n"))
    elif name.endswith("gz"):
        path.write_bytes(gzip.compress(lines.encode()))
    elif name.endswith("parquet"):
        pq.write_table(pa.Table.from_pylist(rows), path)
    else:
        with open(path, "w", encoding="utf-8-sig", newline="") as handle:
            writer = csv.DictWriter(handle, rows[0])
            writer.writeheader()
            writer.writerows(rows)
    found = list(read_records(path, "mine" if column == "mine" else None))
    assert [record.text for record in found] == [row["text"] for row in ROWS]
    assert [record.row for record in found] == [1, 2, 3]
    expected = [{key: value for key, value in row.items() if key != "text"} for row in ROWS]
    if name.endswith("csv"):
        expected = [{key: "" if value is None else str(value) for key, value in row.items()} for row in expected]
    assert [record.metadata for record in found] == expected
    assert found[-1].position == path.stat().st_size


def test_text_files_are_read_whole(docs: Path) -> None:
    path = docs / "a.txt"
    path.write_bytes("\ufeffone\r\ntwo\rthree\n".encode())
    (record,) = read_records(path)
    assert (record.text, record.row, record.metadata) == ("one\ntwo\nthree\n", None, {})


def test_parquet_values_become_plain_data(docs: Path) -> None:
    path = docs / "a.parquet"
    row = {
        "text": "x",
        "day": datetime.date(2020, 1, 2),
        "at": datetime.datetime(2020, 1, 2, 3, 4),
        "price": decimal.Decimal("1.50"),
        "nan": float("nan"),
        "deep": {"inner": [1.5, None]},
        "embedding": [0.1, 0.2],
        "source": "elsewhere",
        "row": 7,
    }
    pq.write_table(pa.Table.from_pylist([row]), path)
    (record,) = read_records(path)
    assert record.metadata == {
        "day": "2020-01-02",
        "at": "2020-01-02T03:04:00",
        "price": "1.50",
        "nan": None,
        "deep": {"inner": [1.5, None]},
        "column_source": "elsewhere",
        "column_row": 7,
    }
    pq.write_table(pa.Table.from_pylist([{"text": "x", "raw": b"bytes"}]), path)
    with pytest.raises(ValueError, match=r"a\.parquet, row 1, column 'raw': a value of type bytes"):
        list(read_records(path))


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("a.jsonl", b'{"text": "x"}\n\n{"text": \n', "line 3: not valid JSON"),
        ("a.jsonl", b'{"text": "x"}\n[1]\n', "line 2: expected a JSON object, found list"),
        ("a.jsonl", b'{"text": "x"}\n{"text": null}\n', "line 2: the column 'text' holds NoneType, not text"),
        ("a.jsonl", b'{"title": "x"}\n', "line 1: none of the columns text, passage.*'title'.*--column"),
        ("a.jsonl", b'{"text": "\\ud800"}\n', "line 1, column 'text': half a surrogate pair"),
        ("a.jsonl", b'{"text": "x", "a": {"b": ["\\udc00"]}}\n', "line 1, column 'a': half a surrogate pair"),
        ("a.jsonl", b'{"text": "x"}\n\xff\n', "after line .*cannot be read on"),
        ("a.jsonl", b'{"text": "x", "n": ' + b"9" * 5000 + b"}\n", "line 1: not valid JSON"),
        ("a.jsonl", b'{"text": ' + b"[" * 200_000 + b"}\n", "line 1: not valid JSON"),
        ("a.jsonl.gz", gzip.compress(b'{"text": "x"}\n' * 9, mtime=0)[:-12], "after line .*cannot be read on"),
        ("a.jsonl.gz", b'{"text": "x"}\n', "after line 0: the file cannot be read on"),
        ("a.csv", b"text,b\nx,1\ny\n", "line 3: 1 fields, but the header names 2"),
        ("a.csv", b'text,b\n"x\nx",1\n"y\ny",1,2\n', "line 5: 3 fields"),
        ("a.csv", b'text,b\n"x,1\n', "line .*: not valid CSV"),
        ("a.csv", b"text,text\nx,1\n", "line 1: a column's name comes twice"),
        ("a.csv", b"title\nx\n", "line 2: none of the columns"),
        ("a.parquet", b"PAR1 not really", "after row 0: not a readable parquet file"),
        ("a.txt", b"one\ntwo\n\xff", "line 3: not valid UTF-8"),
    ],
)
def test_bad_rows_are_named_by_file_and_line(docs: Path, name: str, data: bytes, message: str) -> None:
    path = docs / name
    path.write_bytes(data)
    with pytest.raises(ValueError, match=message) as caught:
        list(read_records(path))
    assert str(path) in str(caught.value)


def test_a_column_that_is_not_there_is_named(docs: Path) -> None:
    path = docs / "a.jsonl"
    path.write_text('{"text": "x"}\n')
    with pytest.raises(ValueError, match=r"a\.jsonl, line 1: there is no column 'body'; the row has 'text'"):
        list(read_records(path, "body"))


def test_empty_files_have_no_texts(docs: Path, store: FaissStore) -> None:
    for name in ("a.txt", "b.md", "c.jsonl", "d.csv"):
        (docs / name).touch()
    pq.write_table(pa.table({"text": pa.array([], pa.string())}), docs / "e.parquet")
    report = index(store, docs)
    assert (report.files, *counts(report)) == (5, 0, 0, 0)


def test_long_files_are_read_in_bounded_memory(docs: Path) -> None:
    path = docs / "long.jsonl"
    with open(path, "w") as handle:
        for number in range(2_000):
            handle.write(json.dumps({"text": "\n".join([f"{number:05}" * 200] * 5)}) + "\n")
    chunker = Chunker(chunk_size=5_000, chunk_overlap=20)
    tracemalloc.start()
    total = sum(1 for _ in chunker.chunks(path, read_records(path)))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert total >= 2_000
    # Of each chunk a hash is remembered, to number equal ones; the texts are not.
    assert peak < path.stat().st_size / 4


# Cutting

texts = st.text(st.sampled_from("ab \n#`-é🌊."), max_size=300)


@settings(max_examples=150)
@given(
    text=texts,
    size=st.integers(1, 60),
    overlap=st.just(0) | st.integers(0, 59),
    name=st.sampled_from(["a.txt", "a.md"]),
)
def test_chunks_are_pieces_at_their_start_and_hold_all_words(text: str, size: int, overlap: int, name: str) -> None:
    from langchain_llm2vec_gen.ingest.records import Record

    chunker = Chunker(chunk_size=size, chunk_overlap=min(overlap, size - 1))
    found = [chunk for chunk, _ in chunker.chunks(Path(name), [Record(text, None)])]
    left = list(text)
    for number, chunk in enumerate(found):
        start = chunk.metadata["start"]
        assert chunk.metadata == {"source": name, "chunk": number, "start": start}
        assert text[start : start + len(chunk.text)] == chunk.text
        assert len(chunk.text) <= size
        left[start : start + len(chunk.text)] = " " * len(chunk.text)
    assert len({chunk.id for chunk in found}) == len(found)
    if not overlap:  # with one, a chunk of repeated text may stand at several places that its neighbours allow
        assert not "".join(left).strip()


def test_markdown_is_cut_at_headings_first(docs: Path, store: FaissStore) -> None:
    text = "Bears.\n\nOn ice.\n# Food\nSeals."
    for name in ("a.md", "a.txt"):
        (docs / name).write_text(text)
    index(store, docs, chunk_size=16, chunk_overlap=0)
    by_source = {
        name: [document.page_content for document in store.documents({"source": str(docs / name)})]
        for name in ("a.md", "a.txt")
    }
    assert by_source["a.md"] == ["Bears.\n\nOn ice.", "# Food\nSeals."]
    assert by_source["a.txt"] == ["Bears.", "On ice.\n# Food", "Seals."]


def test_sizes_that_do_not_fit_are_refused(docs: Path, store: FaissStore) -> None:
    (docs / "a.txt").write_text("x")
    for options, message in (
        ({"chunk_size": 0}, "chunk_size is 0"),
        ({"chunk_size": 10, "chunk_overlap": 10}, "chunk_overlap is 10"),
        ({"chunk_overlap": -1}, "chunk_overlap is -1"),
        ({"batch_size": 0}, "batch_size is 0"),
    ):
        with pytest.raises(ValueError, match=message):
            index(store, docs, **options)


# Indexing


def test_only_what_changed_is_embedded(docs: Path, store: FaissStore, embedding: Counting) -> None:
    (docs / "a.txt").write_text("alpha")
    (docs / "b.jsonl").write_text('{"text": "one", "n": 1}\n{"text": "two", "n": 2}\n')
    assert counts(index(store, docs)) == (3, 0, 0)
    assert sorted(embedding.taken()) == ["alpha", "one", "two"]
    assert counts(index(store, docs)) == (0, 3, 0)
    assert embedding.taken() == []
    (document,) = store.documents({"n": 2})
    assert document.page_content == "two"
    source = str(docs / "b.jsonl")
    assert document.metadata == {"source": source, "row": 2, "chunk": 0, "start": 0, "n": 2}

    # A row before the others: they move, and are not embedded again.
    (docs / "b.jsonl").write_text('{"text": "zero", "n": 0}\n{"text": "one", "n": 10}\n{"text": "two", "n": 2}\n')
    assert counts(index(store, docs)) == (1, 3, 0)
    assert embedding.taken() == ["zero"]
    found = {document.page_content: document.metadata for document in store.documents({"source": source})}
    assert {text: (metadata["row"], metadata["n"]) for text, metadata in found.items()} == {
        "zero": (1, 0),
        "one": (2, 10),
        "two": (3, 2),
    }
    assert store.similarity_search("one", k=1)[0].page_content == "one"

    # A row less, and another source left alone.
    (docs / "b.jsonl").write_text('{"text": "two", "n": 2}\n')
    embedding.taken()
    assert counts(index(store, docs / "b.jsonl")) == (0, 1, 2)
    assert embedding.taken() == []
    assert sorted(document.page_content for document in store.documents()) == ["alpha", "two"]


def test_a_file_is_itself_however_its_path_is_spelled(
    docs: Path, store: FaissStore, embedding: Counting, monkeypatch: pytest.MonkeyPatch
) -> None:
    (docs / "a.md").write_text("Polar bears live on the ice.", encoding="utf-8")
    assert index_files(store, [docs / "a.md"], progress=False).added == 1
    monkeypatch.chdir(docs)
    embedding.taken()
    for spelled in ("a.md", "./a.md", f"../{docs.name}/a.md"):
        report = index_files(store, [spelled], progress=False)
        assert (report.added, report.unchanged, report.removed) == (0, 1, 0)
        (document,) = store.get_by_ids(store.ids())
        assert document.metadata["source"] == str(Path(spelled))
    assert embedding.taken() == []


def test_files_of_one_name_in_two_folders_are_two_sources(
    docs: Path, store: FaissStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    for folder in ("one", "two"):
        (docs / folder).mkdir()
        (docs / folder / "notes.md").write_text(f"Notes of folder {folder}.", encoding="utf-8")
        monkeypatch.chdir(docs / folder)
        assert index_files(store, ["notes.md"], progress=False).removed == 0
    found = store.get_by_ids(store.ids())
    assert sorted(document.page_content for document in found) == ["Notes of folder one.", "Notes of folder two."]


def test_equal_chunks_of_a_source_are_kept_apart(docs: Path, store: FaissStore, embedding: Counting) -> None:
    (docs / "a.jsonl").write_text('{"text": "same", "n": 1}\n{"text": "same", "n": 2}\n')
    (docs / "b.txt").write_text("same")
    assert counts(index(store, docs)) == (3, 0, 0)
    assert counts(index(store, docs)) == (0, 3, 0)
    assert sorted(document.metadata.get("n", 0) for document in store.documents()) == [0, 1, 2]
    (docs / "a.jsonl").write_text('{"text": "same", "n": 2}\n')
    assert counts(index(store, docs)) == (0, 2, 1)
    assert sorted(document.metadata.get("n", 0) for document in store.documents()) == [0, 2]


def test_documents_added_in_other_ways_are_left_alone(docs: Path, store: FaissStore) -> None:
    path = docs / "a.txt"
    path.write_text("alpha")
    store.add_texts(["mine"], [{"source": str(path), "chunk": 0}], ids=["mine"])
    index(store, docs)
    path.write_text("")
    assert counts(index(store, docs)) == (0, 0, 1)
    assert store.ids() == ["mine"]


def test_a_file_that_is_gone_keeps_its_chunks(docs: Path, store: FaissStore) -> None:
    for name in ("a.txt", "b.txt"):
        (docs / name).write_text(name)
    index(store, docs)
    (docs / "b.txt").unlink()
    report = index(store, docs)
    assert (report.files, *counts(report)) == (1, 0, 1, 0)
    assert len(store) == 2


def test_old_chunks_go_after_the_new_ones_are_in(docs: Path, store: FaissStore, monkeypatch: Any) -> None:
    path = docs / "a.txt"
    path.write_text("old")
    index(store, docs)
    path.write_text("new")
    there: list[list[str]] = []
    delete = store.delete

    def spy(ids: Any) -> Any:
        there.append(sorted(document.page_content for document in store.documents()))
        return delete(ids)

    monkeypatch.setattr(store, "delete", spy)
    index(store, docs)
    assert there == [["new", "old"]]
    assert [document.page_content for document in store.documents()] == ["new"]


def test_a_bad_row_keeps_what_was_added_and_deletes_nothing(docs: Path, store: FaissStore) -> None:
    path = docs / "a.jsonl"
    path.write_text('{"text": "old"}\n')
    index(store, docs)
    path.write_text('{"text": "new"}\n' * 3 + "broken\n")
    with pytest.raises(ValueError, match="line 4"):
        index(store, docs, batch_size=2)
    assert sorted(document.page_content for document in store.documents()) == ["new", "new", "old"]


def test_texts_are_embedded_in_batches_across_files(docs: Path, store: FaissStore, monkeypatch: Any) -> None:
    for number in range(10):
        (docs / f"{number}.txt").write_text(f"text {number}")
    sizes: list[int] = []
    add = store.add_texts
    monkeypatch.setattr(
        store, "add_texts", lambda texts, *rest, **more: sizes.append(len(texts)) or add(texts, *rest, **more)
    )
    index(store, docs, batch_size=4)
    assert sizes == [4, 4, 2]


def test_the_progress_bar_ends_at_the_files_sizes(docs: Path, store: FaissStore, capsys: Any) -> None:
    (docs / "a.txt").write_text("x" * 1000)
    (docs / "b.jsonl").write_text('{"text": "y"}\n' * 100)
    index_files(store, [docs])
    assert "2.40k/2.40k" in capsys.readouterr().err


words = st.lists(st.sampled_from(["a", "b", "c", "d d", "é"]), max_size=6)


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(versions=st.lists(st.dictionaries(st.sampled_from(["x.jsonl", "y.jsonl"]), words), min_size=1, max_size=4))
def test_after_any_changes_the_store_holds_what_the_files_hold(
    tmp_path_factory: pytest.TempPathFactory, versions: list[dict[str, list[str]]]
) -> None:
    folder = tmp_path_factory.mktemp("any")
    embedding = Counting()
    expected: dict[str, list[tuple[int, str]]] = {}
    with FaissStore(folder / "corpus.store", embedding) as store:
        for version in versions:
            for name, rows in version.items():
                (folder / name).write_text("".join(json.dumps({"text": row}) + "\n" for row in rows))
                expected[str(folder / name)] = list(enumerate(rows, 1))
            if version:
                embedding.taken()
                report = index(store, *(folder / name for name in version), batch_size=2)
                assert len(embedding.taken()) == report.added
            found: dict[str, list[tuple[int, str]]] = {source: [] for source in expected}
            for document in store.documents():
                found[document.metadata["source"]].append((document.metadata["row"], document.page_content))
            assert {source: sorted(rows) for source, rows in found.items()} == expected


SLOW = """
import sys, time
sys.path.insert(0, {tests!r})
from pathlib import Path
from test_ingest import Counting
from langchain_llm2vec_gen import FaissStore
from langchain_llm2vec_gen.ingest import index_files

class Slow(Counting):
    def embed_documents(self, texts):
        print("batch", flush=True)
        time.sleep(0.1)
        return super().embed_documents(texts)

Slow.__module__, Slow.__qualname__ = {module!r}, "Counting"
with FaissStore(Path(sys.argv[1]), Slow()) as store:
    print("open", flush=True)
    index_files(store, [sys.argv[2]], batch_size=2, progress=False)
"""


def test_a_killed_run_goes_on_where_it_was(tmp_path: Path, docs: Path, embedding: Counting) -> None:
    path, rows = docs / "a.jsonl", 100
    path.write_text("".join(json.dumps({"text": f"text {number}"}) + "\n" for number in range(rows)))
    target, root = tmp_path / "killed.store", Path(__file__).parents[2]
    code = SLOW.format(tests=str(Path(__file__).parent), module=Counting.__module__)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(root), str(root / "integrations")])}
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(target), str(path)], stdout=subprocess.PIPE, env=environment
    )
    assert process.stdout is not None
    assert process.stdout.readline() == b"open\n"
    for _ in range(5):  # the earlier batches are in the store by then
        assert process.stdout.readline() == b"batch\n"
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    process.stdout.close()
    with FaissStore(target, embedding) as store:
        before = len(store)
        assert 0 < before < rows
        assert counts(index(store, path)) == (rows - before, before, 0)
        assert len(embedding.taken()) == rows - before
        assert len(store) == rows
        assert store.similarity_search("text 7", k=1)[0].page_content == "text 7"


def test_a_missing_splitter_names_the_extra(docs: Path, store: FaissStore, monkeypatch: Any) -> None:
    monkeypatch.setitem(sys.modules, "langchain_text_splitters", None)
    with pytest.raises(ImportError, match=r"pip install 'llm2vec-gen-st\[langchain\]'"):
        index(store, docs)
