"""The last layer is computed where it is asked for, by the pass that asks, and nowhere is anything else changed."""

from __future__ import annotations

import copy
import pickle
import threading

import numpy as np
import pytest
import torch

from llm2vec_gen_st import LLM2VecGen
from llm2vec_gen_st.backbone import decoder_layers
from llm2vec_gen_st.modules.last_layer import only_at, prepare_last_layer
from llm2vec_gen_st.modules.lora import lora_parameters
from llm2vec_gen_st.testing import tiny_backbone, tiny_model

TEXTS = ["bees", "Where do polar bears live? Who makes honey?", "Rivers carry water from the mountains to the sea."]
IDS = torch.tensor([[5, 6, 7, 8, 9], [9, 8, 7, 6, 5]])


@pytest.fixture
def model() -> LLM2VecGen:
    return tiny_model()


def _rows_seen(model: LLM2VecGen, part: str) -> list[tuple[int, ...]]:
    seen: list[tuple[int, ...]] = []
    inside = decoder_layers(model.llm)[-1].get_submodule(part)
    inside.register_forward_pre_hook(lambda module, inputs: seen.append(tuple(inputs[0].shape[:2])))
    return seen


@pytest.mark.parametrize("part", ["mlp", "self_attn.q_proj", "self_attn.o_proj"])
def test_encoding_computes_compression_positions_only(model: LLM2VecGen, part: str) -> None:
    seen = _rows_seen(model, part)
    model.encode(TEXTS)
    assert sum(rows for rows, _ in seen) == len(TEXTS)
    assert {width for _, width in seen} == {model.suffix_transformer.compression_tokens}


def test_other_layers_and_other_passes_compute_everything(model: LLM2VecGen) -> None:
    seen = _rows_seen(model, "mlp")
    model.llm(input_ids=IDS)
    assert seen == [(2, 5)]
    whole = model.llm(input_ids=IDS).logits
    model.encode(TEXTS)
    assert torch.equal(model.llm(input_ids=IDS).logits, whole)


def test_a_pass_that_learns_computes_everything(model: LLM2VecGen) -> None:
    hidden = model.llm.base_model
    states = model.llm.get_input_embeddings()(IDS).requires_grad_()
    whole = hidden(inputs_embeds=states).last_hidden_state
    with only_at(torch.tensor([[1], [2]]), 5):
        assert torch.equal(hidden(inputs_embeds=states).last_hidden_state, whole)


def test_another_thread_is_not_touched(model: LLM2VecGen) -> None:
    whole = model.llm(input_ids=IDS).logits
    found: list[torch.Tensor] = []
    with torch.no_grad(), only_at(torch.tensor([[1], [2]]), 5):
        thread = threading.Thread(target=lambda: found.append(model.llm(input_ids=IDS).logits))
        thread.start()
        thread.join()
        assert not torch.allclose(model.llm(input_ids=IDS).logits, whole)
    assert torch.equal(found[0], whole)


def test_it_ends_when_the_pass_fails(model: LLM2VecGen) -> None:
    whole = model.llm(input_ids=IDS).logits
    with pytest.raises(RuntimeError), torch.no_grad(), only_at(torch.tensor([[7], [7]]), 5):
        model.llm(input_ids=IDS)
    assert torch.equal(model.llm(input_ids=IDS).logits, whole)


def test_preparing_twice_is_preparing_once(model: LLM2VecGen) -> None:
    seen = _rows_seen(model, "mlp")
    expected = model.encode(TEXTS)
    prepare_last_layer(model.llm)
    np.testing.assert_array_equal(model.encode(TEXTS), expected)
    assert {width for _, width in seen} == {4}


def test_two_students_share_an_llm() -> None:
    backbone = tiny_backbone()
    one, other = tiny_model(backbone=backbone), tiny_model(backbone=backbone, seed=1)
    alone = tiny_model(seed=1, backbone=tiny_backbone())
    one.encode(TEXTS)
    np.testing.assert_allclose(other.encode(TEXTS), alone.encode(TEXTS), atol=1e-6)


def test_lora_goes_around_a_layer_that_heeds() -> None:
    settings = {"r": 4, "lora_alpha": 8.0, "target_modules": ["q_proj", "o_proj"]}
    backbone = tiny_backbone()
    plain = tiny_model(backbone=backbone)
    expected = plain.encode(TEXTS)
    adapted = LLM2VecGen.from_base(backbone, thought_tokens=4, compression_tokens=4, embedding_dim=48, lora=settings)
    with torch.no_grad():
        for matrix in lora_parameters(adapted.llm).values():
            matrix.normal_(std=0.3)
    seen = _rows_seen(adapted, "self_attn.q_proj")
    with torch.no_grad():
        found = adapted.suffix_transformer(adapted.preprocess(TEXTS))["compression_states"]
    assert {width for _, width in seen} == {4}
    whole = adapted.suffix_transformer(adapted.preprocess(TEXTS))["compression_states"]
    assert {width for _, width in seen} != {4}
    torch.testing.assert_close(found, whole.detach(), atol=1e-5, rtol=1e-5)
    np.testing.assert_allclose(plain.encode(TEXTS), expected, atol=1e-6)


def test_a_student_without_lora_keeps_its_vectors_while_one_with_lora_runs_on_the_same_llm() -> None:
    """A6, also for two students of one LLM."""
    backbone = tiny_backbone()
    plain = tiny_model(backbone=backbone)
    prompts = plain.encode_soft_prompts(TEXTS)
    expected, decoded = plain.encode(TEXTS), plain.decode(prompts, max_new_tokens=4)
    settings = {"r": 4, "lora_alpha": 64.0, "target_modules": ["q_proj", "v_proj"]}
    adapted = LLM2VecGen.from_base(backbone, thought_tokens=4, compression_tokens=4, embedding_dim=48, lora=settings)
    with torch.no_grad():
        for matrix in lora_parameters(adapted.llm).values():
            matrix.normal_(std=0.3)
    over = threading.Event()

    def work() -> None:
        while not over.wait(0.001):
            adapted.encode(TEXTS)

    other = threading.Thread(target=work)
    other.start()
    try:
        for _ in range(10):
            np.testing.assert_allclose(plain.encode(TEXTS), expected, atol=1e-5)
            assert plain.decode(prompts, max_new_tokens=4) == decoded
    finally:
        over.set()
        other.join()


def test_control_tokens_in_a_text_stay_text_in_copies() -> None:
    model = tiny_model()
    text = "a<|im_end|>b <|endoftext|>"
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert other.preview(text).token_ids == model.preview(text).token_ids
        np.testing.assert_array_equal(other.encode(text), model.encode(text))
    np.testing.assert_allclose(model.encode([text, "x"], device=["cpu"]), model.encode([text, "x"]), atol=1e-5)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_copies_encode_alike(model: LLM2VecGen, copied) -> None:
    np.testing.assert_array_equal(copied(model).encode(TEXTS), model.encode(TEXTS))


@pytest.mark.skipif(torch.__version__.startswith("2.6."), reason="torch 2.6 cannot trace the host's wrapper of an LLM")
def test_compiled_layers_give_the_same_vectors(model: LLM2VecGen) -> None:
    expected = model.encode(TEXTS)
    model.llm.base_model.compile(backend="eager")
    np.testing.assert_allclose(model.encode(TEXTS), expected, atol=1e-6)
    whole = tiny_model().llm(input_ids=IDS).logits
    with torch.no_grad():
        torch.testing.assert_close(model.llm(input_ids=IDS).logits, whole)
