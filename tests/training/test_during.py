"""What happens while a student trains: evaluation, trackers, bfloat16, checkpointed gradients, further arguments."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sentence_transformers.sentence_transformer.evaluation import EmbeddingSimilarityEvaluator, SentenceEvaluator
from torch._dynamo.utils import counters
from transformers import TrainerCallback
from transformers.integrations import integration_utils

from llm2vec_gen_st import LLM2VecGen
from llm2vec_gen_st.losses import LLM2VecGenLoss
from llm2vec_gen_st.testing import tiny_backbone
from llm2vec_gen_st.training import StudentCollator, train

from .tiny import TINY, rows


def log(folder: Path) -> list[dict[str, Any]]:
    lines = (folder / "training" / "log.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


def test_evaluators_of_the_host_and_held_out_queries_are_scored_while_training(tmp_path: Path) -> None:
    seen: list[int] = []

    class Spy(SentenceEvaluator):
        def __call__(self, model: Any, output_path: str | None = None, epoch: int = -1, steps: int = -1) -> Any:
            assert isinstance(model, LLM2VecGen)
            seen.append(steps)
            return {"spied": float(np.abs(model.encode(["wax"])).mean())}

    texts = ["where do bears live?", "who makes honey?", "what is wax?", "what is a river?"]
    similarity = EmbeddingSimilarityEvaluator(texts, texts[::-1], [0.1, 0.9, 0.8, 0.2], name="mine")
    options: dict[str, Any] = {"recipe": TINY, "max_steps": 4, "recon_steps": 2, "progress": False}
    train(
        rows(24), tmp_path / "with", base=tiny_backbone(), evaluator=[Spy(), similarity], eval_steps=2, held_out=4,
        query_prompts=("", "Q: "), **options,
    )  # fmt: skip
    assert seen == [2, 4], "not in the stage that leaves embeddings as they are"
    found = log(tmp_path / "with")
    for key in ("eval_spied", "eval_mine_spearman_cosine", "eval_held_out_0_relative_distance"):
        assert sum(key in row for row in found) == 2, key
    assert sum("eval_held_out_1_response_recall_at_1" in row for row in found) == 2
    assert "held_out_1_response_recall_at_1" in found[-1]
    train(rows(24), tmp_path / "without", base=tiny_backbone(), held_out=4, query_prompts=("", "Q: "), **options)
    losses = [[row["loss"] for row in log(tmp_path / name) if "loss" in row] for name in ("with", "without")]
    assert losses[0] == losses[1], "to look changes nothing"
    with pytest.raises(ValueError, match="set eval_steps"):
        train(rows(), tmp_path / "never", base="no/such-model", recipe=TINY, evaluator=Spy())


def test_trackers_of_the_host_get_losses_and_scores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    logged: list[dict[str, Any]] = []
    place: list[str] = []

    class Tracker(TrainerCallback):
        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
            logged.append(dict(logs))

    class Board(integration_utils.TensorBoardCallback):
        def __init__(self) -> None:
            place.append(os.environ["TENSORBOARD_LOGGING_DIR"])
            self.tb_writer = self.logging_dir = None

        def _init_summary_writer(self, args: Any) -> None:
            pass

    monkeypatch.setitem(integration_utils.INTEGRATION_TO_CALLBACK, "trackio", Tracker)
    monkeypatch.setitem(integration_utils.INTEGRATION_TO_CALLBACK, "tensorboard", Board)
    train(
        rows(24), tmp_path, base=tiny_backbone(), recipe=TINY, max_steps=2, held_out=4, eval_steps=2, progress=False,
        report_to=["trackio", "tensorboard"],
    )  # fmt: skip
    keys = {key for logs in logged for key in logs}
    assert {"loss", "alignment", "reconstruction", "eval_held_out_0_response_recall_at_1"} <= keys
    assert place == [str(tmp_path / "training" / "tensorboard" / "whole")], "not among the checkpoints, which go"


def test_tensorboard_files_stay_with_the_student(tmp_path: Path) -> None:
    if not integration_utils.is_tensorboard_available():
        pytest.skip("needs tensorboard or tensorboardX")
    train(rows(), tmp_path, base=tiny_backbone(), recipe=TINY, max_steps=2, progress=False, report_to="tensorboard")
    assert list((tmp_path / "training" / "tensorboard" / "whole").glob("events.*"))


def test_further_arguments_reach_the_host_and_leave_the_recipe_alone(tmp_path: Path) -> None:
    options: dict[str, Any] = {"base": tiny_backbone(), "recipe": TINY, "max_steps": 1, "progress": False}
    train(
        rows(), tmp_path / "a", trainer_arguments={"logging_first_step": True, "dataloader_num_workers": 0}, **options
    )
    with pytest.raises(ValueError, match=r"\['learning_rate', 'seed'\] are decided by the recipe"):
        train(rows(), tmp_path / "b", trainer_arguments={"seed": 1, "learning_rate": 1.0}, **options)
    with pytest.raises(TypeError, match="no_such_argument"):
        train(rows(), tmp_path / "b", trainer_arguments={"no_such_argument": 1}, **options)
    assert not (tmp_path / "b").exists(), "refused before the folder is taken"


@pytest.mark.skipif(torch.__version__.startswith("2.6."), reason="torch 2.6 cannot trace the host's wrapper of an LLM")
@pytest.mark.parametrize("backend", ["eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_compiled_steps_have_the_losses_of_plain_ones(tmp_path: Path, backend: str) -> None:
    """`eager` traces the step and runs it as it is; `inductor`, the host's default, also needs a compiler."""
    found = []
    for compiled in ({}, {"torch_compile": True, "torch_compile_backend": backend}):
        folder, seen = tmp_path / str(len(found)), counters["frames"]["ok"]
        options: dict[str, Any] = {"base": tiny_backbone(), "recipe": TINY, "max_steps": 3, "progress": False}
        train(rows(), folder, trainer_arguments=compiled, **options)
        assert (counters["frames"]["ok"] > seen) == bool(compiled)
        found.append([(row["alignment"], row["reconstruction"]) for row in log(folder) if "alignment" in row])
    np.testing.assert_allclose(found[1], found[0], atol=1e-3)


