"""The grid: its runs, what they learn, what is kept, and what it writes."""

from __future__ import annotations

import csv
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from typer.testing import CliRunner

from llm2vec_gen_st.backbone import Backbone
from llm2vec_gen_st.base_reference import BaseReference
from llm2vec_gen_st.cli import app
from llm2vec_gen_st.modules.lora import lora_parameters
from llm2vec_gen_st.testing import saved_base, tiny_backbone
from llm2vec_gen_st.training import Recipe
from llm2vec_gen_st.training import grid as grid_module
from llm2vec_gen_st.training.grid import DISTANCE, OWN, RECONSTRUCTION, TAUGHT, points, run_grid

from .tiny import with_negatives

SUBJECTS, VERBS = ["bears", "bees", "rivers", "seals", "flowers", "mountains"], ["make", "carry", "hunt", "live on"]
OBJECTS = ["honey", "water", "ice"]
SMALL = Recipe(
    base="tiny", teacher="self", thought_tokens=2, compression_tokens=2, init="ridge", learning_rate=1e-6,
    align_learning_rate=1e-6, recon_weight=0.0, recon_steps=40, recon_learning_rate=2e-2, warmup_steps=0, epochs=100,
    max_steps=5, batch_size=8, dtype="float32", logging_steps=4, max_seq_length=96, max_response_tokens=16, held_out=12,
    document_sources=("response",),
)  # fmt: skip
AXES = {
    "suffix": ["2", "4"], "losses": ["both", "alignment", "reconstruction"], "lora_rank": ["2"], "init": ["random"],
}  # fmt: skip


def data() -> Dataset:
    """Questions whose responses say the same words: 72 different ones."""
    triples = [(subject, verb, thing) for subject in SUBJECTS for verb in VERBS for thing in OBJECTS]
    return Dataset.from_dict(
        {
            "query": [f"Who can {verb} the {thing}, if not {subject}?" for subject, verb, thing in triples],
            "response": [f"{subject} {verb} {thing}." for subject, verb, thing in triples],
        }
    )


def learner() -> Backbone:
    """A tiny LLM whose frozen head can be sure of a token: that of plain random weights is flat whatever it reads."""
    backbone = tiny_backbone()
    with torch.no_grad():
        backbone.llm.get_output_embeddings().weight.mul_(6.0)
    return Backbone(backbone.llm, backbone.tokenizer, BaseReference.of(backbone.llm, "tiny"))


def go(folder: Path, **AXES: list[str]) -> dict[str, dict[str, float]]:
    found = run_grid(data(), folder, AXES, base=learner(), recipe=SMALL, progress=False)
    return {row.point.label: dict(row.scores) for row in found}


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, dict[str, float]]]:
    folder = tmp_path_factory.mktemp("grid")
    return folder, go(folder, **AXES)


def test_points_are_one_change_each() -> None:
    found = {
        point.label: point for point in points(SMALL, {"suffix": ["4", "20"], "init": ["random"], "batch_size": ["4"]})
    }
    assert found["suffix=4"].run == "reference", "what changes nothing is not run again"
    assert found["suffix=20"].recipe.compression_tokens == 10
    assert found["suffix=20"].recipe == SMALL.with_overrides({"thought_tokens": 10, "compression_tokens": 10})
    assert found["init=random"].recipe.align_learning_rate is None
    assert found["batch_size=4"].recipe.batch_size == 4
    for axes in (
        {"suffix": ["3"]},
        {"suffix": ["many"]},
        {"losses": ["none"]},
        {"lora_rnk": ["2"]},
        {"init": ["x"]},
        {"seed": ["1"]},
    ):
        with pytest.raises(ValueError, match=r"even number|losses are|lora_rnk|init must be|seed cannot"):
            points(SMALL, axes)


def test_students_learn_what_their_losses_say(ran: tuple[Path, dict[str, dict[str, float]]]) -> None:
    _, found = ran
    # Without the reconstruction, soft prompts are states that were never meant to be read.
    assert found["losses=reconstruction"][RECONSTRUCTION] < found["losses=alignment"][RECONSTRUCTION] - 0.1
    assert found["reference"][RECONSTRUCTION] < found["losses=alignment"][RECONSTRUCTION] - 0.05
    # Responses say the words of their queries, which ridge regression finds at once, and a few small steps do not.
    for name in ("reference", "losses=alignment", "lora_rank=2"):
        assert found[name][DISTANCE] < 0.1, name
        assert found[name][TAUGHT] > 0.5, name
        assert found[name][OWN] > 0.5, name
    assert found["init=random"][DISTANCE] > 0.5
    assert found["losses=alignment"][DISTANCE] == pytest.approx(found["reference"][DISTANCE], abs=2e-3)
    assert TAUGHT not in found["losses=reconstruction"], "it has no teacher"
    assert found["losses=both"] == found["reference"]


