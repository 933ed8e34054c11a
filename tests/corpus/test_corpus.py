"""A corpus is encoded row for row, whatever its files, parts and shards; what does not fit is refused by name."""

from __future__ import annotations

import gzip
import json
import tracemalloc
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from llm2vec_gen_st import LLM2VecGen
from llm2vec_gen_st.cli import app
from llm2vec_gen_st.corpus import encode_corpus, finished_parts
from llm2vec_gen_st.corpus.plan import plan_corpus
from llm2vec_gen_st.corpus.reading import Columns, Passages, read_file
from llm2vec_gen_st.files import read_jsonl
from llm2vec_gen_st.parts import run_of_parts
from llm2vec_gen_st.testing import tiny_model

ROWS = [
    {"id": f"d{number}", "text": f"{animal} {number}", "title": animal.upper(), "tags": [animal, number]}
    for number, animal in enumerate(["bears", "bees", "seals"] * 5)
]


def write_corpus(path: Path, rows: Sequence[dict[str, Any]] = ROWS, *, row_group: int = 4) -> Path:
    text = "\n".join(json.dumps(row, ensure_ascii=False) for row in rows)
    if path.suffix == ".parquet":
        known = [{key: value for key, value in row.items() if key != "tags"} for row in rows]
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(known), path, row_group_size=row_group)
    elif path.suffix == ".gz":
        path.write_bytes(gzip.compress(text.encode()))
    else:
        path.write_text(text, encoding="utf-8")
    return path


def encode(model: LLM2VecGen, corpus: Any, folder: Path, **options: Any) -> Path:
    return encode_corpus(model, corpus, folder, **{"rows_per_part": 4, "progress": False, **options})


def rows_of(folder: Path) -> list[dict[str, Any]]:
    return [row for path in finished_parts(folder) for row in pyarrow.parquet.read_table(path).to_pylist()]


def ids_and_vectors(folder: Path) -> tuple[list[str], np.ndarray]:
    rows = rows_of(folder)
    return [row["id"] for row in rows], np.array([row["embedding"] for row in rows], np.float32)


# What is written


@pytest.mark.parametrize("name", ["corpus.jsonl", "corpus.jsonl.gz", "corpus.parquet"])
def test_parts_hold_ids_and_vectors_of_every_row_in_order(student: LLM2VecGen, tmp_path: Path, name: str) -> None:
    folder = encode(student, write_corpus(tmp_path / name), tmp_path / "v")
    ids, vectors = ids_and_vectors(folder)
    assert ids == [row["id"] for row in ROWS]
    np.testing.assert_allclose(vectors, student.encode_document([row["text"] for row in ROWS]), atol=1e-5)
    tables = [pyarrow.parquet.read_table(path) for path in finished_parts(folder)]
    assert [len(table) for table in tables] == [4, 4, 4, 3]
    assert tables[0].schema.field("embedding").type == pyarrow.list_(pyarrow.float32(), 48)
    assert tables[0].column_names == ["id", "embedding"]
    names = {path.name for path in folder.iterdir()}
    assert names == {"corpus.json", "encoder.json", *(f"part-{number:06d}.parquet" for number in range(4))}


def test_columns_are_kept_and_chosen(student: LLM2VecGen, tmp_path: Path) -> None:
    rows = [{"_id": number, "body": row["text"], "title": row["title"]} for number, row in enumerate(ROWS)]
    corpus = write_corpus(tmp_path / "corpus.jsonl", rows)
    folder = encode(
        student, corpus, tmp_path / "v", id_column="_id", text_column="body", keep=["text", "title"], prompt_name=None
    )
    found = rows_of(folder)
    assert [row["id"] for row in found] == [str(number) for number in range(15)]
    assert [row["text"] for row in found] == [row["text"] for row in ROWS]
    assert [json.loads(row["metadata"]) for row in found] == [{"title": row["title"]} for row in ROWS]
    expected = student.encode([row["text"] for row in ROWS])
    np.testing.assert_allclose([row["embedding"] for row in found], expected, atol=1e-5)


def test_numbers_that_are_not_finite_are_kept_as_null(student: LLM2VecGen, tmp_path: Path) -> None:
    nan, inf = float("nan"), float("inf")
    rows = [
        {"id": "a", "text": "bees", "w": nan, "x": [1.5, {"y": -inf}]},
        {"id": "b", "text": "seals", "w": 1, "x": 2},
    ]
    corpus = write_corpus(tmp_path / "corpus.jsonl", rows)
    found = rows_of(encode(student, corpus, tmp_path / "v", keep=["w", "x"]))
    assert [row["metadata"] for row in found] == ['{"w": null, "x": [1.5, {"y": null}]}', '{"w": 1, "x": 2}']


