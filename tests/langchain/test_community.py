"""Folders of langchain-community: read as they are, and never run."""

from __future__ import annotations

import copyreg
import os
import pickle
import shutil
import struct
import subprocess
import sys
import types
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

import faiss
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from langchain_core.documents import Document
from langchain_llm2vec_gen.community import read_community_folder

FOLDERS = Path(__file__).parent.parent / "fixtures" / "langchain_community"
TEXTS = [
    "Polar bears live on sea ice.",
    "Bees make honey.",
    "河流把水带到大海。",
    "",
    "Ein Fluß trägt Wasser.\nZeile zwei.",
]
METADATAS = [
    {"source": "bears.txt", "year": 2021, "tags": ["ice", "sea"]},
    {"source": "bees.txt", "score": 0.5, "checked": True, "note": None},
    {"标题": "河流", "emoji": "🌊"},
    {},
    {"box": [1, 2.5], "author": {"name": "Jörg"}},
]


def toy_vectors(texts: list[str]) -> np.ndarray:
    import hashlib

    rows = [np.frombuffer(hashlib.sha256(text.encode()).digest()[:8], dtype=np.uint8) for text in texts]
    return np.stack(rows).astype(np.float32) / 255


@pytest.fixture
def docstore_class(monkeypatch: pytest.MonkeyPatch) -> type:
    """A class that pickles under the name of langchain-community's document store."""
    name = "langchain_community.docstore.in_memory"
    module = types.ModuleType(name)

    class InMemoryDocstore:
        def __init__(self, documents: dict[Any, Any]) -> None:
            self._dict = documents

    InMemoryDocstore.__module__, InMemoryDocstore.__qualname__ = name, "InMemoryDocstore"
    module.InMemoryDocstore = InMemoryDocstore  # type: ignore[attr-defined]
    for part in ("langchain_community", "langchain_community.docstore"):
        monkeypatch.setitem(sys.modules, part, types.ModuleType(part))
    monkeypatch.setitem(sys.modules, name, module)
    return InMemoryDocstore


Save = Callable[..., Path]


@pytest.fixture
def save(tmp_path: Path, docstore_class: type) -> Save:
    def write(
        documents: dict[Any, Any], positions: dict[Any, Any], *, vectors: int | None = None, index: Any = None
    ) -> Path:
        if index is None:
            index = faiss.IndexFlatL2(8)
            index.add(np.arange(8 * (len(positions) if vectors is None else vectors), dtype=np.float32).reshape(-1, 8))
        faiss.write_index(index, str(tmp_path / "index.faiss"))
        (tmp_path / "index.pkl").write_bytes(pickle.dumps((docstore_class(documents), positions)))
        return tmp_path

    return write


def two() -> tuple[dict[Any, Any], dict[Any, Any]]:
    return {"a": Document("A", metadata={"n": 1}), "b": Document("B")}, {0: "b", 1: "a"}


@pytest.mark.parametrize(("folder", "metric"), [("flat_l2", "l2"), ("flat_ip", "ip"), ("hnsw", "l2")])
def test_real_folders_are_read_whole_and_in_order(folder: str, metric: str) -> None:
    found = read_community_folder(FOLDERS / folder)
    assert found.ids == [f"doc-{number}" for number in range(5)]
    assert found.texts == TEXTS
    assert found.metadatas == METADATAS
    assert found.metric == metric
    assert found.vectors.dtype == np.float32
    np.testing.assert_array_equal(found.vectors, toy_vectors(TEXTS))


def test_langchain_community_is_never_imported() -> None:
    code = (
        "import sys; from langchain_llm2vec_gen.community import read_community_folder; "
        f"read_community_folder({str(FOLDERS / 'flat_l2')!r}); "
        "assert not [name for name in sys.modules if name.startswith('langchain_community')]"
    )
    root = Path(__file__).parent.parent.parent
    environment = {**os.environ, "PYTHONPATH": str(root / "integrations")}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=root, env=environment)
    assert done.returncode == 0, done.stderr


def test_another_index_name(tmp_path: Path) -> None:
    for ending in ("faiss", "pkl"):
        shutil.copy(FOLDERS / "flat_l2" / f"index.{ending}", tmp_path / f"mine.{ending}")
    assert read_community_folder(str(tmp_path), "mine").texts == TEXTS
    with pytest.raises(FileNotFoundError, match=r"index\.pkl"):
        read_community_folder(tmp_path)