def test_tables_and_figures_hold_every_point(ran: tuple[Path, dict[str, dict[str, float]]]) -> None:
    folder, found = ran
    rows = list(csv.DictReader((folder / "table.csv").open()))
    assert [row["axis"] + row["value"] for row in rows] == [
        "", "suffix2", "suffix4", "lossesboth", "lossesalignment", "lossesreconstruction", "lora_rank2", "initrandom",
    ]  # fmt: skip
    for row in rows:
        label = f"{row['axis']}={row['value']}" if row["axis"] else "reference"
        assert float(row[OWN]) == pytest.approx(found[label][OWN])
    assert json.loads(rows[1]["recipe"])["compression_tokens"] == 1
    assert (
        f"| losses=reconstruction | {found['losses=reconstruction'][OWN]:.3f} |  |" in (folder / "table.md").read_text()
    )
    for name in ("suffix", "losses", "lora_rank"):
        assert (folder / f"{name}.png").stat().st_size > 5000


def test_finished_runs_are_kept_and_a_broken_one_goes_on(
    ran: tuple[Path, dict[str, dict[str, float]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, found = ran
    trained: list[str] = []
    train = grid_module.train

    def counted(data: Any, output: Path, **options: Any) -> Any:
        trained.append(Path(output).name)
        if len(trained) == 2:
            raise KeyboardInterrupt
        return train(data, output, **options)

    monkeypatch.setattr(grid_module, "train", counted)
    assert go(folder, **AXES) == found
    (folder / "results" / "suffix=2.json").unlink()
    scored = go(folder, **AXES)  # trained, and killed before it was scored
    assert scored["suffix=2"] == pytest.approx(found["suffix=2"])
    assert trained == []
    with pytest.raises(KeyboardInterrupt):
        go(folder, **AXES, suffix_text=["Bees"], warmup_steps=["1"])
    again = go(folder, **AXES, suffix_text=["Bees"], warmup_steps=["1"])
    assert trained == ["suffix_text=Bees", "warmup_steps=1", "warmup_steps=1"]
    assert again["reference"] == found["reference"]
    with pytest.raises(ValueError, match=r"max_steps: .* there, 3 now"):
        run_grid(data(), folder, AXES, base=learner(), recipe=SMALL, progress=False, max_steps=3)


def test_finished_runs_are_known_again_by_hard_negatives_and_a_relative_base(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved_base(tmp_path / "base")
    monkeypatch.chdir(tmp_path)
    negatives = with_negatives(data()).remove_columns("negative_label")
    small = replace(SMALL, base=None, recon_steps=0, max_steps=1)
    axes = {"margin_weight": ["1.0"]}
    found = run_grid(negatives, "out", axes, base="base", recipe=small, progress=False)
    for result in (tmp_path / "out" / "results").iterdir():
        result.unlink()

    def never(*args: Any, **options: Any) -> Any:
        raise AssertionError("a finished run was trained again")

    monkeypatch.setattr(grid_module, "train", never)
    for base in ("base", str(tmp_path / "base")):
        again = run_grid(negatives, "out", axes, base=base, recipe=small, progress=False)
        assert [row.scores for row in again] == [pytest.approx(row.scores) for row in found]


def test_the_llm_is_plain_behind_a_grid_with_lora(tmp_path: Path) -> None:
    backbone = learner()
    run_grid(data(), tmp_path, {"lora_rank": ["2"]}, base=backbone, recipe=SMALL, recon_steps=0, progress=False)
    assert not lora_parameters(backbone.llm)


def test_what_cannot_be_compared_is_refused_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="held-out queries"):
        run_grid(data(), tmp_path, {}, base="no/such-model", recipe=SMALL, held_out=0)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="one process"):
        run_grid(data(), tmp_path, {}, base="no/such-model", recipe=SMALL)


def test_the_command_runs_a_grid(tmp_path: Path) -> None:
    saved_base(tmp_path / "base")
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in data()))
    (tmp_path / "small.json").write_text(json.dumps({"extends": "smollm2-135m", "held_out": 12, "max_steps": 2}))
    command = [
        "grid",
        str(tmp_path / "rows.jsonl"),
        "--output",
        str(tmp_path / "out"),
        "--base",
        str(tmp_path / "base"),
    ]
    command += ["--teacher", "self", "--recipe", str(tmp_path / "small.json"), "--set", "recon_steps=1"]
    command += ["--set", "batch_size=8", "--set", "dtype=float32", "--vary", "suffix=2"]
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 0, done.output
    assert "| suffix=2 |" in done.output
    wrong = CliRunner().invoke(app, [*command, "--vary", "suffix"])
    assert wrong.exit_code == 1
    assert "axis=value" in wrong.output