def test_a_folder_of_files_is_one_corpus(student: LLM2VecGen, tmp_path: Path) -> None:
    inside = tmp_path / "corpus"
    inside.mkdir()
    write_corpus(inside / "b.parquet", ROWS[6:])
    write_corpus(inside / "a.jsonl", ROWS[:6])
    (inside / "README.md").write_text("words")
    folder = encode(student, inside, tmp_path / "v")
    assert ids_and_vectors(folder)[0] == [row["id"] for row in ROWS]
    assert [len(pyarrow.parquet.read_table(path)) for path in finished_parts(folder)] == [4, 2, 4, 4, 1]


@pytest.mark.parametrize("name", ["corpus.jsonl", "corpus.parquet"])
def test_shards_of_any_number_fill_one_folder(student: LLM2VecGen, tmp_path: Path, name: str) -> None:
    corpus = write_corpus(tmp_path / name)
    whole = rows_of(encode(student, corpus, tmp_path / "whole"))
    folder = encode(student, corpus, tmp_path / "v", shard="1/3")
    first = {path: path.stat().st_mtime_ns for path in folder.glob("part-*")}
    assert [path.name for path in first] == ["part-000001.parquet"]
    with pytest.raises(ValueError, match=r"3 of 4 parts are missing, the first is part-000000\.parquet"):
        finished_parts(folder)
    assert finished_parts(folder, partial=True) == list(first)
    encode(student, corpus, folder, shard="0/2")
    encode(student, corpus, folder, shard="1/2")
    assert rows_of(folder) == whole
    assert {path: path.stat().st_mtime_ns for path in first} == first


@given(st.integers(0, 500), st.integers(1, 40))
def test_shards_share_all_parts_and_none_twice(parts: int, count: int) -> None:
    runs = [run_of_parts(parts, f"{index}/{count}") for index in range(count)]
    assert [number for run in runs for number in run] == list(range(parts))
    assert max(map(len, runs)) - min(map(len, runs)) <= 1


# Reading


@settings(max_examples=40)
@given(st.data())
def test_reading_from_any_row_gives_the_rows_from_there(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    texts = data.draw(st.lists(st.text(st.characters(exclude_categories=["Cs"]), max_size=12), min_size=1, max_size=12))
    rows = [{"id": number, "text": text} for number, text in enumerate(texts)]
    folder = tmp_path_factory.mktemp("any")
    kind = data.draw(st.sampled_from(["jsonl", "jsonl.gz", "parquet"]))
    if kind == "parquet":
        path = write_corpus(folder / "c.parquet", rows, row_group=data.draw(st.integers(1, 5)))
    else:
        separators = data.draw(st.lists(st.sampled_from(["\n", "\r\n", "\n\n", "\n  \n"]), min_size=len(rows)))
        lines = (json.dumps(row, ensure_ascii=False) for row in rows)
        text = "".join(line + end for line, end in zip(lines, separators, strict=False)).encode()
        path = folder / f"c.{kind}"
        path.write_bytes(gzip.compress(text) if kind == "jsonl.gz" else text)
    found = list(read_file(path, Columns()))
    assert [row.values for row in found] == rows
    starts = data.draw(st.lists(st.integers(0, len(rows) - 1), max_size=6))
    reader = Passages([path], Columns())
    for start in starts:
        count = data.draw(st.integers(1, 5))
        passages = reader.read(0, found[start].start, count)
        assert [passage.text for passage in passages] == texts[start : start + count]


def test_a_corpus_is_never_read_whole(tmp_path: Path) -> None:
    path = tmp_path / "corpus.jsonl"
    with open(path, "w") as handle:
        for number in range(6000):
            handle.write(json.dumps({"id": number, "text": f"{number} " + "bears " * 500}) + "\n")
    assert path.stat().st_size > 15_000_000
    tracemalloc.start()
    try:
        plan = plan_corpus(path, tmp_path / "v", rows_per_part=100, progress=False)
        reader = Passages(plan.files, plan.columns)
        assert sum(len(plan.passages(reader, number)) for number in range(len(plan.slices))) == 6000
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 4_000_000


# What is refused


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"text": "a"}, "line 3: there is no id in the column 'id' \\(None\\)"),
        ({"id": None, "text": "a"}, "line 3: there is no id"),
        ({"id": "", "text": "a"}, "line 3: there is no id"),
        ({"id": True, "text": "a"}, "line 3: there is no id"),
        ({"id": 1.5, "text": "a"}, "line 3: there is no id"),
        ({"id": "a\0", "text": "a"}, "line 3: the id 'a\\\\x00' has a NUL"),
        ({"id": "x"}, "line 3: there is no text in any of the columns text, query, passage"),
        ({"id": "x", "text": 3}, "line 3: there is no text"),
        (
            {"id": "d0", "text": "again"},
            r"The id 'd0' comes twice: .*corpus\.jsonl, line 1, and .*corpus\.jsonl, line 3\.",
        ),
        ([1], "line 3: expected a JSON object, found list"),
    ],
    ids=str,
)
def test_a_row_that_cannot_be_encoded_is_named_and_nothing_is_written(
    student: LLM2VecGen, tmp_path: Path, wrong: Any, said: str
) -> None:
    corpus = write_corpus(tmp_path / "corpus.jsonl", [*ROWS[:2], wrong, *ROWS[3:]])
    with pytest.raises(ValueError, match=said):
        encode(student, corpus, tmp_path / "v")
    assert not (tmp_path / "v").exists()


