"""Training the three trained baselines: what is learned, what stays, and going on after a stop."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sentence_transformers import SentenceTransformer
from torch.nn import functional
from torch.profiler import ProfilerActivity, profile

from llm2vec_gen_st.backbone import Backbone
from llm2vec_gen_st.base_reference import BaseReference
from llm2vec_gen_st.baselines import (
    LoraSettings,
    StageSettings,
    gircse,
    inbedder,
    llm2vec,
    train_gircse,
    train_inbedder,
    train_llm2vec,
)
from llm2vec_gen_st.baselines import training as training_module
from llm2vec_gen_st.baselines.inbedder import InBedderLLM
from llm2vec_gen_st.baselines.inbedder_training import AnswerCollator, AnswerLoss
from llm2vec_gen_st.baselines.llm2vec_training import MaskedNextTokenLoss, mask_tokens, masked_loss
from llm2vec_gen_st.modules.lora import lora_parameters
from llm2vec_gen_st.teachers import teacher_embeddings
from llm2vec_gen_st.testing import tiny_backbone

from .families import family

SUBJECTS = ["bears", "bees", "rivers", "seals", "flowers"]
VERBS = ["make", "carry", "hunt", "live on"]
OBJECTS = ["honey", "water", "ice", "wax", "nectar"]
SENTENCES = [f"{subject} {verb} {thing}." for subject in SUBJECTS for verb in VERBS for thing in OBJECTS]
random.Random(0).shuffle(SENTENCES)
FIT, HELD_OUT = SENTENCES[:80], SENTENCES[80:]
LORA = LoraSettings(r=8, lora_alpha=16)


def stage(**changes: Any) -> StageSettings:
    return StageSettings(
        **{"steps": 40, "batch_size": 16, "learning_rate": 1e-2, "max_seq_length": 96, "save_steps": 1000, **changes}
    )


def learner() -> Backbone:
    """A tiny LLM whose frozen head can be sure of a token: that of plain random weights is flat whatever it reads."""
    backbone = tiny_backbone()
    with torch.no_grad():
        backbone.llm.get_output_embeddings().weight.mul_(6.0)
    return Backbone(backbone.llm, backbone.tokenizer, BaseReference.of(backbone.llm, "tiny"))


def losses(folder: Path) -> list[float]:
    return [entry["loss"] for entry in json.loads((folder / "log.json").read_text())]


def right_pair_probability(model: SentenceTransformer, firsts: list[str], seconds: list[str]) -> float:
    """How sure cosines (times 20) are of the right partner among all; 1 / N for vectors that say nothing."""
    one, two = (torch.tensor(model.encode(texts)) for texts in (firsts, seconds))
    scores = 20.0 * functional.normalize(one, dim=1) @ functional.normalize(two, dim=1).T
    return float(scores.softmax(dim=1).diagonal().mean())


# LLM2Vec


def test_masked_tokens_are_predicted_from_the_position_before_them() -> None:
    backbone = family("llama")
    measured = MaskedNextTokenLoss(llm2vec(backbone, device="cpu"), share=0.4)
    ids = torch.tensor([[7, 8, 9, 10, 11, 12], [13, 14, 15, 0, 0, 0]])
    mask = torch.tensor([[1, 1, 1, 1, 1, 1], [1, 1, 1, 0, 0, 0]])
    found = measured.loss(ids, mask, torch.Generator().manual_seed(3))
    corrupted, targets = mask_tokens(
        ids, mask, measured.mask_id, 320, share=0.4, generator=torch.Generator().manual_seed(3)
    )
    by_hand = []
    for row, length in enumerate((6, 3)):
        full = torch.zeros(1, 1, length, length)
        with torch.no_grad():
            logits = backbone.llm(corrupted[row : row + 1, :length], attention_mask=full, use_cache=False).logits[0]
        for place in range(length):
            if targets[row, place] != -100:
                by_hand.append(float(functional.cross_entropy(logits[place - 1], ids[row, place])))
    assert len(by_hand) > 1
    assert float(found) == pytest.approx(sum(by_hand) / len(by_hand), rel=1e-4)


@settings(max_examples=50)
@given(st.lists(st.integers(1, 12), min_size=1, max_size=5), st.floats(0.0, 1.0), st.integers(0, 2**31))
def test_masks_touch_only_chosen_tokens_and_never_first_ones_or_padding(
    lengths: list[int], share: float, seed: int
) -> None:
    width = max(lengths)
    mask = (torch.arange(width) < torch.tensor(lengths)[:, None]).long()
    ids = torch.arange(100, 100 + width).repeat(len(lengths), 1) * mask
    corrupted, targets = mask_tokens(ids, mask, 5, 320, share=share, generator=torch.Generator().manual_seed(seed))
    chosen = targets != -100
    assert torch.equal(targets[chosen], ids[chosen])
    assert torch.equal(corrupted[~chosen], ids[~chosen])
    assert not chosen[:, 0].any()
    assert not (chosen & ~mask.bool()).any()
    assert chosen.any() == (width > 1)


def test_masks_follow_berts_shares() -> None:
    ids = torch.full((100, 101), 9)
    corrupted, targets = mask_tokens(
        ids, torch.ones_like(ids), 5, 320, share=0.2, generator=torch.Generator().manual_seed(0)
    )
    chosen = targets != -100
    assert float(chosen[:, 1:].float().mean()) == pytest.approx(0.2, abs=0.02)
    assert float((corrupted[chosen] == 5).float().mean()) == pytest.approx(0.8, abs=0.03)
    assert float((corrupted[chosen] == 9).float().mean()) == pytest.approx(0.1, abs=0.03)


def test_mntp_learns_to_fill_gaps(tmp_path: Path) -> None:
    model = train_llm2vec(learner(), FIT, tmp_path, mntp=stage(), simcse=None, lora=LORA, progress=False)
    log = losses(tmp_path / "training" / "mntp")
    assert log[-1] < 0.85 * log[0], log
    assert masked_loss(model, HELD_OUT) < 0.7 * masked_loss(llm2vec(learner(), device="cpu"), HELD_OUT)


@pytest.fixture(scope="module")
def llm2vec_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Backbone, SentenceTransformer]:
    folder, backbone = tmp_path_factory.mktemp("llm2vec"), tiny_backbone()
    gentle = stage(steps=20, learning_rate=3e-3)
    model = train_llm2vec(
        backbone, FIT, folder, mntp=replace(gentle, steps=10), simcse=gentle, lora=LORA, progress=False
    )
    return folder, backbone, model


def test_simcse_learns_to_tell_texts_apart(llm2vec_run: tuple[Path, Backbone, SentenceTransformer]) -> None:
    folder, _, model = llm2vec_run
    log = losses(folder / "training" / "simcse")
    assert log[-1] < 0.5 * log[0], log
    shortened = [text.rpartition(" ")[0] for text in HELD_OUT]
    untrained = llm2vec(tiny_backbone(), device="cpu")
    before, after = (right_pair_probability(each, HELD_OUT, shortened) for each in (untrained, model))
    assert after > before + 0.05, (before, after)


def test_trained_llm2vec_is_a_teacher_and_comes_back(
    llm2vec_run: tuple[Path, Backbone, SentenceTransformer],
) -> None:
    folder, _, model = llm2vec_run
    loaded = llm2vec(folder, base=tiny_backbone(), device="cpu")
    np.testing.assert_allclose(loaded.encode(HELD_OUT), model.encode(HELD_OUT), atol=1e-5)
    found = teacher_embeddings(HELD_OUT, loaded, progress=False)
    np.testing.assert_allclose(found, model.encode(HELD_OUT), atol=1e-5)
    assert not [path for path in folder.rglob("*") if path.suffix in (".bin", ".pt", ".pth", ".pkl")]


def test_training_leaves_the_base_model_as_it_was(llm2vec_run: tuple[Path, Backbone, SentenceTransformer]) -> None:
    _, backbone, _ = llm2vec_run
    ids = torch.tensor([[5, 6, 7]])
    assert torch.equal(backbone.llm(ids).logits, tiny_backbone().llm(ids).logits)


def test_simcse_stands_on_mntp_and_does_not_change_it(tmp_path: Path) -> None:
    first = train_llm2vec(learner(), FIT, tmp_path / "a", mntp=stage(steps=4), simcse=None, lora=LORA, progress=False)
    both = train_llm2vec(
        learner(), FIT, tmp_path / "b", mntp=stage(steps=4), simcse=stage(steps=4), lora=LORA, progress=False
    )
    alone, stacked = (lora_parameters(model[0].llm) for model in (first, both))
    assert alone.keys() == stacked.keys()
    for name, matrix in alone.items():
        wide = stacked[name]
        old = wide[:8] if name.endswith("lora_A") else wide[:, :8]
        new = wide[8:] if name.endswith("lora_A") else wide[:, 8:]
        assert torch.equal(old, matrix)
        assert float(new.detach().abs().max()) > 0
    assert np.abs(first.encode(HELD_OUT) - both.encode(HELD_OUT)).max() > 1e-3


def test_a_stopped_training_goes_on_and_ends_alike(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments: dict[str, Any] = {
        "mntp": stage(steps=6, save_steps=2), "simcse": stage(steps=6, save_steps=2), "lora": LORA, "progress": False,
    }  # fmt: skip
    whole = train_llm2vec(learner(), FIT, tmp_path / "whole", **arguments)

    class Stop(Exception):
        pass

    original = training_module.LoraTrainer._save
    saved: list[str] = []

    def stopping(self: Any, output_dir: str | None = None, state_dict: Any = None) -> None:
        saved.append(str(output_dir))
        # In the middle of the second stage; the checkpoint being written then is not a whole one.
        if len(saved) == 5:
            raise Stop
        original(self, output_dir, state_dict)

    monkeypatch.setattr(training_module.LoraTrainer, "_save", stopping)
    with pytest.raises(Stop):
        train_llm2vec(learner(), FIT, tmp_path / "stopped", **arguments)
    again = train_llm2vec(learner(), FIT, tmp_path / "stopped", **arguments)
    # Two checkpoints of the second stage are all that was left to write.
    assert len(saved) == 7
    np.testing.assert_allclose(again.encode(HELD_OUT), whole.encode(HELD_OUT), atol=1e-4)
    with pytest.raises(ValueError, match=r"a training run made differently \(dropout: 0.3 there, 0.1 now\)"):
        train_llm2vec(learner(), FIT, tmp_path / "stopped", dropout=0.1, **arguments)


def test_training_of_nothing_and_on_nothing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="Nothing would be trained"):
        train_llm2vec(learner(), FIT, tmp_path, mntp=None, simcse=None)
    backbone = learner()
    with pytest.raises(ValueError, match="3 rows are not enough for a batch of 16"):
        train_llm2vec(backbone, FIT[:3], tmp_path, mntp=stage(), lora=LORA)
    assert not lora_parameters(backbone.llm)


def test_training_in_16_bits_goes_round_the_slow_kernel(tmp_path: Path) -> None:
    backbone = tiny_backbone()
    backbone.llm.to(torch.bfloat16)
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        train_llm2vec(backbone, FIT, tmp_path, mntp=stage(steps=1), simcse=None, lora=LORA, progress=False)
    kernels = {event.key for event in seen.key_averages()}
    assert any("scaled_dot_product" in kernel for kernel in kernels)
    assert not [kernel for kernel in kernels if "flash" in kernel and "backward" in kernel]


@pytest.mark.parametrize("kind", ["llm2vec", "inbedder"])
def test_gradient_checkpointing_runs_layers_again_and_changes_nothing(kind: str, tmp_path: Path) -> None:
    found = {}
    for on in (False, True):
        backbone, passes = learner(), []
        layer = backbone.llm.base_model.layers[0].mlp
        layer.register_forward_pre_hook(lambda *_, passes=passes: passes.append(torch.is_grad_enabled()))
        settings = stage(steps=3, gradient_checkpointing=on)
        # In one folder: a run may go on with or without it.
        if kind == "llm2vec":
            # Both stages: attention dropout must drop the same weights again.
            train_llm2vec(backbone, FIT, tmp_path, mntp=settings, simcse=settings, lora=LORA, progress=False)
        else:
            train_inbedder(backbone, qa_rows(FIT), tmp_path, stage=settings, lora=LORA, progress=False)
        found[on] = (
            {name: matrix.detach().clone() for name, matrix in lora_parameters(backbone.llm).items()},
            sum(passes),
        )
        for module in backbone.llm.modules():
            assert not module.training
            assert not getattr(module, "gradient_checkpointing", False)
    (plain, once), (again, twice) = found[False], found[True]
    assert twice == 2 * once > 0
    for name, matrix in plain.items():
        torch.testing.assert_close(again[name], matrix, atol=1e-6, rtol=1e-5, msg=name)


def test_texts_cut_in_training_are_told_of_once_a_stage(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Each batch of each step has cut texts; one message tells of all of them, and what to raise."""
    train_llm2vec(
        tiny_backbone(),
        [text * 3 for text in FIT],
        tmp_path / "run",
        mntp=stage(steps=3, max_seq_length=8),
        simcse=stage(steps=3, max_seq_length=8),
        lora=LORA,
        progress=False,
    )
    told = [record.getMessage() for record in caplog.records if "were cut" in record.getMessage()]
    assert len(told) == 2
    assert all("longer than 8 tokens" in message and "the stage's max_seq_length" in message for message in told)


