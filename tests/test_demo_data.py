"""The demonstration's data: enough of it, consistent, and answered in the way the demonstration counts."""

from __future__ import annotations

import io
import re
from collections import Counter

from rich.console import Console

from llm2vec_gen_st import LLM2VecGen
from llm2vec_gen_st.demo import load_passages, load_questions, run_demo


def test_there_are_enough_passages_topics_and_questions() -> None:
    passages, questions = load_passages(), load_questions()
    assert len(passages) >= 60
    assert len({passage.topic for passage in passages}) >= 10
    assert len(questions) >= 10


def test_ids_texts_and_questions_are_unique() -> None:
    passages, questions = load_passages(), load_questions()
    for values in (
        [passage.id for passage in passages],
        [passage.text for passage in passages],
        [question.question for question in questions],
        [question.passage_id for question in questions],
    ):
        assert [value for value, times in Counter(values).items() if times > 1] == []


def test_every_passage_has_two_to_four_sentences() -> None:
    counts = {passage.id: len(re.findall(r"[.!?](?:\s|$)", passage.text)) for passage in load_passages()}
    assert {key: count for key, count in counts.items() if not 2 <= count <= 4} == {}


def test_every_question_has_its_passage() -> None:
    known = {passage.id for passage in load_passages()}
    assert [question for question in load_questions() if question.passage_id not in known] == []


def test_demo_prints_tables_that_fit_a_narrow_terminal(student: LLM2VecGen) -> None:
    console = Console(width=80, record=True, file=io.StringIO())
    result = run_demo(student, shown=2, max_new_tokens=4, console=console)
    printed = console.export_text()
    lines = printed.splitlines()
    assert max(len(line) for line in lines) <= 80
    assert all(question.question in printed for question in load_questions()[:2])
    assert sum(line.startswith("│ decoded") for line in lines) == 2
    assert f"Of {result.questions} questions, {result.first} have their passage at rank 1" in " ".join(printed.split())
    assert 0 <= result.first <= result.top_three <= result.questions == len(load_questions())
    assert len(result.seconds) == 5
