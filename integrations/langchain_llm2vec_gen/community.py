"""Reading a FAISS folder of langchain-community without running what its pickle file asks for.

The folder holds ``index.faiss`` and ``index.pkl``: a pickled pair of a document store and a mapping from the index's
positions to document ids. A pickle may name any function to be called. Here only the two classes of that pair can be
named, and each stands for a class of ours that holds state and does nothing.
"""

from __future__ import annotations

import io
import pickle
import pickletools
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from langchain_llm2vec_gen.store.metrics import Metric
from llm2vec_gen_st.extras import require


@dataclass(frozen=True)
class CommunityStore:
    """What a langchain-community FAISS folder holds.

    Args:
        ids: Document ids, in the order of the index.
        texts: Texts, N of them.
        metadatas: Metadata, plain data only.
        vectors: Vectors (N, D), float32; approximations if the index is quantized.
        metric: ``ip`` or ``l2``, as the index searches.
    """

    ids: list[str]
    texts: list[str]
    metadatas: list[dict[str, Any]]
    vectors: np.ndarray
    metric: Metric


def read_community_folder(folder: str | Path, index_name: str = "index") -> CommunityStore:
    """Read a folder that ``FAISS.save_local`` of langchain-community wrote; no code in it is run.

    Args:
        folder: The folder.
        index_name: Name of its two files, without ending.

    Returns:
        Documents and vectors.

    Raises:
        ValueError: If the pickle file names anything but documents and their store, if it or the index cannot be read,
            or if documents and vectors do not belong together; says what.
        FileNotFoundError: If one of the files is missing.
        MissingExtraError: If faiss is not installed.
    """
    folder = Path(folder)
    pickle_path, index_path = folder / f"{index_name}.pkl", folder / f"{index_name}.faiss"
    for path in (pickle_path, index_path):
        if not path.is_file():
            raise FileNotFoundError(f"{path}: there is no such file; a saved store has {index_name}.faiss and .pkl.")
    ids, texts, metadatas = _documents(pickle_path)
    vectors, metric = _vectors(index_path, len(ids), pickle_path)
    return CommunityStore(ids, texts, metadatas, vectors, metric)


class _Held:
    """Stands for a class named in a pickle; an instance keeps the state it is given."""

    __slots__ = ("state",)

    state: Any

    def __init__(self, *arguments: object) -> None:
        raise pickle.UnpicklingError("a class is called where a saved object should be made")

    def __setstate__(self, state: Any) -> None:
        self.state = state


class _HeldDocstore(_Held):
    __slots__ = ()


class _HeldDocument(_Held):
    __slots__ = ()


# The same two classes, where the releases of LangChain have had them.
_KNOWN: dict[tuple[str, str], type[_Held]] = {
    **{
        (f"{package}.docstore.in_memory", "InMemoryDocstore"): _HeldDocstore
        for package in ("langchain_community", "langchain_classic", "langchain")
    },
    **{
        (module, "Document"): _HeldDocument
        for module in (
            "langchain_core.documents.base",
            "langchain_core.documents",
            "langchain.schema.document",
            "langchain.schema",
            "langchain.docstore.document",
        )
    },
}

# Opcodes that make plain data, classes by name (both kinds go through find_class), and objects of these classes. Others
# reach past find_class (extension codes, persistent ids, buffers) or are written by no pickler.
_PUT = frozenset({"PUT", "BINPUT", "LONG_BINPUT"})
_OPCODES = """
    PROTO FRAME STOP MARK POP POP_MARK MEMOIZE PUT BINPUT LONG_BINPUT GET BINGET LONG_BINGET
    NONE NEWTRUE NEWFALSE INT BININT BININT1 BININT2 LONG LONG1 LONG4 FLOAT BINFLOAT
    STRING BINSTRING SHORT_BINSTRING UNICODE BINUNICODE SHORT_BINUNICODE BINUNICODE8
    BINBYTES SHORT_BINBYTES BINBYTES8
    EMPTY_LIST LIST APPEND APPENDS EMPTY_TUPLE TUPLE TUPLE1 TUPLE2 TUPLE3
    EMPTY_DICT DICT SETITEM SETITEMS EMPTY_SET ADDITEMS FROZENSET
    GLOBAL STACK_GLOBAL INST OBJ REDUCE NEWOBJ NEWOBJ_EX BUILD
"""
_ADMITTED = frozenset(_OPCODES.split())
_DEEPEST = 100
_VALUES_PER_OPCODE = 100


class _Unpickler(pickle.Unpickler):
    def __init__(self, data: bytes, path: Path) -> None:
        super().__init__(io.BytesIO(data))
        self._path = path

    def find_class(self, module: str, name: str) -> type[_Held]:
        known = _KNOWN.get((module, name))
        if known is None:
            raise _RefusedError(
                f"{self._path}: refused, because it names {module}.{name}; only LangChain's documents and their store "
                "may be named. Nothing of the file was run."
            )
        return known

    def persistent_load(self, pid: Any) -> Any:
        raise _RefusedError(f"{self._path}: refused, because it names an object outside the file by the id {pid!r}.")


class _RefusedError(ValueError):
    """A pickle that asks for more than data."""


