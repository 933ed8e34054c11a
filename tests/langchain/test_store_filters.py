"""Filters in SQL against a plain reading of what they mean."""

from __future__ import annotations

import operator
import re
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from langchain_llm2vec_gen import FaissStore

# Few names and values, so that filters often match; odd ones among them.
FIELD_NAMES = ["a", "b", "c", "año", "名", "a b", "x.y", "0", "$", "'", "A", "[0]", "#-1", "%s", "🐻"]
TEXTS = [
    "",
    "a",
    "b",
    "ab",
    "A",
    "1",
    "true",
    "null",
    "a\0",
    "a\0b",
    "\0",
    "é",
    "é",
    "名",
    "🐻",
    "'",
    '"',
    "\\u0000",
    "\n",
]
NUMBERS = [
    0,
    1,
    -1,
    2,
    2**53,
    2**53 + 1,
    2**63 - 1,
    -(2**63),
    0.0,
    1.0,
    0.1,
    0.30000000000000004,
    1.5,
    -0.0,
    1e300,
    5e-324,
]

texts = st.sampled_from(TEXTS) | st.text(st.characters(exclude_categories=["Cs"]), max_size=4)
numbers = (
    st.sampled_from(NUMBERS)
    | st.integers(-3, 3)
    | st.integers(-(2**63), 2**63 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
)
scalars = st.none() | st.booleans() | texts | numbers
fields = st.sampled_from(FIELD_NAMES)
values = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(fields, inner, max_size=3), max_leaves=6
)
documents = st.dictionaries(fields | st.sampled_from(['"', "\\", "a\0b", "\n", ""]), values, max_size=4)

comparisons = st.sampled_from(["$gt", "$gte", "$lt", "$lte"])
plain_operators = st.one_of(
    st.tuples(st.sampled_from(["$eq", "$ne"]), scalars),
    st.tuples(comparisons, texts | numbers),
    st.tuples(comparisons, st.sampled_from([float("inf"), float("-inf")])),
    st.tuples(st.sampled_from(["$in", "$nin"]), st.lists(scalars, max_size=4)),
    st.tuples(st.just("$exists"), st.booleans()),
)


def several(pairs: Any) -> Any:
    return st.lists(pairs, min_size=1, max_size=2).map(dict)


operators = several(plain_operators | st.tuples(st.just("$not"), several(plain_operators)))
written_names = fields.filter(lambda name: not name.startswith("$")).map(lambda name: name.replace(".", "\\."))
dotted = st.lists(written_names, min_size=1, max_size=2).map(".".join)
conditions = st.recursive(scalars | operators, lambda inner: st.dictionaries(dotted, inner, min_size=1, max_size=2))
filters = st.recursive(
    st.dictionaries(dotted, conditions, max_size=2),
    lambda inner: st.one_of(
        st.tuples(st.sampled_from(["$and", "$or"]), st.lists(inner, min_size=1, max_size=3)).map(
            lambda pair: {pair[0]: pair[1]}
        ),
        inner.map(lambda filter: {"$not": filter}),
        st.tuples(inner, inner).map(lambda pair: {**pair[0], **pair[1]}),
    ),
    max_leaves=5,
)

SIGNS = {"$gt": operator.gt, "$gte": operator.ge, "$lt": operator.lt, "$lte": operator.le}
MISSING = object()


def admits(filter: dict[str, Any], metadata: dict[str, Any]) -> bool:
    """What a filter means."""
    return all(entry(key, value, metadata) for key, value in filter.items())


def entry(key: str, value: Any, metadata: dict[str, Any]) -> bool:
    if key == "$and":
        return all(admits(inner, metadata) for inner in value)
    if key == "$or":
        return any(admits(inner, metadata) for inner in value)
    if key == "$not":
        return not admits(value, metadata)
    return holds([name.replace("\\.", ".") for name in re.split(r"(?<!\\)\.", key)], value, metadata)


def holds(path: list[str], condition: Any, metadata: dict[str, Any]) -> bool:
    if not isinstance(condition, dict):
        condition = {"$eq": condition}
    if not all(name.startswith("$") for name in condition):
        return all(
            holds([*path, *(name.replace("\\.", ".") for name in re.split(r"(?<!\\)\.", key))], inner, metadata)
            for key, inner in condition.items()
        )
    found: Any = metadata
    for name in path:
        found = found.get(name, MISSING) if isinstance(found, dict) else MISSING
    return all(compares(found, name, operand) for name, operand in condition.items())


