"""A vector depends on its text alone: not on batch, padding, order, threads, odd characters, or what was cut off."""

from __future__ import annotations

import gc
import logging
import random
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pandas
import psutil
import pytest
import torch
from sentence_transformers import SentenceTransformer
from transformers import AutoModelForCausalLM, LlamaConfig

from llm2vec_gen_st import LLM2VecGen
from llm2vec_gen_st.backbone import Backbone
from llm2vec_gen_st.base_reference import BaseReference
from llm2vec_gen_st.testing import tiny_backbone, tiny_model, tiny_tokenizer

from .large_heads import with_large_heads

WORDS = [
    "polar",
    "bears",
    "live",
    "on",
    "sea",
    "ice",
    "who",
    "makes",
    "honey",
    "rivers",
    "carry",
    "water",
    "42",
    "café",
    "naïve",
    "蜂蜜",
    "to",
    "the",
    "mountains",
]
ODD = [
    "Buddhism (religion/philosophy)",
    "👨‍👩‍👧‍👦",
    "السلام عليكم ورحمة الله",
    "nothing\0here",
    " " * 2000,
    "\ud800 alone \udfff",
    "<|im_start|>user\nhello<|im_end|><|endoftext|>",
    "<question1>",
    "",
    "Rivers carry water from the mountains. " * 40,
]


def _texts(count: int, seed: int = 0) -> list[str]:
    """Texts of 1 to about 300 tokens."""
    chance = random.Random(seed)
    return ["a", *(" ".join(chance.choices(WORDS, k=chance.randint(1, 70))) for _ in range(count - 1))]


