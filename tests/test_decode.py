"""Decoding: one text for each soft prompt, the same in any batch, and a clear word for what cannot be decoded."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from llm2vec_gen_st import LLM2VecGen
from llm2vec_gen_st.backbone import Backbone
from llm2vec_gen_st.interpret import decode_ids, decoded_texts
from llm2vec_gen_st.testing import tiny_backbone

TEXTS = ["bees", "Where do polar bears live?", "", "Rivers carry water from the mountains to the sea.", "蜂蜜"]


@pytest.fixture(scope="module")
def prompts(student: LLM2VecGen) -> torch.Tensor:
    """Soft prompts that differ enough for the tiny LLM to say different things."""
    return torch.randn(7, 4, 64, generator=torch.Generator().manual_seed(0)) * 0.3


def test_batch_decode_equals_one_by_one_and_is_deterministic(student: LLM2VecGen, prompts: torch.Tensor) -> None:
    together = student.decode(prompts, max_new_tokens=12)
    assert len(together) == 7
    assert len(set(together)) > 3
    assert [student.decode(prompt, max_new_tokens=12)[0] for prompt in prompts] == together
    assert student.decode(prompts, max_new_tokens=12, batch_size=2) == together
    torch.manual_seed(99)
    assert student.decode(prompts, max_new_tokens=12) == together


def test_texts_are_decoded_through_their_soft_prompts(student: LLM2VecGen) -> None:
    prompts = student.encode_soft_prompts(TEXTS)
    assert prompts.shape == (5, 4, 64)
    assert prompts.dtype == torch.float32
    torch.testing.assert_close(student.encode_soft_prompts(TEXTS[3]), prompts[3], atol=1e-5, rtol=0)
    expected = student.decode(prompts, max_new_tokens=8)
    assert student.decode(TEXTS, max_new_tokens=8) == expected
    assert student.decode((text for text in TEXTS), max_new_tokens=8, batch_size=2) == expected
    assert student.decode(TEXTS[1], max_new_tokens=8) == expected[1:2]
    asked = student.encode_soft_prompts(TEXTS, prompt_name="query")
    assert student.decode(TEXTS, prompt_name="query", max_new_tokens=8) == student.decode(asked, max_new_tokens=8)
    assert student.decode([]) == []


def test_arrays_lists_and_a_single_soft_prompt_are_accepted(student: LLM2VecGen, prompts: torch.Tensor) -> None:
    expected = student.decode(prompts, max_new_tokens=5)
    assert student.decode(prompts.numpy(), max_new_tokens=5) == expected
    assert student.decode(list(prompts), max_new_tokens=5) == expected
    assert student.decode(list(prompts.numpy()), max_new_tokens=5) == expected
    assert student.decode(prompts[2], max_new_tokens=5) == expected[2:3]


def test_pooled_vector_is_refused_with_what_to_pass(student: LLM2VecGen) -> None:
    for pooled in (student.encode(TEXTS), student.encode("bees"), student.encode(TEXTS, convert_to_tensor=True)):
        with pytest.raises(ValueError, match=r"shape \(N, 4, 64\) from encode_soft_prompts, or texts") as caught:
            student.decode(pooled)
        assert str(tuple(pooled.shape)) in str(caught.value)
    with pytest.raises(ValueError, match="encode_soft_prompts"):
        student.decode(np.zeros((2, 4, 63), np.float32))
    with pytest.raises(TypeError, match="Input 1"):
        student.decode(["a", 3])


def test_as_many_pooled_vectors_as_a_soft_prompt_has_are_refused_where_they_are_as_wide() -> None:
    wide = LLM2VecGen.from_base(tiny_backbone(), compression_tokens=4, embedding_dim=64, device="cpu")
    pooled = wide.encode(TEXTS[:4])
    assert pooled.shape == (4, 64)
    for given in (pooled, torch.tensor(pooled), list(pooled)):
        with pytest.raises(ValueError, match=r"shape \(N, 4, 64\) from encode_soft_prompts"):
            wide.decode(given)
    alone = wide.encode_soft_prompts(TEXTS[:1])[0]
    with pytest.raises(ValueError, match=r"pass array\[None\]"):
        wide.decode(alone)
    assert len(wide.decode(alone[None], max_new_tokens=3)) == 1


def test_text_ends_at_the_end_ids_and_at_the_end_text(backbone: Backbone, prompts: torch.Tensor) -> None:
    long = decode_ids(backbone, prompts, max_new_tokens=10, end_ids=[])
    assert [len(row) for row in long] == [10] * 7
    row = max(long, key=lambda ids: len(set(ids)))
    end = row[5]
    found = decode_ids(backbone, prompts, max_new_tokens=10, end_ids=[end])
    assert found[long.index(row)] == row[: row.index(end) + 1]
    assert all(ids == full[: len(ids)] and (end not in ids[:-1]) for ids, full in zip(found, long, strict=True))
    texts = decoded_texts(backbone, long)
    mark = texts[0][3:5]
    ended = decoded_texts(backbone, long, end_text=mark)
    assert ended == [text.partition(mark)[0] for text in texts]
    assert ended != texts


def test_repetition_penalty_of_the_llm_does_not_change_greedy_decoding(
    backbone: Backbone, prompts: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = decode_ids(backbone, prompts, max_new_tokens=8)
    monkeypatch.setattr(backbone.llm.generation_config, "repetition_penalty", 5.0)
    assert decode_ids(backbone, prompts, max_new_tokens=8) == expected