def compares(found: Any, name: str, operand: Any) -> bool:
    if name == "$not":
        return not all(compares(found, inner, value) for inner, value in operand.items())
    if name == "$exists":
        return (found is not MISSING) is operand
    if name in ("$ne", "$nin"):
        return not compares(found, {"$ne": "$eq", "$nin": "$in"}[name], operand)
    if name == "$in":
        return any(compares(found, "$eq", value) for value in operand)
    items = found if isinstance(found, list) else [found]
    same = [item for item in items if kind(item) == kind(operand)]
    return any(item == operand if name == "$eq" else SIGNS[name](item, operand) for item in same)


def kind(value: Any) -> str:
    if isinstance(value, bool):
        return "bool"
    if isinstance(value, int | float):
        return "number"
    return type(value).__name__


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FaissStore]:
    """One file for all examples: making one takes longer than asking it."""
    with FaissStore(tmp_path_factory.mktemp("filters") / "corpus.store") as store:
        yield store


@settings(max_examples=100, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(documents, min_size=1, max_size=8), st.lists(filters, min_size=1, max_size=6))
@example(
    [{"a": "a\0b"}, {"a": ["a", "\0"]}, {"b": "\0"}], [{"a": "a"}, {"a": {"$gt": "a"}}, {"a": {"$in": ["a\0b", 1]}}]
)
@example(
    [{"a": True}, {"a": 1}, {"a": 1.0}, {"a": "1"}, {"a": [None]}], [{"a": 1}, {"a": True}, {"a": None}, {"a": "1"}]
)
@example([{"a": {"b": 1}}, {"a.b": 1}, {"a": [{"b": 1}]}, {"a": None}], [{"a.b": 1}, {"a": {"b": 1}}, {"a\\.b": 1}])
@example([{"año": 1, "名": {"🐻": "é"}}], [{"año": 1}, {"名.🐻": "é"}])
@example([{"a": 0.1 + 0.2}, {"a": 2**53 + 1}], [{"a": 0.1 + 0.2}, {"a": float(2**53)}, {"a": {"$in": [0.1 + 0.2]}}])
def test_filters_mean_what_they_say(
    store: FaissStore, metadatas: list[dict[str, Any]], asked: list[dict[str, Any]]
) -> None:
    ids = [str(number) for number in range(len(metadatas))]
    store.delete()
    store.add_embeddings(ids, [[1.0]] * len(ids), metadatas, ids)
    assert [document.metadata for document in store.documents()] == metadatas
    for filter in asked:
        expected = [id for id, metadata in zip(ids, metadatas, strict=True) if admits(filter, metadata)]
        assert store.ids(filter) == expected, filter
        hits = store.similarity_search_by_vector([1.0], k=len(ids), filter=filter)
        assert sorted(str(document.id) for document in hits) == expected, filter


@pytest.mark.parametrize(
    ("value", "plain"),
    [
        (np.int64(3), 3),
        (np.uint8(3), 3),
        (np.float64(3), 3.0),
        (np.float32(0.1), float(np.float32(0.1))),
        (np.bool_(True), True),
        (np.str_("a"), "a"),
    ],
    ids=repr,
)
def test_scalars_of_numpy_are_compared_as_they_are_stored(store: FaissStore, value: Any, plain: Any) -> None:
    store.delete()
    metadatas = [{"a": value}, {"a": [value]}, {"a": None}, {}, {"a": repr(value)}]
    store.add_embeddings(list("abcde"), [[1.0]] * 5, metadatas, list("abcde"))
    for written in (value, plain):
        for filter in ({"a": written}, {"a": {"$eq": written}}, {"a": {"$in": [written, "other"]}}):
            assert store.ids(filter) == ["a", "b"]
            hits = store.similarity_search_by_vector([1.0], k=5, filter=filter)
            assert sorted(str(document.id) for document in hits) == ["a", "b"]
        assert store.ids({"a": {"$ne": written}}) == ["c", "d", "e"]
    # Filters are remembered: a number and the text of it are two.
    hits = store.similarity_search_by_vector([1.0], k=5, filter={"a": repr(value)})
    assert [document.id for document in hits] == ["e"]
    assert store.ids({"a": {"$exists": np.bool_(False)}}) == ["d"]
