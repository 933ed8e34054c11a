"""The page in headless Chromium: two queries, what is shown of them, and where it was loaded from."""

from __future__ import annotations

import json
import os
import socket
import threading
from collections.abc import Iterator
from html import unescape
from pathlib import Path

import pytest
from langchain_llm2vec_gen import FaissStore, LLM2VecGenEmbeddings

pytest.importorskip("gradio")

from llm2vec_gen_st import LLM2VecGen
from llm2vec_gen_st.app import QueryReader
from llm2vec_gen_st.interpret.pages import safe_lines

from .browser import CHROMIUM, DRIVER, NEEDED, embed, opened, served, texts
from .conftest import PASSAGES

pytestmark = pytest.mark.slow

QUERIES = ["who makes <honey>?", "where do polar bears live? ${6*7}"]


@pytest.fixture(scope="module", autouse=True)
def chromium() -> None:
    """Without a browser these tests skip, but where the whole suite is asked for they fail."""
    if CHROMIUM is None or DRIVER is None:
        (pytest.fail if os.environ.get("LLM2VEC_GEN_WHOLE_SUITE") else pytest.skip)(NEEDED)


@pytest.fixture
def ways_out() -> Iterator[tuple[dict[str, str], list[str]]]:
    """Variables that send a process's requests to a proxy that counts them, and those requests."""
    asked: list[str] = []

    def count() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            with connection:
                asked.append(connection.recv(200).decode(errors="replace"))

    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=count, daemon=True).start()
        proxy = f"http://127.0.0.1:{listener.getsockname()[1]}"
        names = ("http_proxy", "https_proxy", "all_proxy")
        env = {name: value for name, value in os.environ.items() if not name.lower().endswith("_proxy")}
        env |= dict.fromkeys(names, proxy) | {"no_proxy": "127.0.0.1,localhost"}
        env.pop("HF_HUB_OFFLINE", None)
        yield env, asked


def test_two_queries_are_read_and_nothing_comes_from_elsewhere(
    saved: Path, tmp_path: Path, ways_out: tuple[dict[str, str], list[str]]
) -> None:
    env, asked = ways_out
    store = tmp_path / "corpus.store"
    model = LLM2VecGen(str(saved), device="cpu")
    with FaissStore(store, LLM2VecGenEmbeddings(model)) as made:
        made.add_texts([passage.text for passage in PASSAGES], ids=[passage.id for passage in PASSAGES])
        made.settings["model"] = str(saved)
        expected = QueryReader(model, made).read(QUERIES)

    with served("--store", str(store), env=env) as url, opened(url) as driver:
        assert driver.title == "What an embedding holds"
        embed(driver, QUERIES)
        assert texts(driver, "article h2") == QUERIES
        assert texts(driver, "article blockquote") == [
            unescape(safe_lines(reading.decoded or "")) or "(nothing)" for reading in expected
        ]
        for number, reading in enumerate(expected, 1):
            column = f"article:nth-of-type({number})"
            assert reading.tokens
            assert reading.hits
            assert len(texts(driver, f"{column} td.token")) == len(reading.tokens)
            assert texts(driver, f"{column} li p") == [hit.text for hit in reading.hits]
            assert texts(driver, f"{column} li cite") == [hit.source for hit in reading.hits]
        assert texts(driver, ".lvg-done")[0].startswith("Cosine of the two embeddings: ")
        assert driver.title == "What an embedding holds"
        wide = driver.execute_script("return document.documentElement.scrollWidth - window.innerWidth")
        assert wide <= 0

        embed(driver, [" ", ""])
        assert texts(driver, ".lvg-error") == ["A query is empty: type a question or a few words."]
        assert texts(driver, "article h2") == QUERIES

        embed(driver, ["", QUERIES[1]])
        assert texts(driver, "article h2") == QUERIES[1:]

        events = [json.loads(entry["message"])["message"] for entry in driver.get_log("performance")]
        loaded = [
            event["params"]["request"]["url"] for event in events if event["method"] == "Network.requestWillBeSent"
        ]
        assert len(loaded) > 10
        assert [one for one in loaded if not one.startswith((url, "data:", "blob:"))] == []
        assert [entry for entry in driver.get_log("browser") if entry["level"] == "SEVERE"] == []
    assert asked == []