def test_gradient_checkpointing_is_refused_where_it_cannot_work(tmp_path: Path) -> None:
    rows = [{"anchor": text, "positive": text} for text in FIT]
    with pytest.raises(ValueError, match="GIRCSE cannot be trained with gradient checkpointing"):
        train_gircse(learner(), rows, tmp_path, stage=stage(gradient_checkpointing=True), lora=LORA)
    assert not list(tmp_path.iterdir())


# InBedder


def qa_rows(sentences: list[str]) -> list[dict[str, str]]:
    rows = []
    for sentence in sentences:
        subject, *_, thing = sentence.rstrip(".").split()
        rows.append({"text": sentence, "question": "Who?", "answer": subject})
        rows.append({"text": sentence, "question": "What?", "answer": thing})
    return rows


def test_answers_are_learned_at_the_positions_after_the_question() -> None:
    backbone = family("llama")
    module = InBedderLLM(backbone)
    rows = qa_rows(["bees make honey.", "bears live on ice."])[:3]
    batch = AnswerCollator(module, max_answer_tokens=4)(rows)
    by_hand = []
    for row in rows:
        start, _ = module.prompt_ids(row["text"], row["question"], 512)
        answer = [*backbone.tokenizer(row["answer"])["input_ids"], backbone.tokenizer.eos_token_id][:4]
        with torch.no_grad():
            logits = backbone.llm(torch.tensor([start + answer]), use_cache=False).logits[0]
        for offset, token in enumerate(answer):
            by_hand.append(float(functional.cross_entropy(logits[len(start) + offset - 1], torch.tensor(token))))
    model = SentenceTransformer(modules=[module], device="cpu")
    found = AnswerLoss(model)([{key.removeprefix("answer_"): value for key, value in batch.items()}])
    assert float(found) == pytest.approx(sum(by_hand) / len(by_hand), rel=1e-4)


