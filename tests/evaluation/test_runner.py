"""Running tasks: what is on record is what the model read, and nothing is encoded twice without a reason."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from sentence_transformers import SentenceTransformer

from llm2vec_gen_st import LLM2VecGen
from llm2vec_gen_st.baselines import BASELINES, build, hyde
from llm2vec_gen_st.evaluation import EvaluationError, Result, evaluate, find_tasks, read_results, runner
from llm2vec_gen_st.evaluation.encoder import InstructedEncoder
from llm2vec_gen_st.evaluation.fingerprints import describe_model
from llm2vec_gen_st.evaluation.local import local_tasks
from llm2vec_gen_st.evaluation.results import result_path
from llm2vec_gen_st.testing import tiny_backbone

Seen = list[tuple[str | None, str]]


def spy_on(model: SentenceTransformer, monkeypatch: pytest.MonkeyPatch) -> Seen:
    """What reaches the model: instruction and text, as its first module reads them."""
    seen: Seen = []
    preprocess = model.preprocess

    def spy(inputs: list[str], prompt: str | None = None, **kwargs: Any) -> Any:
        seen.extend((prompt, text) for text in inputs)
        return preprocess(inputs, prompt=prompt, **kwargs)

    monkeypatch.setattr(model, "preprocess", spy)
    return seen


def run(model: SentenceTransformer, folder: Path, output: Path, **options: Any) -> dict[str, Result]:
    found = evaluate(model, str(folder), output, name="tiny", progress=False, **options)
    return {result.task_name: result for result in found}


def test_the_instructions_on_record_are_those_that_reach_the_model(
    student: LLM2VecGen, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = {
        "retrieval": "Find:",
        "reranking": "Rank:",
        "sts": "Same:",
        "pairs": "Pair:",
        "classification": "Class:",
        "clustering": "Group:",
        "document": "Shorten:",
    }
    file = tmp_path / "instructions.json"
    file.write_text(json.dumps(chosen))
    seen = spy_on(student, monkeypatch)
    for name in sorted(chosen.keys() - {"document"}):
        seen.clear()
        (result,) = run(student, folder / name, tmp_path / "out", instructions=file).values()
        logged = json.loads(result_path(tmp_path / "out", "tiny", name).read_text())["instructions"]
        assert logged == result.instructions
        assert {prompt for prompt, _ in seen} == set(logged.values())
        own = f"{chosen[name]} "
        expected = {"query": own, "document": "Shorten: "} if name in ("retrieval", "reranking") else {"text": own}
        assert logged == expected
        assert result.texts == len(seen)


def test_queries_get_the_query_s_instruction_and_documents_the_document_s(
    student: LLM2VecGen, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = spy_on(student, monkeypatch)
    (result,) = run(student, folder / "retrieval", tmp_path / "out").values()
    texts = defaultdict(set)
    for prompt, text in seen:
        texts[prompt].add(text)
    assert texts[result.instructions["query"]] == {"bear", "bee", "seal", "whale", "fox", "owl"}
    assert "bear ice" in texts[result.instructions["document"]]
    assert len(texts) == 2


def test_another_model_gets_its_own_prompts_and_none_of_ours(
    words: SentenceTransformer, folder: Path, tmp_path: Path
) -> None:
    words.prompts = {"query": "query: ", "passage": "passage: ", "plain": "text: "}
    words.default_prompt_name = "plain"
    found = run(words, folder, tmp_path)
    assert found["retrieval"].instructions == {"query": "query: ", "document": "passage: "}
    assert found["sts"].instructions == {"text": "text: "}


def test_no_instructions_are_no_instructions(
    student: LLM2VecGen, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = spy_on(student, monkeypatch)
    for name in ("retrieval", "sts"):
        run(student, folder / name, tmp_path, instructions={})
    assert {prompt for prompt, _ in seen} == {""}


def test_a_side_without_an_instruction_on_record_is_never_encoded(student: LLM2VecGen) -> None:
    with pytest.raises(KeyError, match="text"):
        InstructedEncoder(student, {"query": ""}).encode([], task_metadata=None, hf_split="test", hf_subset="default")  # type: ignore[arg-type]


def test_an_unchanged_second_run_encodes_nothing(
    student: LLM2VecGen, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = run(student, folder, tmp_path)
    seen = spy_on(student, monkeypatch)
    # The batch size is on record, but scores do not depend on it.
    second = run(student, folder, tmp_path, batch_size=5)
    assert seen == []
    assert second == first


def one_training_step(model: LLM2VecGen) -> None:
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=1e-6)
    features = {key: value.to(model.device) for key, value in model.preprocess(["a bear"]).items()}
    model(features)["sentence_embedding"].pow(2).sum().backward()
    optimizer.step()


def another_length(model: LLM2VecGen) -> None:
    model.max_seq_length = 200


def another_width(model: LLM2VecGen) -> None:
    model.truncate_dim = 16


def another_dtype(model: LLM2VecGen) -> None:
    model.llm.to(torch.bfloat16)


def another_instruction(model: LLM2VecGen) -> None:
    model.prompts["STS"] = "Say again: "


@pytest.mark.parametrize(
    "change", [one_training_step, another_length, another_width, another_dtype, another_instruction]
)
def test_what_changes_embeddings_is_encoded_again(
    fresh_student: LLM2VecGen,
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    change: Callable[[LLM2VecGen], None],
) -> None:
    before = run(fresh_student, folder / "sts", tmp_path)["sts"]
    change(fresh_student)
    seen = spy_on(fresh_student, monkeypatch)
    after = run(fresh_student, folder / "sts", tmp_path)["sts"]
    assert seen
    assert after.key != before.key


def test_a_changed_instruction_runs_its_own_task_again_and_no_other(
    fresh_student: LLM2VecGen, folder: Path, tmp_path: Path
) -> None:
    before = run(fresh_student, folder, tmp_path)
    fresh_student.prompts["pairs"] = "Pair: "
    after = run(fresh_student, folder, tmp_path)
    assert [name for name in before if before[name] != after[name]] == ["pairs"]


def test_changed_data_and_libraries_and_a_wish_run_a_task_again(
    words: SentenceTransformer, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = spy_on(words, monkeypatch)

    def encoded(**options: Any) -> bool:
        seen.clear()
        run(words, folder / "sts", tmp_path, **options)
        return bool(seen)

    assert encoded()
    assert not encoded()
    assert encoded(overwrite=True)
    with open(folder / "sts" / "test.jsonl", "a") as handle:
        handle.write('{"sentence1": "bear", "sentence2": "ice", "score": 0}\n')
    assert encoded()
    monkeypatch.setattr(runner, "library_versions", lambda: {"mteb": "99"})
    assert encoded()


def test_every_result_file_records_what_scores_depend_on(student: LLM2VecGen, folder: Path, tmp_path: Path) -> None:
    run(student, folder, tmp_path, batch_size=7)
    files = sorted((tmp_path / "results" / "tiny").glob("*.json"))
    assert len(files) == 6
    for file in files:
        found = json.loads(file.read_text(), parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
        base = student.suffix_transformer.base
        assert found["model"]["base"] == {"id": "tiny", "revision": None, "fingerprint": base.fingerprint}
        assert len(found["model"]["adapter"]) == 16
        assert found["model"]["dtype"] == ["float32"]
        assert found["model"]["max_seq_length"] == student.max_seq_length
        assert found["batch_size"] == 7
        assert found["instructions"]
        assert {"mteb", "sentence-transformers", "transformers", "torch"} <= found["versions"].keys()
        assert found["task"]["data"]["revision"]
        assert 0 <= found["score"] <= 1


def test_a_failing_task_costs_no_other_task_its_result(
    words: SentenceTransformer, folder: Path, tmp_path: Path
) -> None:
    tasks = local_tasks(folder)
    file = folder / "pairs" / "test.jsonl"
    kept = file.read_text()
    file.write_text('{"sentence1": "bear"}\n')
    with pytest.raises(EvaluationError, match=r"1 of 6 tasks failed: pairs \(ValueError: .*test.jsonl, row 1"):
        evaluate(words, tasks, tmp_path / "out", name="words", progress=False)
    assert len(read_results(tmp_path / "out")) == 5
    assert (tmp_path / "out" / "table.md").is_file()
    file.write_text(kept)
    found = evaluate(words, str(folder), tmp_path / "out", name="words", progress=False)
    assert len(found) == 6


def test_embeddings_without_any_difference_have_no_score(
    words: SentenceTransformer, folder: Path, tmp_path: Path, files: Any
) -> None:
    rows = [{"sentence1": "x", "sentence2": "y", "score": score} for score in range(4)]
    files.jsonl(folder / "same" / "test.jsonl", rows)
    with pytest.raises(EvaluationError, match="cosine_spearman is nan"):
        run(words, folder / "same", tmp_path)


def test_another_model_under_a_known_name_is_refused_before_anything_is_run(
    words: SentenceTransformer, student: LLM2VecGen, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(words, folder / "sts", tmp_path)
    run(words, folder / "pairs", tmp_path)
    seen = spy_on(student, monkeypatch)
    with pytest.raises(ValueError, match="on pairs of another model of the name 'tiny'"):
        run(student, folder / "sts", tmp_path)
    assert not seen
    both = evaluate(student, [str(folder / "sts"), str(folder / "pairs")], tmp_path, name="tiny", progress=False)
    assert len({str(result.model) for result in read_results(tmp_path)}) == 1
    assert len(both) == 2


def test_when_a_task_fails_its_reason_is_told_even_if_no_table_can_be_made(
    words: SentenceTransformer, student: LLM2VecGen, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = [str(folder / "sts"), str(folder / "pairs")]
    evaluate(words, wanted, tmp_path, name="tiny", progress=False)
    run_task = runner._run

    def fail(model: Any, task: Any, *args: Any, **kwargs: Any) -> Any:
        if task.metadata.name == "pairs":
            raise OSError("no memory")
        return run_task(model, task, *args, **kwargs)

    monkeypatch.setattr(runner, "_run", fail)
    with pytest.raises(EvaluationError, match=r"no memory.*No tables were written: Under the name 'tiny'"):
        evaluate(student, wanted, tmp_path, name="tiny", progress=False)


def test_a_task_that_is_used_twice_draws_the_same_texts(student: LLM2VecGen, folder: Path, tmp_path: Path) -> None:
    (task,) = local_tasks(folder / "clustering")
    scores = [evaluate(student, task, tmp_path, name=name, progress=False)[0].score for name in ("a", "b")]
    assert scores[0] == scores[1]


def test_a_file_that_is_no_result_is_named_and_kept(words: SentenceTransformer, folder: Path, tmp_path: Path) -> None:
    path = result_path(tmp_path, "tiny", "sts")
    path.parent.mkdir(parents=True)
    path.write_text("half of a fi")
    with pytest.raises(ValueError, match="Move it away") as caught:
        run(words, folder / "sts", tmp_path)
    assert str(path) in str(caught.value)
    assert path.read_text() == "half of a fi"


def test_lora_matrices_belong_to_the_adapter() -> None:
    pytest.importorskip("peft")
    lora = {"r": 2, "lora_alpha": 4, "target_modules": ["q_proj"]}
    model = LLM2VecGen.from_base(tiny_backbone(), embedding_dim=8, lora=lora, device="cpu")
    before = describe_model(model)
    name, matrix = next((name, value) for name, value in model.named_parameters() if ".lora_B." in name)
    matrix.data.flatten()[-1] += 1e-6
    assert describe_model(model)["adapter"] != before["adapter"], name
    assert describe_model(model)["base"] == before["base"]


def test_settings_of_every_baseline_tell_results_apart() -> None:
    backbone = tiny_backbone()
    base: dict[str, Any] = {"device": "cpu", "answers": 2, "max_new_tokens": 4, "temperature": 0.7, "seed": 0}
    before = describe_model(hyde(backbone, **base))
    assert describe_model(hyde(backbone, **base)) == before
    for change in ({"answers": 3}, {"max_new_tokens": 5}, {"temperature": 0.8}, {"seed": 1}):
        assert describe_model(hyde(backbone, **{**base, **change})) != before, change
    for setting, value in {"prompts": {"document": "Own: "}, "default_prompt_name": "own", "truncate_dim": 8}.items():
        inner = hyde(backbone, **base)
        setattr(inner[0].encoder, setting, value)
        assert describe_model(inner) != before, setting
    (module,) = before["modules"]
    assert module["settings"]["base"]["fingerprint"] == backbone.reference.fingerprint
    assert module["settings"]["generation"]["max_new_tokens"] == 4
    found = [describe_model(build(name, backbone, device="cpu")) for name in BASELINES]
    assert len({str(one) for one in found}) == len(found)


def test_groups_names_folders_and_tasks_are_found_each_once(folder: Path) -> None:
    tasks = find_tasks(["STS12", "mteb-lite", "BIOSSES", str(folder / "sts"), local_tasks(folder / "pairs")[0]])
    names = [task.metadata.name for task in tasks]
    assert names[0] == "STS12"
    assert names[-2:] == ["sts", "pairs"]
    assert len(names) == len(set(names)) == 13
    assert len(find_tasks("mteb-eng-v2")) == 41
    assert len(find_tasks("bright")) == 12
    assert list(find_tasks("STS17")[0].hf_subsets) == ["en-en"]  # as in the benchmark: English alone


def test_an_unknown_task_is_named_with_what_there_is() -> None:
    with pytest.raises(ValueError, match=r"'STS99' is no group .*advbench-ir"):
        find_tasks("STS99")
    with pytest.raises(ValueError, match="No tasks were asked for"):
        find_tasks([])


def test_two_tasks_of_one_name_are_refused(folder: Path, tmp_path: Path, files: Any) -> None:
    files.sts(tmp_path / "other" / "sts")
    with open(tmp_path / "other" / "sts" / "test.jsonl", "a") as handle:
        handle.write('{"sentence1": "bear", "sentence2": "ice", "score": 0}\n')
    with pytest.raises(ValueError, match="Two different tasks are called 'sts'"):
        find_tasks([str(folder), str(tmp_path / "other")])