def test_the_mapping_decides_which_vector_belongs_to_which_document(save: Save) -> None:
    found = read_community_folder(save(*two()))
    assert (found.ids, found.texts, found.metadatas) == (["b", "a"], ["B", "A"], [{}, {"n": 1}])
    np.testing.assert_array_equal(found.vectors, np.arange(16, dtype=np.float32).reshape(2, 8))


def test_an_empty_store_is_read(save: Save) -> None:
    found = read_community_folder(save({}, {}))
    assert found.ids == []
    assert found.vectors.shape == (0, 8)


@pytest.mark.parametrize("kind", ["IVF2,Flat", "IDMap,Flat", "IDMap2,IVF2,Flat", "PCA8,Flat", "HNSW4"])
def test_vectors_come_out_of_every_kind_of_index(save: Save, kind: str) -> None:
    vectors = np.random.default_rng(0).normal(size=(100, 8)).astype(np.float32)
    index = faiss.index_factory(8, kind)
    index.train(vectors)
    if kind.startswith("IDMap"):
        index.add_with_ids(vectors[::-1].copy(), np.arange(100)[::-1].copy())
    else:
        index.add(vectors)
    documents = {str(number): Document(str(number)) for number in range(100)}
    found = read_community_folder(save(documents, {number: str(number) for number in range(100)}, index=index))
    np.testing.assert_allclose(found.vectors, vectors, atol=1e-5)


def test_folders_that_do_not_fit_together_are_refused(save: Save) -> None:
    documents, positions = two()
    for arguments, message in (
        (({"a": documents["a"]}, positions), "1 ids have no document, the first of them 'b'"),
        ((documents, {0: "a"}), "1 documents have no vector, one of them 'b'"),
        ((documents, {0: "a", 1: "a"}), "1 document ids more than once"),
        ((documents, {0: "a", 2: "b"}), "not 0 to 1"),
        ((documents, {0: "a", 1: 7}), "not strings"),
        (({"a": "A", "b": documents["b"]}, positions), "document 'a' is not one"),
        (([], positions), "not a dictionary"),
    ):
        with pytest.raises(ValueError, match=message):
            read_community_folder(save(*arguments))
    with pytest.raises(ValueError, match=r"holds 3 vectors, but .* 2 documents"):
        read_community_folder(save(documents, positions, vectors=3))
    with pytest.raises(ValueError, match="metric number"):
        read_community_folder(save({}, {}, index=faiss.IndexFlat(8, faiss.METRIC_L1)))
    folder = save(documents, positions)
    (folder / "index.faiss").write_bytes(b"not an index")
    with pytest.raises(ValueError, match=r"index\.faiss: not a readable FAISS index"):
        read_community_folder(folder)


class Call:
    """Pickles as a call of a function."""

    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        self.reduced = (function, arguments)

    def __reduce__(self) -> Any:
        return self.reduced


def refuse(folder: Path, data: bytes, canary: Path, named: str) -> None:
    (folder / "index.pkl").write_bytes(data)
    with pytest.raises(ValueError, match=named):
        read_community_folder(folder)
    assert not canary.exists()


@pytest.fixture
def canary(tmp_path: Path) -> Path:
    return tmp_path / "canary"


@pytest.mark.parametrize("protocol", range(6))
def test_calls_are_refused_by_name(save: Save, docstore_class: type, canary: Path, protocol: int) -> None:
    documents, positions = two()
    folder = save(documents, positions)
    touch = f"open({str(canary)!r}, 'w').close()"
    for call, named in (
        (Call(os.system, f"touch '{canary}'"), "names (posix|nt).system"),
        (Call(eval, touch), "names (builtins|__builtin__).eval"),
        (Call(exec, touch), "names (builtins|__builtin__).exec"),
        (Call(getattr, "", "join"), "names (builtins|__builtin__).getattr"),
        (Call(subprocess.call, ["touch", str(canary)]), "names (subprocess|commands).call"),
        (Call(copyreg._reconstructor, dict, dict, {}), "names (copyreg|copy_reg)._reconstructor"),  # type: ignore[attr-defined]
        (Call(shutil.rmtree, str(folder / "nothing")), "names shutil.rmtree"),
        (date(2020, 1, 1), "names datetime.date"),
    ):
        refuse(folder, pickle.dumps((call, positions), protocol), canary, named)
        if protocol >= 2:  # older ones name copyreg for every object
            hidden = Document.model_construct(page_content="A", metadata={"deep": [{"er": call}]})
            data = pickle.dumps((docstore_class({"a": hidden}), {0: "a"}), protocol)
            refuse(folder, data, canary, f"{named}|names (builtins|__builtin__).set")


