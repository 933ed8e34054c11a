"""The page without a browser: what it shows step by step, what the command hands on, and what is served."""

from __future__ import annotations

import re
import socket
import sys
from pathlib import Path
from typing import Any

import pytest
from langchain_llm2vec_gen import FaissStore, LLM2VecGenEmbeddings

import llm2vec_gen_st.app.page as page_module
from llm2vec_gen_st import LLM2VecGen
from llm2vec_gen_st.app import QueryReader
from llm2vec_gen_st.app.page import build_page, serve, updates
from llm2vec_gen_st.demo import load_passages
from llm2vec_gen_st.testing import tiny_model

from ..command_line import fail, run
from .conftest import PASSAGES


@pytest.fixture(scope="module")
def reader(student: LLM2VecGen, store: FaissStore) -> QueryReader:
    return QueryReader(student, store, passages=len(PASSAGES), max_new_tokens=6)


def test_two_queries_are_shown_side_by_side_and_one_alone(reader: QueryReader) -> None:
    *before, (status, found) = updates(reader, "who makes honey?", " where? ")
    assert ["searching" in before[0][0], "lens" in before[1][0], "decoding" in before[2][0]] == [True] * 3
    assert re.search(r"Cosine of the two embeddings: -?0\.\d{3}|1\.000", status)
    assert found is not None
    assert found.count("<article>") == found.count("<blockquote>") == found.count("Nearest passages (cosine)") == 2
    for first, second in (("who makes honey?", ""), ("", "who makes honey?")):
        *_, (status, alone) = updates(reader, first, second)
        assert alone is not None
        assert alone.count("<article>") == 1
        assert "<h2>who makes honey?</h2>" in alone
        assert "Cosine" not in status


def test_no_text_becomes_markup(reader: QueryReader) -> None:
    *_, (_, found) = updates(reader, '<script>alert("1")</script>', "")
    assert found is not None
    assert not re.search(r"<(script|img|b)\b", found)
    assert "&lt;script&gt;alert(&quot;1&quot;)&lt;/script&gt;" in found
    assert "&lt;img src=x onerror=" in found


@pytest.mark.parametrize("texts", [("", ""), (" ", "\n")])
def test_an_empty_query_is_a_sentence_in_the_page(reader: QueryReader, texts: tuple[str, str]) -> None:
    ((status, found),) = updates(reader, *texts)
    assert 'role="alert"' in status
    assert "A query is empty" in status
    assert found is None


def test_a_store_that_cannot_be_searched_is_a_sentence_in_the_page(store: FaissStore) -> None:
    other = LLM2VecGen.from_base(
        tiny_model().backbone, thought_tokens=2, compression_tokens=2, embedding_dim=8, device="cpu"
    )
    *_, (status, found) = updates(QueryReader(other, store), "who makes honey?", "")
    assert 'role="alert"' in status
    assert "8" in status
    assert found is None


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[tuple[QueryReader, dict[str, Any]]]:
    """What the command would serve."""
    calls: list[tuple[QueryReader, dict[str, Any]]] = []

    def record(reader: QueryReader, **options: Any) -> None:
        calls.append((reader, {**options, "found": reader.read(["bees"])[0].hits}))

    monkeypatch.setattr(page_module, "import_gradio", lambda: None)
    monkeypatch.setattr(page_module, "serve", record)
    return calls


def test_without_a_store_the_demonstration_is_searched(
    saved: Path, served: list[tuple[QueryReader, dict[str, Any]]]
) -> None:
    assert run("app", "--model", saved).exit_code == 0
    ((_, options),) = served
    assert {key: options[key] for key in ("host", "port", "share")} == {
        "host": "127.0.0.1", "port": None, "share": False,
    }  # fmt: skip
    assert {hit.text for hit in options["found"]} <= {passage.text for passage in load_passages()}


def test_a_store_brings_its_model_and_refuses_another(
    saved: Path, tmp_path: Path, served: list[tuple[QueryReader, dict[str, Any]]]
) -> None:
    store = tmp_path / "corpus.store"
    with FaissStore(store, LLM2VecGenEmbeddings(LLM2VecGen(str(saved), device="cpu"))) as made:
        made.add_texts(["Bees make honey."], ids=["b"])
        made.settings["model"] = str(saved)
    assert run("app", "--store", store, "--host", "0.0.0.0", "--port", 8123, "--share").exit_code == 0
    assert [hit.text for hit in served[0][1]["found"]] == ["Bees make honey."]
    assert (served[0][1]["host"], served[0][1]["port"], served[0][1]["share"]) == ("0.0.0.0", 8123, True)

    other = tmp_path / "other"
    tiny_model(seed=1, backbone=LLM2VecGen(str(saved), device="cpu").backbone).save_pretrained(str(other))
    assert str(store) in fail("app", "--store", store, "--model", other)
    assert "no such store" in fail("app", "--store", tmp_path / "none.store")
    assert len(served) == 1


def test_a_missing_extra_is_named_before_anything_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gradio", None)
    message = fail("app", "--model", "no-such-model")
    assert "'gradio'" in message
    assert "pip install 'llm2vec-gen-st[app]'" in message


def test_what_is_served_loads_nothing_from_elsewhere(
    reader: QueryReader, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    gradio, httpx = pytest.importorskip("gradio"), pytest.importorskip("httpx")
    answers: list[Any] = []

    def visit(page: Any) -> None:
        answers.append(httpx.get(page.local_url))
        page.close()

    monkeypatch.setattr(gradio.Blocks, "block_thread", visit)
    serve(reader)
    assert re.match(r"http://127\.0\.0\.1:\d+/: open it in a browser", capsys.readouterr().out)
    (answer,) = answers
    assert answer.status_code == 200
    assert answer.headers["content-security-policy"].startswith("default-src 'self' ")
    assert not re.search(r"""<(?:link|script|img)[^>]*(?:href|src)=["'](?:https?:)?//""", answer.text)
    assert "fonts.googleapis" not in answer.text
    assert not build_page(reader).analytics_enabled


def test_a_taken_port_is_told_in_a_sentence(reader: QueryReader) -> None:
    pytest.importorskip("gradio")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(OSError, match=rf"cannot be served on 127\.0\.0\.1, port {port}"):
            serve(reader, port=port)
