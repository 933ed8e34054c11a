"""Teacher embeddings are computed once, survive a crash, and never come from another teacher's cache."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.modules import Normalize

from llm2vec_gen_st.backbone import Backbone
from llm2vec_gen_st.teachers import load_teacher, teacher_embeddings
from llm2vec_gen_st.teachers.sources import SelfTeacher, SentenceTransformerTeacher
from llm2vec_gen_st.testing import tiny_backbone, tiny_model

TEXTS = [
    "Bees make honey.",
    "",
    "Polar bears live on sea ice in the Arctic and hunt seals.",
    "蜂蜜",
    "<|im_end|> \ud800",
]


class Spy:
    """A teacher that counts what it embeds, and can fail or give a value that is not finite."""

    def __init__(self, key: str = "spy", fail_at: int | None = None, bad: str | None = None) -> None:
        self.key, self.fail_at, self.bad = key, fail_at, bad
        self.seen: list[str] = []
        self.calls = 0

    def embed(self, texts: Sequence[str]) -> np.ndarray:
        """Length, first letter and a constant of each text."""
        self.calls += 1
        if self.calls == self.fail_at:
            raise RuntimeError("out of memory")
        self.seen.extend(texts)
        rows = np.array([[len(text), ord(text[:1] or "\0"), len(self.key)] for text in texts], dtype=np.float64)
        for row, text in enumerate(texts):
            if text == self.bad:
                rows[row, 1] = np.inf
        return rows


def _expected(texts: Sequence[str], key: str = "spy") -> np.ndarray:
    return np.array([[len(text), ord(text[:1] or "\0"), len(key)] for text in texts], dtype=np.float32)


@pytest.mark.parametrize("cached", [True, False])
def test_each_text_is_embedded_once_and_given_in_order(tmp_path: Path, cached: bool) -> None:
    cache = tmp_path / "deep" / "cache.sqlite" if cached else None
    texts = [*TEXTS, *reversed(TEXTS), "new"]
    spy = Spy()
    found = teacher_embeddings(texts, spy, cache=cache, batch_size=2, progress=False)
    assert found.dtype == np.float32
    np.testing.assert_array_equal(found, _expected(texts))
    assert sorted(spy.seen) == sorted([*TEXTS, "new"])
    again = Spy()
    found = teacher_embeddings([*texts, "newer"], again, cache=cache, progress=False)
    np.testing.assert_array_equal(found, _expected([*texts, "newer"]))
    assert again.seen == ["newer"] if cached else len(again.seen) == 7
    assert teacher_embeddings([], Spy(), cache=cache, progress=False).shape[0] == 0


def test_more_texts_than_one_database_query_takes_come_back_from_the_cache(tmp_path: Path) -> None:
    texts = [f"text {number}" for number in range(1201)]
    teacher_embeddings(texts, Spy(), cache=tmp_path / "c", batch_size=500, progress=False)
    spy = Spy()
    np.testing.assert_array_equal(
        teacher_embeddings(texts, spy, cache=tmp_path / "c", progress=False), _expected(texts)
    )
    assert not spy.seen


def test_crash_in_the_middle_keeps_the_finished_batches(tmp_path: Path) -> None:
    texts = [f"{number} " * (number + 1) for number in range(10)]
    crashing = Spy(fail_at=4)
    with pytest.raises(RuntimeError, match="out of memory"):
        teacher_embeddings(texts, crashing, cache=tmp_path / "c", batch_size=2, progress=False)
    assert len(crashing.seen) == 6
    spy = Spy()
    np.testing.assert_array_equal(
        teacher_embeddings(texts, spy, cache=tmp_path / "c", batch_size=2, progress=False), _expected(texts)
    )
    assert sorted(spy.seen) == sorted(set(texts) - set(crashing.seen))


def test_non_finite_embedding_is_named_and_not_kept(tmp_path: Path) -> None:
    texts = ["a", "bb", "ccc", "dddd"]
    with pytest.raises(FloatingPointError, match=r"text 2 is not finite"):
        teacher_embeddings(texts, Spy(bad="ccc"), cache=tmp_path / "c", batch_size=2, progress=False)
    spy = Spy()
    np.testing.assert_array_equal(
        teacher_embeddings(texts, spy, cache=tmp_path / "c", progress=False), _expected(texts)
    )
    assert spy.seen == ["ccc", "dddd"]


def test_different_teachers_do_not_share_entries(tmp_path: Path) -> None:
    for key in ("one", "three", "one"):
        found = teacher_embeddings(TEXTS, Spy(key), cache=tmp_path / "c", progress=False)
        np.testing.assert_array_equal(found, _expected(TEXTS, key))


def _encoder(seed: int = 0, dtype: torch.dtype = torch.float32, **options: object) -> SentenceTransformer:
    backbone = tiny_backbone(seed=seed)
    backbone.llm.to(dtype)
    return SentenceTransformer(modules=list(tiny_model(seed=seed, backbone=backbone)), device="cpu", **options)


def test_whatever_changes_an_embedding_changes_the_teachers_key(tmp_path: Path) -> None:
    """Weights (also in float16, which has no fingerprint), dtype, length, instruction, and modules without weights."""
    short, normalized = _encoder(), _encoder()
    short.max_seq_length = 100
    normalized.append(Normalize())
    one_weight = _encoder()
    one_weight[1].mlp_align.bias.data += 1
    # What encode_document falls back to where there is no prompt for documents.
    web, other_web = (_encoder(prompts={"document": "", "query": "", "web": text}) for text in ("Sum: ", "Short: "))
    web.default_prompt_name = other_web.default_prompt_name = "web"
    models = [
        _encoder(), _encoder(seed=1), _encoder(dtype=torch.float16), _encoder(seed=1, dtype=torch.float16),
        _encoder(dtype=torch.bfloat16), _encoder(prompts={"document": "passage: "}), _encoder(truncate_dim=8),
        short, normalized, one_weight, web, other_web,
    ]  # fmt: skip
    keys = [SentenceTransformerTeacher(model, "tiny").key for model in models]
    assert len(set(keys)) == len(models)
    assert SentenceTransformerTeacher(_encoder(), "tiny").key == keys[0]
    assert SentenceTransformerTeacher(_encoder(), "other").key != keys[0]
    half = [tiny_backbone(seed=seed) for seed in (0, 1)]
    for backbone in half:
        backbone.llm.to(torch.float16)
    selves = [SelfTeacher(b).key for b in (tiny_backbone(), tiny_backbone(seed=1), *half)]
    selves.append(SelfTeacher(tiny_backbone(), max_tokens=9).key)
    assert len(set(selves)) == len(selves)
    assert SelfTeacher(tiny_backbone()).key == selves[0]
    for model in models[:2]:
        found = teacher_embeddings(TEXTS, model, cache=tmp_path / "c", progress=False)
        np.testing.assert_allclose(found, model.encode_document(TEXTS), atol=1e-5)


def test_sentence_transformer_embeds_responses_as_documents() -> None:
    model = _encoder(prompts={"document": "passage: ", "query": "query: "})
    found = teacher_embeddings(TEXTS, model, progress=False, batch_size=2)
    np.testing.assert_allclose(found, model.encode(["passage: " + text for text in TEXTS]), atol=1e-5)
    assert np.abs(found - model.encode(TEXTS)).max() > 1e-3


def _mean_by_hand(backbone: Backbone, text: str) -> np.ndarray:
    """Mean of the last hidden states over the response's tokens, one unbatched pass."""
    opening = backbone.tokenizer("Summarize the following passage: ")["input_ids"]
    response = backbone.tokenizer(text)["input_ids"]
    with torch.no_grad():
        output = backbone.llm(input_ids=torch.tensor([opening + response]), output_hidden_states=True)
    return output.hidden_states[-1][0, len(opening) :].mean(dim=0).numpy()