def text(value: str) -> bytes:
    raw = value.encode()
    return b"\x8c" + bytes([len(raw)]) + raw


DOCSTORE = text("langchain_community.docstore.in_memory") + text("InMemoryDocstore") + b"\x93"


@pytest.mark.parametrize(
    ("body", "named"),
    [
        (text("os") + text("system") + b"\x93" + text("touch canary") + b"\x85R", "names os.system"),
        (b"cos\nsystem\n" + text("touch canary") + b"\x85R", "names os.system"),
        (b"(" + text("touch canary") + b"ios\nsystem\n", "names os.system"),
        (b"(cos\nsystem\n" + text("touch canary") + b"o", "names os.system"),
        # a known class as the way to others
        (
            text("langchain_community.docstore.in_memory") + text("InMemoryDocstore.__init__.__globals__") + b"\x93",
            "__globals__",
        ),
        (text("langchain_llm2vec_gen.community") + text("_Held") + b"\x93", "_Held"),
        # known classes called, or built on in odd ways
        (DOCSTORE + b")R", "called where a saved object"),
        (DOCSTORE + text("x") + b"\x85R", "called where a saved object"),
        (b"(" + DOCSTORE + b"o", "expected a pair"),
        (DOCSTORE + b")}\x92", "called where|not a document store|expected a pair"),
        (DOCSTORE + b"}b", "not a document store"),
        (DOCSTORE + text("x") + b"\x85\x81", "not a document store|expected a pair"),
        (b"}}b", "not a document store|expected a pair"),
        # ways around find_class
        (b"\x82\x01", "opcode EXT1"),
        (b"\x83\x01\x00", "opcode EXT2"),
        (b"\x84\x01\x00\x00\x00", "opcode EXT4"),
        (b"Pid\n", "opcode PERSID"),
        (text("id") + b"Q", "opcode BINPERSID"),
        (b"\x97", "opcode NEXT_BUFFER"),
        # memory
        (b"Nr\xff\xff\xff\x7f", "numbers an object 2147483647"),
        (b"\x8d" + struct.pack("<Q", 1 << 60), "cut short"),
        (b"N" * 3, "expected a pair"),
    ],
)
def test_hand_made_pickles_are_refused(save: Save, canary: Path, body: bytes, named: str) -> None:
    folder = save(*two())
    refuse(folder, b"\x80\x04" + body + b".", canary, named)


def test_registered_extension_codes_are_refused(save: Save, canary: Path) -> None:
    folder = save(*two())
    copyreg.add_extension("os", "system", 0x7F01)
    try:
        refuse(folder, b"\x80\x04\x83\x01\x7f" + text(f"touch '{canary}'") + b"\x85R.", canary, "opcode EXT2")
    finally:
        copyreg.remove_extension("os", "system", 0x7F01)


def test_metadata_that_unfolds_without_end_is_refused(save: Save) -> None:
    laugh: list[Any] = ["ha"]
    for _ in range(40):
        laugh = [laugh, laugh]
    cycle: list[Any] = []
    cycle.append(cycle)
    for value in (laugh, cycle):
        document = Document.model_construct(page_content="A", metadata={"value": value})
        with pytest.raises(ValueError, match="nested too deeply, or unfolds"):
            read_community_folder(save({"a": document}, {0: "a"}))
    for value in ({1: "key"}, {"b": b"bytes"}, {"s": {1}}):
        document = Document.model_construct(page_content="A", metadata={"value": value})
        with pytest.raises(ValueError, match="not plain data"):
            read_community_folder(save({"a": document}, {0: "a"}))


@settings(max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_changed_bytes_never_get_past_a_value_error(tmp_path: Path, data: st.DataObject) -> None:
    honest = (FOLDERS / "flat_l2" / "index.pkl").read_bytes()
    changed = bytearray(honest)
    for _ in range(data.draw(st.integers(1, 4))):
        changed[data.draw(st.integers(0, len(honest) - 1))] = data.draw(st.integers(0, 255))
    shutil.copy(FOLDERS / "flat_l2" / "index.faiss", tmp_path)
    (tmp_path / "index.pkl").write_bytes(bytes(changed[: data.draw(st.integers(0, len(honest)))]))
    try:
        found = read_community_folder(tmp_path)
    except ValueError as error:
        named = str(error)
    else:
        named = "index.pkl"
        assert len(found.texts) == len(found.ids) == len(found.metadatas) == 5
    assert "index.pkl" in named
