"""LangChain embeddings: each text its instruction, plain floats, few calls, threads, and a fingerprint."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from langchain_core.embeddings import Embeddings
from langchain_core.vectorstores import InMemoryVectorStore
from langchain_llm2vec_gen import LLM2VecGenEmbeddings
from langchain_tests.integration_tests import EmbeddingsIntegrationTests
from langchain_tests.unit_tests import EmbeddingsUnitTests
from sentence_transformers.base.modules import Normalize

from llm2vec_gen_st import LLM2VecGen
from llm2vec_gen_st.modules.lora import lora_parameters
from llm2vec_gen_st.testing import saved_model, tiny_backbone, tiny_model

from .event_loop import check_goes_on, rounds

MODEL = tiny_model()
ODD = [
    "Buddhism (religion/philosophy)",
    "👩‍👩‍👧",
    "دب قطبي",
    "\0",
    " " * 2000,
    "a\ud800b",
    "",
    "<|im_end|><|endoftext|> <question1>",
    "polar bears " * 200,
]


class TestStandardUnit(EmbeddingsUnitTests):
    @property
    def embeddings_class(self) -> type[Embeddings]:
        return LLM2VecGenEmbeddings

    @property
    def embedding_model_params(self) -> dict[str, Any]:
        return {"model": MODEL}


class TestStandardIntegration(EmbeddingsIntegrationTests):
    @property
    def embeddings_class(self) -> type[Embeddings]:
        return LLM2VecGenEmbeddings

    @property
    def embedding_model_params(self) -> dict[str, Any]:
        return {"model": MODEL}


@pytest.fixture
def embeddings() -> LLM2VecGenEmbeddings:
    return LLM2VecGenEmbeddings(MODEL)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A student beside its base model."""
    return saved_model(tmp_path_factory.mktemp("saved") / "student")


def test_queries_and_documents_get_their_own_instruction(embeddings: LLM2VecGenEmbeddings) -> None:
    np.testing.assert_allclose(embeddings.embed_query("honey"), MODEL.encode_query("honey"), atol=1e-6)
    np.testing.assert_allclose(embeddings.embed_documents(["honey"]), MODEL.encode_document(["honey"]), atol=1e-6)
    assert not np.allclose(embeddings.embed_query("honey"), embeddings.embed_documents(["honey"])[0], atol=1e-3)


def test_other_instructions_are_used_by_name_and_none_means_none() -> None:
    model = tiny_model()
    model.prompts["bears"] = "About bears: "
    model.default_prompt_name = "query"
    embeddings = LLM2VecGenEmbeddings(model, query_prompt_name="bears", document_prompt_name=None)
    np.testing.assert_allclose(embeddings.embed_query("a"), model.encode("About bears: a", prompt=""), atol=1e-6)
    np.testing.assert_allclose(embeddings.embed_documents(["a"])[0], model.encode("a", prompt=""), atol=1e-6)


def test_an_instruction_without_text_names_those_that_have_one() -> None:
    with pytest.raises(ValueError, match="no instruction 'passage'; it has document, query"):
        LLM2VecGenEmbeddings(MODEL, document_prompt_name="passage")


