"""Questions answered from retrieved passages: retriever, prompt, and chat model in one chain."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

from langchain_core.documents import Document
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import BaseMessage, HumanMessage, SystemMessage
from langchain_core.output_parsers import StrOutputParser
from langchain_core.retrievers import BaseRetriever
from langchain_core.runnables import Runnable, RunnableLambda, RunnablePassthrough
from langchain_core.vectorstores import VectorStore

INSTRUCTION = (
    "Answer the question with what the numbered passages say, in a few sentences. Put the number of a passage behind "
    "what you take from it, like [1]. If the passages do not hold the answer, say that they do not."
)
PASSAGES = 4
"""Passages retrieved from a store."""


def answer_chain(store_or_retriever: VectorStore | BaseRetriever, chat: BaseChatModel) -> Runnable[str, dict[str, Any]]:
    """A chain from a question to its answer and the passages it was given.

    The prompt, with room for the answer, is kept within the chat model's context window: passages that do not fit are
    left out, the least relevant (the last) first.

    Args:
        store_or_retriever: Where passages come from; a store gives its 4 nearest.
        chat: The chat model; :class:`~langchain_llm2vec_gen.ChatLLM2VecGen` on the store's own model keeps one LLM in
            memory.

    Returns:
        A runnable from the question to a dictionary of ``question``, ``passages`` (the documents in the prompt, [1]
        first) and ``answer``. Streaming it gives the passages before the answer, and the answer in pieces.

    Raises:
        ValueError: When run, if the question or the most relevant passage alone does not fit into the window.

    Example:
        >>> from langchain_core.language_models import FakeListChatModel
        >>> from langchain_core.retrievers import BaseRetriever
        >>> class Bears(BaseRetriever):
        ...     def _get_relevant_documents(self, query, *, run_manager):
        ...         return [Document("Polar bears live on sea ice.")]
        >>> chain = answer_chain(Bears(), FakeListChatModel(responses=["On sea ice [1]."]))
        >>> chain.invoke("Where do polar bears live?")["answer"]
        'On sea ice [1].'
    """
    retriever = (
        store_or_retriever.as_retriever(search_kwargs={"k": PASSAGES})
        if isinstance(store_or_retriever, VectorStore)
        else store_or_retriever
    )

    def fit(state: dict[str, Any]) -> list[Document]:
        return fitting_passages(state["question"], state["retrieved"], chat)

    def prompt(state: dict[str, Any]) -> list[BaseMessage]:
        return messages(state["question"], state["passages"])

    chain = (
        {"question": RunnablePassthrough(), "retrieved": retriever}
        | RunnablePassthrough.assign(passages=RunnableLambda(fit))
        | RunnableLambda(_without_retrieved)
        | RunnablePassthrough.assign(answer=RunnableLambda(prompt) | chat | StrOutputParser())
    )
    return cast("Runnable[str, dict[str, Any]]", chain)


def messages(question: str, passages: Sequence[Document]) -> list[BaseMessage]:
    """The prompt: what to do, then the numbered passages and the question.

    Example:
        >>> print(messages("Where?", [Document("Here.")])[1].content)
        [1] Here.
        <BLANKLINE>
        Question: Where?
    """
    numbered = [f"[{number}] {passage.page_content.strip()}" for number, passage in enumerate(passages, 1)]
    return [
        SystemMessage(INSTRUCTION),
        HumanMessage("\n\n".join([*(numbered or ["There are no passages."]), f"Question: {question.strip()}"])),
    ]


def fitting_passages(question: str, passages: Sequence[Document], chat: BaseChatModel) -> list[Document]:
    """As many of the passages, from the first on, as the chat model's window has room for.

    Args:
        question: The question.
        passages: Passages, most relevant first.
        chat: The chat model; one that does not tell its window (``profile["max_input_tokens"]``) gets all passages.

    Returns:
        The first of the passages.

    Raises:
        ValueError: If not even the first passage, or the question alone, fits.
    """
    window = (getattr(chat, "profile", None) or {}).get("max_input_tokens")
    if window is None:
        return list(passages)
    room = window - (getattr(chat, "max_tokens", None) or 0)
    for count in range(len(passages), -1, -1):
        needed = chat.get_num_tokens_from_messages(messages(question, passages[:count]))
        if needed <= room and (count or not passages):
            return list(passages[:count])
        if count <= 1 and needed > room:
            what = "the most relevant passage" if count else "the question"
            raise ValueError(
                f"With {what} the prompt takes {needed} tokens, and the chat model has room for {room} beside its "
                "answer. Ask for a shorter answer, or index with a smaller chunk size."
            )
    raise AssertionError("one of the counts above decides")


def _without_retrieved(state: dict[str, Any]) -> dict[str, Any]:
    return {"question": state["question"], "passages": state["passages"]}
