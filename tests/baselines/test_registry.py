"""Options of the baselines written as text, as the command line takes them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llm2vec_gen_st.baselines import BASELINES
from llm2vec_gen_st.baselines.registry import known_options, options_from_text


@given(st.integers(), st.floats(allow_nan=False), st.text())
def test_options_keep_their_values_whatever_they_are(answers: int, temperature: float, encoder: str) -> None:
    expected = {"answers": answers, "temperature": temperature, "encoder": encoder}
    assert options_from_text("hyde", {key: str(value) for key, value in expected.items()}) == expected


KEYS = sorted({key for name in BASELINES for key in known_options(name)})
VALUES = st.one_of(st.text(), st.integers().map(str))


@given(st.sampled_from(list(BASELINES)), st.one_of(st.text(), st.sampled_from(KEYS)), VALUES)
def test_any_text_is_an_option_of_the_right_kind_or_refused_by_name(name: str, key: str, value: str) -> None:
    known = known_options(name)
    refusal = None
    try:
        found = options_from_text(name, {key: value})
    except ValueError as error:
        refusal = str(error)
    if refusal is not None:
        assert repr(name) in refusal
        return
    assert found.keys() == {key}
    assert type(found[key]) is known[key]


def test_options_that_are_no_single_values_are_left_out() -> None:
    for name in BASELINES:
        assert "max_seq_length" in known_options(name) or name == "hyde"
        assert not known_options(name).keys() & {"prompts", "model_kwargs", "adapters", "base_or_path"}
    with pytest.raises(ValueError, match="Unknown baseline 'ecco'; known are mean"):
        known_options("ecco")
