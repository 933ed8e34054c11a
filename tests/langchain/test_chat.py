"""The chat model: the embedder's own LLM, real streams, stop words, lengths, and messages that stay text."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from langchain_core.caches import InMemoryCache
from langchain_core.callbacks import AsyncCallbackHandler, BaseCallbackHandler
from langchain_core.exceptions import ContextOverflowError
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage, AIMessageChunk, ChatMessage, HumanMessage, SystemMessage, ToolMessage
from langchain_llm2vec_gen import ChatLLM2VecGen, LLM2VecGenEmbeddings
from langchain_llm2vec_gen import chat as chat_module
from langchain_llm2vec_gen.answers import AnswerReader
from langchain_llm2vec_gen.chat import PromptTooLongError
from langchain_llm2vec_gen.writing import WritingSettings, next_tokens
from langchain_tests.integration_tests import ChatModelIntegrationTests
from langchain_tests.unit_tests import ChatModelUnitTests
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    GenerationConfig,
    GPT2Config,
    LlamaConfig,
    MistralConfig,
)

from llm2vec_gen_st import LLM2VecGen
from llm2vec_gen_st.backbone import Backbone
from llm2vec_gen_st.modules.lora import lora_parameters
from llm2vec_gen_st.reasoning import without_reasoning
from llm2vec_gen_st.testing import saved_model, tiny_backbone, tiny_model

from .event_loop import check_goes_on, rounds

QUESTION = "Where do polar bears live?"
# With tied embeddings a random LLM repeats the prompt's last token, a line break, which is no answer.
SMALL: dict[str, Any] = {
    "vocab_size": 320, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "tie_word_embeddings": False, "initializer_range": 0.3, "bos_token_id": None,
    "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip


def _backbone() -> Backbone:
    return tiny_backbone(LlamaConfig(**SMALL, max_position_embeddings=1024), seed=1)


MODEL = tiny_model(backbone=_backbone())


def _text(message: Any) -> str:
    assert isinstance(message.content, str)
    return message.content


class _Standard:
    """What the standard suites are told: a chat model for text, without tools."""

    @property
    def chat_model_class(self) -> type[BaseChatModel]:
        return ChatLLM2VecGen

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {"model": MODEL}

    @property
    def standard_chat_model_params(self) -> dict[str, Any]:
        return {"temperature": 0, "max_tokens": 10, "timeout": 60, "stop": [], "max_retries": 2}

    @property
    def has_tool_calling(self) -> bool:
        return False

    @property
    def has_structured_output(self) -> bool:
        return False

    @property
    def supports_model_override(self) -> bool:
        return False


class TestStandardUnit(_Standard, ChatModelUnitTests):
    pass


class TestStandardIntegration(_Standard, ChatModelIntegrationTests):
    pass


@pytest.fixture
def chat() -> ChatLLM2VecGen:
    return ChatLLM2VecGen(MODEL, max_tokens=24)


def _written_by(model: LLM2VecGen, ids: list[int], length: int) -> list[int]:
    """Greedy continuation by the LLM's own ``generate``."""
    config = GenerationConfig(
        max_new_tokens=length, do_sample=False, eos_token_id=model.tokenizer.eos_token_id, pad_token_id=0
    )
    found = model.llm.generate(input_ids=torch.tensor([ids]), generation_config=config)  # type: ignore[operator]
    return [token for token in found[0, len(ids) :].tolist() if token != model.tokenizer.eos_token_id]


