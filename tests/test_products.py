"""How linear layers of a frozen LLM multiply: equal values and gradients, and only where it is asked for."""

from __future__ import annotations

import copy
import pickle
import threading
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from llm2vec_gen_st import LLM2VecGen, products
from llm2vec_gen_st.losses.reconstruction import reconstruction_loss
from llm2vec_gen_st.products import multiplying, prepare_products, quick_products
from llm2vec_gen_st.testing import tiny_backbone

onednn = pytest.mark.skipif(not products.onednn_formats(), reason="torch has no oneDNN on this machine")


def frozen_layer(inputs: int = 24, outputs: int = 40, *, bias: bool = True, dtype: Any = torch.float32) -> nn.Linear:
    layer = nn.Linear(inputs, outputs, bias=bias, dtype=dtype).requires_grad_(False)
    prepare_products(layer)
    return layer


@pytest.fixture
def by_onednn(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Rows of each product that oneDNN computes."""
    multiply, counts = products.multiply_onednn, []

    def watched(rows: torch.Tensor, *weights: Any) -> torch.Tensor:
        counts.append(len(rows))
        return multiply(rows, *weights)

    monkeypatch.setattr(products, "multiply_onednn", watched)
    return counts


@onednn
@given(
    shape=st.lists(st.integers(0, 9), min_size=0, max_size=3),
    sizes=st.tuples(st.integers(1, 70), st.integers(1, 70)),
    bias=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float64]),
)
def test_values_are_those_of_the_layer(
    shape: list[int], sizes: tuple[int, int], bias: bool, dtype: torch.dtype
) -> None:
    layer = frozen_layer(*sizes, bias=bias, dtype=dtype)
    inputs = torch.randn(*shape, sizes[0], dtype=dtype)
    with quick_products():
        found = layer(inputs)
    expected = nn.functional.linear(inputs, layer.weight, layer.bias)
    assert found.shape == expected.shape
    torch.testing.assert_close(found, expected, atol=1e-5 if dtype != torch.bfloat16 else 2e-2, rtol=0)


@onednn
@pytest.mark.parametrize("bias", [True, False])
def test_gradients_are_those_of_the_layer(bias: bool, by_onednn: list[int]) -> None:
    layer = frozen_layer(bias=bias)
    inputs, gradient = torch.randn(3, 5, 24), torch.randn(3, 5, 40)
    quick, plain = (inputs.clone().requires_grad_() for _ in range(2))
    with quick_products():
        layer(quick).backward(gradient)
    nn.functional.linear(plain, layer.weight, layer.bias).backward(gradient)
    torch.testing.assert_close(quick.grad, plain.grad, atol=1e-5, rtol=0)
    assert by_onednn == [15, 15]


@onednn
@pytest.mark.parametrize("trained", ["weight", "bias"])
def test_layers_that_learn_get_their_gradients(trained: str, by_onednn: list[int]) -> None:
    layer = frozen_layer()
    getattr(layer, trained).requires_grad_(True)
    with quick_products():
        layer(torch.randn(3, 24)).sum().backward()
    assert getattr(layer, trained).grad is not None
    assert by_onednn == []


@onednn
def test_only_where_it_is_asked_for(by_onednn: list[int]) -> None:
    layer = frozen_layer()
    inputs = torch.randn(3, 24)
    assert torch.equal(layer(inputs), nn.functional.linear(inputs, layer.weight, layer.bias))
    with torch.backends.mkldnn.flags(enabled=False), quick_products():
        layer(inputs)
    with quick_products(), torch.autocast("cpu", torch.bfloat16):
        assert layer(inputs).dtype == torch.bfloat16
    with pytest.raises(ZeroDivisionError), quick_products():
        raise ZeroDivisionError
    layer(inputs)
    assert by_onednn == []


@onednn
def test_other_threads_multiply_as_they_would(by_onednn: list[int]) -> None:
    layer = frozen_layer()
    with quick_products():
        other = threading.Thread(target=lambda: layer(torch.randn(3, 24)))
        other.start()
        other.join()
        assert by_onednn == []
        layer(torch.randn(3, 24))
    assert by_onednn == [3]


def test_preparing_again_and_copies(by_onednn: list[int]) -> None:
    layers = nn.Sequential(frozen_layer())
    first = layers[0].forward
    prepare_products(layers)
    assert layers[0].forward is first
    for other in (copy.deepcopy(layers), pickle.loads(pickle.dumps(layers))):
        other[0].weight.zero_()
        other[0].bias.zero_()
        with quick_products():
            assert not other(torch.randn(2, 24)).any()
            assert layers(torch.randn(2, 24)).any()


def test_compiled_layers_multiply_as_they_would() -> None:
    layer = frozen_layer()
    compiled = torch.compile(layer, backend="eager")
    inputs = torch.randn(3, 24)
    with multiplying(lambda layer, rows: rows.new_zeros(len(rows), 40)):
        assert not layer(inputs).any()
        assert torch.equal(compiled(inputs), nn.functional.linear(inputs, layer.weight, layer.bias))


@onednn
def test_encoding_and_training_multiply_by_onednn(by_onednn: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """And give the vectors, the loss and the gradient that torch's own products give."""
    model = LLM2VecGen.from_base(tiny_backbone(), embedding_dim=8)
    prompt = torch.randn(2, 3, model.backbone.hidden_size)
    ids = torch.tensor([[5, 6, 7], [8, 9, 1]])
    found = []
    for formats in (products.onednn_formats(), frozenset()):
        monkeypatch.setattr(products, "onednn_formats", lambda formats=formats: formats)
        learned = prompt.clone().requires_grad_()
        before = len(by_onednn)
        vectors = model.encode(["Who makes honey?", "Bees."], convert_to_tensor=True)
        encoding = len(by_onednn)
        loss = reconstruction_loss(model.llm, learned, ids, torch.ones_like(ids))
        loss.backward()
        assert (before < encoding < len(by_onednn)) == bool(formats)
        found.append((vectors, loss.detach(), learned.grad))
    for quick, plain in zip(*found, strict=True):
        torch.testing.assert_close(quick, plain, atol=1e-5, rtol=0)
