"""Answers from passages: what the prompt holds, what fits into it, and what comes out in which order."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from langchain_core.documents import Document
from langchain_core.language_models import FakeListChatModel
from langchain_core.messages import BaseMessage
from langchain_core.retrievers import BaseRetriever
from langchain_llm2vec_gen import FaissStore
from langchain_llm2vec_gen.rag import answer_chain, fitting_passages, messages
from pydantic import Field

from llm2vec_gen_st import LLM2VecGen

QUESTION = "Where do polar bears live?"


class Listening(FakeListChatModel):
    """Counts a token a word, and remembers what it was asked."""

    responses: list[str] = Field(default=["On sea ice [1]."])
    max_tokens: int = 0
    asked: list[list[BaseMessage]] = Field(default_factory=list)

    def get_num_tokens_from_messages(self, messages: list[BaseMessage], tools: Any = None) -> int:
        return sum(len(str(message.content).split()) for message in messages)

    def _call(self, messages: list[BaseMessage], *rest: Any, **more: Any) -> str:
        self.asked.append(messages)
        return super()._call(messages, *rest, **more)


class Fixed(BaseRetriever):
    documents: list[Document]

    def _get_relevant_documents(self, query: str, *, run_manager: Any) -> list[Document]:
        assert query == QUESTION
        return self.documents


def listening(window: int | None = None, max_tokens: int = 0) -> Listening:
    profile: Any = None if window is None else {"max_input_tokens": window}
    return Listening(profile=profile, max_tokens=max_tokens)


def passages(count: int, words: int = 10) -> list[Document]:
    return [Document(f"passage{number} " + "word " * (words - 1)) for number in range(count)]


def test_the_prompt_numbers_the_passages_in_their_order() -> None:
    chat = listening()
    found = answer_chain(Fixed(documents=passages(3)), chat).invoke(QUESTION)
    assert found == {"question": QUESTION, "passages": passages(3), "answer": "On sea ice [1]."}
    ((system, human),) = chat.asked
    assert system.type == "system"
    text = str(human.content)
    places = [text.index(part) for part in ("[1] passage0", "[2] passage1", "[3] passage2", f"Question: {QUESTION}")]
    assert places == sorted(places)


def test_streaming_gives_the_passages_before_the_answer_and_the_answer_in_pieces() -> None:
    parts = list(answer_chain(Fixed(documents=passages(2)), listening()).stream(QUESTION))
    kinds = [key for part in parts for key in part]
    assert kinds.index("passages") < kinds.index("answer")
    answers = [part["answer"] for part in parts if "answer" in part]
    assert len(answers) > 3
    assert "".join(answers) == "On sea ice [1]."
    assert sum("passages" in part for part in parts) == 1


def test_the_chain_runs_asynchronously() -> None:
    found = asyncio.run(answer_chain(Fixed(documents=passages(2)), listening()).ainvoke(QUESTION))
    assert found["answer"] == "On sea ice [1]."


def test_the_least_relevant_passages_are_left_out_of_a_short_window() -> None:
    chat = listening()
    three = chat.get_num_tokens_from_messages(messages(QUESTION, passages(3)))
    for room, count in ((three, 3), (three - 1, 2)):
        found = answer_chain(Fixed(documents=passages(4)), listening(room + 20, max_tokens=20)).invoke(QUESTION)
        assert found["passages"] == passages(4)[:count]


def test_what_cannot_fit_is_said() -> None:
    with pytest.raises(ValueError, match=r"With the most relevant passage .* has room for 60"):
        answer_chain(Fixed(documents=passages(2, words=100)), listening(70, max_tokens=10)).invoke(QUESTION)
    with pytest.raises(ValueError, match="With the question"):
        answer_chain(Fixed(documents=[]), listening(10)).invoke(QUESTION)


def test_no_passages_are_told_to_the_model() -> None:
    chat = listening(1000)
    assert answer_chain(Fixed(documents=[]), chat).invoke(QUESTION)["passages"] == []
    assert "There are no passages." in str(chat.asked[0][1].content)


@given(lengths=st.lists(st.integers(1, 40), max_size=6), window=st.integers(1, 300))
def test_the_most_passages_that_fit_are_kept(lengths: list[int], window: int) -> None:
    chat = listening(window)
    given_ = [Document("word " * length) for length in lengths]

    def fits(count: int) -> bool:
        return chat.get_num_tokens_from_messages(messages(QUESTION, given_[:count])) <= window

    possible = [count for count in range(bool(given_), len(given_) + 1) if fits(count)]
    if possible:
        assert fitting_passages(QUESTION, given_, chat) == given_[: max(possible)]
    else:
        with pytest.raises(ValueError, match="has room for"):
            fitting_passages(QUESTION, given_, chat)


def test_one_model_embeds_retrieves_and_answers(student: LLM2VecGen, tmp_path: Path) -> None:
    from langchain_llm2vec_gen import ChatLLM2VecGen, LLM2VecGenEmbeddings

    chat = ChatLLM2VecGen(model=student, max_tokens=8)
    with FaissStore(tmp_path / "corpus.store", LLM2VecGenEmbeddings(model=student)) as store:
        store.add_texts([f"Passage {number} about honey." for number in range(6)])
        found = answer_chain(store, chat).invoke("Who makes honey?")
        assert len(found["passages"]) == 4
        assert isinstance(found["answer"], str)
        store.add_texts(["Who makes honey? " * 400])
        retriever = store.as_retriever(search_kwargs={"k": 7})
        kept = [part["passages"] for part in answer_chain(retriever, chat).stream("a") if "passages" in part]
    assert len(kept[0]) < 7
