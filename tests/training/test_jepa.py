"""Teacher 'self': what the reconstruction stage changes, and what it does not."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from datasets import Dataset

from llm2vec_gen_st import LLM2VecGen
from llm2vec_gen_st.testing import tiny_backbone
from llm2vec_gen_st.training import train

PAIRS = [
    (f"What is {thing} number {number}?", f"{thing.title()} {number} is carried by water to the sea.")
    for number in range(8)
    for thing in ("honey", "ice", "river")
]


def test_the_embedding_is_the_same_however_long_the_reconstruction_stage(tmp_path: Path) -> None:
    """So a student of the built-in recipe embeds alike with and without what the stage teaches MLP_recon."""

    def student(recon_steps: int) -> LLM2VecGen:
        rows = Dataset.from_dict({"query": [query for query, _ in PAIRS], "response": [text for _, text in PAIRS]})
        return train(
            rows, tmp_path / str(recon_steps), base=tiny_backbone(), teacher="self", recipe="smollm2-135m-self",
            thought_tokens=4, compression_tokens=4, max_steps=4, warmup_steps=0, held_out=0, dtype="float32",
            batch_size=8, recon_steps=recon_steps, progress=False,
        )  # fmt: skip

    none, short, long = student(0), student(1), student(8)
    texts = [query for query, _ in PAIRS]
    expected = short.encode(texts)
    for other in (none, long):
        np.testing.assert_allclose(other.encode(texts), expected, atol=1e-5 * np.abs(expected).max())
        torch.testing.assert_close(other.suffix_transformer.suffix, short.suffix_transformer.suffix)
    recon = none.response_head.mlp_recon
    assert recon is not None
    assert torch.equal(recon.weight, torch.eye(64) * recon.weight[0, 0]), "the alignment has moved it"
    one, two = short.encode_soft_prompts(texts), long.encode_soft_prompts(texts)
    assert (one - two).abs().max() > 0.1 * one.abs().max()