def _cosines(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return (a * b).sum(1) / np.linalg.norm(a, axis=1) / np.linalg.norm(b, axis=1)


def _calls(llm: torch.nn.Module, log: list[dict[str, Any]]) -> Callable[[], None]:
    """Log the keyword arguments of every forward pass of the LLM's body; returns what ends the logging."""
    return llm.base_model.register_forward_pre_hook(
        lambda module, args, kwargs: log.append({**kwargs, "shape": _shape(kwargs)}), with_kwargs=True
    ).remove


def _shape(call: dict[str, Any]) -> tuple[int, int]:
    """Rows of a call, and their width with what is cached."""
    given = next(call[name] for name in ("inputs_embeds", "input_ids") if call.get(name) is not None)
    past = call.get("past_key_values")
    return given.shape[0], given.shape[1] + (past.get_seq_length() if past is not None else 0)


@pytest.fixture(scope="module")
def one_by_one(student: LLM2VecGen) -> tuple[list[str], np.ndarray]:
    """40 texts, each embedded alone."""
    texts = _texts(40)
    return texts, np.stack([student.encode(text) for text in texts])


# A1: batch and padding


@pytest.mark.parametrize("batch_size", [2, 7, 40])
@pytest.mark.parametrize("side", ["left", "right"])
def test_vector_does_not_depend_on_batch_order_or_padding_side(
    student: LLM2VecGen, one_by_one: tuple[list[str], np.ndarray], batch_size: int, side: str
) -> None:
    texts, alone = one_by_one
    lengths = [len(student.preview(text).token_ids) for text in texts]
    assert min(lengths) == 1
    assert max(lengths) > 200
    assert len(np.unique(alone.round(5), axis=0)) == 40
    order = np.random.default_rng(batch_size).permutation(40)
    before = student.tokenizer.padding_side
    student.tokenizer.padding_side = side
    try:
        together = student.encode([texts[row] for row in order], batch_size=batch_size)
    finally:
        student.tokenizer.padding_side = before
    assert np.abs(together - alone[order]).max() < 1e-4
    assert _cosines(together, alone[order]).min() >= 0.99999


def test_bf16_ranks_the_same_in_every_batch(student_bf16: LLM2VecGen) -> None:
    query = student_bf16.encode_query("who makes honey")
    candidates = [*_texts(60, seed=1), *WORDS]
    alone = {text: float(student_bf16.similarity(query, student_bf16.encode_document(text))) for text in candidates}
    # The fixed set: texts whose scores are further apart than bfloat16's rounding.
    ranked: list[str] = []
    for text in sorted(alone, key=alone.__getitem__, reverse=True):
        if not ranked or alone[ranked[-1]] - alone[text] > 2e-3:
            ranked.append(text)
    assert len(ranked) >= 15
    shuffled = random.Random(0).sample(ranked, len(ranked))
    for batch_size in (2, 7, 40):
        found = student_bf16.encode_document(shuffled, batch_size=batch_size)
        assert found.dtype == np.float32
        top = student_bf16.similarity(query, found)[0].argsort(descending=True)[:10]
        assert [shuffled[row] for row in top.tolist()] == ranked[:10]


# A2: odd text


def _student(attention: str, dtype: torch.dtype) -> LLM2VecGen:
    tokenizer = tiny_tokenizer()
    tokenizer.pad_token = tokenizer.eos_token
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, eos_token_id=2, pad_token_id=2, bos_token_id=None,
    )  # fmt: skip
    torch.manual_seed(0)
    llm = AutoModelForCausalLM.from_config(config, attn_implementation=attention).to(dtype)
    assert llm.config._attn_implementation == attention
    return tiny_model(backbone=Backbone(llm.requires_grad_(False).eval(), tokenizer, BaseReference("tiny")))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_odd_texts_are_finite_and_keep_the_suffix_in_its_place(attention: str, dtype: torch.dtype) -> None:
    model = _student(attention, dtype)
    log: list[dict[str, Any]] = []
    stop = _calls(model.llm, log)
    found = model.encode(ODD, batch_size=len(ODD))
    stop()
    assert found.shape == (len(ODD), 48)
    assert found.dtype == np.float32
    assert np.isfinite(found).all()
    suffix = model.suffix_transformer.suffix.detach().to(dtype)
    lengths = sorted(len(model.preview(text).token_ids) for text in ODD)
    seen = []
    for row in torch.cat([row for call in log for row in call["inputs_embeds"].unbind()], dim=0).split(
        [call["inputs_embeds"].shape[1] for call in log for _ in call["inputs_embeds"]]
    ):
        starts = [start for start in range(len(row) - 7) if torch.equal(row[start : start + 8], suffix)]
        assert len(starts) == 1
        seen.append(starts[0])
    assert sorted(seen) == lengths
    alone = np.stack([model.encode(text) for text in ODD])
    assert np.abs(alone - found).max() < (1e-5 if dtype == torch.float32 else 0.05)


def test_control_tokens_in_text_are_read_as_text(student: LLM2VecGen) -> None:
    special = set(student.tokenizer.all_special_ids)
    assert len(special) == 3
    for text in (ODD[6], "<|endoftext|>", "a<|im_end|>b"):
        ids = student.preview(text).token_ids
        assert not special & set(ids)
        assert student.tokenizer.decode(ids) == text


def test_non_finite_vector_names_the_input(fresh_student: LLM2VecGen) -> None:
    fresh_student.llm.get_input_embeddings().weight.data[student_token(fresh_student, "Q")] = float("nan")
    texts = ["a", "river", "bears", "Q", "honey, honey and honey"]
    with pytest.raises(FloatingPointError, match=r"1 inputs are not finite; the first is input 3\b"):
        fresh_student.encode(texts)
    with pytest.raises(FloatingPointError, match=r"input 3\b"):
        fresh_student.encode(texts, convert_to_tensor=True)
    with pytest.raises(FloatingPointError, match=r"input 3\b"):
        fresh_student.encode(texts, convert_to_numpy=False)
    with pytest.raises(FloatingPointError, match=r"input 3\b"):
        fresh_student.encode_soft_prompts(texts)
    fresh_student.response_head.mlp_align.weight.data[0, 0] = float("nan")
    with pytest.raises(FloatingPointError, match=r"2 inputs are not finite; the first is input 0\b"):
        fresh_student.encode(["a", "b"])


