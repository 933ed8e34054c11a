"""The command `evaluate`, on a tiny student saved to disk and on one of another kind."""

from __future__ import annotations

from pathlib import Path

import pytest
from sentence_transformers import SentenceTransformer
from typer.testing import CliRunner, Result

from llm2vec_gen_st import LLM2VecGen
from llm2vec_gen_st.backbone import Backbone
from llm2vec_gen_st.baselines.echo import EchoLLM, echo
from llm2vec_gen_st.checkpoints import export_native
from llm2vec_gen_st.cli import app
from llm2vec_gen_st.evaluation import read_results
from llm2vec_gen_st.evaluation.loading import load_model
from llm2vec_gen_st.modules.tensors import CheckpointError


@pytest.fixture
def saved(student: LLM2VecGen, tmp_path: Path) -> Path:
    """Two models on disk: a native export and a model that has nothing to do with students."""
    export_native(student, tmp_path / "native")
    return tmp_path


def run(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, ["evaluate", *map(str, arguments)])


def test_models_are_evaluated_compared_and_named(saved: Path, folder: Path) -> None:
    options = ["--tasks", folder / "sts", "--output", saved / "out", "--dtype", "float32"]
    first = run(saved / "native", *options)
    assert first.exit_code == 0, first.output
    assert "| sts | cosine_spearman |" in first.output
    (saved / "mine.json").write_text('{"sts": "Say again:"}')
    second = run(
        saved / "native", *options, "--name", "other", "--baseline", "native", "--instructions", saved / "mine.json"
    )
    assert second.exit_code == 0, second.output
    assert "| task | metric | native | other |" in second.output
    found = {result.name: result.instructions for result in read_results(saved / "out")}
    assert found == {"native": {"text": ""}, "other": {"text": "Say again: "}}


def test_several_tasks_may_be_separated_by_commas(saved: Path, folder: Path) -> None:
    done = run(saved / "native", "--tasks", f"{folder / 'sts'},{folder / 'pairs'}", "--output", saved / "out")
    assert done.exit_code == 0, done.output
    assert {result.task_name for result in read_results(saved / "out")} == {"sts", "pairs"}


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--tasks", "STS99"], "'STS99' is no group"),
        (["--tasks", "STS12", "--baseline", "teacher"], "'teacher' has no results"),
        (["--tasks", "STS12", "--instructions", "nowhere.json"], "nowhere.json: there is no such file"),
    ],
)
def test_mistakes_are_told_before_anything_is_loaded(tmp_path: Path, options: list[str], said: str) -> None:
    done = run("no-such-model", *options, "--output", tmp_path / "out")
    assert done.exit_code == 1
    assert said in " ".join(done.stderr.split())
    assert not (tmp_path / "out").exists()


def test_failed_tasks_are_one_sentence(saved: Path, folder: Path) -> None:
    (folder / "sts" / "test.jsonl").write_text('{"sentence1": "a", "sentence2": "b", "score": "high"}\n')
    done = run(saved / "native", "--tasks", folder / "sts", "--output", saved / "out")
    assert done.exit_code == 1
    assert "1 of 1 tasks failed: sts" in " ".join(done.stderr.split())


def test_a_folder_of_stock_modules_is_a_plain_model_and_a_broken_one_is_refused(saved: Path) -> None:
    assert type(load_model(str(saved / "native"))) is SentenceTransformer
    (saved / "empty").mkdir()
    with pytest.raises(CheckpointError, match="not a checkpoint"):
        load_model(str(saved / "empty"))


def test_students_and_baselines_are_known_by_their_folders(backbone: Backbone, tmp_path: Path) -> None:
    base = str(tmp_path / "base")
    backbone.llm.save_pretrained(base)
    backbone.tokenizer.save_pretrained(base)
    LLM2VecGen.from_base(base, embedding_dim=8, device="cpu").save_pretrained(str(tmp_path / "student"))
    assert isinstance(load_model(str(tmp_path / "student")), LLM2VecGen)
    echo(base, device="cpu").save_pretrained(str(tmp_path / "echo"))
    loaded = load_model(str(tmp_path / "echo"))
    assert type(loaded) is SentenceTransformer
    assert type(loaded[0]) is EchoLLM