def _documents(path: Path) -> tuple[list[str], list[str], list[dict[str, Any]]]:
    data = path.read_bytes()
    opcodes = _check_opcodes(data, path)
    try:
        loaded = _Unpickler(data, path).load()
    except _RefusedError:
        raise
    # Whatever goes wrong inside, the file is at fault: only the opcodes above and the classes here took part.
    except Exception as error:
        raise ValueError(f"{path}: not a document store that can be read ({type(error).__name__}: {error}).") from error
    if not (isinstance(loaded, tuple) and len(loaded) == 2):
        raise ValueError(f"{path}: expected a pair of a document store and a mapping, found {type(loaded).__name__}.")
    docstore, positions = loaded
    documents = _state(docstore, _HeldDocstore, f"{path}: the document store").get("_dict")
    if not isinstance(documents, dict) or not isinstance(positions, dict):
        raise ValueError(f"{path}: the document store or the mapping of positions is not a dictionary.")
    if set(positions) != set(range(len(positions))) or not all(type(key) is int for key in positions):
        raise ValueError(f"{path}: the positions of the mapping are not 0 to {len(positions) - 1}.")
    ids = [positions[position] for position in range(len(positions))]
    if bad := [id_ for id_ in (*ids, *documents) if not isinstance(id_, str)]:
        raise ValueError(f"{path}: {len(bad)} document ids are not strings, one of them a {type(bad[0]).__name__}.")
    if len(set(ids)) < len(ids):
        raise ValueError(f"{path}: the mapping names {len(ids) - len(set(ids))} document ids more than once.")
    if missing := [id_ for id_ in ids if id_ not in documents]:
        raise ValueError(f"{path}: {len(missing)} ids have no document, the first of them {missing[0]!r}.")
    if extra := documents.keys() - set(ids):
        raise ValueError(f"{path}: {len(extra)} documents have no vector, one of them {min(extra)!r}.")
    plain = _Plain(opcodes * _VALUES_PER_OPCODE)
    texts, metadatas = [], []
    for id_ in ids:
        where = f"{path}: document {id_!r}"
        fields = _state(documents[id_], _HeldDocument, where)
        text, metadata = fields.get("page_content"), fields.get("metadata", {})
        if not isinstance(text, str) or not isinstance(metadata, dict):
            raise ValueError(f"{where} has no text, or metadata that is not a dictionary.")
        texts.append(text)
        metadatas.append(plain.copy(metadata, where))
    return ids, texts, metadatas


def _check_opcodes(data: bytes, path: Path) -> int:
    """Read through a pickle without building anything; returns the number of its opcodes."""
    count = 0
    try:
        for opcode, argument, _ in pickletools.genops(data):
            count += 1
            if opcode.name not in _ADMITTED:
                raise _RefusedError(f"{path}: refused, because it holds the pickle opcode {opcode.name}.")
            # Memory is set aside up to the highest number.
            if opcode.name in _PUT and int(argument or 0) > count:
                raise _RefusedError(f"{path}: refused, because it numbers an object {argument} among {count} opcodes.")
    except _RefusedError:
        raise
    except Exception as error:  # pickletools raises what its parsers happen to meet
        raise ValueError(f"{path}: not a pickle file, or cut short ({error}).") from error
    return count


def _state(held: Any, kind: type[_Held], where: str) -> Mapping[str, Any]:
    """The attributes of a saved object."""
    state = getattr(held, "state", None) if isinstance(held, kind) else None
    # Pydantic's models keep them one level further down.
    if isinstance(state, dict) and isinstance(state.get("__dict__"), dict):
        state = state["__dict__"]
    if not isinstance(state, dict):
        raise ValueError(f"{where} is not one, or was saved without its content.")
    return state


class _Plain:
    """Copies plain data; stops at cycles, and where few bytes unfold into very many values."""

    def __init__(self, budget: int) -> None:
        self._left = budget

    def copy(self, value: Any, where: str, depth: int = 0) -> Any:
        self._left -= 1
        if self._left < 0 or depth > _DEEPEST:
            raise ValueError(f"{where}: the metadata is nested too deeply, or unfolds into too many values.")
        if value is None or isinstance(value, str | bool | int | float):
            return value
        if isinstance(value, list | tuple):
            return [self.copy(inner, where, depth + 1) for inner in value]
        if isinstance(value, dict) and all(isinstance(key, str) for key in value):
            return {key: self.copy(inner, where, depth + 1) for key, inner in value.items()}
        raise ValueError(f"{where}: the metadata holds a {type(value).__name__}, which is not plain data.")


def _vectors(path: Path, expected: int, pickle_path: Path) -> tuple[np.ndarray, Metric]:
    faiss = require("faiss", extra="langchain", why="reading a FAISS index")
    try:
        index = faiss.read_index(str(path))
    except RuntimeError as error:
        raise ValueError(f"{path}: not a readable FAISS index ({_first_line(error)}).") from error
    if index.ntotal != expected:
        raise ValueError(f"{path} holds {index.ntotal} vectors, but {pickle_path} {expected} documents.")
    metrics: dict[int, Metric] = {faiss.METRIC_INNER_PRODUCT: "ip", faiss.METRIC_L2: "l2"}
    if index.metric_type not in metrics:
        raise ValueError(f"{path}: the index's metric number {index.metric_type} is neither inner product nor L2.")
    metric = metrics[index.metric_type]
    labels, inner = np.arange(expected), index
    while isinstance(inner, faiss.IndexIDMap):  # IndexIDMap2 is one; the outer index owns the inner one
        labels = faiss.vector_to_array(inner.id_map)[labels]
        inner = faiss.downcast_index(inner.index)
    if not np.array_equal(np.sort(labels), np.arange(expected)):
        raise ValueError(f"{path}: the labels of the index are not its positions 0 to {expected - 1}.")
    if not expected:
        return np.zeros((0, index.d), dtype=np.float32), metric
    try:
        if (inverted := faiss.try_extract_index_ivf(inner)) is not None:
            inverted.make_direct_map()
        stored = inner.reconstruct_n(0, expected)
    except RuntimeError as error:
        raise ValueError(
            f"{path}: this kind of index does not give its vectors back ({_first_line(error)})."
        ) from error
    vectors = np.empty((expected, index.d), dtype=np.float32)
    vectors[labels] = stored
    return vectors, metric


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]
