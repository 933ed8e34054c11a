"""Instructions: every task of the benchmarks has its own, on the side it belongs to, and mteb finds it by itself."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import datasets
import mteb
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mteb.abstasks import AbsTask, AbsTaskRetrieval, AbsTaskSTS
from mteb.abstasks.task_metadata import TaskMetadata
from mteb.models.abs_encoder import get_prompt_name
from mteb.types import PromptType
from sentence_transformers import SentenceTransformer

from llm2vec_gen_st import LLM2VecGen
from llm2vec_gen_st.checkpoints import export_native
from llm2vec_gen_st.evaluation import built_in_instructions, instructions_for, load_instructions
from llm2vec_gen_st.evaluation.instructions import Side, default_instructions, instruction_of, with_overrides
from llm2vec_gen_st.prompts import DOCUMENT, QUERY

ENGLISH = list(mteb.get_benchmark("MTEB(eng, v2)").tasks)
BRIGHT = [task for name in ("BRIGHT", "BRIGHT(long)", "BRIGHT(v1.1)") for task in mteb.get_benchmark(name).tasks]
SIDES: dict[Side, PromptType | None] = {"query": PromptType.query, "document": PromptType.document, "text": None}


def by_mteb(prompts: dict[str, str], task: AbsTask, side: Side) -> str | None:
    """What mteb itself puts before a text."""
    name = get_prompt_name(prompts, task.metadata, SIDES[side])
    return None if name is None else prompts[name]


def test_the_benchmark_has_the_tasks_of_the_paper() -> None:
    assert len(ENGLISH) == 41
    assert len(BRIGHT) == 22


@pytest.mark.parametrize("task", [*ENGLISH, *BRIGHT], ids=lambda task: task.metadata.name)
def test_every_task_has_an_instruction_of_its_own_on_the_right_side(task: AbsTask) -> None:
    prompts = dict(built_in_instructions())
    name = task.metadata.name
    if isinstance(task, AbsTaskRetrieval):
        assert by_mteb(prompts, task, "query") == prompts[f"{name}-query"]
        assert by_mteb(prompts, task, "document") == DOCUMENT
    else:
        assert by_mteb(prompts, task, "text") == prompts[name]


@pytest.mark.parametrize("task", ENGLISH, ids=lambda task: task.metadata.name)
def test_our_order_of_precedence_is_that_of_mteb(task: AbsTask) -> None:
    prompts = dict(built_in_instructions())
    meta = task.metadata
    for side in SIDES:
        assert instruction_of(prompts, meta.name, meta.type, side) == (by_mteb(prompts, task, side) or "")


@given(st.sets(st.sampled_from([f"{name}{end}" for name in ("STS12", "STS") for end in ("", "-query", "-document")])))
def test_precedence_is_that_of_mteb_for_any_set_of_names(names: set[str]) -> None:
    prompts = {name: f"instruction {name}" for name in names} | {"query": "any query", "document": "any document"}
    task = next(task for task in ENGLISH if task.metadata.name == "STS12")
    for side in SIDES:
        assert instruction_of(prompts, "STS12", "STS", side) == (by_mteb(prompts, task, side) or "")


def test_instructions_are_generative_and_end_in_one_space() -> None:
    for name, text in built_in_instructions().items():
        assert text == f"{text.strip()} ", name
        assert name == "document" or text.startswith("Generate a passage that "), name
    assert built_in_instructions()["query"] == QUERY
    assert built_in_instructions()["document"] == DOCUMENT


def test_advbench_has_an_instruction() -> None:
    assert instruction_of(built_in_instructions(), "AdvBench-IR", "Retrieval", "query") != QUERY


def write(tmp_path: Path, value: Any) -> Path:
    path = tmp_path / "mine.json"
    path.write_text(value if isinstance(value, str) else json.dumps(value), encoding="utf-8")
    return path


def test_a_file_replaces_instructions_by_the_task_s_name_alone(tmp_path: Path) -> None:
    found = load_instructions(write(tmp_path, {"ArguAna": "Argue:", "STS12": "Say again: ", "AdvBench-IR": "Do:"}))
    assert instruction_of(found, "ArguAna", "Retrieval", "query") == "Argue: "
    assert instruction_of(found, "ArguAna", "Retrieval", "document") == DOCUMENT
    assert instruction_of(found, "STS12", "STS", "text") == "Say again: "
    assert instruction_of(found, "AdvBench-IR", "Retrieval", "query") == "Do: "
    assert instruction_of(found, "STS13", "STS", "text") == built_in_instructions()["STS13"]


@pytest.mark.parametrize("kind", ["Retrieval", "STS"])
def test_an_instruction_of_an_unknown_task_never_comes_before_its_documents(kind: str) -> None:
    found = with_overrides({"mine": "Mine:", "document": "Shorten:"})
    assert instruction_of(found, "mine", kind, "document") == "Shorten: "
    assert instruction_of(found, "mine", kind, "query") == instruction_of(found, "mine", kind, "text") == "Mine: "


def test_an_empty_instruction_is_no_instruction(tmp_path: Path) -> None:
    found = load_instructions(write(tmp_path, {"STS12": ""}))
    assert instruction_of(found, "STS12", "STS", "text") == ""


@given(st.dictionaries(st.text(min_size=1, max_size=8), st.text(max_size=8), max_size=4))
def test_replacing_twice_is_replacing_once(overrides: dict[str, str]) -> None:
    once = with_overrides(overrides)
    assert with_overrides(once) == once
    assert built_in_instructions().keys() <= once.keys()


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("{", "not a JSON object"),
        (["STS12"], "found list"),
        ({"STS12": 3}, "'STS12'"),
        ('{"STS12": "a", "STS12": "b"}', "'STS12' occurs twice"),
    ],
)
def test_a_file_that_is_no_such_object_is_refused_by_name(tmp_path: Path, content: Any, said: str) -> None:
    path = write(tmp_path, content)
    with pytest.raises(ValueError, match=said) as caught:
        load_instructions(path)
    assert str(path) in str(caught.value)


def test_a_student_is_evaluated_by_the_built_in_instructions_and_its_own(fresh_student: LLM2VecGen) -> None:
    fresh_student.prompts["STS12"] = "Mine: "
    found = default_instructions(fresh_student)
    assert found["STS12"] == "Mine: "
    assert found["STS13"] == built_in_instructions()["STS13"]


def test_another_model_keeps_to_its_own_prompts(words: SentenceTransformer) -> None:
    words.prompts = {"query": "query: "}
    assert default_instructions(words) == {"query": "query: "}


class Pairs(AbsTaskSTS):
    """A task made of mteb's classes alone, under the name of one of mteb's tasks."""

    metadata = TaskMetadata(
        name="STS12",
        description="Two pairs.",
        dataset={"path": "nowhere", "revision": "1"},
        type="STS",
        eval_langs=["eng-Latn"],
        main_score="cosine_spearman",
    )

    def load_data(self, *args: Any, **kwargs: Any) -> None:
        rows = [("bees", "honey", 1.0), ("bears", "ice", 4.0), ("sea", "sea", 5.0)]
        columns = zip(*rows, strict=True)
        table = dict(zip(("sentence1", "sentence2", "score"), map(list, columns), strict=True))
        self.dataset = datasets.DatasetDict({"test": datasets.Dataset.from_dict(table)})
        self.data_loaded = True


class Finding(AbsTaskRetrieval):
    """As above, a retrieval task."""

    metadata = TaskMetadata(
        name="ArguAna",
        description="Two queries.",
        dataset={"path": "nowhere", "revision": "1"},
        type="Retrieval",
        eval_langs=["eng-Latn"],
        main_score="ndcg_at_10",
    )

    def load_data(self, *args: Any, **kwargs: Any) -> None:
        queries = datasets.Dataset.from_list([{"id": "a", "text": "claim"}, {"id": "b", "text": "other"}])
        corpus = datasets.Dataset.from_list([{"id": "x", "text": "passage"}, {"id": "y", "text": "more"}])
        relevant = {"a": {"x": 1}, "b": {"y": 1}}
        parts = {"queries": queries, "corpus": corpus, "relevant_docs": relevant, "top_ranked": None}
        self.dataset = {"default": {"test": parts}}  # type: ignore[dict-item]
        self.data_loaded = True


def test_mteb_alone_gives_a_native_export_the_instructions_saved_in_it(
    fresh_student: LLM2VecGen, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fresh_student.prompts = instructions_for(fresh_student)  # type: ignore[assignment]
    export_native(fresh_student, tmp_path / "native")
    plain = SentenceTransformer(str(tmp_path / "native"), device="cpu")
    seen: list[tuple[str, str | None]] = []
    encode = plain.encode

    def spy(inputs: list[str], *args: Any, prompt: str | None = None, **kwargs: Any) -> Any:
        seen.extend((text, prompt) for text in inputs)
        return encode(inputs, *args, prompt=prompt, **kwargs)

    monkeypatch.setattr(plain, "encode", spy)
    with warnings.catch_warnings():
        # mteb says so by a warning if it cannot read a prompt's name.
        warnings.filterwarnings("error", message=".*not in the expected format.*")
        result = mteb.evaluate(plain, [Pairs(), Finding()], cache=None, show_progress_bar=False)
    assert [one.task_name for one in result.task_results] == ["STS12", "ArguAna"]
    prompts = dict(seen)
    assert prompts["bees"] == prompts["honey"] == built_in_instructions()["STS12"]
    assert prompts["claim"] == built_in_instructions()["ArguAna-query"]
    assert prompts["passage"] == DOCUMENT