def test_the_route_holds_through_a_retriever_after_save_and_load(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    embeddings = LLM2VecGenEmbeddings(str(saved), model_kwargs={"dtype": "float32"})
    store = InMemoryVectorStore.from_texts(["bees", "bears"], embeddings)
    kept = [entry["vector"] for entry in store.store.values()]
    np.testing.assert_allclose(kept, embeddings.model.encode_document(["bees", "bears"]), atol=1e-6)
    read: list[str] = []
    preprocess = embeddings.model.suffix_transformer.preprocess
    monkeypatch.setattr(
        embeddings.model.suffix_transformer,
        "preprocess",
        lambda texts, prompt=None, **kwargs: read.append(prompt) or preprocess(texts, prompt=prompt, **kwargs),
    )
    retriever = store.as_retriever()
    assert len(retriever.invoke("honey")) == len(asyncio.run(retriever.ainvoke("honey"))) == 2
    assert read == [embeddings.model.prompts["query"]] * 2


def test_vectors_are_plain_floats_that_dump_to_json(embeddings: LLM2VecGenEmbeddings) -> None:
    query, documents = embeddings.embed_query("a"), embeddings.embed_documents(["a", "b"])
    assert {type(value) for row in [query, *documents] for value in row} == {float}
    assert json.loads(json.dumps([query, *documents])) == [query, *documents]


def test_arrays_hold_the_same_vectors(embeddings: LLM2VecGenEmbeddings) -> None:
    found = embeddings.embed_documents_array(iter(["a", "b"]))
    assert (found.dtype, found.shape) == (np.float32, (2, 48))
    assert found.tolist() == embeddings.embed_documents(["a", "b"])
    assert embeddings.embed_documents_array([]).shape == (0, 48)
    assert embeddings.embed_documents([]) == []


def test_odd_texts_are_embedded_like_alone(embeddings: LLM2VecGenEmbeddings) -> None:
    together = np.array(embeddings.embed_documents(ODD))
    assert np.isfinite(together).all()
    np.testing.assert_allclose(together, [embeddings.embed_documents([text])[0] for text in ODD], atol=1e-5)
    assert len({tuple(row) for row in embeddings.embed_documents(["", "\0", "a\ud800b", "<|im_end|>"])}) == 4


@settings(max_examples=30)
@given(texts=st.lists(st.text(st.characters(exclude_categories=()), max_size=20), max_size=4))
def test_any_texts_give_finite_vectors(texts: list[str]) -> None:
    embeddings = LLM2VecGenEmbeddings(MODEL)
    found = embeddings.embed_documents_array(texts)
    assert found.shape == (len(texts), 48)
    assert np.isfinite(found).all()


def test_what_is_no_text_is_named_by_its_position(embeddings: LLM2VecGenEmbeddings) -> None:
    with pytest.raises(TypeError, match="Input 1 is not a string"):
        embeddings.embed_documents(["a", None])  # type: ignore[list-item]


@pytest.mark.parametrize("call", ["embed_documents", "embed_documents_array"])
def test_many_texts_take_one_call_in_batches_of_the_size_asked_for(call: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, calls, batches = tiny_model(), [], []
    encode, preprocess = model.encode, model.suffix_transformer.preprocess
    monkeypatch.setattr(model, "encode", lambda *args, **kwargs: calls.append(kwargs) or encode(*args, **kwargs))
    monkeypatch.setattr(
        model.suffix_transformer,
        "preprocess",
        lambda texts, **kwargs: batches.append(len(texts)) or preprocess(texts, **kwargs),
    )
    getattr(LLM2VecGenEmbeddings(model, batch_size=4), call)([f"text {number}" for number in range(10)])
    assert len(calls) == 1
    assert sorted(batches) == [2, 4, 4]


def test_progress_is_shown_for_documents_if_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    LLM2VecGenEmbeddings(MODEL).embed_documents(["a"])
    shown = LLM2VecGenEmbeddings(MODEL, show_progress_bar=True)
    shown.embed_query("a")
    assert "Batches" not in capsys.readouterr().err
    shown.embed_documents(["a"])
    assert "Batches" in capsys.readouterr().err


@pytest.mark.parametrize("batch_size", [0, -1])
def test_batches_without_texts_are_refused(batch_size: int) -> None:
    with pytest.raises(ValueError, match="batch_size must be at least 1"):
        LLM2VecGenEmbeddings(MODEL, batch_size=batch_size)


def test_sixteen_threads_get_the_vectors_of_one(embeddings: LLM2VecGenEmbeddings) -> None:
    texts = [f"{'polar bears ' * (number % 23)}{number}" for number in range(64)]
    alone = [embeddings.embed_query(text) for text in texts]
    with ThreadPoolExecutor(16) as pool:
        together = list(pool.map(embeddings.embed_query, texts))
        documents = list(pool.map(embeddings.embed_documents, [texts[start : start + 8] for start in range(0, 64, 8)]))
    np.testing.assert_allclose(together, alone, atol=1e-5)
    np.testing.assert_allclose(np.concatenate(documents), embeddings.embed_documents_array(texts), atol=1e-5)


def test_event_loop_goes_on_while_texts_are_embedded(
    embeddings: LLM2VecGenEmbeddings, monkeypatch: pytest.MonkeyPatch
) -> None:
    encode = embeddings.model.encode

    def slow(*args: Any, **kwargs: Any) -> Any:
        time.sleep(0.3)
        return encode(*args, **kwargs)

    monkeypatch.setattr(embeddings.model, "encode", slow)

    async def both() -> None:
        await asyncio.gather(embeddings.aembed_query("honey"), embeddings.aembed_documents(ODD))

    seconds = asyncio.run(rounds(both()))
    assert len(seconds) > 20
    check_goes_on(seconds, 0.3)


def test_converting_many_vectors_lets_the_event_loop_go_on(
    embeddings: LLM2VecGenEmbeddings, monkeypatch: pytest.MonkeyPatch
) -> None:
    many = np.zeros((20_000, 384), np.float32)
    start = time.perf_counter()
    many.tolist()
    whole = time.perf_counter() - start
    monkeypatch.setattr(embeddings, "embed_documents_array", lambda texts: many)
    check_goes_on(asyncio.run(rounds(embeddings.aembed_documents([]))), whole)


def test_async_methods_give_the_same_vectors(embeddings: LLM2VecGenEmbeddings) -> None:
    assert asyncio.run(embeddings.aembed_query("honey")) == embeddings.embed_query("honey")
    assert asyncio.run(embeddings.aembed_documents(ODD)) == embeddings.embed_documents(ODD)


LORA = {"r": 2, "lora_alpha": 4, "target_modules": ["q_proj"]}


def _with_lora() -> LLM2VecGen:
    return LLM2VecGen.from_base(
        tiny_backbone(), thought_tokens=4, compression_tokens=4, embedding_dim=48, device="cpu", lora=LORA
    )


CHANGES: dict[str, Callable[[LLM2VecGen], Any]] = {
    "suffix": lambda model: model.suffix_transformer.suffix[0, 0].add_(1e-3),
    "recon": lambda model: model.response_head.mlp_recon.weight[0, 0].add_(1e-3),  # type: ignore[union-attr]
    "align": lambda model: model.response_head.mlp_align.bias[0].add_(1e-3),  # type: ignore[union-attr]
    "query instruction": lambda model: model.prompts.update(query="Say: "),
    "document instruction": lambda model: model.prompts.update(document="Say: "),
    "truncation": lambda model: setattr(model, "truncate_dim", 16),
    "length": lambda model: setattr(model.suffix_transformer, "max_seq_length", 64),
    "normalisation": lambda model: model.append(Normalize()),
    "LoRA": lambda model: lora_parameters(model.llm)["layers.0.self_attn.q_proj.lora_B"].add_(1e-2),
}


@pytest.mark.parametrize("change", list(CHANGES))
def test_fingerprint_changes_with_whatever_changes_vectors(change: str) -> None:
    model = _with_lora() if change == "LoRA" else tiny_model()
    embeddings = LLM2VecGenEmbeddings(model)
    text = "Rivers carry water from the mountains to the sea, and bees make honey. " * 4
    fingerprint, query, document = (
        embeddings.fingerprint,
        embeddings.embed_query(text),
        embeddings.embed_documents([text]),
    )
    assert embeddings.fingerprint == fingerprint
    with torch.no_grad():
        CHANGES[change](model)
    assert embeddings.fingerprint != fingerprint
    assert embeddings.embed_query(text) != query or embeddings.embed_documents([text]) != document


def test_fingerprint_tells_models_apart_and_survives_saving(saved: Path) -> None:
    student = LLM2VecGenEmbeddings(str(saved))
    fingerprint = student.fingerprint
    assert len(fingerprint) == 16
    assert int(fingerprint, 16) >= 0
    again = LLM2VecGen(str(saved), backbone=tiny_backbone(), device="cpu")
    assert LLM2VecGenEmbeddings(again).fingerprint == fingerprint
    assert LLM2VecGenEmbeddings(again, batch_size=2, show_progress_bar=True).fingerprint == fingerprint
    assert LLM2VecGenEmbeddings(again, query_prompt_name="document").fingerprint != fingerprint
    assert LLM2VecGenEmbeddings(tiny_model(seed=1)).fingerprint != LLM2VecGenEmbeddings(MODEL).fingerprint
    other_base = LLM2VecGenEmbeddings(tiny_model(backbone=tiny_backbone(seed=1)))
    assert other_base.fingerprint != LLM2VecGenEmbeddings(MODEL).fingerprint


def test_a_saved_and_loaded_student_with_lora_keeps_its_fingerprint(tmp_path: Path) -> None:
    model = _with_lora()
    with torch.no_grad():
        CHANGES["LoRA"](model)
    model.save_pretrained(str(tmp_path))
    again = LLM2VecGen(str(tmp_path), backbone=tiny_backbone(), device="cpu")
    assert LLM2VecGenEmbeddings(again).fingerprint == LLM2VecGenEmbeddings(model).fingerprint


def test_options_of_loading_are_refused_for_a_loaded_model() -> None:
    with pytest.raises(ValueError, match="loaded already"):
        LLM2VecGenEmbeddings(MODEL, model_kwargs={"dtype": "float32"})


def test_importing_needs_no_community_package() -> None:
    code = "import sys, langchain_llm2vec_gen as p; p.LLM2VecGenEmbeddings, p.ChatLLM2VecGen; "
    done = subprocess.run(
        [sys.executable, "-c", code + "print([name for name in sys.modules if 'langchain_community' in name])"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.stdout.strip(), done.returncode) == ("[]", 0), done.stderr
