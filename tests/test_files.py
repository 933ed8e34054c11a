"""A crash leaves the old file or the new one, and an unreadable row is named by its file and line."""

from __future__ import annotations

import errno
import gzip
import json
import os
import stat
from pathlib import Path

import pytest

from llm2vec_gen_st.files import count_rows, read_jsonl, read_rows, write_atomically, write_json, write_rows

ROWS = [{"query": "a\u2028b", "n": 1}, {"query": "蜂蜜", "n": 2}]


def _names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_writer_that_raises_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    target = tmp_path / "a.txt"
    target.write_text("old")

    def half(path: Path) -> None:
        path.write_text("ne")
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        write_atomically(target, half)
    assert target.read_text() == "old"
    assert _names(tmp_path) == ["a.txt"]


def test_reader_never_sees_half_of_a_file(tmp_path: Path) -> None:
    target = tmp_path / "deep" / "er" / "a.txt"
    seen: list[bool] = []

    def slowly(path: Path) -> None:
        path.write_text("half")
        seen.append(target.exists())
        path.write_text("whole")

    write_atomically(target, slowly)
    assert seen == [False]
    assert target.read_text() == "whole"
    assert _names(target.parent) == ["a.txt"]


def test_files_can_be_read_by_whom_the_umask_lets_and_it_stays_for_other_threads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def private(path: Path) -> None:
        path.touch(mode=0o600)

    before = os.umask(0o027)
    try:
        with monkeypatch.context() as patch:
            patch.delattr(os, "umask")  # changing it, if only for a moment, changes it for every thread
            write_atomically(tmp_path / "a.txt", private)
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "a.txt").stat().st_mode) == 0o640
    with pytest.raises(FileNotFoundError):
        write_atomically(tmp_path / "b.txt", lambda path: None)
    assert _names(tmp_path) == ["a.txt"]


def test_unserializable_json_leaves_the_old_file(tmp_path: Path) -> None:
    write_json(tmp_path / "a.json", {"é": 1})
    with pytest.raises(TypeError):
        write_json(tmp_path / "a.json", {"a": object()})
    assert json.loads((tmp_path / "a.json").read_text(encoding="utf-8")) == {"é": 1}
    assert "é" in (tmp_path / "a.json").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", ["rows.parquet", "rows.jsonl"])
def test_rows_come_back_as_written(tmp_path: Path, name: str) -> None:
    write_rows(tmp_path / name, iter(ROWS))
    assert read_rows(str(tmp_path / name)) == ROWS
    with pytest.raises(Exception, match="surrogates"):
        write_rows(tmp_path / name, [{"query": "\ud800"}])
    assert read_rows(tmp_path / name) == ROWS
    assert _names(tmp_path) == [name]


def test_gzip_and_text_files_are_read(tmp_path: Path) -> None:
    with gzip.open(tmp_path / "rows.jsonl.gz", "wt", encoding="utf-8") as handle:
        handle.write("\n".join(json.dumps(row) for row in ROWS))
    assert read_rows(tmp_path / "rows.jsonl.gz") == ROWS
    (tmp_path / "rows.txt").write_bytes("a\u2028b\x0cc\r\n\n  \n蜂蜜".encode())
    assert read_rows(tmp_path / "rows.txt") == [{"query": "a\u2028b\x0cc"}, {"query": "蜂蜜"}]


@pytest.mark.parametrize(
    ("line", "said"),
    [('{"query": ', "not valid JSON"), ("[1, 2]", "found list"), ('"text"', "found str"), ("3", "found int")],
)
@pytest.mark.parametrize("packed", [False, True])
def test_wrong_row_is_named_by_file_and_line(tmp_path: Path, line: str, said: str, packed: bool) -> None:
    path = tmp_path / ("rows.jsonl" + ".gz" * packed)
    text = f'{{"query": "a"}}\n\n{line}\n{{"query": "b"}}\n'.encode()
    path.write_bytes(gzip.compress(text) if packed else text)
    rows = read_jsonl(path)
    assert next(rows) == {"query": "a"}
    with pytest.raises(ValueError, match=rf"{path.name}, line 3: .*{said}"):
        next(rows)


def test_undecodable_or_torn_file_is_named(tmp_path: Path) -> None:
    for name in ("rows.jsonl", "rows.txt"):
        (tmp_path / name).write_bytes(b'{"query": "\xff"}\n')
        with pytest.raises(ValueError, match=name):
            read_rows(tmp_path / name)
    (tmp_path / "rows.jsonl.gz").write_bytes(gzip.compress(b'{"query": "a"}\n' * 999)[:-20])
    with pytest.raises(ValueError, match=r"rows\.jsonl\.gz"):
        read_rows(tmp_path / "rows.jsonl.gz")
    (tmp_path / "plain.jsonl.gz").write_bytes(b'{"query": "a"}\n')
    with pytest.raises(ValueError, match=r"plain\.jsonl\.gz"):
        read_rows(tmp_path / "plain.jsonl.gz")
    (tmp_path / "rows.parquet").write_bytes(b"PAR1 torn")
    with pytest.raises(ValueError, match=r"rows\.parquet"):
        read_rows(tmp_path / "rows.parquet")


@pytest.mark.parametrize("name", ["rows.csv", "rows.parquet.gz", "rows.txt.gz", "rows"])
def test_unknown_kind_of_file_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("a")
    with pytest.raises(ValueError, match=rf"{name}: unknown kind of file"):
        read_rows(tmp_path / name)
    with pytest.raises(ValueError, match=name):
        write_rows(tmp_path / name, [])


@pytest.mark.parametrize("links", [True, False])
def test_a_file_that_is_not_to_be_replaced_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, links: bool) -> None:
    """Also on file systems that know no hard links."""

    def unknown(*_: object) -> None:
        raise OSError(errno.ENOTSUP, "not supported")

    if not links:
        monkeypatch.setattr(os, "link", unknown)
    write_json(tmp_path / "a.json", 1, replace=False)
    with pytest.raises(FileExistsError):
        write_json(tmp_path / "a.json", 2, replace=False)
    assert json.loads((tmp_path / "a.json").read_text()) == 1
    assert _names(tmp_path) == ["a.json"]


def test_rows_are_counted_without_reading_them(tmp_path: Path) -> None:
    for name in ("rows.parquet", "rows.jsonl"):
        write_rows(tmp_path / name, ROWS)
        assert count_rows(tmp_path / name) == 2
    (tmp_path / "rows.parquet").write_bytes(b"PAR1 torn")
    with pytest.raises(ValueError, match=r"rows\.parquet: not a readable parquet file"):
        count_rows(tmp_path / "rows.parquet")


@pytest.mark.parametrize("ending", [".jsonl", ".parquet"])
def test_columns_that_only_later_rows_have_are_written(tmp_path: Path, ending: str) -> None:
    write_rows(tmp_path / f"rows{ending}", [{"text": "a"}, {"text": "b", "title": "T"}])
    found = read_rows(tmp_path / f"rows{ending}")
    assert [row.get("title") for row in found] == [None, "T"]