def student_token(model: LLM2VecGen, character: str) -> int:
    """The only token id of a character."""
    (token,) = model.preview(character).token_ids
    return token


# A3: truncation


def test_text_beyond_the_limit_changes_nothing_and_is_warned_about_once(
    student: LLM2VecGen, caplog: pytest.LogCaptureFixture
) -> None:
    limit = student.suffix_transformer.text_limit
    assert limit == 512 - 8
    # "Q" is one token and stays one, so the number of tokens is the number of characters.
    assert len(student.preview("Q" * 100).token_ids) == 100
    counts = [10, limit - 1, limit, limit + 1, 200_000]
    log: list[dict[str, Any]] = []
    stop = _calls(student.llm, log)
    with caplog.at_level(logging.WARNING):
        found = student.encode(["Q" * count for count in counts], batch_size=2)
    stop()
    warnings = [record.getMessage() for record in caplog.records if "were cut" in record.getMessage()]
    assert len(warnings) == 1
    assert warnings[0].startswith("2 of the inputs")
    assert str(limit) in warnings[0]
    assert max(call["shape"][1] for call in log) == 512
    assert np.abs(found[3:] - found[2]).max() < 3e-6
    assert np.abs(found[0] - found[2]).max() > 1e-4
    # The last token inside the limit still counts.
    other = student.encode(["Q" * (limit - 1) + "b", "Q" * (limit - 1) + "bQQ"])
    assert np.abs(other[0] - found[2]).max() > 1e-4
    assert np.abs(other[0] - other[1]).max() < 3e-6
    tokens = student.encode(["Q" * count for count in counts], output_value="token_embeddings")
    assert [tuple(item.shape) for item in tokens] == [(4, 64)] * 5
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        student.encode_soft_prompts(["Q" * 600] * 5, batch_size=2)
    assert [record.getMessage()[:2] for record in caplog.records] == ["5 "]
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        student.encode(["Q" * limit])
    assert not caplog.records


def test_text_far_beyond_the_limit_is_not_tokenized_to_its_end(
    student: LLM2VecGen, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit = student.suffix_transformer.text_limit
    plain = student.suffix_transformer.text_tokenizer
    seen: list[int] = []

    class Counting:
        def __init__(self, core: Any) -> None:
            self.core = core

        def encode(self, text: str, **kwargs: Any) -> Any:
            seen.append(len(text))
            return self.core.encode(text, **kwargs)

    text = "polar bears live on sea ice. " * 20_000
    whole = student.tokenizer(text[:9000])["input_ids"]
    monkeypatch.setattr(plain, "_core", Counting(plain._core))
    assert student.preview(text).token_ids == whole[:limit]
    assert student.preview(text).cut
    assert sum(seen) < 4 * 8 * (limit + 1)
    monkeypatch.undo()

    def seconds(value: str) -> float:
        started = time.process_time()
        for _ in range(5):
            student.encode(value)
        return time.process_time() - started

    at_limit = student.tokenizer.decode(whole[:limit])
    seconds(at_limit)
    assert seconds(text) < 3 * seconds(at_limit) + 0.05


def test_raised_max_seq_length_keeps_more(fresh_student: LLM2VecGen) -> None:
    short = fresh_student.encode("Q" * 600)
    fresh_student.max_seq_length = 700
    assert fresh_student.suffix_transformer.text_limit == 692
    assert not fresh_student.preview("Q" * 600).cut
    assert np.abs(fresh_student.encode("Q" * 600) - short).max() > 1e-5


# A4: inputs


class _SetLike:
    """Iterable and sized, without positions."""

    def __init__(self, *texts: str) -> None:
        self.texts = dict.fromkeys(texts)

    def __iter__(self) -> Iterator[str]:
        return iter(self.texts)

    def __len__(self) -> int:
        return len(self.texts)


@pytest.mark.parametrize(
    "wrap",
    [
        lambda texts: (text for text in texts),
        tuple,
        np.array,
        lambda texts: np.array(texts, dtype=object),
        lambda texts: pandas.Series(texts, index=[7, 8, 9]),
        lambda texts: _SetLike(*texts),
        lambda texts: dict.fromkeys(texts).keys(),
    ],
    ids=["generator", "tuple", "array", "object array", "series", "set-like", "keys"],
)
def test_any_iterable_of_strings_is_embedded_in_its_order(
    student: LLM2VecGen, wrap: Callable[[list[str]], Any]
) -> None:
    texts = ["honey", "a longer text about rivers", "bears"]
    expected = student.encode(texts)
    found = student.encode(wrap(texts))
    assert found.shape == (3, 48)
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, expected, atol=1e-6)
    assert student.encode_soft_prompts(wrap(texts)).shape == (3, 4, 64)


