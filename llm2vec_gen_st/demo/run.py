"""Search passages for answers, and let the LLM say what each question's embedding holds."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text
from transformers.utils import logging as hf_logging

from llm2vec_gen_st.extras import require
from llm2vec_gen_st.files import read_jsonl
from llm2vec_gen_st.model import LLM2VecGen

MODEL = "llm2vec-gen-smollm2-135m"


@dataclass(frozen=True)
class Passage:
    """One passage of the demonstration.

    Args:
        id: Its identifier.
        topic: What it belongs to.
        text: The passage.
    """

    id: str
    topic: str
    text: str


@dataclass(frozen=True)
class Question:
    """One question, and the passage that answers it.

    Args:
        question: The question.
        passage_id: Identifier of the passage.
    """

    question: str
    passage_id: str


@dataclass(frozen=True)
class DemoResult:
    """What a demonstration found.

    Args:
        questions: Number of questions.
        first: Questions whose passage came first.
        top_three: Questions whose passage was among the first three.
        seconds: Seconds by step.
    """

    questions: int
    first: int
    top_three: int
    seconds: dict[str, float]


def load_passages() -> list[Passage]:
    """The passages that ship with the package.

    Example:
        >>> load_passages()[0].topic
        'astronomy'
    """
    return [Passage(**row) for row in _rows("passages.jsonl")]


def load_questions() -> list[Question]:
    """The questions that ship with the package.

    Example:
        >>> load_questions()[8].question
        'Why is the sky blue?'
    """
    return [Question(**row) for row in _rows("questions.jsonl")]


def faster_dtype(device: str = "cpu") -> torch.dtype:
    """The dtype in which this machine multiplies matrices of the built-in model's sizes faster.

    Args:
        device: Where to measure.

    Returns:
        ``torch.bfloat16`` or ``torch.float32``.
    """

    def seconds(dtype: torch.dtype) -> float:
        left, right = (torch.ones(*shape, dtype=dtype, device=device) for shape in ((1024, 576), (576, 1536)))
        best = float("inf")
        for _ in range(4):
            start = time.perf_counter()
            (left @ right).sum().item()
            best = min(best, time.perf_counter() - start)
        return best

    return torch.bfloat16 if seconds(torch.bfloat16) < seconds(torch.float32) else torch.float32


def run_demo(
    model: str | LLM2VecGen = MODEL,
    *,
    dtype: str | torch.dtype | None = None,
    shown: int = 3,
    max_new_tokens: int = 40,
    batch_size: int = 16,
    console: Console | None = None,
) -> DemoResult:
    """Encode the passages, find those that answer the questions, and let the same LLM put one answer into words.

    Args:
        model: The student: a name or directory, or a loaded one.
        dtype: Number format of the base model's weights; the faster one here if not given.
        shown: Questions shown with their best passages and with what their embeddings decode to.
        max_new_tokens: Longest decoded text and longest answer, in tokens.
        batch_size: Texts run at once.
        console: Where to print.

    Returns:
        The counts and times that were printed.
    """
    console = console or Console()
    passages, questions = load_passages(), load_questions()
    clock = _Clock()
    hf_logging.disable_progress_bar()
    console.print("[bold]Loading the model ...[/bold]")
    with clock("load the model"):
        if isinstance(model, str):
            model = LLM2VecGen(model, model_kwargs={"dtype": dtype or faster_dtype()})
    console.print(_about(model), highlight=False)
    console.print(f"[bold]Encoding {len(passages)} passages and {len(questions)} questions ...[/bold]")
    with clock(f"encode {len(passages)} passages"):
        documents = model.encode_document(
            [passage.text for passage in passages], batch_size=batch_size, convert_to_tensor=True
        )
    asked = [question.question for question in questions]
    with clock(f"encode {len(asked)} questions and search"):
        scores = model.similarity(model.encode_query(asked, batch_size=batch_size, convert_to_tensor=True), documents)
        order = scores.argsort(dim=1, descending=True).tolist()
    decoded: list[str] = []
    if shown > 0:
        with clock(f"decode {len(asked[:shown])} embeddings to text"):
            soft_prompts = model.encode_soft_prompts(asked[:shown], prompt_name="query")
            decoded = model.decode(soft_prompts, max_new_tokens=max_new_tokens)
    for number, said in enumerate(decoded):
        best = [(float(scores[number, row]), passages[row]) for row in order[number][:3]]
        console.print(_answer(questions[number], best, said, min(console.width, 92)))

    if shown > 0:
        with clock("answer a question from its passages"):
            said = answer(model, passages, documents.numpy(force=True), asked[0], max_new_tokens)
        console.print(_title(f"{asked[0]} The same LLM answers from the passages it found:"))
        console.print(Text(" ".join(said.split()), style="italic"))
    ranks = [
        [passages[row].id for row in found].index(question.passage_id)
        for question, found in zip(questions, order, strict=True)
    ]
    first, top_three = sum(rank == 0 for rank in ranks), sum(rank < 3 for rank in ranks)
    console.print(_times(clock.seconds))
    console.print(
        f"Of {len(questions)} questions, {first} have their passage at rank 1 and {top_three} within the top 3 "
        f"(of {len(passages)} passages).",
        style="bold",
    )
    return DemoResult(len(questions), first, top_three, clock.seconds)


def answer(
    model: LLM2VecGen, passages: Sequence[Passage], embeddings: np.ndarray, question: str, max_tokens: int
) -> str:
    """Answer a question with LangChain: passages from a vector store, words from the LLM that embedded them.

    Args:
        model: The student, whose frozen LLM answers.
        passages: N passages.
        embeddings: Their embeddings (N, D).
        question: The question.
        max_tokens: Longest answer, in tokens.

    Returns:
        The answer.

    Raises:
        MissingExtraError: If LangChain or FAISS is not installed.
    """
    for package in ("langchain_core", "faiss"):
        require(package, extra="demo", why="the demonstration")
    from langchain_llm2vec_gen import ChatLLM2VecGen, FaissStore, LLM2VecGenEmbeddings
    from langchain_llm2vec_gen.rag import answer_chain

    store = FaissStore.from_texts([], LLM2VecGenEmbeddings(model=model))
    store.add_embeddings([passage.text for passage in passages], embeddings, ids=[passage.id for passage in passages])
    retriever = store.as_retriever(search_kwargs={"k": 3})
    return str(answer_chain(retriever, ChatLLM2VecGen(model, max_tokens=max_tokens)).invoke(question)["answer"])


class _Clock:
    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, step: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.seconds[step] = time.perf_counter() - start


def _rows(name: str) -> list[dict[str, str]]:
    with resources.as_file(resources.files("llm2vec_gen_st.demo") / name) as path:
        return list(read_jsonl(Path(path)))


def _about(model: LLM2VecGen) -> str:
    transformer = model.suffix_transformer
    return (
        f"{transformer.base.id}, frozen, in {str(model.llm.dtype).removeprefix('torch.')}; "
        f"{transformer.thought_tokens} thought and {transformer.compression_tokens} compression tokens; "
        f"embeddings of {model.get_embedding_dimension()} dimensions"
    )


def _answer(question: Question, best: list[tuple[float, Passage]], said: str, width: int) -> Table:
    table = Table(title=_title(question.question), title_justify="left", show_lines=True, width=width)
    table.add_column("score", justify="right", no_wrap=True)
    table.add_column("passage (green: the one that answers the question)")
    for score, passage in best:
        right = passage.id == question.passage_id
        table.add_row(f"{score:.3f}", Text(passage.text, style="green" if right else ""))
    table.add_row("decoded", Text(" ".join(said.split()) or "(nothing)", style="italic"))
    return table


def _title(text: str) -> Text:
    return Text(f"\n{text}", style="bold cyan")


def _times(seconds: dict[str, float]) -> Table:
    table = Table(title=_title("Time"), title_justify="left")
    table.add_column("step")
    table.add_column("seconds", justify="right")
    for step, value in seconds.items():
        table.add_row(step, f"{value:.1f}")
    table.add_row("all", f"{sum(seconds.values()):.1f}", style="bold")
    return table
