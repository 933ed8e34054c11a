"""Hard negatives: the margin loss, its rows, and its accounting over accumulation and processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from llm2vec_gen_st import LLM2VecGen
from llm2vec_gen_st.losses import LLM2VecGenLoss, alignment_loss, margin_loss
from llm2vec_gen_st.teachers import teacher_embeddings
from llm2vec_gen_st.testing import tiny_backbone, tiny_model
from llm2vec_gen_st.training import StudentCollator, train
from llm2vec_gen_st.training.data import load_rows, student_rows

from .tiny import TINY, rows, with_negatives

TESTS = str(Path(__file__).parent.parent)
MARGIN = TINY.with_overrides({"margin_weight": 0.5, "margin_threshold": 3.0})


def naive(queries: torch.Tensor, negatives: torch.Tensor, threshold: float) -> torch.Tensor:
    """The same, one pair at a time."""
    everything = [*queries, *negatives]
    total = torch.zeros((), dtype=queries.dtype)
    for place, query in enumerate(queries):
        lacking = [
            torch.clamp(threshold**2 - ((query - other) ** 2).sum(), min=0)
            for number, other in enumerate(everything)
            if number != place
        ]
        total = total + torch.stack(lacking).mean()
    return total / len(queries)


@settings(max_examples=60)
@given(
    count=st.integers(1, 6), width=st.integers(1, 8), threshold=st.floats(0.1, 20), scale=st.floats(0.01, 10),
    seed=st.integers(0, 10_000),
)  # fmt: skip
def test_margin_loss_and_its_gradient_are_those_of_every_pair(
    count: int, width: int, threshold: float, scale: float, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    queries, negatives = (
        (torch.randn(count, width, generator=generator) * scale).requires_grad_(True) for _ in range(2)
    )
    found, expected = margin_loss(queries, negatives, threshold=threshold), naive(queries, negatives, threshold)
    torch.testing.assert_close(found, expected, atol=1e-3 * scale**2, rtol=1e-4)
    for one, other in zip(
        torch.autograd.grad(found, (queries, negatives)),
        torch.autograd.grad(expected, (queries, negatives)),
        strict=True,
    ):
        torch.testing.assert_close(one, other, atol=1e-3 * scale, rtol=1e-3)


@pytest.mark.filterwarnings("ignore:.*not a double precision:UserWarning")
def test_margin_loss_has_the_gradient_of_its_differences() -> None:
    queries = torch.tensor([[0.3, -0.2], [0.9, 0.4], [-0.5, 0.8]], requires_grad=True)
    negatives = torch.tensor([[0.1, 0.7], [-0.6, -0.4], [1.1, -0.9]], requires_grad=True)
    assert torch.autograd.gradcheck(
        lambda one, two: margin_loss(one, two, threshold=2.0), (queries, negatives), eps=1e-2, atol=1e-2
    )


def test_embeddings_beyond_the_threshold_are_left_alone() -> None:
    queries = torch.tensor([[0.0, 0.0], [30.0, 0.0]], requires_grad=True)
    negatives = torch.tensor([[0.0, 30.0], [30.0, 30.0]])
    assert margin_loss(queries, negatives).item() == 0.0
    near = margin_loss(queries, negatives - torch.tensor([0.0, 21.0]))
    assert near.item() == pytest.approx((100 - 81) / 3)
    (gradient,) = torch.autograd.grad(near, queries)
    assert (gradient[:, 1] > 0).all(), "a step down the gradient goes away from the negatives above"
    with pytest.raises(ValueError, match=r"\(2, 2\).*\(1, 2\)"):
        margin_loss(queries, negatives[:1])
    nothing = torch.zeros(0, 2, requires_grad=True)
    margin_loss(nothing, nothing).backward()


def test_loss_takes_negatives_behind_the_queries() -> None:
    model = tiny_model()
    queries, negatives = ["bees", "Where do polar bears live?", "sea"], ["wax", "Where is ice?"]
    batch: dict[str, Any] = {**model.preprocess(queries + negatives), "negative_of": torch.tensor([2, 0])}
    labels = torch.randn(5, 48, generator=torch.Generator().manual_seed(0))
    loss = LLM2VecGenLoss(model, recon_weight=0, margin_weight=0.5, margin_threshold=4.0, align_weight=2.0)
    found = loss([batch], labels)
    assert list(found) == ["alignment", "margin"]
    with torch.no_grad():
        of_queries, of_negatives = (torch.from_numpy(model.encode(texts)) for texts in (queries, negatives))
    expected = 0.5 * margin_loss(of_queries[[2, 0]], of_negatives, threshold=4.0)
    assert expected > 0.1
    torch.testing.assert_close(found["margin"].detach(), expected, atol=1e-4, rtol=1e-4)
    both = alignment_loss(of_queries, labels[:3]) + alignment_loss(of_negatives, labels[3:]) * 2 / 3
    torch.testing.assert_close(found["alignment"].detach(), 2.0 * both, atol=1e-4, rtol=1e-4)
    queries_only = loss([batch], labels[:3])
    torch.testing.assert_close(
        queries_only["alignment"].detach(), 2.0 * alignment_loss(of_queries, labels[:3]), atol=1e-4, rtol=1e-4
    )
    torch.testing.assert_close(queries_only["margin"], found["margin"])
    with pytest.raises(ValueError, match="negative_query"):
        loss([dict(model.preprocess(queries))], labels[:3])
    for wrong in ({"margin_weight": -1.0}, {"margin_threshold": 0.0}):
        with pytest.raises(ValueError, match="margin_weight"):
            LLM2VecGenLoss(model, **wrong)


def test_documents_have_no_negatives_and_queries_keep_theirs() -> None:
    recipe = MARGIN.with_overrides({"document_sources": ("response",), "query_prompts": ("", "Q: ")})
    data = with_negatives(rows(4), every=3)
    built = student_rows(load_rows(data, recipe), recipe)
    expected = [data["negative_query"][0], "", "", "Q: " + data["negative_query"][3]]
    assert built["negative_query"] == expected + [""] * 4
    batch = StudentCollator(tiny_model().suffix_transformer)([built[row] for row in (4, 3, 0, 1)])
    assert batch["query_negative_of"].tolist() == [1, 2]
    assert len(batch["query_input_ids"]) == 6
    assert len(batch["response_input_ids"]) == 4
    np.testing.assert_allclose(batch["label"][4:], [data["negative_label"][row] for row in (3, 0)], atol=1e-6)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda data: data.remove_columns("negative_query"), "a column 'negative_query'"),
        (lambda data: data.remove_columns("negative_label"), "need 'negative_label' too"),
        (lambda data: data.remove_columns("label"), "beside a column 'label' only"),
        (lambda data: data.remove_columns("negative_response").add_column("negative_response", [None] * 4), "Row 0"),
    ],
)
def test_negatives_that_could_not_be_used_are_refused_before_anything_is_loaded(
    tmp_path: Path, change: Any, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        train(change(with_negatives(rows(4))), tmp_path, base="no/such-model", teacher="self", recipe=MARGIN)


def test_negatives_without_weight_are_left_out() -> None:
    assert "negative_query" not in load_rows(with_negatives(rows(4)), TINY).column_names


def _trained(folder: Path, **changes: Any) -> tuple[LLM2VecGen, dict[str, torch.Tensor]]:
    data = with_negatives(rows(), every=2)
    model = train(data, folder, base=tiny_backbone(), recipe=MARGIN, max_steps=2, progress=False, **changes)
    return model, {name: value.detach() for name, value in model.named_parameters() if value.requires_grad}


def test_training_pushes_negatives_away_and_logs_it(tmp_path: Path) -> None:
    model, _ = _trained(tmp_path / "with", learning_rate=1e-2, max_response_tokens=8)
    other, _ = _trained(tmp_path / "without", learning_rate=1e-2, max_response_tokens=8, margin_weight=0.0)
    data = with_negatives(rows(), every=2)
    pairs = [(query, no) for query, no in zip(data["query"], data["negative_query"], strict=True) if no is not None]

    def distance(student: LLM2VecGen) -> float:
        one, two = (student.encode([pair[side] for pair in pairs]) for side in (0, 1))
        return float(np.square(one - two).sum(axis=1).mean())

    assert distance(model) > distance(other)
    log = (tmp_path / "with" / "training" / "log.jsonl").read_text()
    assert '"margin"' in log
    assert '"margin"' not in (tmp_path / "without" / "training" / "log.jsonl").read_text()


def test_negatives_get_a_teachers_vectors_of_their_own_responses(tmp_path: Path) -> None:
    """Rows without labels: the teacher embeds both responses, and a student aligned with them alone learns both."""
    data = with_negatives(rows(8)).remove_columns(["label", "negative_label"])
    seen: list[torch.Tensor] = []
    forward = LLM2VecGenLoss.forward

    def spy(self: LLM2VecGenLoss, features: Any, labels: torch.Tensor) -> Any:
        seen.append(labels)
        return forward(self, features, labels)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LLM2VecGenLoss, "forward", spy)
        train(data, tmp_path, base=tiny_backbone(), teacher="self", recipe=MARGIN, max_steps=1, progress=False)
    expected = teacher_embeddings(list(data["negative_response"]), "self", backbone=tiny_backbone(), progress=False)
    assert seen[0].shape == (8, 64)
    gaps = np.abs(seen[0][4:, None].numpy() - expected[None]).max(axis=2).min(axis=1)
    assert gaps.max() < 1e-4


def test_accumulated_batches_count_each_query_and_each_negative_once(tmp_path: Path) -> None:
    """Micro-batches hold different numbers of negatives, which do not change what a query weighs."""
    logs = {}
    for name, options in (("big", {"batch_size": 8}), ("small", {"batch_size": 2, "gradient_accumulation": 4})):
        _trained(tmp_path / name, **options)
        lines = (tmp_path / name / "training" / "log.jsonl").read_text().splitlines()
        logs[name] = next(row for row in map(json.loads, lines) if "alignment" in row)
    for part in ("alignment", "reconstruction"):
        assert logs["big"][part] == pytest.approx(logs["small"][part], abs=1e-3)


def test_margins_of_micro_batches_are_weighted_by_their_queries() -> None:
    generator = torch.Generator().manual_seed(0)
    batches = [torch.randn(2, count, 3, generator=generator) for count in (1, 3)]
    apart = [margin_loss(*batch, threshold=4.0) for batch in batches]
    summed = sum(margin_loss(*batch, threshold=4.0, rows=2.0) for batch in batches)
    torch.testing.assert_close(summed / 2, (apart[0] + 3 * apart[1]) / 4)


GLOO_SCRIPT = """
import sys, torch, torch.distributed as dist
from safetensors.torch import save_file
from llm2vec_gen_st.losses import margin_loss
dist.init_process_group("gloo")
rank = dist.get_rank()
generator = torch.Generator().manual_seed(0)
everything = torch.randn(2, 5, 3, generator=generator)
mine = slice(0, 4) if rank == 0 else slice(4, 5)
queries, negatives = (part[mine].clone().requires_grad_(True) for part in everything)
loss = margin_loss(queries, negatives, threshold=3.0, rows=5 / 2)
loss.backward()
save_file({{"loss": loss.detach()[None], "queries": queries.grad, "negatives": negatives.grad}}, {out!r} + f"/{{rank}}")
dist.destroy_process_group()
"""

TRAIN_SCRIPT = """
import os, sys
from safetensors.torch import save_file
sys.path.insert(0, {tests!r})
from training.test_margin import MARGIN
from training.tiny import rows, with_negatives
from llm2vec_gen_st.testing import tiny_backbone
from llm2vec_gen_st.training import train
model = train(with_negatives(rows(), every=3), {out!r}, base=tiny_backbone(), recipe=MARGIN, max_steps=3,
              progress=False, batch_size={batch})