def test_ids_that_come_twice_in_different_files_are_named_by_both(student: LLM2VecGen, tmp_path: Path) -> None:
    files = [write_corpus(tmp_path / "a.jsonl", ROWS[:5]), write_corpus(tmp_path / "b.parquet", ROWS[3:])]
    with pytest.raises(
        ValueError, match=r"The id 'd[34]' comes twice: .*a\.jsonl, line [45], and .*b\.parquet, row [01]"
    ):
        encode(student, files, tmp_path / "v")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"rows_per_part": 5}, "rows_per_part: 4 there, 5 now"),
        ({"keep": ["text"]}, "keep"),
        ({"text_column": "title"}, "text_column"),
        ({"prompt_name": "query"}, "fingerprint.*instruction"),
        ({"prompt_name": "other"}, "no instruction 'other'"),
        ({"seed": 1}, "fingerprint"),
        ({"dtype": True}, "dtype: 'float32' there, 'bfloat16' now"),
        ({"shard": "3/3"}, "shard '3/3'"),
    ],
    ids=str,
)
def test_a_folder_of_other_embeddings_is_refused(
    student: LLM2VecGen, student_bf16: LLM2VecGen, tmp_path: Path, change: dict[str, Any], said: str
) -> None:
    corpus = write_corpus(tmp_path / "corpus.jsonl")
    folder = encode(student, corpus, tmp_path / "v")
    before = {path: path.read_bytes() for path in folder.iterdir()}
    options = dict(change)
    model = student_bf16 if options.pop("dtype", False) else tiny_model(seed=1) if options.pop("seed", 0) else student
    with pytest.raises(ValueError, match=said):
        encode(model, corpus, folder, **options)
    assert {path: path.read_bytes() for path in folder.iterdir()} == before


def test_a_corpus_that_has_changed_is_refused_even_if_it_is_as_long(student: LLM2VecGen, tmp_path: Path) -> None:
    corpus = write_corpus(tmp_path / "corpus.jsonl")
    folder = encode(student, corpus, tmp_path / "v", shard="0/2")
    whole = corpus.read_text()
    corpus.write_text(whole.replace("seals 14", "seals 41"))
    with pytest.raises(ValueError, match=r"corpus\.jsonl: the file is not what it was .*part 3"):
        encode(student, corpus, folder, shard="1/2")
    corpus.write_text(whole.replace("bears 0", "bears 9"))
    with pytest.raises(ValueError, match="part 0"):
        encode(student, corpus, folder)
    corpus.write_text(whole + "\n")
    with pytest.raises(ValueError, match="files: "):
        encode(student, corpus, folder)
    corpus.write_text(whole)
    encode(student, corpus, folder)
    assert len(rows_of(folder)) == 15


def test_json_of_endless_depth_is_named(student: LLM2VecGen, tmp_path: Path) -> None:
    path = tmp_path / "corpus.jsonl"
    path.write_text('{"id": "a", "text": "a"}\n{"id": "b", "text": ' + "[" * 100_000, encoding="utf-8")
    for read in (lambda: encode(student, path, tmp_path / "v"), lambda: list(read_jsonl(path))):
        with pytest.raises(ValueError, match=r"corpus\.jsonl, line 2: not valid JSON .*recursion"):
            read()