def test_single_string_empty_string_and_no_strings(student: LLM2VecGen, student_bf16: LLM2VecGen) -> None:
    assert student.encode("honey").shape == (48,)
    np.testing.assert_allclose(student.encode(np.str_("honey")), student.encode("honey"), atol=1e-6)
    assert np.isfinite(student.encode("")).all()
    np.testing.assert_allclose(student.encode(["", "honey"])[0], student.encode(""), atol=1e-5)
    assert student.encode([]).shape == (0, 48)
    assert student.encode([]).dtype == np.float32
    assert student.encode(iter(())).shape == (0, 48)
    assert student.encode([], convert_to_tensor=True).shape == (0, 48)
    assert student.encode([], truncate_dim=8).shape == (0, 8)
    assert student.encode([], precision="binary").shape == (0, 6)
    assert student.encode([], convert_to_numpy=False) == []
    assert student.encode_query([]).shape == (0, 48)
    assert student_bf16.encode("honey").dtype == np.float32
    assert student_bf16.encode("honey", convert_to_tensor=True).dtype == torch.float32


@pytest.mark.parametrize("wrong", [3, None, b"bytes", 1.5, ["nested"], ("a", "b"), {"text": "a"}])
def test_item_that_is_no_string_is_named_by_position(student: LLM2VecGen, wrong: Any) -> None:
    for encode in (student.encode, student.encode_query, student.encode_soft_prompts):
        with pytest.raises(TypeError, match=rf"Input 2 is not a string but {type(wrong).__name__}"):
            encode(["a", "b", wrong])


@pytest.mark.parametrize("wrong", [3, None, b"bytes", {"a": "b"}])
def test_input_that_is_no_iterable_of_strings_is_refused(student: LLM2VecGen, wrong: Any) -> None:
    with pytest.raises(TypeError, match=f"got {type(wrong).__name__}"):
        student.encode(wrong)


