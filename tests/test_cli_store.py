"""The commands on a store: index, search and ask, on a tiny student saved to disk."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from langchain_core.documents import Document
from langchain_llm2vec_gen import ChatLLM2VecGen, FaissStore
from langchain_llm2vec_gen.rag import messages

from llm2vec_gen_st import LLM2VecGen
from llm2vec_gen_st.testing import saved_base, saved_model, tiny_backbone

from .command_line import fail, succeed

COMMANDS = ("index", "search", "ask")


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("students")
    backbone = tiny_backbone()
    # The random LLM goes on with the prompt's last word; this makes it one that can be seen.
    backbone.tokenizer.chat_template = f"{backbone.tokenizer.chat_template}Bees"
    base = saved_base(folder / "base", backbone)
    for seed in (0, 1):
        saved_model(folder / f"student{seed}", base, seed=seed)
    return folder / "student0"


@pytest.fixture
def docs(tmp_path: Path) -> Path:
    folder = tmp_path / "docs"
    folder.mkdir()
    (folder / "bears.txt").write_text("Polar bears live on [sea] ice in the Arctic and hunt seals.")
    rows = [{"text": "Bees make honey.", "year": 2020}, {"text": "Rivers carry water.", "year": 2021}]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "image.png").touch()
    return folder


@pytest.fixture
def store(saved: Path, docs: Path, tmp_path: Path) -> Path:
    path = tmp_path / "corpus.store"
    succeed("index", docs, "--store", path, "--model", saved)
    return path


@pytest.mark.parametrize("command", COMMANDS)
def test_help_shows_an_example_that_parses(command: str) -> None:
    printed = succeed(command, "--help")
    example = printed.partition("Example:")[2].partition("╭")[0]
    assert example.split()[:2] == ["llm2vec-gen", command]
    for option in [word for word in example.split() if word.startswith("-")]:
        assert option in printed.partition("╭")[2]


def test_index_again_adds_only_what_changed(saved: Path, docs: Path, tmp_path: Path) -> None:
    store = tmp_path / "corpus.store"
    printed = succeed("index", docs, "--store", store, "--model", saved)
    assert "3 chunks added, 0 unchanged, 0 removed, from 2 files; 3 in all." in printed
    assert "left out: 1 .png" in printed
    (docs / "bears.txt").write_text("Polar bears sleep.")
    assert "1 chunks added, 2 unchanged, 1 removed" in succeed("index", docs, "--store", store)


def test_search_needs_no_model_and_works_from_another_folder(
    saved: Path, docs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(saved.parent)
    store = tmp_path / "corpus.store"
    succeed("index", docs, "--store", store, "--model", saved.name, "--dtype", "bfloat16", "--metric", "ip")
    monkeypatch.chdir(docs)
    found = json.loads(succeed("search", store, "Bees make honey.", "--json"))
    assert len(found) == 3
    assert [row["score"] for row in found] == sorted((row["score"] for row in found), reverse=True)
    assert set(found[0]) == {"id", "score", "text", "metadata"}
    with FaissStore(store, read_only=True) as opened:
        assert dict(opened.settings) == {"model": str(saved), "dtype": "bfloat16"}
        assert opened.stats()["metric"] == "ip"


def test_search_shows_score_source_and_text(store: Path, docs: Path) -> None:
    printed = succeed("search", store, "polar bears", "-k", 3)
    for expected in (str(docs / "bears.txt"), "[sea] ice", "rows.jsonl, row 2", "Rivers carry water."):
        assert expected in "".join(printed.split("\n")) or expected in printed
    assert len(json.loads(succeed("search", store, "polar bears", "-k", 1, "--json"))) == 1


def test_filters_choose_the_documents(store: Path) -> None:
    found = json.loads(succeed("search", store, "x", "--filter", '{"year": {"$gte": 2021}}', "--json"))
    assert [row["text"] for row in found] == ["Rivers carry water."]
    assert "--filter" in fail("search", store, "x", "--filter", "{year}")
    assert "not a JSON object" in fail("search", store, "x", "--filter", "[1]")
    assert "$near" in fail("search", store, "x", "--filter", '{"year": {"$near": 1}}')


def test_ask_answers_and_lists_its_passages(store: Path, saved: Path) -> None:
    limits = ("-k", 2, "--max-tokens", 60, "--filter", '{"year": 2020}')
    printed = succeed("ask", store, "Who makes honey?", *limits)
    answer, _, passages = printed.partition("┏")
    assert "[1]" in passages
    assert "Bees make honey." in passages
    assert "[2]" not in passages
    assert "Rivers" not in passages

    chat = ChatLLM2VecGen(LLM2VecGen(str(saved)), max_tokens=60)
    expected = chat.invoke(messages("Who makes honey?", [Document("Bees make honey.")])).content
    assert str(expected).split()
    assert answer.split() == str(expected).split()


def test_index_kinds_and_columns_are_passed_on(saved: Path, docs: Path, tmp_path: Path) -> None:
    store = tmp_path / "corpus.store"
    (docs / "rows.jsonl").write_text('{"mine": "Bees make honey in summer."}\n')
    options = ("--column", "mine", "--chunk-size", 12, "--chunk-overlap", 0, "--index", "hnsw", "--batch-size", 2)
    succeed("index", docs / "rows.jsonl", "--store", store, "--model", saved, *options)
    with FaissStore(store, read_only=True) as opened:
        assert opened.stats()["index"] == "hnsw"
        assert [document.page_content for document in opened.documents()] == ["Bees make", "honey in", "summer."]
    assert "no column 'other'" in fail("index", docs / "rows.jsonl", "--store", store, "--column", "other")


def test_errors_are_one_sentence(saved: Path, store: Path, docs: Path, tmp_path: Path) -> None:
    assert "no such store" in fail("search", tmp_path / "none.store", "x")
    assert not (tmp_path / "none.store").exists()
    assert "no such store" in fail("ask", tmp_path / "none.store", "x")
    assert "none.txt" in fail("index", docs / "none.txt", "--store", tmp_path / "new.store", "--model", saved)
    assert "image.png" in fail("index", docs / "image.png", "--store", tmp_path / "new.store", "--model", saved)
    assert not (tmp_path / "new.store").exists()
    assert "chunk_overlap" in fail("index", docs, "--store", store, "--chunk-size", 10, "--chunk-overlap", 10)
    other = saved.with_name("student1")
    assert "embedding" in fail("index", docs, "--store", store, "--model", other)
    assert "embedding" in fail("search", store, "x", "--model", other)
    assert json.loads(succeed("search", store, "x", "--json"))
    unnamed = tmp_path / "unnamed.store"
    FaissStore(unnamed).close()
    assert "--model" in fail("search", unnamed, "x")
    (tmp_path / "broken.store").write_text("not a store")
    assert "broken.store" in fail("search", tmp_path / "broken.store", "x")
