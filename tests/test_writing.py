"""Linear layers while an LLM writes: the same values, and nothing of it stays behind."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

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


def _own_forwards(llm: nn.Module) -> list[nn.Module]:
    return [layer for layer in llm.modules() if "forward" in vars(layer)]


def test_layers_multiply_contiguous_states(backbone: Backbone, monkeypatch: pytest.MonkeyPatch) -> None:
    """A strided view would make torch copy the head's weight once per row on the CPU."""
    multiply, seen = nn.functional.linear, []

    def watched(rows: torch.Tensor, *weights: Any) -> torch.Tensor:
        seen.append(rows.is_contiguous())
        return multiply(rows, *weights)

    monkeypatch.setattr(nn.functional, "linear", watched)
    queries, settings = ["Who makes honey?", "Bees?"], GenerationSettings(max_new_tokens=3)
    generate_responses(backbone, TextTokenizer(backbone.tokenizer), queries, settings)
    decode_ids(backbone, torch.randn(2, 4, backbone.hidden_size), max_new_tokens=3)
    assert len(seen) >= 4
    assert all(seen)
    assert not _own_forwards(backbone.llm)


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


def test_few_rows_are_multiplied_from_the_other_side(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = nn.Linear(24, 40)
    counts: list[int] = []
    monkeypatch.setattr(
        nn.functional, "linear", lambda rows, *_: counts.append(len(rows)) or torch.zeros(len(rows), 40)
    )
    with writing(layer):
        for count in (7, *module._FEW_ROWS, 33):
            layer(torch.randn(count, 24))
    assert counts == [7, 33]


def test_layers_are_as_before_after_an_error(backbone: Backbone) -> None:
    with pytest.raises(IndexError), writing(backbone.llm):
        backbone.llm(torch.tensor([[10**6]]))
    assert not _own_forwards(backbone.llm)


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


def test_two_writers_of_one_llm(backbone: Backbone) -> None:
    """One that ends leaves layers that still multiply for the other."""
    ids = torch.ones(9, 1, dtype=torch.long)
    plain = backbone.llm(ids).logits
    first, second = writing(backbone.llm), writing(backbone.llm)
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    torch.testing.assert_close(backbone.llm(ids).logits, plain, atol=1e-5, rtol=0)
    second.__exit__(None, None, None)
    assert not _own_forwards(backbone.llm)
