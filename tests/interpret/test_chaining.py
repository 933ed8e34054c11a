"""Latent chains: every step is what one plain pass over soft prompt and suffix gives, whatever the batch."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from sentence_transformers.base.modules import Normalize

from llm2vec_gen_st import LLM2VecGen
from llm2vec_gen_st.interpret import latent_chain
from llm2vec_gen_st.testing import tiny_backbone, tiny_model

TEXTS = ["where do polar bears live?", "", "Who makes honey and wax from the nectar of flowers?", "a river"]


def next_states(model: LLM2VecGen, ids: list[int], soft_prompt: torch.Tensor) -> torch.Tensor:
    """Compression states (n, H) behind text, soft prompt and suffix, by one unbatched pass of the whole causal LM."""
    transformer = model.suffix_transformer
    text = model.llm.get_input_embeddings()(torch.tensor(ids, dtype=torch.long))
    rows = torch.cat([text, soft_prompt.to(text), transformer.suffix.to(text)])[None]
    found: torch.Tensor = model.llm.base_model(inputs_embeds=rows).last_hidden_state[0]
    return found[-transformer.compression_tokens :].float()


@pytest.mark.parametrize("behind_text", [False, True])
def test_each_step_is_a_plain_pass_over_the_soft_prompt_before(student: LLM2VecGen, behind_text: bool) -> None:
    found = latent_chain(student, TEXTS, steps=2, behind_text=behind_text, max_new_tokens=5)
    assert [(step.input, step.text, step.step) for step in found] == [
        (number, text, step) for number, text in enumerate(TEXTS) for step in range(3)
    ]
    head = student.response_head
    for number, text in enumerate(TEXTS):
        ids = student.preview(text, prompt_name="query").token_ids if behind_text else []
        soft_prompt = student.encode_soft_prompts(text, prompt_name="query")
        expected = [student.encode_query(text)]
        decoded = student.decode(soft_prompt, max_new_tokens=5)
        for _ in range(2):
            with torch.inference_mode():
                soft_prompt = head.soft_prompt(next_states(student, ids, soft_prompt))
                expected.append(head.align(soft_prompt).mean(dim=0).numpy())
            decoded += student.decode(soft_prompt, max_new_tokens=5)
        own = [step for step in found if step.input == number]
        assert [step.decoded for step in own] == decoded
        for step, vector in zip(own, expected, strict=True):
            np.testing.assert_allclose(step.embedding, vector, atol=1e-4)
            cosine = float(vector @ expected[0] / np.linalg.norm(vector) / np.linalg.norm(expected[0]))
            assert step.similarity_to_first == pytest.approx(cosine, abs=1e-4)
        assert own[0].similarity_to_first == own[0].similarity_to_previous == pytest.approx(1.0)
        assert own[1].similarity_to_first == own[1].similarity_to_previous < 0.999
        assert own[2].similarity_to_previous == pytest.approx(
            float(torch.cosine_similarity(*(torch.tensor(step.embedding) for step in own[1:]), dim=0)), abs=1e-5
        )


def test_a_text_does_not_depend_on_its_batch(student: LLM2VecGen) -> None:
    together = latent_chain(student, TEXTS, steps=2, behind_text=True, max_new_tokens=3)
    alone = [
        step for text in TEXTS for step in latent_chain(student, text, steps=2, behind_text=True, max_new_tokens=3)
    ]
    for one, other in zip(together, alone, strict=True):
        np.testing.assert_allclose(one.embedding, other.embedding, atol=1e-4)
        assert one.decoded == other.decoded


def test_embeddings_are_those_of_encode_with_every_module_behind_the_llm() -> None:
    plain = tiny_model()
    model = LLM2VecGen(modules=[*plain.children(), Normalize()], device="cpu", truncate_dim=16)
    found = latent_chain(model, TEXTS, steps=1, max_new_tokens=1)
    first = np.stack([step.embedding for step in found if step.step == 0])
    assert first.shape == (len(TEXTS), 16)
    np.testing.assert_allclose(first, model.encode(TEXTS, prompt_name="query"), atol=1e-5)


def test_texts_behind_which_there_is_no_room_are_cut_or_refused(caplog: pytest.LogCaptureFixture) -> None:
    model = tiny_model()
    model.max_seq_length = 24
    limit = model.suffix_transformer.text_limit
    whole = "e " * 40
    ids = model.suffix_transformer.text_tokenizer.ids(whole).ids
    fitting = model.tokenizer.decode(ids[: limit - 2])
    for text in (whole, fitting):
        caplog.clear()
        found = latent_chain(model, [text], steps=1, behind_text=True, max_new_tokens=1, prompt_name=None)
        assert [record.message[:15] for record in caplog.records] == ["1 of the inputs"]
        soft_prompt = model.encode_soft_prompts(text)
        with torch.inference_mode():
            expected = model.response_head.align(
                model.response_head.soft_prompt(next_states(model, ids[: limit - 4], soft_prompt))
            )
        np.testing.assert_allclose(found[1].embedding, expected.mean(dim=0).numpy(), atol=1e-4)
    model.max_seq_length = 12
    assert len(latent_chain(model, "a", steps=1, max_new_tokens=1, prompt_name=None)) == 2
    with pytest.raises(ValueError, match="max_seq_length 12 leaves no room for text beside a soft prompt of 4 vectors"):
        latent_chain(model, "a", behind_text=True, prompt_name=None)


def test_lora_weights_take_part_in_every_step_but_not_in_decoding() -> None:
    options: dict[str, Any] = {"r": 2, "lora_alpha": 64, "target_modules": ["q_proj", "v_proj"]}
    model = LLM2VecGen.from_base(
        tiny_backbone(), thought_tokens=2, compression_tokens=3, embedding_dim=8, device="cpu", lora=options
    )
    torch.manual_seed(0)
    for name, parameter in model.llm.named_parameters():
        if ".lora_B." in name:
            torch.nn.init.normal_(parameter)
    from llm2vec_gen_st.modules.lora import lora_enabled

    found = latent_chain(model, "honey", steps=1, max_new_tokens=4)
    soft_prompt = model.encode_soft_prompts("honey", prompt_name="query")
    embeddings = []
    for enabled in (True, False):
        with torch.inference_mode(), lora_enabled(model.llm, enabled):
            states = model.response_head.soft_prompt(next_states(model, [], soft_prompt))
            embeddings.append(model.response_head.align(states).mean(dim=0).numpy())
    np.testing.assert_allclose(found[1].embedding, embeddings[0], atol=1e-4)
    assert np.abs(embeddings[0] - embeddings[1]).max() > 1e-2
    assert found[0].decoded == model.decode(soft_prompt, max_new_tokens=4)[0]


def test_wrong_arguments_are_named(student: LLM2VecGen, student_bf16: LLM2VecGen) -> None:
    assert latent_chain(student, []) == []
    assert len(latent_chain(student, "a", steps=0, max_new_tokens=1)) == 1
    assert len(latent_chain(student_bf16, "a", steps=1, max_new_tokens=1)) == 2
    with pytest.raises(ValueError, match="steps must not be negative, got -1"):
        latent_chain(student, "a", steps=-1)
    with pytest.raises(TypeError, match="Input 1 is not a string but int"):
        latent_chain(student, ["a", 3])  # type: ignore[list-item]
    with pytest.raises(ValueError, match="summary"):
        latent_chain(student, "a", prompt_name="summary")


def test_soft_prompts_that_are_not_finite_are_refused() -> None:
    model = tiny_model()
    recon = model.response_head.mlp_recon
    assert recon is not None
    recon.bias.data[0] = float("inf")
    with pytest.raises(FloatingPointError, match="not finite"):
        latent_chain(model, "a")


def test_records_make_a_table(student: LLM2VecGen) -> None:
    found = latent_chain(student, TEXTS, steps=1, max_new_tokens=1)
    table = pd.DataFrame([asdict(step) for step in found])
    assert table.shape == (len(TEXTS) * 2, 7)
    assert "embedding" not in repr(found[0])