OPTIONS: list[dict[str, Any]] = [
    {"precision": "int8"},
    {"precision": "uint8"},
    {"precision": "binary"},
    {"precision": "ubinary"},
    {"convert_to_tensor": True},
    {"convert_to_tensor": True, "precision": "binary"},
    {"convert_to_numpy": False},
    {"convert_to_numpy": False, "precision": "ubinary"},
    {"normalize_embeddings": True},
    {"truncate_dim": 8},
    {"truncate_dim": 8, "normalize_embeddings": True, "precision": "int8"},
    {"output_value": "token_embeddings"},
    {"output_value": None},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_options_mean_what_they_mean_in_sentence_transformers(student: LLM2VecGen, options: dict[str, Any]) -> None:
    texts = [*_texts(4, seed=2), ""]
    host = SentenceTransformer(modules=list(student), device="cpu")
    _assert_same(student.encode(texts, **options), host.encode(texts, **options))
    if options.get("precision") not in ("int8", "uint8"):  # the host cannot take these of one vector
        _assert_same(student.encode("honey", **options), host.encode("honey", **options))


def test_unknown_precision_and_option_are_refused(student: LLM2VecGen) -> None:
    with pytest.raises(ValueError, match="int4"):
        student.encode("a", precision="int4")
    with pytest.raises(ValueError, match="int4"):
        student.encode([], precision="int4")
    with pytest.raises(ValueError, match="colour"):
        student.encode("a", colour="red")


@pytest.mark.parametrize("size", [0, -1])
def test_batch_sizes_at_which_nothing_would_be_encoded_are_refused(student: LLM2VecGen, size: int) -> None:
    for act in (student.encode, student.encode_query, student.encode_soft_prompts, student.decode):
        with pytest.raises(ValueError, match=f"batch_size is {size}; it must be at least 1"):
            act(["bees"], batch_size=size)


def _assert_same(found: Any, expected: Any) -> None:
    assert type(found) is type(expected)
    if isinstance(expected, dict):
        assert found.keys() == expected.keys()
        for key in expected:
            _assert_same(found[key], expected[key])
    elif isinstance(expected, list):
        assert len(found) == len(expected)
        for a, b in zip(found, expected, strict=True):
            _assert_same(a, b)
    elif isinstance(expected, torch.Tensor | np.ndarray):
        assert found.dtype == expected.dtype
        assert found.shape == expected.shape
        np.testing.assert_allclose(np.asarray(found), np.asarray(expected), atol=1e-6)
    else:
        assert found == expected


def test_positional_options_are_those_of_sentence_transformers(student: LLM2VecGen) -> None:
    host = SentenceTransformer(modules=list(student), device="cpu", prompts=student.prompts)
    texts = ["who makes honey", "a"]
    np.testing.assert_allclose(student.encode(texts, "query", None, 1), host.encode(texts, "query", None, 1), atol=1e-6)


# A5: instructions


def test_instruction_as_argument_equals_instruction_pasted_in_front(student: LLM2VecGen) -> None:
    texts = ["where do polar bears live?", "", "Rivers <|im_end|>"]
    query, document = student.prompts["query"], student.prompts["document"]
    assert query != document
    np.testing.assert_allclose(student.encode_query(texts), student.encode([query + t for t in texts]), atol=1e-6)
    np.testing.assert_allclose(student.encode_document(texts), student.encode([document + t for t in texts]), atol=1e-6)
    np.testing.assert_allclose(
        student.encode(texts, prompt="X: "), student.encode(["X: " + t for t in texts]), atol=1e-6
    )
    named, pasted = (
        student.encode_soft_prompts(texts, prompt_name="query"),
        student.encode_soft_prompts([query + t for t in texts]),
    )
    torch.testing.assert_close(named, pasted)
    assert np.abs(student.encode_query(texts) - student.encode(texts)).max() > 1e-4


def test_preview_shows_text_and_ids(student: LLM2VecGen) -> None:
    preview = student.preview("honey?", prompt_name="query")
    assert preview.text == student.prompts["query"] + "honey?"
    assert student.tokenizer.decode(preview.token_ids) == preview.text
    assert preview.suffix_length == 8
    assert not preview.cut
    assert student.preview("Q" * 505).cut
    assert len(student.preview("Q" * 505).token_ids) == 504
    assert student.preview("honey?", prompt="Say: ").text == "Say: honey?"


def test_unknown_instruction_lists_the_known_ones(student: LLM2VecGen) -> None:
    for call in (student.encode, student.preview, student.encode_soft_prompts, student.decode):
        with pytest.raises(ValueError, match="qeury") as caught:
            call("honey", prompt_name="qeury")
        assert "query" in str(caught.value).replace("qeury", "")
        assert "document" in str(caught.value)


# A6: threads


def test_sixteen_threads_get_the_vectors_of_one(student: LLM2VecGen, caplog: pytest.LogCaptureFixture) -> None:
    jobs = [_texts(1 + number % 5, seed=number) for number in range(64)]
    jobs[5] = ["Q" * 700] * 3
    expected = [student.encode(job) for job in jobs]
    caplog.clear()
    with caplog.at_level(logging.WARNING), ThreadPoolExecutor(16) as pool:
        found = list(pool.map(student.encode, jobs))
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)
    assert [record.getMessage()[:2] for record in caplog.records if "cut" in record.getMessage()] == ["3 "]