def test_inbedder_learns_to_answer(tmp_path: Path) -> None:
    untrained = inbedder(learner(), device="cpu")
    model = train_inbedder(learner(), qa_rows(FIT), tmp_path, stage=stage(), lora=LORA, progress=False)
    log = losses(tmp_path / "training")
    assert log[-1] < 0.7 * log[0], log

    def share_right(each: SentenceTransformer) -> float:
        """Share of the answers' tokens to held-out questions that the LLM would write."""
        module = each[0]
        assert isinstance(module, InBedderLLM)
        right = []
        for row in qa_rows(HELD_OUT):
            laid_out = module.answered(row["text"], row["question"], row["answer"], 64)
            with torch.no_grad(), module.own_pass():
                logits = module.llm(torch.tensor([laid_out.ids]), use_cache=False).logits[0]
            places = range(laid_out.first, laid_out.stop)
            right += [int(logits[place - 1].argmax()) == laid_out.ids[place] for place in places]
        return sum(right) / len(right)

    before, after = share_right(untrained), share_right(model)
    assert after > before + 0.1, (before, after)
    loaded = inbedder(tmp_path, base=learner(), device="cpu")
    np.testing.assert_allclose(loaded.encode(HELD_OUT), model.encode(HELD_OUT), atol=1e-5)


