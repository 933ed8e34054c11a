"""Linear layers while an LLM writes: the same values, and nothing of it stays behind."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from llm2vec_gen_st import products
from llm2vec_gen_st import writing as module
from llm2vec_gen_st.backbone import Backbone
from llm2vec_gen_st.interpret.decode import decode_ids
from llm2vec_gen_st.responses.generation import GenerationSettings, generate_responses
from llm2vec_gen_st.testing import tiny_backbone
from llm2vec_gen_st.text import TextTokenizer
from llm2vec_gen_st.writing import writing


@pytest.fixture
def backbone() -> Backbone:
    return tiny_backbone()


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> list[torch.Size]:
    """Shapes of the weights that are copied into oneDNN's layout."""
    pack, shapes = products.packed, []

    def watched(weight: torch.Tensor, rows: int) -> torch.Tensor:
        shapes.append(weight.shape)
        return pack(weight, rows)

    monkeypatch.setattr(module, "packed", watched)
    return shapes


def test_layers_multiply_contiguous_states(backbone: Backbone, monkeypatch: pytest.MonkeyPatch) -> None:
    """A strided view would make torch copy the head's weight once per row on the CPU."""
    multiply, seen = nn.functional.linear, []
    monkeypatch.setattr(products, "onednn_formats", frozenset)
    monkeypatch.setattr(module, "onednn_formats", frozenset)

    def watched(rows: torch.Tensor, *weights: Any) -> torch.Tensor:
        seen.append(rows.is_contiguous())
        return multiply(rows, *weights)

    monkeypatch.setattr(nn.functional, "linear", watched)
    queries, settings = ["Who makes honey?", "Bees?"], GenerationSettings(max_new_tokens=3)
    generate_responses(backbone, TextTokenizer(backbone.tokenizer), queries, settings)
    decode_ids(backbone, torch.randn(2, 4, backbone.hidden_size), max_new_tokens=3)
    assert len(seen) >= 4
    assert all(seen)


@pytest.mark.parametrize("shape", [(1,), (8,), (33,), (8, 1), (32, 1), (1, 20), (3, 5), (40, 1)])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_values_are_those_of_the_layer(shape: tuple[int, ...], bias: bool, dtype: torch.dtype) -> None:
    layer = nn.Linear(24, 40, bias=bias, dtype=dtype)
    inputs = torch.randn(*shape, 24, dtype=dtype)
    plain = layer(inputs)
    with writing(layer):
        found = layer(inputs)
    assert found.shape == plain.shape
    assert found.is_contiguous()
    torch.testing.assert_close(found, plain, atol=1e-5 if dtype == torch.float32 else 2e-2, rtol=0)


packing = pytest.mark.skipif(not products.onednn_formats(), reason="torch has no packed products on this machine")


@packing
@pytest.mark.parametrize("count", [1, 8, 33, 300])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype", sorted(products.onednn_formats(), key=str))
def test_packed_values_are_those_of_the_layer(
    count: int, bias: bool, dtype: torch.dtype, copies: list[torch.Size]
) -> None:
    layer = nn.Linear(96, 40, bias=bias, dtype=dtype)
    inputs = torch.randn(count, 1, 96, dtype=dtype)
    with torch.inference_mode(), writing(layer):
        plain = nn.functional.linear(inputs, layer.weight, layer.bias)
        for _ in range(3):
            found = layer(inputs)
    assert copies == [layer.weight.shape]
    assert found.is_contiguous()
    torch.testing.assert_close(found, plain, atol=1e-5 if dtype == torch.float32 else 2e-2, rtol=0)


@packing
def test_layers_are_packed_when_they_are_used_again(copies: list[torch.Size]) -> None:
    layer = nn.Linear(24, 40)
    rows = torch.randn(3, 24)
    with torch.inference_mode(), writing(layer):
        layer(rows)
        assert copies == []
        layer(rows), layer(rows)
        assert copies == [layer.weight.shape]


@packing
def test_weights_changed_between_two_writings_count() -> None:
    layer = nn.Linear(24, 40)
    rows = torch.randn(3, 24)
    with torch.inference_mode():
        for _ in range(2):
            layer.weight.mul_(2)
            with writing(layer):
                layer(rows)
                torch.testing.assert_close(layer(rows), nn.functional.linear(rows, layer.weight, layer.bias))


@packing
def test_gradients_go_through_layers_that_are_packed(copies: list[torch.Size]) -> None:
    layer = nn.Linear(24, 40)
    rows = torch.randn(3, 24, requires_grad=True)
    with writing(layer):
        with torch.inference_mode():
            layer(torch.randn(3, 24)), layer(torch.randn(3, 24))
        assert copies == [layer.weight.shape]
        layer(rows).sum().backward()
    torch.testing.assert_close(rows.grad, layer.weight.sum(dim=0).expand(3, 24).detach())


def test_large_llms_are_not_copied(monkeypatch: pytest.MonkeyPatch, copies: list[torch.Size]) -> None:
    layers = nn.Sequential(nn.Linear(24, 24, bias=False), nn.Linear(24, 24, bias=False))
    monkeypatch.setattr(module, "_COPIES_AT_MOST", 2 * 24 * 24 * 4 - 1)
    with torch.inference_mode(), writing(layers):
        for _ in range(3):
            layers(torch.randn(3, 24))
    assert copies == []


def test_layers_are_as_before_after_an_error(backbone: Backbone) -> None:
    ids = torch.ones(9, 1, dtype=torch.long)
    plain = backbone.llm(ids).logits
    with pytest.raises(IndexError), writing(backbone.llm):
        backbone.llm(torch.tensor([[10**6]]))
    assert torch.equal(backbone.llm(ids).logits, plain)


def test_forward_of_another_library_stays(backbone: Backbone) -> None:
    """Where weights are spread over devices, accelerate gives layers a forward of their own."""
    head = backbone.llm.get_output_embeddings()
    calls: list[int] = []
    multiply = head.forward

    def hooked(states: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        return multiply(states)

    head.forward = hooked
    decode_ids(backbone, torch.randn(2, 4, backbone.hidden_size), max_new_tokens=3)
    assert len(calls) == 3
    assert head.forward is hooked


@packing
def test_a_writer_inside_another_leaves_it_its_copies(backbone: Backbone, copies: list[torch.Size]) -> None:
    ids = torch.ones(9, 1, dtype=torch.long)
    with torch.inference_mode(), writing(backbone.llm):
        for _ in range(2):
            backbone.llm(ids)
        made = len(copies)
        with writing(backbone.llm):
            backbone.llm(ids)
        backbone.llm(ids)
    assert len(copies) == made > 0
