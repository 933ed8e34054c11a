"""Latent lens: nearest corpus tokens by cosine, limits, the saved folder, other LLMs, damage, and killed builds."""

from __future__ import annotations

import json
import shutil
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import faiss
import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers.processors import TemplateProcessing

from llm2vec_gen_st import LLM2VecGen
from llm2vec_gen_st.base_reference import BaseModelError
from llm2vec_gen_st.interpret import LatentLens, build_latent_lens, compression_states
from llm2vec_gen_st.interpret.contexts import SpanTokenizer, TokenSpan, context_of
from llm2vec_gen_st.modules.tensors import CheckpointError
from llm2vec_gen_st.testing import tiny_backbone, tiny_model

CORPUS = [
    "Polar bears live on sea ice. They hunt seals!",
    "",
    "Bees make honey and wax.\nRivers carry water to the sea.",
    "Пчёлы делают мёд. 蜂蜜",
    "a",
    "<|im_end|> is only text here",
]
QUERIES = ["who makes honey?", "where do bears live"]
WORKER = Path(__file__).with_name("latent_lens_worker.py")


@pytest.fixture(scope="module")
def folder(student: LLM2VecGen, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("lens") / "index"
    build_latent_lens(student, CORPUS, path, batch_size=4, progress=False)
    return path


def states_by_hand(model: LLM2VecGen, text: str, layer: int) -> np.ndarray:
    """States (T, H) of length 1 of a text's tokens, from one pass over it alone."""
    ids = model.suffix_transformer.text_tokenizer.ids(text).ids
    if not ids:
        return np.zeros((0, 64), np.float32)
    with torch.inference_mode():
        found = model.llm.base_model(input_ids=torch.tensor([ids]), output_hidden_states=True)
    return unit(found.hidden_states[layer][0].numpy())


def unit(states: np.ndarray) -> np.ndarray:
    lengths: np.ndarray = states / np.linalg.norm(states, axis=1, keepdims=True)
    return lengths


@pytest.mark.parametrize("layer", [-1, 1, 0])
def test_matches_are_the_nearest_of_a_plain_search(student: LLM2VecGen, tmp_path: Path, layer: int) -> None:
    lens = build_latent_lens(student, iter(CORPUS), tmp_path / "index", layer=layer, batch_size=4, progress=False)
    rows = [(number, states) for number, text in enumerate(CORPUS) for states in states_by_hand(student, text, layer)]
    corpus = np.stack([states for _, states in rows])
    assert len(lens) == len(corpus)
    states = compression_states(student, QUERIES, layer=layer, prompt_name="query")
    expected = -np.sort(-(unit(states.flatten(0, 1).numpy()) @ corpus.T), axis=1)[:, :6]
    found = lens.nearest(QUERIES, k=6)
    assert [(match.input, match.position, match.rank) for match in found] == [
        (number, position, rank) for number in range(2) for position in range(4) for rank in range(1, 7)
    ]
    np.testing.assert_allclose([match.similarity for match in found], expected.flatten(), atol=1e-5)
    # The tokens, too, are those whose states are that near.
    for match in found:
        assert match.text == QUERIES[match.input]
        query = unit(states[match.input].numpy())[match.position]
        near = [number for number, vector in rows if abs(float(vector @ query) - match.similarity) < 1e-5]
        assert any(match.sentence in CORPUS[number] for number in near)


def test_tokens_are_marked_in_their_sentence(student: LLM2VecGen, folder: Path) -> None:
    lens = LatentLens.load(folder, student)
    found = {(match.sentence, match.start, match.stop, match.token_id) for match in lens.nearest(QUERIES, k=500)}
    assert len({(sentence, start) for sentence, start, _, _ in found}) > 30
    assert {sentence for sentence, *_ in found} >= {"They hunt seals!", "Bees make honey and wax.", "a"}
    for match in lens.nearest(QUERIES, k=500):
        before, token, after = match.parts
        assert before + token + after == match.sentence
        assert token == match.token
        # A token may be a piece of a character; the character is marked then.
        assert str(student.tokenizer.decode([match.token_id])).strip().strip("\ufffd") in token or not token.strip()
    # Control tokens written in a text are text.
    assert not {token_id for *_, token_id in found} & set(student.tokenizer.all_special_ids)


def test_a_saved_index_opens_the_same(student: LLM2VecGen, folder: Path, tmp_path: Path) -> None:
    built = build_latent_lens(student, CORPUS, tmp_path / "again", batch_size=1, progress=False)
    loaded = LatentLens.load(folder, student)
    assert len(loaded) == len(built)
    assert loaded.layer == 2
    first, second = (pd.DataFrame(lens.nearest(QUERIES, k=4)) for lens in (loaded, built))
    pd.testing.assert_frame_equal(first, second, atol=1e-5)
    assert sorted(path.name for path in folder.iterdir()) == ["contexts.sqlite", "latent_lens.json", "states.faiss"]
    moved = tmp_path / "moved Ω folder"
    shutil.copytree(folder, moved)
    pd.testing.assert_frame_equal(pd.DataFrame(LatentLens.load(moved, student).nearest(QUERIES, k=4)), first)


def test_fewer_tokens_than_asked_for(student: LLM2VecGen, tmp_path: Path) -> None:
    lens = build_latent_lens(student, ["a", "b"], tmp_path / "index", progress=False)
    found = lens.nearest("a", k=50)
    assert [match.rank for match in found] == [1, 2] * 4
    assert lens.nearest([], k=2) == []
    with pytest.raises(ValueError, match="k must be at least 1"):
        lens.nearest("a", k=0)


def test_limits_are_kept_and_no_more_texts_are_read_than_needed(student: LLM2VecGen, tmp_path: Path) -> None:
    taken: list[int] = []

    def texts() -> Iterator[str]:
        for number in range(10_000):
            taken.append(number)
            yield "Rivers carry water from the mountains to the sea, " * 3

    lens = build_latent_lens(
        student, texts(), tmp_path / "index", tokens_per_text=7, max_tokens=30, batch_size=2, progress=False
    )
    assert len(lens) == 30
    assert len(taken) <= 8
    manifest = json.loads((tmp_path / "index" / "latent_lens.json").read_text())
    assert (manifest["texts"], manifest["tokens"], manifest["layer"]) == (5, 30, 2)
    starts = sorted({match.start for match in lens.nearest("river", k=30)})
    assert len(starts) == 7
    assert starts[0] < 30 < 100 < starts[-1]  # Spread over the text.

    short = build_latent_lens(student, texts(), tmp_path / "short", max_text_tokens=3, max_tokens=6, progress=False)
    ids = student.suffix_transformer.text_tokenizer.ids("Rivers carry water from").ids[:3]
    assert {match.token_id for match in short.nearest("river", k=6)} == set(ids)


@pytest.mark.parametrize("name", ["max_text_tokens", "tokens_per_text", "max_tokens", "batch_size"])
def test_limits_must_be_positive(student: LLM2VecGen, tmp_path: Path, name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} must be at least 1, got 0"):
        build_latent_lens(student, CORPUS, tmp_path / "index", progress=False, **{name: 0})
    assert not list(tmp_path.iterdir())


def test_failures_leave_nothing_behind(student: LLM2VecGen, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "index"
    with pytest.raises(TypeError, match="Text 4 is not a string but NoneType"):
        build_latent_lens(student, ["a", "b", "c", "d", None], target, batch_size=2, progress=False)  # type: ignore[list-item]
    with pytest.raises(TypeError, match="one string"):
        build_latent_lens(student, "bees", target, progress=False)
    with pytest.raises(ValueError, match=r"no token in the corpus \(2 texts\)"):
        build_latent_lens(student, ["", ""], target, progress=False)
    with pytest.raises(ValueError, match="layer 9"):
        build_latent_lens(student, CORPUS, target, layer=9, progress=False)
    for error in (KeyboardInterrupt(), OSError("disk full")):

        def interrupt(*_: object, error: BaseException = error) -> None:
            raise error

        monkeypatch.setattr(faiss, "write_index", interrupt)
        with pytest.raises(type(error)):
            build_latent_lens(student, CORPUS, target, progress=False)
    assert not list(tmp_path.iterdir())


def test_a_folder_that_is_there_is_not_written_over(student: LLM2VecGen, folder: Path, tmp_path: Path) -> None:
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    with pytest.raises(FileExistsError, match="not an empty folder"):
        build_latent_lens(student, CORPUS, folder, progress=False)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    (tmp_path / "empty").mkdir()
    assert len(build_latent_lens(student, ["a"], tmp_path / "empty", progress=False)) == 1


def test_states_of_another_llm_are_refused(student: LLM2VecGen, student_bf16: LLM2VecGen, folder: Path) -> None:
    other = tiny_model(backbone=tiny_backbone(seed=1))
    with pytest.raises(BaseModelError, match=r"index holds states of the LLM tiny .* build an index") as caught:
        LatentLens.load(folder, other)
    for model in (student, other):
        assert str(model.backbone.reference.fingerprint) in str(caught.value)
    assert "checkpoint" not in str(caught.value)
    # The same weights in another dtype, and another student on the same LLM, are no other LLM.
    assert len(LatentLens.load(folder, student_bf16).nearest("bees", k=1)) == 4
    fresh = LLM2VecGen.from_base(student.backbone, thought_tokens=1, compression_tokens=2, embedding_dim=8, seed=5)
    assert len(LatentLens.load(folder, fresh).nearest("bees", k=1)) == 2


def test_damaged_files_are_named(student: LLM2VecGen, folder: Path, tmp_path: Path) -> None:
    def copy(name: str) -> Path:
        return Path(shutil.copytree(folder, tmp_path / name))

    with pytest.raises(FileNotFoundError, match=r"there is no index"):
        LatentLens.load(tmp_path, student)
    for name in ("states.faiss", "contexts.sqlite", "latent_lens.json"):
        damaged = copy(f"cut-{name}")
        content = (damaged / name).read_bytes()
        (damaged / name).write_bytes(content[: len(content) // 3])
        with pytest.raises(CheckpointError, match=name.replace(".", r"\.")):
            LatentLens.load(damaged, student)
    (copy("gone") / "contexts.sqlite").unlink()
    with pytest.raises(CheckpointError, match=r"contexts\.sqlite"):
        LatentLens.load(tmp_path / "gone", student)
    build_latent_lens(student, CORPUS[:3], tmp_path / "other", progress=False)
    mixed = copy("mixed")
    shutil.copy(tmp_path / "other" / "states.faiss", mixed)
    with pytest.raises(CheckpointError, match="do not belong together"):
        LatentLens.load(mixed, student)
    newer = copy("newer") / "latent_lens.json"
    newer.write_text(json.dumps({**json.loads(newer.read_text()), "format_version": 2}))
    with pytest.raises(CheckpointError, match="format_version 1"):
        LatentLens.load(newer.parent, student)
    wide = copy("wide")
    index = faiss.IndexFlatIP(32)
    index.add(np.ones((len(LatentLens.load(folder, student)), 32), np.float32))
    faiss.write_index(index, str(wide / "states.faiss"))
    with pytest.raises(CheckpointError, match="32 dimensions"):
        LatentLens.load(wide, student)


@pytest.mark.parametrize("place", ["reading", "moving"])
def test_a_killed_build_leaves_nothing_that_loads_and_can_be_built_again(
    student: LLM2VecGen, tmp_path: Path, place: str
) -> None:
    target = tmp_path / "index"
    worker = subprocess.Popen(
        [sys.executable, str(WORKER), str(target), place],
        stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2],
    )  # fmt: skip
    try:
        assert worker.stdout is not None
        assert worker.stdout.readline() == "here\n"
        if place == "reading":
            with pytest.raises(FileExistsError, match="another build is writing"):
                build_latent_lens(student, CORPUS, target, progress=False)
    finally:
        worker.send_signal(signal.SIGKILL)
        worker.wait()
    assert not target.exists()
    with pytest.raises(FileNotFoundError):
        LatentLens.load(target, student)
    if place == "reading":
        with pytest.raises(FileNotFoundError):
            LatentLens.load(tmp_path / "index.partial", student)
    lens = build_latent_lens(student, CORPUS, target, progress=False)
    assert len(lens) > 30
    assert [path.name for path in tmp_path.iterdir()] == ["index"]


def test_without_lora_layers_the_corpus_is_read_by_the_plain_llm(tmp_path: Path) -> None:
    backbone = tiny_backbone()
    plain = build_latent_lens(tiny_model(backbone=backbone), CORPUS, tmp_path / "plain", progress=False)
    model = LLM2VecGen.from_base(
        backbone, thought_tokens=2, compression_tokens=3, embedding_dim=8, device="cpu",
        lora={"r": 2, "lora_alpha": 64, "target_modules": ["q_proj", "v_proj"]},
    )  # fmt: skip
    for name, parameter in model.llm.named_parameters():
        if ".lora_B." in name:
            torch.nn.init.normal_(parameter)
    build_latent_lens(model, CORPUS, tmp_path / "lora", progress=False)
    first, second = (
        faiss.read_index(str(tmp_path / name / "states.faiss")).reconstruct_n(0, len(plain))
        for name in ("plain", "lora")
    )
    np.testing.assert_allclose(first, second, atol=1e-6)


@given(text=st.text(alphabet=st.characters(exclude_categories=["Cs"]), max_size=400), data=st.data())
def test_a_context_holds_its_token_and_is_part_of_its_text(text: str, data: st.DataObject) -> None:
    start = data.draw(st.integers(0, len(text)))
    stop = data.draw(st.integers(start, len(text)))
    found = context_of(text, TokenSpan(0, 1, start, stop))
    assert found.sentence in text
    assert 0 <= found.start <= found.stop <= len(found.sentence)
    marked, token = found.sentence[found.start : found.stop], text[start:stop]
    assert marked == (token.strip() or token)
    assert len(found.sentence) <= max(240, stop - start)


def test_sentences_end_where_they_should() -> None:
    long = "and " * 50 + "so on!"
    text = f"One ends here. Is this two? {long} 三句话。四。\nFive"
    sentences = ["One ends here.", "Is this two?", long, "三句话。", "四。", "Five"]
    for sentence in sentences:
        start = text.index(sentence)
        for place in (place for place in range(start, start + len(sentence)) if not text[place].isspace()):
            assert context_of(text, TokenSpan(0, 1, place, place + 1)).sentence == sentence


@given(st.text(max_size=60))
@settings(max_examples=60)
def test_spans_cover_the_text(student: LLM2VecGen, text: str) -> None:
    text = text.encode("utf-8", "replace").decode()
    tokenizer = SpanTokenizer(student.tokenizer)
    ids, spans = tokenizer.spans(text, 10_000)
    assert ids == student.suffix_transformer.text_tokenizer.ids(text).ids
    covered = {place for span in spans for place in range(span.start, span.stop)}
    assert {place for place, character in enumerate(text) if not character.isspace()} <= covered
    assert tokenizer.spans(text, 3) == (ids[:3], spans[:3])


def test_a_long_sentence_is_cut_around_the_token() -> None:
    text = "".join(f"word{number} " for number in range(200))
    for number in (0, 100, 199):
        start = text.index(f"word{number} ")
        found = context_of(text, TokenSpan(0, 1, start, start + len(f"word{number}")))
        assert len(found.sentence) == 240
        before, behind = found.start, 240 - found.stop
        assert min(before, behind) > 100 or number in (0, 199)


def test_a_token_that_the_tokenizer_puts_in_front_is_read_but_not_kept(tmp_path: Path) -> None:
    backbone = tiny_backbone()
    backbone.tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", 0)]
    )
    model = tiny_model(backbone=backbone)
    texts = ["", "bees make honey"]
    ids = [model.suffix_transformer.text_tokenizer.ids(text).ids for text in texts]
    assert [row[0] for row in ids] == [0, 0]
    lens = build_latent_lens(model, texts, tmp_path / "index", progress=False)
    assert len(lens) == len(ids[1]) - 1
    stored = faiss.read_index(str(tmp_path / "index" / "states.faiss")).reconstruct_n(0, len(lens))
    np.testing.assert_allclose(stored, states_by_hand(model, texts[1], 2)[1:], atol=1e-5)
    assert 0 not in {match.token_id for match in lens.nearest("bees", k=50)}


def test_each_sentence_is_stored_once_a_text(folder: Path) -> None:
    connection = sqlite3.connect(folder / "contexts.sqlite")
    sentences = [text for (text,) in connection.execute("SELECT text FROM sentences")]
    connection.close()
    assert sorted(sentences) == sorted(set(sentences))
    assert "They hunt seals!" in sentences