def test_self_teacher_is_the_mean_over_the_responses_tokens(backbone: Backbone, tmp_path: Path) -> None:
    texts = [TEXTS[0], TEXTS[2], TEXTS[3], "Rivers carry water from the mountains."]
    expected = np.stack([_mean_by_hand(backbone, text) for text in texts])
    for batch_size in (1, 2, 64):
        found = teacher_embeddings(texts, "self", backbone=backbone, batch_size=batch_size, progress=False)
        np.testing.assert_allclose(found, expected, atol=1e-5)
    assert np.abs(expected[0] - expected[1]).max() > 1e-2
    cached = [
        teacher_embeddings(TEXTS, "self", backbone=b, cache=tmp_path / "c", progress=False)
        for b in (backbone, tiny_backbone(seed=1), backbone)
    ]
    assert np.isfinite(cached[0]).all()
    assert cached[0].shape == (5, 64)
    np.testing.assert_array_equal(cached[0], cached[2])
    assert np.abs(cached[0] - cached[1]).max() > 1e-2


def test_self_teacher_cuts_long_responses_and_reads_control_tokens_as_text(backbone: Backbone) -> None:
    teacher = SelfTeacher(backbone, max_tokens=5)
    found = teacher.embed(["QQQQQ", "QQQQQ and more", "<|im_end|>"])
    np.testing.assert_allclose(found[0], found[1], atol=1e-6)
    np.testing.assert_allclose(found[0], _mean_by_hand(backbone, "QQQQQ"), atol=1e-5)
    split = backbone.tokenizer("<|im_end|>", split_special_tokens=True)["input_ids"]
    assert len(split) > 1
    shortened = backbone.tokenizer.decode(split[:5])
    np.testing.assert_allclose(found[2], _mean_by_hand(backbone, shortened), atol=1e-5)


def test_broken_llm_is_noticed_by_position() -> None:
    backbone = tiny_backbone()
    (token,) = backbone.tokenizer("Z")["input_ids"]
    backbone = Backbone(copy.deepcopy(backbone.llm), backbone.tokenizer, backbone.reference)
    backbone.llm.get_input_embeddings().weight.data[token] = float("nan")
    with pytest.raises(FloatingPointError, match="text 1 is not finite"):
        teacher_embeddings(["bees", "Zoo", "ice"], "self", backbone=backbone, progress=False)


def test_self_without_the_llm_is_refused() -> None:
    with pytest.raises(ValueError, match="backbone"):
        load_teacher("self")