def test_the_corpus_own_folder_is_refused_for_the_embeddings(student: LLM2VecGen, tmp_path: Path) -> None:
    write_corpus(tmp_path / "corpus.jsonl", ROWS)
    with pytest.raises(ValueError, match="is the corpus's own folder"):
        encode(student, tmp_path, tmp_path / "." / ".." / tmp_path.name)
    assert [path.name for path in tmp_path.iterdir()] == ["corpus.jsonl"]
    encode(student, tmp_path / "corpus.jsonl", tmp_path)
    assert len(rows_of(tmp_path)) == len(ROWS)


def test_files_that_are_no_corpus_are_refused(student: LLM2VecGen, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "blank.jsonl").write_text("\n\n")
    (tmp_path / "words.txt").write_text("a\n")
    for path, error, said in (
        (tmp_path / "nowhere.jsonl", FileNotFoundError, "no such file"),
        (tmp_path / "empty", FileNotFoundError, "holds no .jsonl"),
        (tmp_path / "words.txt", ValueError, "unknown kind of corpus"),
        (tmp_path / "blank.jsonl", ValueError, "there are no passages"),
        ([tmp_path / "blank.jsonl"] * 2, ValueError, "Two files of the corpus are called 'blank.jsonl'"),
    ):
        with pytest.raises(error, match=said):
            encode(student, path, tmp_path / "v")
    with pytest.raises(FileNotFoundError, match="holds no encoded corpus"):
        finished_parts(tmp_path / "empty")


def test_a_damaged_archive_is_named(tmp_path: Path) -> None:
    lines = "".join(json.dumps({"id": str(n), "text": f"{n}: {n**9}"}) + "\n" for n in range(3000))
    whole = gzip.compress(lines.encode())
    path = tmp_path / "corpus.jsonl.gz"
    kinds = set()
    for place in range(2000, len(whole) - 100, 997):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 0xFF]) + whole[place + 1 :])
        with pytest.raises(ValueError, match=r"corpus\.jsonl\.gz, (after )?line \d+: ") as caught:
            list(read_file(path, Columns()))
        kinds.add(type(caught.value.__cause__))
    assert zlib.error in kinds


def test_an_embedding_that_is_not_finite_is_named_by_part_and_ids(fresh_student: LLM2VecGen, tmp_path: Path) -> None:
    (token,) = fresh_student.backbone.tokenizer("Z")["input_ids"]
    fresh_student.llm.get_input_embeddings().weight.data[token] = float("nan")
    rows = [*ROWS[:5], {"id": "odd", "text": "Z"}, *ROWS[5:]]
    with pytest.raises(FloatingPointError, match=r"corpus\.jsonl, part 1 \(ids 'd4' to 'd6'\): .*input 1"):
        encode(fresh_student, write_corpus(tmp_path / "corpus.jsonl", rows), tmp_path / "v")
    assert [path.name for path in finished_parts(tmp_path / "v", partial=True)] == ["part-000000.parquet"]


# The command


def test_the_command_encodes_shard_by_shard(
    student: LLM2VecGen, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("llm2vec_gen_st.cli.corpus.load_model", lambda model, dtype: student)
    corpus = write_corpus(tmp_path / "corpus.jsonl")
    folder = tmp_path / "v"

    def run(*extra: str) -> Any:
        command = ["encode-corpus", "any", str(corpus), "-o", str(folder), "--rows-per-part", "4", "--keep", "text"]
        return CliRunner().invoke(app, [*command, *extra], env={"COLUMNS": "200"})

    assert "2 of 4 parts (15 passages) are there" in run("--shard", "0/2").stdout
    assert "4 of 4 parts (15 passages) are there" in run("--shard", "1/2").stdout
    assert [row["text"] for row in rows_of(folder)] == [row["text"] for row in ROWS]
    wrong = run("--prompt-name", "query")
    assert wrong.exit_code == 1
    assert "instruction" in wrong.stderr
    monkeypatch.setattr("llm2vec_gen_st.cli.corpus.load_model", lambda model, dtype: pytest.fail("loaded"))
    corpus.write_text('{"text": "no id"}\n')
    failed = CliRunner().invoke(app, ["encode-corpus", "any", str(corpus), "-o", str(tmp_path / "w")])
    assert failed.exit_code == 1
    assert "line 1: there is no id" in failed.stderr
