"""The command line: every command on a tiny student saved to disk, its help, and its errors."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import typer
from sentence_transformers import SentenceTransformer

from llm2vec_gen_st import LLM2VecGen, __version__
from llm2vec_gen_st.files import read_rows
from llm2vec_gen_st.responses import read_responses
from llm2vec_gen_st.testing import saved_base, saved_model

from .command_line import fail, run, succeed

COMMANDS = (
    "demo", "encode", "encode-corpus", "decode", "explain", "map", "respond", "train", "convert", "info",
    "index", "search", "ask", "app",
)  # fmt: skip
TEXTS = ["where do polar bears live?", "who makes [honey]?"]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved_base(tmp_path_factory.mktemp("base"))


@pytest.fixture(scope="module")
def saved(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved_model(tmp_path_factory.mktemp("students") / "student", base)


@pytest.mark.parametrize("command", COMMANDS)
def test_help_shows_an_example_that_parses(command: str) -> None:
    printed = succeed(command, "--help")
    example = printed.partition("Example:")[2].partition("╭")[0]
    assert example.split()[:2] == ["llm2vec-gen", command]
    for option in [word for word in example.split() if word.startswith("--")]:
        assert option in printed.partition("╭")[2]


def test_help_is_fast_and_loads_no_framework() -> None:
    code = (
        "import sys; from llm2vec_gen_st.cli import app; app(['--help'], standalone_mode=False); "
        "assert not {'torch', 'transformers', 'sentence_transformers'} & sys.modules.keys()"
    )
    before = os.times()
    root = Path(__file__).parent.parent
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=root)
    assert done.returncode == 0, done.stderr
    assert all(command in done.stdout for command in COMMANDS)
    after = os.times()
    # Of the processor: the machine may have other work.
    assert after.children_user + after.children_system - before.children_user - before.children_system < 5


def test_version() -> None:
    assert succeed("--version").strip() == __version__


@pytest.mark.parametrize("name", ["vectors.npy", "vectors.jsonl", "vectors.parquet"])
def test_encode_writes_what_the_model_returns(saved: Path, tmp_path: Path, name: str) -> None:
    output = tmp_path / name
    assert "2 embeddings of 48 dimensions" in succeed("encode", saved, *TEXTS, "--output", output)
    if output.suffix == ".npy":
        found = np.load(output)
    else:
        rows = read_rows(output)
        assert [row["text"] for row in rows] == TEXTS
        found = np.array([row["embedding"] for row in rows])
    np.testing.assert_allclose(found, LLM2VecGen(str(saved)).encode_query(TEXTS), atol=1e-6)


def test_encode_reads_files_and_keeps_their_columns(saved: Path, tmp_path: Path) -> None:
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("".join(json.dumps({"id": n, "body": text}) + "\n" for n, text in enumerate(TEXTS)))
    succeed("encode", saved, "-i", source, "-o", output, "--column", "body", "--prompt-name", "document")
    rows = read_rows(output)
    assert [(row["id"], row["text"]) for row in rows] == list(enumerate(TEXTS))
    expected = LLM2VecGen(str(saved)).encode_document(TEXTS)
    np.testing.assert_allclose([row["embedding"] for row in rows], expected, atol=1e-6)
    assert "'body'" not in fail("encode", saved, "-i", source, "-o", output)
    assert "'other'" in fail("encode", saved, "-i", source, "-o", output, "--column", "other")


def test_encode_without_instruction_and_in_bfloat16(saved: Path, tmp_path: Path) -> None:
    output = tmp_path / "vectors.npy"
    succeed("encode", saved, *TEXTS, "-o", output, "--prompt-name", "none", "--dtype", "bfloat16")
    expected = LLM2VecGen(str(saved), model_kwargs={"dtype": "bfloat16"}).encode(TEXTS)
    np.testing.assert_allclose(np.load(output), expected, atol=1e-6)


def test_decode_prints_the_decoded_texts(saved: Path) -> None:
    printed = succeed("decode", saved, *TEXTS, "--max-new-tokens", "4")
    assert all(text in printed for text in TEXTS)
    said = LLM2VecGen(str(saved)).decode(TEXTS, prompt_name="query", max_new_tokens=4)
    assert all(word in printed for text in said for word in text.split() if word.isascii() and word.isprintable())


def test_info_counts_parameters_and_names_the_base(saved: Path, base: Path) -> None:
    printed = succeed("info", saved)
    model = LLM2VecGen(str(saved))
    trainable = 8 * 64 + (64 * 64 + 64) + (64 * 48 + 48)
    for expected in (
        str(base),
        str(model.suffix_transformer.base.fingerprint),
        f"{trainable:,}",
        f"{sum(parameter.numel() for parameter in model.llm.parameters()):,}",
        "4 thought + 4 compression tokens",
        repr(model.prompts["query"]),
    ):
        assert expected in printed


def test_respond_then_train_makes_a_student_that_loads(base: Path, tmp_path: Path) -> None:
    queries = tmp_path / "queries.txt"
    queries.write_text("".join(f"What is a river, number {number}?\n" for number in range(6)))
    folder, student = tmp_path / "responses", tmp_path / "student"
    respond = ("respond", queries, "-o", folder, "-m", base, "--max-new-tokens", "5", "--batch-size", "2")
    succeed(*respond, "--format", "jsonl", "--shard", "0/2")
    succeed(*respond, "--format", "jsonl", "--shard", "1/2")
    flags = ("ok", "cut_off", "empty")
    assert len(read_responses(folder, include=flags)) == 6

    data = tmp_path / "data.jsonl"
    rows = [{"query": f"query {number}", "response": f"Bees make honey {number}."} for number in range(6)]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = ("epochs=1", "batch_size=2", "thought_tokens=2", "compression_tokens=2", "dtype=float32")
    chosen = [argument for setting in settings for argument in ("--set", setting)]
    succeed("train", data, "-o", student, "--base", base, "--teacher", "self", "--recipe", "llama3", *chosen)
    assert LLM2VecGen(str(student)).encode(["a river"]).shape == (1, 64)


def test_convert_to_each_form_keeps_the_embeddings(saved: Path, tmp_path: Path) -> None:
    expected = LLM2VecGen(str(saved)).encode(TEXTS)
    for form in ("ours", "official", "native"):
        succeed("convert", saved, tmp_path / form, "--to", form)
    np.testing.assert_allclose(LLM2VecGen(str(tmp_path / "ours")).encode(TEXTS), expected, atol=1e-5)
    np.testing.assert_allclose(LLM2VecGen(str(tmp_path / "official")).encode(TEXTS), expected, atol=1e-5)
    native = SentenceTransformer(str(tmp_path / "native"), device="cpu")
    np.testing.assert_allclose(native.encode(TEXTS), expected, atol=1e-5)
    assert "not an empty folder" in fail("convert", saved, tmp_path / "ours", "--to", "native")


def test_errors_are_one_sentence(saved: Path, base: Path, tmp_path: Path) -> None:
    output = tmp_path / "vectors.npy"
    assert "vectors.txt" in fail("encode", saved, "a", "-o", tmp_path / "vectors.txt")
    assert "--input" in fail("encode", saved, "-o", output)
    assert "no-such-file" in fail("encode", saved, "-i", tmp_path / "no-such-file.txt", "-o", output)
    assert "summary" in fail("encode", saved, "a", "-o", output, "--prompt-name", "summary")
    assert "no-such-model" in fail("info", tmp_path / "no-such-model")
    assert "no-such-file" in fail("respond", tmp_path / "no-such-file.txt", "-o", tmp_path / "r", "-m", base)
    assert "respond" in fail("train", tmp_path / "no-such-folder", "-o", tmp_path / "s")
    assert "key=value" in fail("train", saved, "-o", tmp_path / "s", "--set", "epochs")
    assert "['progress']" in fail("train", saved, "-o", tmp_path / "s", "--set", "progress=false")
    assert not output.exists()


def test_a_missing_base_and_a_broken_checkpoint_are_named(saved: Path, tmp_path: Path) -> None:
    config = next(saved.rglob("suffix_config.json"))
    for name, change in (
        ("no-base", {"base": {"id": str(tmp_path / "gone"), "revision": "abc123", "fingerprint": None}}),
        ("future", {"format_version": 99}),
    ):
        copy = tmp_path / name
        for file in saved.rglob("*"):
            if file.is_file():
                target = copy / file.relative_to(saved)
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(file.read_bytes())
        path = copy / config.relative_to(saved)
        path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    message = fail("info", tmp_path / "no-base")
    assert "gone" in message
    assert "abc123" in message
    assert "format_version" in fail("info", tmp_path / "future")


def test_debug_shows_the_traceback(saved: Path, tmp_path: Path) -> None:
    result = run("--debug", "encode", saved, "a", "-o", tmp_path / "vectors.txt")
    assert isinstance(result.exception, ValueError)


def test_bugs_keep_their_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    for error in (KeyError("column"), TypeError("not callable"), RuntimeError("shapes")):
        monkeypatch.setattr("llm2vec_gen_st.demo.run.run_demo", _raising(error))
        result = run("demo")
        assert result.exception is error
        assert "Error: " not in result.output


def test_exits_and_interrupts_are_left_to_the_shell(monkeypatch: pytest.MonkeyPatch) -> None:
    for error, code in (
        (typer.Exit(3), 3),
        (KeyboardInterrupt(), 130),
        (typer.Abort(), 1),
        (BrokenPipeError(32, ""), 1),
    ):
        monkeypatch.setattr("llm2vec_gen_st.demo.run.run_demo", _raising(error))
        result = run("demo")
        assert result.exit_code == code
        assert "Error: " not in result.output
        assert "Traceback" not in result.output


def _raising(error: BaseException) -> Callable[..., None]:
    def raise_it(*_: object, **__: object) -> None:
        raise error

    return raise_it


def test_a_reader_that_goes_away_ends_the_command_quietly() -> None:
    printing = (
        "import typer; from llm2vec_gen_st.cli.errors import Commands; app = typer.Typer(cls=Commands); "
        "app.callback()(lambda: None); app.command('go')(lambda: print('found')); app(['go'])"
    )
    module = ["-m", "llm2vec_gen_st.cli"]
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONUNBUFFERED"}
    reading, writing = os.pipe()
    os.close(reading)
    for arguments in ([*module, "--version"], [*module, "info", "--help"], ["-c", printing]):
        done = subprocess.run(
            [sys.executable, *arguments],
            stdout=writing,
            stderr=subprocess.PIPE,
            text=True,
            cwd=Path(__file__).parent.parent,
            env=environment,
        )
        assert (done.returncode, done.stderr) == (1, "")
    os.close(writing)


def test_the_module_runs_as_the_command_does() -> None:
    command = [sys.executable, "-m", "llm2vec_gen_st.cli", "--version"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parent.parent)
    assert done.stdout.strip() == __version__