@pytest.mark.parametrize("lora", [False, True])
def test_gradients_agree_with_and_without_checkpointing(lora: bool) -> None:
    """C4: every gradient of both losses, and layers do run twice."""
    found, passes = {}, {}
    for on in (False, True):
        settings = {"r": 2, "lora_alpha": 4, "target_modules": ["q_proj"]} if lora else None
        model = LLM2VecGen.from_base(
            tiny_backbone(), thought_tokens=4, compression_tokens=4, embedding_dim=12, lora=settings, device="cpu"
        )
        if on:
            # Renamed in newer versions of transformers, which warn of the older name.
            llm: Any = model.llm
            (getattr(llm, "activation_checkpointing_enable", None) or llm.gradient_checkpointing_enable)()
        count: list[int] = []
        model.llm.base_model.layers[0].mlp.register_forward_pre_hook(lambda *_, count=count: count.append(1))
        model.train()
        batch = StudentCollator(model.suffix_transformer)(list(rows(4)))
        features = [
            {key: batch[f"{column}_{key}"] for key in ("input_ids", "attention_mask")}
            for column in ("query", "response")
        ]
        sum(LLM2VecGenLoss(model)(features, batch["label"]).values()).backward()
        found[on] = {name: value.grad for name, value in model.named_parameters() if value.requires_grad}
        passes[on] = len(count)
        assert not model.llm.training
    assert passes[True] > passes[False]
    for name, gradient in found[False].items():
        assert gradient is not None, name
        torch.testing.assert_close(found[True][name], gradient, atol=1e-6, rtol=1e-5, msg=name)


def test_bfloat16_trains_in_bfloat16_and_its_losses_fall(tmp_path: Path) -> None:
    backbone = tiny_backbone()
    backbone.llm.to(torch.bfloat16)
    # Eight rows again and again: the alignment can only get better, unless bfloat16 gradients are lost.
    model = train(
        rows(8), tmp_path, base=backbone, recipe=TINY, batch_size=8, max_steps=30, learning_rate=5e-3,
        gradient_accumulation=1, progress=False,
    )  # fmt: skip
    assert {parameter.dtype for parameter in model.llm.parameters()} == {torch.bfloat16}
    assert model.suffix_transformer.suffix.dtype == torch.float32
    for key in ("alignment", "reconstruction"):
        found = [row[key] for row in log(tmp_path) if key in row]
        assert np.isfinite(found).all()
        assert np.mean(found[-3:]) < np.mean(found[:3]), key


@pytest.mark.parametrize("engine", ["FSDP", "DeepSpeed"])
def test_sharding_is_refused_before_anything_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, engine: str
) -> None:
    monkeypatch.setenv(f"ACCELERATE_USE_{engine.upper()}", "true")
    with pytest.raises(ValueError, match=f"cannot be trained with {engine}"):
        train(rows(), tmp_path, base="no/such-model", recipe=TINY)
    assert not list(tmp_path.iterdir())