def test_rows_without_an_answer_are_named(tmp_path: Path) -> None:
    for row in ({"text": "a", "question": "b"}, {"text": "a", "question": "b", "answer": " "}):
        with pytest.raises(ValueError, match="Row 1 needs texts for answer"):
            train_inbedder(learner(), [*qa_rows(FIT[:1])[:1], row], tmp_path)


# GIRCSE


def test_gircse_learns_to_find_the_partner(tmp_path: Path) -> None:
    def halves(texts: list[str]) -> list[dict[str, str]]:
        return [{"anchor": text, "positive": f"It is {text.split()[-1]} for {text.split()[0]}"} for text in texts]

    model = train_gircse(
        learner(), halves(FIT), tmp_path, soft_tokens=3, temperature=0.05,
        stage=stage(learning_rate=3e-3), lora=LORA, prompts={"query": ""}, progress=False,
    )  # fmt: skip
    log = losses(tmp_path / "training")
    assert log[-1] < 0.8 * log[0], log
    held = halves(HELD_OUT)
    sides = [row["anchor"] for row in held], [row["positive"] for row in held]
    untrained = gircse(learner(), soft_tokens=3, device="cpu")
    before, after = (right_pair_probability(each, *sides) for each in (untrained, model))
    assert after > before + 0.1, (before, after)
    loaded = gircse(tmp_path, base=learner(), device="cpu")
    assert loaded[0].soft_tokens == 3
    np.testing.assert_allclose(loaded.encode(HELD_OUT), model.encode(HELD_OUT), atol=1e-5)


def test_pairs_without_a_partner_are_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="Row 0 needs texts for positive"):
        train_gircse(learner(), [{"anchor": "a"}], tmp_path)