# A7: memory


def test_encoding_never_keeps_a_cache(student: LLM2VecGen) -> None:
    log: list[dict[str, Any]] = []
    outputs: list[Any] = []
    stop = _calls(student.llm, log)
    hook = student.llm.base_model.register_forward_hook(lambda module, args, output: outputs.append(output))
    student.encode(_texts(5))
    student.encode_soft_prompts(["a"])
    stop()
    hook.remove()
    assert len(log) >= 2
    assert all(call["use_cache"] is False for call in log)
    assert all(output.past_key_values is None for output in outputs)


def test_one_long_text_does_not_pad_the_short_ones(student: LLM2VecGen) -> None:
    texts = ["bear"] * 15 + ["Q" * 504] + ["bear"] * 16
    # Not one start for all of them, which would be run once.
    texts[0] = "ears"
    log: list[dict[str, Any]] = []
    stop = _calls(student.llm, log)
    found = student.encode(texts, batch_size=32)
    stop()
    short = len(student.preview("bear").token_ids) + 8
    assert sorted(call["shape"] for call in log) == [(1, 512), (31, short)]
    np.testing.assert_allclose(found[15], student.encode("Q" * 504), atol=1e-5)
    np.testing.assert_allclose(found[16], student.encode("bear"), atol=1e-5)


def test_no_group_is_larger_than_the_token_budget() -> None:
    model = LLM2VecGen.from_base(
        tiny_backbone(), thought_tokens=2, compression_tokens=2, embedding_dim=8, max_batch_tokens=200, device="cpu"
    )
    texts = _texts(40, seed=4)
    log: list[dict[str, Any]] = []
    stop = _calls(model.llm, log)
    found = model.encode(texts, batch_size=40)
    stop()
    shapes = [call["shape"] for call in log]
    assert sum(rows for rows, _ in shapes) == 40
    assert len(shapes) > 3
    assert all(rows == 1 or rows * width <= 200 for rows, width in shapes)
    np.testing.assert_allclose(found, np.stack([model.encode(text) for text in texts]), atol=1e-5)


def test_memory_after_2000_calls_is_that_after_200(student: LLM2VecGen) -> None:
    chance = random.Random(0)
    texts = _texts(60, seed=3)
    process = psutil.Process()
    resident: dict[int, int] = {}
    for call in range(1, 2001):
        student.encode(chance.choices(texts, k=chance.randint(1, 4)))
        if call in (200, 2000):
            gc.collect()
            resident[call] = process.memory_info().rss
    assert resident[2000] <= 1.05 * resident[200], resident


def test_heads_stay_precise_when_the_model_is_cast_or_runs_under_autocast() -> None:
    model = with_large_heads(tiny_model())
    texts = ["bees", "rivers carry water", ""]
    expected = model.encode(texts)

    def cosines(found: np.ndarray) -> np.ndarray:
        both = np.linalg.norm(found, axis=1) * np.linalg.norm(expected, axis=1)
        cosine: np.ndarray = (found * expected).sum(axis=1) / both
        return cosine

    with torch.autocast("cpu", torch.bfloat16):
        learning = model(model.preprocess(texts))["sentence_embedding"]
    assert learning.requires_grad
    assert (cosines(learning.detach().float().numpy()) > 0.999).all()
    model.bfloat16()
    assert model.llm.dtype == torch.bfloat16
    assert {parameter.dtype for parameter in model.response_head.parameters()} == {torch.float32}
    assert (cosines(model.encode(texts)) > 0.999).all()
