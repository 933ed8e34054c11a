"""The commands explain and map, on a tiny student saved to disk."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from llm2vec_gen_st import LLM2VecGen
from llm2vec_gen_st.files import read_rows
from llm2vec_gen_st.interpret import Dropping, LatentLens, build_latent_lens, idea_map, latent_chain, logit_lens
from llm2vec_gen_st.responses import GenerationSettings, write_responses
from llm2vec_gen_st.responses.generation import Response
from llm2vec_gen_st.testing import saved_model

from ..command_line import fail, succeed

TEXTS = ["where do polar bears live?", "who makes [honey]?"]
CORPUS = ["Bees make honey [and wax].", "Rivers carry water to the sea."]


class Answers:
    """An LLM that always responds the same: well, or with a text that is cut off."""

    name = "answers"
    texts = ("Bees make honey.", "Because of the")

    def writer(self) -> dict[str, Any]:
        return {"id": "answers"}

    def respond(self, queries: Sequence[str], settings: GenerationSettings, *, seed: int) -> list[Response]:
        flags = ("ok", "cut_off")
        return [Response(text, 4, flag) for text, flag, _ in zip(self.texts, flags, queries, strict=True)]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved_model(tmp_path_factory.mktemp("explained") / "student")


@pytest.fixture(scope="module")
def model(saved: Path) -> LLM2VecGen:
    return LLM2VecGen(str(saved), device="cpu")


def test_explain_prints_and_writes_what_the_functions_find(saved: Path, model: LLM2VecGen, tmp_path: Path) -> None:
    build_latent_lens(model, CORPUS, tmp_path / "contexts", progress=False)
    printed = succeed(
        "explain", *TEXTS, "--model", saved, "--top-k", 3, "--max-new-tokens", 4, "--lens", tmp_path / "contexts",
        "--png", tmp_path / "lens.png", "--html", tmp_path / "lens.html", "--json", tmp_path / "lens.json",
    )  # fmt: skip
    tokens = logit_lens(model, TEXTS, top_k=3, drop=Dropping())
    matches = LatentLens.load(tmp_path / "contexts", model).nearest(TEXTS, k=3)
    for text in TEXTS:
        assert text in printed
    for token in tokens:
        assert f"{token.probability:.3f}" in printed
    for before, token, after in {match.parts for match in matches}:
        assert f"{before}«{token}»{after}".rstrip() in printed
    assert {match.sentence for match in matches} <= set(CORPUS)

    written = json.loads((tmp_path / "lens.json").read_text(encoding="utf-8"))
    assert [row["text"] for row in written] == TEXTS
    assert [row["decoded"] for row in written] == model.decode(TEXTS, prompt_name="query", max_new_tokens=4)
    for number, row in enumerate(written):
        assert [(item["position"], item["rank"], item["token_id"], item["token"]) for item in row["lens"]] == [
            (token.position, token.rank, token.token_id, token.token) for token in tokens if token.input == number
        ]
        assert [item["sentence"] for item in row["contexts"]] == [
            match.sentence for match in matches if match.input == number
        ]
    assert (tmp_path / "lens.png").read_bytes()[:4] == b"\x89PNG"
    assert all(text in (tmp_path / "lens.html").read_text(encoding="utf-8") for text in TEXTS)


def test_explain_drops_words_unless_told_to_keep_all(saved: Path, model: LLM2VecGen, tmp_path: Path) -> None:
    for options, drop in (([], Dropping()), (["--keep-all"], None)):
        path = tmp_path / f"{len(options)}.json"
        succeed("explain", TEXTS[0], "--model", saved, "--json", path, "--prompt-name", "none", *options)
        found = [item["token_id"] for item in json.loads(path.read_text())[0]["lens"]]
        assert found == [token.token_id for token in logit_lens(model, TEXTS[0], top_k=5, drop=drop, prompt_name=None)]
    assert (tmp_path / "0.json").read_text() != (tmp_path / "1.json").read_text()


def test_a_lens_is_built_of_a_file_or_of_responses(saved: Path, model: LLM2VecGen, tmp_path: Path) -> None:
    source = tmp_path / "corpus.jsonl"
    source.write_text("".join(json.dumps({"text": text, "said": text.upper()}) + "\n" for text in CORPUS))
    folder = write_responses(TEXTS, tmp_path / "responses", Answers(), progress=False)
    for name, arguments, texts in (
        ("file", (source,), CORPUS),
        ("column", (source, "--column", "said", "--layer", 1), [text.upper() for text in CORPUS]),
        ("answers", (folder,), Answers.texts),
    ):
        printed = succeed("latent-lens", "build", *arguments, "--output", tmp_path / name, "--model", saved)
        lens = LatentLens.load(tmp_path / name, model)
        assert f"{len(lens)} token states of layer {lens.layer}" in printed
        expected = build_latent_lens(model, texts, tmp_path / "same" / name, layer=lens.layer, progress=False)
        assert lens.nearest(TEXTS, k=2) == expected.nearest(TEXTS, k=2)
    assert LatentLens.load(tmp_path / "column", model).layer == 1


def test_help_shows_an_example_that_parses() -> None:
    example, _, options = succeed("latent-lens", "build", "--help").partition("Example:")[2].partition("╭")
    assert example.split()[:3] == ["llm2vec-gen", "latent-lens", "build"]
    assert {word for word in example.split() if word.startswith("--")} <= set(options.split())


def test_building_a_lens_names_what_is_wrong(saved: Path, tmp_path: Path) -> None:
    output, source = tmp_path / "lens", tmp_path / "corpus.jsonl"
    build = ("latent-lens", "build")
    assert "no-such" in fail(*build, tmp_path / "no-such.jsonl", "--output", output, "--model", saved)
    source.write_text('{"text": "a"}\n{"query": 1}\n')
    assert "row 1 has no text" in fail(*build, source, "--output", output, "--model", saved)
    assert "--column" in fail(*build, tmp_path, "--column", "said", "--output", output, "--model", saved)
    source.write_text('{"text": "a"}\n')
    assert "layer 9" in fail(*build, source, "--layer", 9, "--output", output, "--model", saved)
    assert not output.exists()
    output.mkdir()
    (output / "mine").touch()
    assert "choose another" in fail(*build, source, "--output", output, "--model", saved)
    assert [path.name for path in output.iterdir()] == ["mine"]


def test_explain_shows_the_steps_of_a_chain(saved: Path, model: LLM2VecGen, tmp_path: Path) -> None:
    options = ("--model", saved, "--max-new-tokens", 4, "--json", tmp_path / "chain.json")
    assert "step 1" not in succeed("explain", *TEXTS, *options)
    assert all(row["chain"] == [] for row in json.loads((tmp_path / "chain.json").read_text()))
    printed = succeed("explain", *TEXTS, *options, "--chain", 2)
    steps = latent_chain(model, TEXTS, steps=2, max_new_tokens=4)
    written = json.loads((tmp_path / "chain.json").read_text())
    for step in steps:
        row = written[step.input]
        if step.step == 0:
            assert row["decoded"] == step.decoded
            continue
        assert f"step {step.step}, cosine {step.similarity_to_first:.3f}: " in printed
        found = row["chain"][step.step - 1]
        assert (found["step"], found["decoded"]) == (step.step, step.decoded)
        assert found["similarity_to_previous"] == pytest.approx(step.similarity_to_previous, abs=1e-5)


def test_explain_names_what_is_wrong(saved: Path, tmp_path: Path) -> None:
    for option, name in (("--png", "lens.jpg"), ("--html", "lens.txt"), ("--json", "lens.jsonl")):
        assert name in fail("explain", "a", "--model", saved, option, tmp_path / name)
    assert "no such folder" in fail("explain", "a", "--model", saved, "--lens", tmp_path / "none")
    assert "latent_lens.json" in fail("explain", "a", "--model", saved, "--lens", tmp_path)
    assert "summary" in fail("explain", "a", "--model", saved, "--prompt-name", "summary")
    assert not list(tmp_path.iterdir())


def test_map_prints_and_writes_what_the_function_finds(saved: Path, model: LLM2VecGen, tmp_path: Path) -> None:
    texts, labels = ["bees", "honey", "a river", "the sea", "<b>ice</b>"], ["hive", "hive", 2, 2, 2]
    source, output = tmp_path / "texts.jsonl", tmp_path / "new" / "map"
    rows = [{"text": text, "label": label, "id": 1} for text, label in zip(texts, labels, strict=True)]
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    printed = succeed("map", source, "--output", output, "--model", saved, "--neighbours", 2)
    found = idea_map(model, texts, [str(label) for label in labels], neighbours=2)
    for separation in found.separation:
        assert separation.encoder in printed
        assert f"{separation.silhouette:.3f}" in printed
        assert f"{separation.neighbour_agreement:.1%}" in printed
    points = read_rows(output / "points.jsonl")
    assert [(row["encoder"], row["text"], row["label"]) for row in points] == [
        (point.encoder, point.text, point.label) for point in found.points
    ]
    assert [row["x"] for row in points] == pytest.approx([point.x for point in found.points], abs=1e-5)
    assert [row["encoder"] for row in json.loads((output / "separation.json").read_text())] == [
        "mean pooling", "LLM2Vec-Gen",
    ]  # fmt: skip
    assert (output / "map.png").read_bytes()[:4] == b"\x89PNG"
    page = (output / "map.html").read_text(encoding="utf-8")
    assert "&lt;b&gt;ice&lt;/b&gt;" in page
    assert "<b>" not in page


def test_map_names_the_row_that_is_wrong(saved: Path, tmp_path: Path) -> None:
    source, output = tmp_path / "texts.jsonl", tmp_path / "map"
    source.write_text('{"text": "a", "label": "x"}\n{"text": "b"}\n')
    assert "row 1 has no class" in fail("map", source, "--output", output, "--model", saved)
    source.write_text('{"text": "a", "label": "x"}\n{"label": "x"}\n')
    assert "row 1 has no text" in fail("map", source, "--output", output, "--model", saved)
    source.write_text('{"text": "a", "label": "x"}\n{"text": "b", "label": "x"}\n')
    assert "2 classes" in fail("map", source, "--output", output, "--model", saved)
    assert "no-such" in fail("map", tmp_path / "no-such.jsonl", "--output", output, "--model", saved)
    assert not output.exists()