class _Says:
    """Stands in for the LLM: its next tokens are those of given texts, one token a piece."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, text: str, *, end: bool = True, pieces: int = 1) -> None:
        tokenizer = MODEL.tokenizer
        self.taken = 0
        plain = MODEL.suffix_transformer.text_tokenizer
        self.ids = [
            token
            for start in range(0, len(text), pieces)
            for token in plain.ids(text[start : start + pieces], add_special_tokens=False).ids
        ]
        if end:
            self.ids.append(tokenizer.eos_token_id)
        monkeypatch.setattr(chat_module, "next_tokens", self)

    def __call__(self, *args: Any) -> Iterator[int]:
        self.taken = 0
        for token in self.ids:
            self.taken += 1
            yield token


def test_the_base_model_is_loaded_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved_model(tmp_path / "student")
    loads: list[Any] = []
    original = AutoModelForCausalLM.from_pretrained

    def count(*args: Any, **kwargs: Any) -> Any:
        loads.append(args)
        return original(*args, **kwargs)

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", count)
    embeddings = LLM2VecGenEmbeddings(str(tmp_path / "student"))
    weights = {name: tensor.clone() for name, tensor in embeddings.model.llm.state_dict().items()}
    before = embeddings.embed_query(QUESTION)
    chat = ChatLLM2VecGen(embeddings, max_tokens=3)
    chat.invoke(QUESTION)
    assert len(loads) == 1
    assert chat.llm is embeddings.model.llm
    assert ChatLLM2VecGen(embeddings.model).llm is chat.llm
    assert embeddings.embed_query(QUESTION) == before
    assert all(torch.equal(tensor, weights[name]) for name, tensor in chat.llm.state_dict().items())


@pytest.mark.parametrize(
    "config",
    [
        LlamaConfig(**SMALL),
        MistralConfig(**SMALL, sliding_window=8),
        Gemma3TextConfig(**SMALL, head_dim=16, sliding_window=8),
        GPT2Config(vocab_size=320, n_embd=64, n_layer=2, n_head=4, bos_token_id=None, eos_token_id=2),
    ],
    ids=lambda config: config.model_type,
)
def test_answer_is_the_llms_own_greedy_one(config: Any) -> None:
    model = tiny_model(backbone=tiny_backbone(config))
    chat = ChatLLM2VecGen(model, max_tokens=24)
    messages = [{"role": "user", "content": QUESTION}]
    prompt = model.tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)["input_ids"]
    expected = _written_by(model, prompt, 24)
    answer = chat.invoke(QUESTION)
    assert answer.content == model.tokenizer.decode(expected, skip_special_tokens=True).strip()
    assert answer.usage_metadata is not None
    assert answer.usage_metadata["input_tokens"] == len(prompt)
    assert answer.usage_metadata["output_tokens"] >= len(expected)
    assert chat.get_num_tokens_from_messages([HumanMessage(QUESTION)]) == len(prompt)


def test_streamed_pieces_are_many_and_make_the_answer(chat: ChatLLM2VecGen) -> None:
    whole, chunks = chat.invoke(QUESTION), list(chat.stream(QUESTION))
    assert len(chunks) > 5
    assert "".join(map(_text, chunks)) == whole.content != ""
    total = chunks[0]
    for chunk in chunks[1:]:
        total = total + chunk
    assert total.usage_metadata == whole.usage_metadata
    assert total.response_metadata == whole.response_metadata
    assert whole.response_metadata == {"finish_reason": "length", "model_name": "tiny"}

    async def streamed() -> str:
        return "".join([_text(chunk) async for chunk in chat.astream(QUESTION)])

    assert asyncio.run(streamed()) == whole.content
    assert asyncio.run(chat.ainvoke(QUESTION)).content == whole.content


def test_a_stream_gives_out_text_before_the_rest_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    says = _Says(monkeypatch, "Bees make honey, bears eat it.")
    stream = ChatLLM2VecGen(MODEL).stream(QUESTION)
    assert _text(next(stream)) == "B"
    assert says.taken == 1
    stream.close()  # type: ignore[attr-defined]
    assert says.taken == 1


def test_callbacks_hear_each_token_of_a_stream_once(chat: ChatLLM2VecGen) -> None:
    heard: list[str] = []
    heard_async: list[str] = []

    class Listener(BaseCallbackHandler):
        def on_llm_new_token(self, token: str, **kwargs: Any) -> None:
            heard.append(token)

    class AsyncListener(AsyncCallbackHandler):
        async def on_llm_new_token(self, token: str, **kwargs: Any) -> None:
            heard_async.append(token)

    async def streamed() -> None:
        async for _ in chat.astream(QUESTION, config={"callbacks": [AsyncListener()]}):
            pass

    expected = chat.invoke(QUESTION, config={"callbacks": [Listener()]}).content
    assert heard == []
    list(chat.stream(QUESTION, config={"callbacks": [Listener()]}))
    asyncio.run(streamed())
    assert "".join(heard) == "".join(heard_async) == expected


def test_the_end_is_told_apart_from_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    says = _Says(monkeypatch, "Honey.")
    answer = ChatLLM2VecGen(MODEL).invoke(QUESTION)
    assert (answer.content, answer.response_metadata["finish_reason"]) == ("Honey.", "stop")
    assert answer.usage_metadata is not None
    assert answer.usage_metadata["output_tokens"] == len(says.ids)
    short = ChatLLM2VecGen(MODEL).invoke(QUESTION, max_tokens=2)
    assert (short.content, short.response_metadata["finish_reason"]) == ("Ho", "length")


def test_max_tokens_by_option_by_call_and_by_bind() -> None:
    chat = ChatLLM2VecGen(MODEL, max_tokens=7)

    def used(answer: AIMessage) -> int:
        assert answer.usage_metadata is not None
        return answer.usage_metadata["output_tokens"]

    assert used(chat.invoke("a")) == 7
    assert used(chat.invoke("a", max_tokens=3)) == 3
    assert used(chat.invoke("a", max_tokens=None)) == 7
    assert used(chat.bind(max_tokens=2).invoke("a")) == 2
    assert used(asyncio.run(chat.bind(max_tokens=2).ainvoke("a"))) == 2


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("max_tokens", 0, "max_tokens must be at least 1"),
        ("temperature", -0.1, "temperature must not be negative"),
        ("top_p", 0.0, "top_p must be above 0"),
        ("top_p", 1.1, "at most 1"),
        ("stop", [""], "stop word must not be empty"),
    ],
)
def test_options_out_of_range_are_refused_early_and_late(option: str, value: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ChatLLM2VecGen(MODEL, **{option: value})
    with pytest.raises(ValueError, match=message):
        ChatLLM2VecGen(MODEL).invoke("a", **{option: value})


def test_an_unknown_option_of_a_call_is_named(chat: ChatLLM2VecGen) -> None:
    with pytest.raises(ValueError, match="does not know the options max_token; a call takes max_tokens"):
        chat.invoke("a", max_token=3)


def test_something_without_an_llm_is_refused() -> None:
    with pytest.raises(
        ValueError, match="takes an LLM2VecGenEmbeddings or an LLM2VecGen, whose LLM it shares, not str"
    ):
        ChatLLM2VecGen("llm2vec-gen-smollm2-135m")  # type: ignore[arg-type]


@pytest.mark.parametrize("pieces", [1, 2, 3, 5, 100])
@pytest.mark.parametrize(
    ("stop", "expected"),
    [
        (["\nHuman:"], "The bears live on ice.\n\nHuma Human"),
        (["Human:"], "The bears live on ice.\n\nHuma Human"),
        ([" live"], "The bears"),
        (["ive"], "The bears l"),
        (["T"], ""),
        (["never", "ice"], "The bears live on"),
        (["."], "The bears live on ice"),
        (["🐻‍❄️"], "The bears live on ice.\n\nHuma Human\nHuman: Who?"),
    ],
)
def test_nothing_of_a_stop_word_or_behind_it_is_shown(
    stop: list[str], expected: str, pieces: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "The bears live on ice.\n\nHuma Human\nHuman: Who? 🐻‍❄️ and the answer goes on"
    says = _Says(monkeypatch, text, pieces=pieces)
    chat = ChatLLM2VecGen(MODEL)
    chunks = list(chat.stream(QUESTION, stop=stop))
    word = next(word for word in stop if word in text)
    assert "".join(map(_text, chunks)) == expected
    taken = MODEL.tokenizer.decode(says.ids[: says.taken])
    assert word in taken
    assert word not in MODEL.tokenizer.decode(says.ids[: says.taken - 1])
    assert chunks[-1].response_metadata["finish_reason"] == "stop"
    assert chat.invoke(QUESTION, stop=stop).content == ChatLLM2VecGen(MODEL, stop=stop).invoke(QUESTION).content
    assert chat.bind(stop=stop).invoke(QUESTION).content == "".join(map(_text, chunks))


def test_stop_words_of_a_call_replace_those_of_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    _Says(monkeypatch, "one two three")
    chat = ChatLLM2VecGen(MODEL, stop=["two"])
    assert chat.invoke("a").content == "one"
    assert chat.invoke("a", stop=["three"]).content == "one two"
    assert chat.invoke("a", stop=[]).content == "one two three"


def test_a_cache_tells_models_with_other_stop_words_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    says = _Says(monkeypatch, "one two three")
    cache = InMemoryCache()
    for _ in range(2):
        assert ChatLLM2VecGen(MODEL, cache=cache).invoke("a").content == "one two three"
        assert ChatLLM2VecGen(MODEL, cache=cache, stop=["two"]).invoke("a").content == "one"
        assert ChatLLM2VecGen(MODEL, cache=cache, stop=["two"]).invoke("a", stop=["three"]).content == "one two"
        says.taken = 0
    assert ChatLLM2VecGen(MODEL, cache=cache, stop=["two"]).invoke("a").content == "one"
    assert says.taken == 0


def test_half_a_stop_word_at_the_end_is_part_of_the_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    _Says(monkeypatch, "Ask Hum")
    assert ChatLLM2VecGen(MODEL).invoke("a", stop=["Human"]).content == "Ask Hum"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("<think>hm, 2 + 2</think>\n\nFour.", "Four."),
        ("Four<think>hm</think>.", "Four."),
        ("Four. <think>never closed", "Four."),
        ("a < b <thin", "a < b <thin"),
        ("<think></think>", ""),
    ],
)
def test_reasoning_never_reaches_an_answer(text: str, expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    _Says(monkeypatch, text)
    chat = ChatLLM2VecGen(MODEL)
    assert chat.invoke(QUESTION).content == "".join(map(_text, chat.stream(QUESTION))) == expected
    assert without_reasoning(text) == expected


@pytest.mark.parametrize("special", [False, True])
def test_reasoning_between_tokens_of_its_own_is_dropped(special: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    backbone = tiny_backbone()
    backbone.tokenizer.add_tokens(["<think>", "</think>"], special_tokens=special)
    model = tiny_model(backbone=backbone)
    ids = backbone.tokenizer("<think>secret</think>shown")["input_ids"]
    monkeypatch.setattr(chat_module, "next_tokens", lambda *args: iter([*ids, 2]))
    assert ChatLLM2VecGen(model).invoke(QUESTION).content == "shown"


def test_a_template_that_opens_the_reasoning_is_understood(monkeypatch: pytest.MonkeyPatch) -> None:
    backbone = tiny_backbone()
    backbone.tokenizer.chat_template = str(backbone.tokenizer.chat_template).replace(
        "assistant\n", "assistant\n<think>"
    )
    model = tiny_model(backbone=backbone)
    _Says(monkeypatch, "hm, 2 + 2</think>Four.")
    assert ChatLLM2VecGen(model).invoke("What is <think>?").content == "Four."
    assert ChatLLM2VecGen(MODEL).invoke("What is <think>").content == "hm, 2 + 2Four."


def test_control_tokens_that_the_llm_writes_are_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = MODEL.tokenizer("ice")["input_ids"]
    monkeypatch.setattr(chat_module, "next_tokens", lambda *args: iter([0, *plain, 1, 2]))
    assert ChatLLM2VecGen(MODEL).invoke("a").content == "ice"


def test_characters_of_several_tokens_come_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    says = _Says(monkeypatch, "漢字 🐻‍❄️ naïve")
    assert len(says.ids) > 15
    chunks = [_text(chunk) for chunk in ChatLLM2VecGen(MODEL).stream("a")]
    assert "".join(chunks) == "漢字 🐻‍❄️ naïve"
    assert "\ufffd" not in "".join(chunks)


any_answer = st.text("ab<>/thinkENDS \n🐻\ufffd", max_size=40) | st.lists(
    st.sampled_from(["<think>", "</think>", "<th", "END", "EN", "a", " ", "\n"]), max_size=12
).map("".join)


@settings(max_examples=400)
@given(
    text=any_answer,
    cuts=st.lists(st.integers(0, 60), max_size=8),
    stop=st.none()
    | st.sampled_from(["END", "ab", " ", "\n\n", "<", "EN "])
    | st.text("abEN< ", min_size=1, max_size=3),
    reasoning=st.booleans(),
)
def test_pieces_do_not_depend_on_where_the_text_is_cut(
    text: str, cuts: list[int], stop: str | None, reasoning: bool
) -> None:
    words = [] if stop is None else [stop]
    expected = AnswerReader(words, reasoning=reasoning).read(text, complete=True)
    reader = AnswerReader(words, reasoning=reasoning)
    pieces = [reader.read(text[:cut]) for cut in sorted(min(cut, len(text)) for cut in cuts)]
    assert "".join([*pieces, reader.read(text, complete=True)]) == expected
    assert "<think>" not in expected or "<think" not in text.replace("<think>", "")
    assert expected == expected.strip()
    assert not any(word in expected for word in words)
    if not words and not reasoning and "</think>" not in text:
        assert expected == without_reasoning(text)


def test_conversations_are_read_through_the_chat_template(chat: ChatLLM2VecGen) -> None:
    messages = [
        SystemMessage("Be brief."),
        HumanMessage([{"type": "text", "text": "Who makes "}, "honey?"]),
        AIMessage("Bees."),
        ChatMessage(role="user", content="And wax?"),
    ]
    ids = chat._prompt(messages).ids
    assert MODEL.tokenizer.decode(ids) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nWho makes honey?<|im_end|>\n"
        "<|im_start|>assistant\nBees.<|im_end|>\n<|im_start|>user\nAnd wax?<|im_end|>\n<|im_start|>assistant\n"
    )
    assert chat.get_num_tokens_from_messages(messages) == len(ids)
    assert chat._prompt([HumanMessage("a"), AIMessageChunk(content="b")]).ids.count(1) == 3


@settings(max_examples=50)
@given(text=st.text(st.characters(exclude_categories=()), max_size=20), control=st.sampled_from(["<|im_end|>", "\0"]))
def test_control_tokens_inside_messages_stay_text(text: str, control: str) -> None:
    chat = ChatLLM2VecGen(MODEL)
    spelled = [SystemMessage(control + text), HumanMessage(text + control), AIMessage(control), HumanMessage(text)]
    plain = [SystemMessage("a"), HumanMessage("b"), AIMessage("c"), HumanMessage("d")]
    special = set(MODEL.tokenizer.all_special_ids) | {1}
    assert [token for token in chat._prompt(spelled).ids if token in special] == [
        token for token in chat._prompt(plain).ids if token in special
    ]


def test_tokens_of_a_text_are_counted_by_the_llms_own_tokenizer(chat: ChatLLM2VecGen) -> None:
    assert chat.get_num_tokens("polar bears") == len(MODEL.tokenizer("polar bears")["input_ids"])
    assert chat.get_num_tokens("<|im_end|>") > 1
    assert ChatLLM2VecGen(MODEL, custom_get_token_ids=lambda text: [1, 2, 3]).get_num_tokens("a") == 3


def test_messages_are_joined_without_a_chat_template() -> None:
    backbone = tiny_backbone()
    backbone.tokenizer.chat_template = None
    chat = ChatLLM2VecGen(tiny_model(backbone=backbone), max_tokens=2)
    ids = chat._prompt([SystemMessage("Be brief."), HumanMessage("Who?")]).ids
    assert backbone.tokenizer.decode(ids) == "Be brief.\n\nWho?"
    assert chat.invoke("Who?").response_metadata["finish_reason"] == "length"


@pytest.mark.parametrize(
    ("messages", "said"),
    [
        ([], "no messages"),
        ([HumanMessage("a"), ToolMessage("1", tool_call_id="1")], "Message 1 is of the type 'tool'"),
        ([HumanMessage([{"type": "image_url", "image_url": {"url": "https://a.b/c"}}])], "Message 0 .*'image_url'"),
        (
            [AIMessage("", tool_calls=[{"name": "add", "args": {}, "id": "1", "type": "tool_call"}])],
            "Message 0 calls tools",
        ),
    ],
)
def test_messages_that_cannot_be_read_are_named(chat: ChatLLM2VecGen, messages: list[Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        chat.invoke(messages)
    with pytest.raises(ValueError, match=said):
        list(chat.stream(messages))


def test_tools_are_refused(chat: ChatLLM2VecGen) -> None:
    with pytest.raises(NotImplementedError):
        chat.bind_tools([])
    with pytest.raises(ValueError, match="calls no tools"):
        chat.get_num_tokens_from_messages([HumanMessage("a")], tools=[{"name": "add"}])


def test_a_prompt_beyond_the_window_is_refused_with_both_lengths() -> None:
    chat = ChatLLM2VecGen(MODEL)
    long = "bees " * 2000
    count = chat.get_num_tokens_from_messages([HumanMessage(long)])
    assert count > 1024
    with pytest.raises(PromptTooLongError, match=f"takes {count} tokens, and the context window of tiny has 1024"):
        chat.invoke(long)
    with pytest.raises(ContextOverflowError):
        list(chat.stream(long))


def test_an_answer_ends_where_the_window_does() -> None:
    chat = ChatLLM2VecGen(MODEL, max_tokens=4000)
    around = chat.get_num_tokens_from_messages([HumanMessage("!")]) - 1
    message = HumanMessage("!?" * ((1020 - around) // 2))
    assert 1018 <= chat.get_num_tokens_from_messages([message]) < 1024
    answer = chat.invoke([message])
    assert answer.usage_metadata is not None
    assert answer.usage_metadata["total_tokens"] == 1024
    assert answer.response_metadata["finish_reason"] == "length"
    assert chat.profile is not None
    assert chat.profile["max_input_tokens"] == 1024


def test_sampling_follows_temperature_and_nucleus(chat: ChatLLM2VecGen) -> None:
    greedy = chat.invoke(QUESTION).content
    with torch.random.fork_rng():
        torch.manual_seed(0)
        assert len({_text(chat.invoke(QUESTION, temperature=2.0)) for _ in range(4)}) > 1
        assert {_text(chat.invoke(QUESTION, temperature=1.0, top_p=1e-6)) for _ in range(3)} == {greedy}


def test_scores_that_are_not_finite_are_reported() -> None:
    backbone = tiny_backbone()
    backbone.llm.get_input_embeddings().weight.data[5, 0] = float("nan")
    with pytest.raises(FloatingPointError, match="scores are not finite"):
        next(next_tokens(backbone.llm, [5], WritingSettings(1, 0.0, 1.0)))


def test_lora_layers_are_off_while_chatting_and_on_while_embedding() -> None:
    backbone = _backbone()
    expected = ChatLLM2VecGen(tiny_model(backbone=backbone), max_tokens=16).invoke(QUESTION).content
    student = LLM2VecGen.from_base(
        backbone, thought_tokens=2, compression_tokens=2, embedding_dim=8, device="cpu",
        lora={"r": 2, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"]},
    )  # fmt: skip
    with torch.no_grad():
        for parameter in lora_parameters(student.llm).values():
            parameter.normal_()
    chat = ChatLLM2VecGen(student, max_tokens=16)
    vector = student.encode(QUESTION)
    with ThreadPoolExecutor(4) as pool:
        vectors = [pool.submit(student.encode, QUESTION) for _ in range(8)]
        answers = [pool.submit(lambda: chat.invoke(QUESTION).content) for _ in range(4)]
        assert {answer.result() for answer in answers} == {expected}
        for found in vectors:
            np.testing.assert_allclose(found.result(), vector, atol=1e-5)
    # A stream that waits for its reader keeps nobody from embedding.
    stream = chat.stream(QUESTION)
    first = _text(next(stream))
    thread = threading.Thread(target=student.encode, args=(QUESTION,), daemon=True)
    thread.start()
    thread.join(30)
    assert not thread.is_alive()
    assert first + "".join(map(_text, stream)) == expected


def test_threads_answer_and_embed_at_once(chat: ChatLLM2VecGen) -> None:
    embeddings = LLM2VecGenEmbeddings(MODEL)
    questions = [f"{'word ' * (number % 5)}{number}" for number in range(16)]
    alone = [chat.invoke(question, max_tokens=6).content for question in questions]
    vectors = [embeddings.embed_query(question) for question in questions]
    with ThreadPoolExecutor(16) as pool:
        answers = pool.map(lambda question: chat.invoke(question, max_tokens=6).content, questions)
        found = pool.map(embeddings.embed_query, questions)
        assert list(answers) == alone
        np.testing.assert_allclose(list(found), vectors, atol=1e-5)
    assert [answer.content for answer in chat.bind(max_tokens=6).batch(questions)] == alone


def _slow(monkeypatch: pytest.MonkeyPatch, seconds: float) -> list[int]:
    """Each token takes a while; gives the tokens that were written."""
    written: list[int] = []

    def slow(*args: Any) -> Iterator[int]:
        for token in next_tokens(*args):
            time.sleep(seconds)
            written.append(token)
            yield token

    monkeypatch.setattr(chat_module, "next_tokens", slow)
    return written


def test_event_loop_goes_on_while_an_answer_is_written(chat: ChatLLM2VecGen, monkeypatch: pytest.MonkeyPatch) -> None:
    _slow(monkeypatch, 0.2)

    async def streamed() -> None:
        async for _ in chat.astream(QUESTION, max_tokens=4):
            pass

    async def both() -> None:
        await asyncio.gather(chat.ainvoke(QUESTION, max_tokens=4), streamed())

    seconds = asyncio.run(rounds(both()))
    assert len(seconds) > 20
    check_goes_on(seconds, 0.2)


def test_a_cancelled_call_stops_writing(chat: ChatLLM2VecGen, monkeypatch: pytest.MonkeyPatch) -> None:
    written = _slow(monkeypatch, 0.02)

    async def cancelled() -> None:
        await asyncio.wait_for(chat.ainvoke(QUESTION, max_tokens=500), timeout=0.3)

    with pytest.raises(asyncio.TimeoutError):
        asyncio.run(cancelled())
    count = len(written)
    time.sleep(0.2)
    assert len(written) <= count + 1 < 100


def test_what_identifies_the_model_is_small_and_changes_with_its_settings(chat: ChatLLM2VecGen) -> None:
    assert chat._llm_type == "llm2vec-gen"
    assert chat.asdict() == {
        "model_name": "tiny", "base_fingerprint": MODEL.backbone.reference.fingerprint, "max_tokens": 24,
        "temperature": 0.0, "top_p": 1.0, "model_stop": None, "_type": "llm2vec-gen",
    }  # fmt: skip
    assert len(repr(chat)) < 500
    assert "model" not in chat.model_dump()


def test_the_backbone_stays_as_it_was(chat: ChatLLM2VecGen) -> None:
    backbone: Backbone = MODEL.backbone
    config = backbone.llm.generation_config.to_dict() if backbone.llm.generation_config else None
    before = backbone.tokenizer.backend_tokenizer.to_str()
    chat.invoke(QUESTION, temperature=0.5)
    assert backbone.tokenizer.backend_tokenizer.to_str() == before
    assert (backbone.llm.generation_config.to_dict() if backbone.llm.generation_config else None) == config
