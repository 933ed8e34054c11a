"""A folder's manifest refuses whatever was made differently, however deep the difference is."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llm2vec_gen_st.manifests import claim, read_manifest, refuse_difference

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 3) | st.text(max_size=2),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from("abc"), inner, max_size=3),
    max_leaves=6,
)
MANIFESTS = st.dictionaries(st.sampled_from(["x", "y", "z"]), VALUES, min_size=1)


@pytest.mark.parametrize(
    ("found", "wanted", "said"),
    [
        ({"mntp": {"steps": 3}}, {"mntp": None}, "mntp: {'steps': 3} there, None now"),
        ({"mntp": None}, {"mntp": {"steps": 3}}, "mntp: None there, {'steps': 3} now"),
        ({"w": {"id": 1, "more": 2}}, {"w": {"id": 1}}, "w.more: 2 there, None now"),
        ({"w": {"id": {"a": 1}}}, {"w": {"id": {"a": 2}}}, "w.id.a: 1 there, 2 now"),
        ({"w": {"a": 1}}, {"w": {}}, "w.a: 1 there, None now"),
        ({"size": 1, "seed": 2}, {"size": 1}, "seed: 2 there, None now"),
        ({"size": 1}, {"size": 1, "seed": 2}, "seed: None there, 2 now"),
    ],
)
def test_every_difference_is_refused_and_named(
    tmp_path: Path, found: dict[str, Any], wanted: dict[str, Any], said: str
) -> None:
    path = tmp_path / "made.json"
    claim(path, found, holds="parts")
    with pytest.raises(ValueError, match=re.escape(f"({said}).")):
        claim(path, wanted, holds="parts")
    assert read_manifest(path) == found


@given(found=MANIFESTS, wanted=MANIFESTS)
def test_only_what_says_the_same_is_accepted(found: dict[str, Any], wanted: dict[str, Any]) -> None:
    refuse_difference(Path("out"), "parts", found, found)
    # A key that is not there and one that holds nothing say the same; so do objects without any content.
    if _said(found, wanted) != _said(wanted, wanted):
        with pytest.raises(ValueError, match="made differently"):
            refuse_difference(Path("out"), "parts", found, wanted)


def _said(values: Any, keys: Any) -> Any:
    return {key: _content(values.get(key)) for key in keys}


def _content(value: Any) -> Any:
    return (
        {key: _content(inner) for key, inner in value.items() if inner is not None}
        if isinstance(value, dict)
        else value
    )


def test_what_an_older_manifest_does_not_say_is_filled_in_deep_down(tmp_path: Path) -> None:
    path = tmp_path / "made.json"
    claim(path, {"recipe": {"steps": 3}}, holds="a run")
    unsaid = {"recipe": {"steps": 1, "rank": 0}, "processes": 1}
    claim(path, {"recipe": {"steps": 3, "rank": 0}, "processes": 1}, holds="a run", unsaid=unsaid)
    with pytest.raises(ValueError, match=r"recipe\.rank: 0 there, 2 now"):
        claim(path, {"recipe": {"steps": 3, "rank": 2}, "processes": 1}, holds="a run", unsaid=unsaid)
