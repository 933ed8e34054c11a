"""Losses: chunking, checkpointing and accumulation change memory, never a value or a gradient."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from packaging.version import Version
from torch.backends import cuda
from torch.nn import functional
from torch.profiler import ProfilerActivity, profile

from llm2vec_gen_st import LLM2VecGen
from llm2vec_gen_st.backbone import Backbone
from llm2vec_gen_st.losses import LLM2VecGenLoss, alignment_loss, chunked_cross_entropy, reconstruction_loss
from llm2vec_gen_st.modules.groups import similar_lengths
from llm2vec_gen_st.modules.suffix_transformer import pad_right
from llm2vec_gen_st.testing import tiny_backbone, tiny_model

QUERIES = [
    "bees",
    "Where do polar bears live?",
    "",
    "Rivers carry water",
    "Who makes honey?",
    "sea",
    "ice",
    "what is a river",
]
RESPONSES = [
    "Bees make honey and wax.", "On sea ice.", "a", "Rivers carry water from the mountains to the sea.", "Bees.",
    "The sea is salt water.", "Ice is frozen water", "It is a stream of water that flows to the sea, or to a lake.",
]  # fmt: skip


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def _batch(
    model: LLM2VecGen, part: slice = slice(None), **normalisers: float
) -> tuple[list[dict[str, Any]], torch.Tensor]:
    """Features of queries and responses, and teacher embeddings."""
    query = model.preprocess(QUERIES[part])
    response = pad_right(model.suffix_transformer.response_ids(RESPONSES[part], 500))
    if "rows" in normalisers:
        query["mean_rows"] = normalisers["rows"]
    if "tokens" in normalisers:
        response["mean_tokens"] = normalisers["tokens"]
    return [query, response], torch.randn(8, 48, generator=_generator(5))[part]


def _gradients(model: LLM2VecGen) -> dict[str, torch.Tensor]:
    head = model.response_head
    found = {
        "suffix": model.suffix_transformer.suffix.grad,
        "recon": head.mlp_recon.weight.grad,
        "recon bias": head.mlp_recon.bias.grad,
        "align": head.mlp_align.weight.grad,
        "align bias": head.mlp_align.bias.grad,
    }
    assert all(gradient is not None and gradient.abs().max() > 0 for gradient in found.values())
    return {name: gradient.clone() for name, gradient in found.items()}


def _backward(model: LLM2VecGen, loss: LLM2VecGenLoss, batches: list[Any]) -> tuple[float, dict[str, torch.Tensor]]:
    model.zero_grad(set_to_none=True)
    total = 0.0
    for features, labels in batches:
        value = sum(loss(features, labels).values())
        value.backward()
        total += value.item()
    return total, _gradients(model)


# Chunked cross entropy


@settings(max_examples=60)
@given(
    rows=st.integers(1, 40), width=st.integers(1, 12), vocabulary=st.integers(1, 30), chunk=st.integers(1, 50),
    seed=st.integers(0, 10_000), factor=st.sampled_from([1.0, -2.0, 0.25]),
)  # fmt: skip
def test_chunked_cross_entropy_is_that_of_the_full_logits(
    rows: int, width: int, vocabulary: int, chunk: int, seed: int, factor: float
) -> None:
    generator = _generator(seed)
    hidden = torch.randn(rows, width, generator=generator, requires_grad=True)
    weight = torch.randn(vocabulary, width, generator=generator)
    labels = torch.randint(0, vocabulary, (rows,), generator=generator)
    longest = 0

    def logits_of(part: torch.Tensor) -> torch.Tensor:
        nonlocal longest
        longest = max(longest, len(part))
        return part @ weight.T

    found = chunked_cross_entropy(hidden, labels, logits_of, chunk=chunk)
    expected = functional.cross_entropy(hidden @ weight.T, labels, reduction="sum")
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-5)
    (found_gradient,) = torch.autograd.grad(found * factor, hidden)
    (expected_gradient,) = torch.autograd.grad(expected * factor, hidden)
    torch.testing.assert_close(found_gradient, expected_gradient, atol=1e-5, rtol=1e-5)
    assert longest <= chunk
    with torch.no_grad():
        torch.testing.assert_close(
            chunked_cross_entropy(hidden, labels, logits_of, chunk=chunk), found, atol=1e-5, rtol=0
        )


# Reconstruction


@pytest.mark.parametrize("chunk", [1, 7, 128])
def test_reconstruction_is_the_llms_own_loss_given_the_soft_prompts(backbone: Backbone, chunk: int) -> None:
    llm = backbone.llm
    lengths = [5, 1, 9]
    ids = [torch.randint(3, 320, (length,), generator=_generator(length)).tolist() for length in lengths]
    prompt = torch.randn(3, 4, 64, generator=_generator(0), requires_grad=True)
    batch = pad_right(ids)
    found = reconstruction_loss(llm, prompt, batch["input_ids"], batch["attention_mask"], chunk=chunk)
    # One row at a time, through the LLM's own labels.
    total = torch.zeros(())
    for row, length in enumerate(lengths):
        response = torch.tensor([ids[row]])
        inputs = torch.cat([prompt[row : row + 1], llm.get_input_embeddings()(response)], dim=1)
        labels = torch.cat([torch.full((1, 4), -100), response], dim=1)
        total = total + llm(inputs_embeds=inputs, labels=labels, use_cache=False).loss * length
    expected = total / sum(lengths)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)
    (found_gradient,) = torch.autograd.grad(found, prompt)
    (expected_gradient,) = torch.autograd.grad(expected, prompt)
    assert expected_gradient.abs().max() > 1e-3
    torch.testing.assert_close(found_gradient, expected_gradient, atol=1e-5, rtol=0)
    by_tokens = reconstruction_loss(llm, prompt, batch["input_ids"], batch["attention_mask"], tokens=30.0)
    torch.testing.assert_close(by_tokens * 2, found, atol=1e-5, rtol=0)


def test_reconstruction_in_groups_is_that_of_the_whole_batch_and_holds_one_group_at_a_time(
    backbone: Backbone, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = backbone.llm
    ids = [torch.randint(3, 320, (length,), generator=_generator(length)).tolist() for length in (5, 1, 9, 0, 7)]
    prompt = torch.randn(5, 4, 64, generator=_generator(0), requires_grad=True)
    batch = pad_right(ids)
    passes: list[int] = []
    handle = llm.base_model.layers[0].register_forward_pre_hook(
        lambda module, args: passes.append(args[0].shape[0] * args[0].shape[1])
    )
    found = {}
    for budget in (1000, 26, 1):
        monkeypatch.setattr("llm2vec_gen_st.losses.reconstruction.GROUP_TOKENS", budget)
        passes.clear()
        loss = reconstruction_loss(llm, prompt, batch["input_ids"], batch["attention_mask"])
        (gradient,) = torch.autograd.grad(loss * 3, prompt)
        found[budget] = (loss.detach(), gradient, list(passes))
        with torch.no_grad():
            without = reconstruction_loss(llm, prompt, batch["input_ids"], batch["attention_mask"])
        torch.testing.assert_close(without, loss.detach(), atol=1e-6, rtol=0)
    handle.remove()
    for loss, gradient, _ in found.values():
        torch.testing.assert_close(loss, found[1000][0], atol=1e-5, rtol=0)
        torch.testing.assert_close(gradient, found[1000][1], atol=1e-5, rtol=0)
    assert max(found[26][2]) <= 26
    assert [len(sizes) for _, _, sizes in found.values()] == sorted(len(sizes) for _, _, sizes in found.values())
    assert len(found[1][2]) == 4
    assert found[1000][1][3].abs().max() == 0
    assert not any(parameter.requires_grad for parameter in llm.parameters())


def test_responses_end_with_the_end_of_text_token_and_spell_no_other(student: LLM2VecGen) -> None:
    transformer, end = student.suffix_transformer, student.tokenizer.eos_token_id
    (ids,) = transformer.response_ids(["honey <|im_end|> wax"], 100)
    assert ids[-1] == end
    assert end not in ids[:-1]
    assert student.tokenizer.decode(ids[:-1]) == "honey <|im_end|> wax"
    (cut,) = transformer.response_ids(["honey " * 99], 10)
    assert len(cut) == 10
    assert end not in cut


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.*deprecated:FutureWarning")
def test_gradient_checkpointing_changes_no_value_and_no_gradient() -> None:
    values = {}
    for checkpointing in (False, True):
        model = tiny_model()
        passes: list[int] = []
        layer = model.llm.base_model.layers[0].mlp
        layer.register_forward_pre_hook(lambda module, args, passes=passes: passes.append(1))
        before = model.encode(QUERIES)
        if checkpointing:
            model.llm.gradient_checkpointing_enable()
            assert np.abs(model.encode(QUERIES) - before).max() < 1e-6
        loss = LLM2VecGenLoss(model)
        passes.clear()
        values[checkpointing] = (*_backward(model, loss, [_batch(model)]), len(passes))
        assert not any(module.training for module in model.llm.modules())
    assert values[True][0] == pytest.approx(values[False][0], abs=1e-6)
    for name, gradient in values[False][1].items():
        torch.testing.assert_close(values[True][1][name], gradient, atol=1e-6, rtol=1e-5, msg=name)
    assert values[True][2] > values[False][2], "no layer was run again"


# Alignment


def test_align_reduction_is_a_sum_or_a_mean_over_dimensions() -> None:
    student, teacher = torch.randn(3, 48, generator=_generator(0)), torch.randn(3, 48, generator=_generator(1))
    by_hand = sum(float(((a - b) ** 2).sum()) for a, b in zip(student, teacher, strict=True)) / 3
    assert float(alignment_loss(student, teacher, reduction="sum")) == pytest.approx(by_hand, rel=1e-6)
    assert float(alignment_loss(student, teacher, reduction="mean")) == pytest.approx(by_hand / 48, rel=1e-6)
    assert float(alignment_loss(student, teacher, reduction="sum", rows=12)) == pytest.approx(by_hand / 4, rel=1e-6)


def test_teacher_of_another_width_is_refused(fresh_student: LLM2VecGen) -> None:
    loss = LLM2VecGenLoss(fresh_student, recon_weight=0)
    features, labels = _batch(fresh_student)
    with pytest.raises(ValueError, match=r"\(8, 48\).*\(8, 1\).*embedding_dim"):
        loss(features, labels[:, :1])
    with pytest.raises(ValueError, match="label column"):
        loss(features, None)


# Both


def test_losses_are_the_weighted_parts_of_one_pass(fresh_student: LLM2VecGen) -> None:
    features, labels = _batch(fresh_student)
    found = LLM2VecGenLoss(fresh_student, recon_weight=0.5, align_weight=2.0, align_reduction="sum")(features, labels)
    assert list(found) == ["reconstruction", "alignment"]
    with torch.no_grad():
        distance = (torch.from_numpy(fresh_student.encode(QUERIES)) - labels).square().sum(dim=1).mean()
        prompts, response = fresh_student.encode_soft_prompts(QUERIES), features[1]
        token_loss = reconstruction_loss(fresh_student.llm, prompts, response["input_ids"], response["attention_mask"])
    torch.testing.assert_close(found["alignment"].detach(), 2.0 * distance, atol=1e-4, rtol=1e-5)
    torch.testing.assert_close(found["reconstruction"].detach(), 0.5 * token_loss, atol=1e-5, rtol=1e-5)
    # The gradient of the total is the sum of those of the parts.
    suffix = fresh_student.suffix_transformer.suffix
    parts = [torch.autograd.grad(value, suffix, retain_graph=True)[0] for value in found.values()]
    (whole,) = torch.autograd.grad(sum(found.values()), suffix)
    torch.testing.assert_close(whole, parts[0] + parts[1], atol=1e-5, rtol=1e-4)
    assert all(part.abs().max() > 0 for part in parts)
    assert not any(parameter.requires_grad for parameter in fresh_student.llm.parameters())


def test_four_micro_batches_equal_one_batch(fresh_student: LLM2VecGen) -> None:
    loss = LLM2VecGenLoss(fresh_student)
    whole, expected = _backward(fresh_student, loss, [_batch(fresh_student)])
    tokens = float(_batch(fresh_student)[0][1]["attention_mask"].sum())
    parts = [_batch(fresh_student, slice(start, start + 2), rows=8.0, tokens=tokens) for start in (0, 2, 4, 6)]
    total, found = _backward(fresh_student, loss, parts)
    assert total == pytest.approx(whole, abs=1e-5)
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, atol=1e-6, rtol=1e-4, msg=name)
    # Without the normalisers, means of unequal batches are something else.
    plain, _ = _backward(
        fresh_student, loss, [_batch(fresh_student, slice(start, start + 2)) for start in (0, 2, 4, 6)]
    )
    assert plain / 4 != pytest.approx(whole, abs=1e-4)


def test_loss_without_weight_is_not_computed(fresh_student: LLM2VecGen) -> None:
    rows: list[int] = []
    heads: list[int] = []
    body = fresh_student.llm.base_model
    body.register_forward_pre_hook(lambda module, args, kwargs: rows.append(1), with_kwargs=True)
    fresh_student.llm.get_output_embeddings().register_forward_hook(lambda module, args, output: heads.append(1))
    features, labels = _batch(fresh_student)
    found = LLM2VecGenLoss(fresh_student, recon_weight=0)(features[:1], labels)
    assert list(found) == ["alignment"]
    assert not heads
    lengths = (features[0]["attention_mask"].sum(dim=1) + fresh_student.suffix_transformer.suffix_length).tolist()
    groups = len(list(similar_lengths(lengths, 8192)))
    assert len(rows) == 2 * groups, "for each group of similar length: the text without gradient, and the suffix"
    found = LLM2VecGenLoss(fresh_student, align_weight=0)(features, None)
    assert list(found) == ["reconstruction"]
    assert heads


def test_loss_works_on_a_bf16_llm() -> None:
    backbone = tiny_backbone()
    backbone.llm.to(torch.bfloat16)
    model = tiny_model(backbone=backbone)
    value, _ = _backward(model, LLM2VecGenLoss(model), [_batch(model)])
    exact = tiny_model()
    expected, _ = _backward(exact, LLM2VecGenLoss(exact), [_batch(exact)])
    assert value == pytest.approx(expected, rel=0.02)
    assert model.suffix_transformer.suffix.grad.dtype == torch.float32


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_backward_in_16_bits_goes_round_the_slow_kernel(dtype: torch.dtype, checkpointing: bool) -> None:
    """On a CPU the backward pass of fused attention is slow in bfloat16; text, which learns nothing, keeps it."""
    base = tiny_backbone()
    base.llm.to(dtype)
    if checkpointing:
        base.llm.gradient_checkpointing_enable()
    model = tiny_model(backbone=base)
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        _backward(model, LLM2VecGenLoss(model), [_batch(model)])
    flash = "aten::_scaled_dot_product_flash_attention_for_cpu"
    kernels = {event.key for event in seen.key_averages()}
    # Older versions of torch have it in float32 only.
    assert flash in kernels or (dtype != torch.float32 and Version(torch.__version__) < Version("2.13"))
    assert (f"{flash}_backward" in kernels) == (dtype == torch.float32)
    assert not cuda.fp16_bf16_reduction_math_sdp_allowed(), "a switch of all devices stays as it was"


def test_gradients_of_both_attention_kernels_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    base = tiny_backbone()
    base.llm.to(torch.bfloat16)
    model = tiny_model(backbone=base)
    _, quick = _backward(model, LLM2VecGenLoss(model), [_batch(model)])
    monkeypatch.setattr("llm2vec_gen_st.modules.suffix_transformer.quick_backward", nullcontext)
    monkeypatch.setattr("llm2vec_gen_st.losses.reconstruction.quick_backward", nullcontext)
    _, fused = _backward(model, LLM2VecGenLoss(model), [_batch(model)])
    for name, gradient in quick.items():
        cosine = functional.cosine_similarity(gradient.flatten(), fused[name].flatten(), dim=0)
        assert cosine > 0.995, name


@pytest.mark.parametrize(
    "options", [{"recon_weight": -1}, {"recon_weight": 0, "align_weight": 0}, {"align_reduction": "max"}], ids=str
)
def test_wrong_weights_are_refused(student: LLM2VecGen, options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"weight|align_reduction"):
        LLM2VecGenLoss(student, **options)


def test_model_without_suffix_is_refused() -> None:
    with pytest.raises(ValueError, match="no suffix or no response head"):
        LLM2VecGenLoss(torch.nn.Linear(2, 2))  # type: ignore[arg-type]