trained = {{n: p.detach().contiguous() for n, p in model.named_parameters() if p.requires_grad}}
save_file(trained, {out!r} + f"/{{os.environ.get('RANK', '0')}}")
"""


def _distributed(script: str, folder: Path, processes: int, **values: Any) -> list[dict[str, torch.Tensor]]:
    folder.mkdir()
    path = folder / "script.py"
    path.write_text(script.format(tests=TESTS, out=str(folder), **values))
    launch = ["-m", "torch.distributed.run", "--nproc-per-node", str(processes)] if processes > 1 else []
    done = subprocess.run(
        [sys.executable, *launch, str(path)],
        env={**os.environ, "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return [load_file(folder / str(rank)) for rank in range(processes)]


@pytest.mark.slow
def test_margins_of_two_processes_are_those_of_one(tmp_path: Path) -> None:
    """Uneven rows: loss and gradients of the processes together are those of one process with all rows."""
    found = _distributed(GLOO_SCRIPT, tmp_path / "two", 2)
    everything = torch.randn(2, 5, 3, generator=torch.Generator().manual_seed(0)).requires_grad_(True)
    expected = margin_loss(*everything, threshold=3.0)
    (gradient,) = torch.autograd.grad(expected, everything)
    torch.testing.assert_close((found[0]["loss"] + found[1]["loss"])[0] / 2, expected.detach())
    for number, name in enumerate(("queries", "negatives")):
        together = torch.cat([part[name] for part in found]) / 2
        torch.testing.assert_close(together, gradient[number], atol=1e-5, rtol=1e-5)


@pytest.mark.slow
def test_two_processes_with_hard_negatives_train_as_one(tmp_path: Path) -> None:
    (one,) = _distributed(TRAIN_SCRIPT, tmp_path / "one", 1, batch=8)
    first, second = _distributed(TRAIN_SCRIPT, tmp_path / "two", 2, batch=4)
    assert first["0.suffix"].shape == (8, 64)
    for name, value in one.items():
        assert torch.equal(first[name], second[name]), name
        torch.testing.assert_close(first[name], value, atol=1e-4, rtol=1e-3)
