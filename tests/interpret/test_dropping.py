"""Dropping: stop words, tokens that say nothing, and the text's own words, in any case and with any edges."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llm2vec_gen_st.interpret import ENGLISH_STOP_WORDS, Dropping
from llm2vec_gen_st.interpret.dropping import bare_word, words_of

EDGES = st.text(alphabet=" \t\n.,;:!?()[]\"'-_*#", max_size=3)


@given(before=EDGES, word=st.from_regex(r"[a-z]+", fullmatch=True), behind=EDGES, upper=st.booleans())
def test_edges_and_case_change_nothing(before: str, word: str, behind: str, upper: bool) -> None:
    token = before + (word.upper() if upper else word) + behind
    assert bare_word(token) == word
    assert Dropping().drops(token) == (word in ENGLISH_STOP_WORDS)
    assert Dropping().drops(token, words_of(f"so {word}?"))
    assert Dropping(stop_words=(), query_words=False).drops(token, {word}) is False


@given(st.text())
def test_tokens_without_letter_or_digit_are_punctuation(token: str) -> None:
    says_something = any(character.isalnum() for character in token.casefold())
    drop = Dropping(stop_words=())
    assert drop.drops(token) is not says_something
    assert Dropping(stop_words=(), punctuation=False).drops(token) is False


@given(st.lists(st.text(min_size=1), max_size=8))
def test_every_word_of_a_text_is_dropped_when_it_is_a_token(words: list[str]) -> None:
    own = words_of(" ".join(words))
    assert all(Dropping().drops(word, own) for text in words for word in text.split())


@pytest.mark.parametrize("token", [" bears", "Honey", "42", "蜂蜜", "é"])
def test_words_stay(token: str) -> None:
    assert not Dropping().drops(token, words_of("polar ice"))


def test_pieces_of_a_split_word_are_words_of_the_text() -> None:
    assert Dropping().drops("pass", words_of("password", [" pass", "word"]))
    assert not Dropping().drops("pass", words_of("password"))
