"""Logit lens: the tokens, logits and probabilities that one plain forward pass gives, less those that are left out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pandas as pd
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import Gemma2Config, GPT2Config, PretrainedConfig

from llm2vec_gen_st import LLM2VecGen
from llm2vec_gen_st.interpret import Dropping, LensToken, compression_states, logit_lens
from llm2vec_gen_st.interpret.dropping import bare_word, words_of
from llm2vec_gen_st.testing import tiny_backbone, tiny_model

TEXTS = ["where do polar bears live?", "", "Who makes honey?", "a river", "蜂蜜 и мёд"]
FAMILIES: dict[str, Callable[[], PretrainedConfig | None]] = {
    "llama": lambda: None,
    # A cap behind the head, and a norm of its own kind.
    "gemma2": lambda: Gemma2Config(
        vocab_size=320, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, query_pre_attn_scalar=16, sliding_window=16, final_logit_softcapping=0.5,
        bos_token_id=None, eos_token_id=2, pad_token_id=0,
    ),
    "gpt2": lambda: GPT2Config(
        vocab_size=320, n_embd=64, n_layer=2, n_head=4, n_positions=1024, bos_token_id=None, eos_token_id=2
    ),
}  # fmt: skip


def logits_by_hand(model: LLM2VecGen, text: str, prompt_name: str | None = "query") -> torch.Tensor:
    """Logits (n, V) at the compression tokens from one unbatched pass through the whole causal LM."""
    with torch.inference_mode():
        found: torch.Tensor = model.llm(inputs_embeds=_rows(model, text, prompt_name), use_cache=False).logits[0]
    return found[-model.suffix_transformer.compression_tokens :].float()


def states_by_hand(model: LLM2VecGen, text: str, layer: int) -> torch.Tensor:
    """Hidden states (n, H) at the compression tokens, of all layers the one asked for."""
    with torch.inference_mode():
        found = model.llm.base_model(inputs_embeds=_rows(model, text, "query"), output_hidden_states=True)
    states: torch.Tensor = found.hidden_states[layer][0]
    return states[-model.suffix_transformer.compression_tokens :].float()


def _rows(model: LLM2VecGen, text: str, prompt_name: str | None) -> torch.Tensor:
    instruction = "" if prompt_name is None else model.prompts[prompt_name]
    ids = torch.tensor([model.tokenizer(instruction + text)["input_ids"]], dtype=torch.long)
    embedded = model.llm.get_input_embeddings()(ids)
    return torch.cat([embedded, model.suffix_transformer.suffix[None].to(embedded.dtype)], dim=1)


@pytest.mark.parametrize("family", list(FAMILIES))
def test_tokens_are_the_likeliest_of_a_plain_pass(family: str) -> None:
    model = tiny_model(backbone=tiny_backbone(FAMILIES[family]()))
    # Larger weights, so that probabilities differ.
    with torch.no_grad():
        for parameter in model.llm.parameters():
            if parameter.ndim == 2:
                parameter.mul_(4.0)
    found = logit_lens(model, TEXTS, top_k=7)
    assert [(token.input, token.position, token.rank) for token in found] == [
        (number, position, rank) for number in range(len(TEXTS)) for position in range(4) for rank in range(1, 8)
    ]
    assert all(token.text == TEXTS[token.input] for token in found)
    for number, text in enumerate(TEXTS):
        logits = logits_by_hand(model, text)
        probabilities = logits.softmax(dim=-1)
        best = logits.topk(7, dim=-1).values
        for token in (token for token in found if token.input == number):
            assert token.logit == pytest.approx(float(best[token.position, token.rank - 1]), abs=1e-4)
            assert token.logit == pytest.approx(float(logits[token.position, token.token_id]), abs=1e-4)
            assert token.probability == pytest.approx(
                float(probabilities[token.position, token.token_id]), rel=1e-3, abs=1e-6
            )
            assert token.token == model.tokenizer.decode([token.token_id])


@given(
    text=st.text(max_size=30) | st.sampled_from(["Polar bears live on ice", "the sea, the SEA"]),
    top_k=st.integers(1, 12),
    punctuation=st.booleans(),
    query_words=st.booleans(),
    stop_words=st.frozensets(st.sampled_from(["the", "and", "e", "r", "bear", "1"])),
)
@settings(max_examples=25)
def test_dropping_takes_tokens_out_of_the_whole_ranking_and_changes_nothing_else(
    student: LLM2VecGen, text: str, top_k: int, punctuation: bool, query_words: bool, stop_words: frozenset[str]
) -> None:
    drop = Dropping(stop_words=stop_words, punctuation=punctuation, query_words=query_words)
    everything = logit_lens(student, [text], top_k=10_000)
    assert len(everything) == 4 * student.llm.config.vocab_size
    control = set(student.tokenizer.all_special_ids)
    ids = student.suffix_transformer.text_tokenizer.ids(text, add_special_tokens=False).ids
    words = words_of(text, [student.tokenizer.decode([token]) for token in ids])
    expected: list[LensToken] = []
    for position in range(4):
        kept = [
            token
            for token in everything
            if token.position == position
            and not drop.drops("" if token.token_id in control else token.token, words if query_words else ())
        ]
        expected += [replace(token, rank=rank) for rank, token in enumerate(kept[:top_k], 1)]
    assert logit_lens(student, text, top_k=top_k, drop=drop) == expected


def test_default_dropping_leaves_no_stop_word_punctuation_or_word_of_the_text(student: LLM2VecGen) -> None:
    text = "Bees make honey; rivers carry water."
    plain = logit_lens(student, text, top_k=320)
    assert {"honey", "the", ""} & {bare_word(token.token) for token in plain} == {"honey", "the", ""}
    words = {bare_word(token.token) for token in logit_lens(student, text, top_k=320, drop=Dropping())}
    assert words
    assert not words & {"honey", "bees", "the", "and", ""}


def test_logits_exist_for_64_positions_at_a_time_and_once_each(student: LLM2VecGen) -> None:
    seen: list[int] = []

    def note(_: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
        seen.append(inputs[0].shape[:-1].numel())

    handle = student.llm.get_output_embeddings().register_forward_pre_hook(note)
    try:
        texts = [f"river {number}" for number in range(40)]
        found = logit_lens(student, texts, top_k=2)
    finally:
        handle.remove()
    assert max(seen) == 64
    checking = 2  # One token, through the head alone and through the whole LLM.
    assert sum(seen) == 40 * 4 + checking
    one_by_one = [token for text in texts for token in logit_lens(student, text, top_k=2)]
    assert [(token.position, token.rank, token.token_id) for token in found] == [
        (token.position, token.rank, token.token_id) for token in one_by_one
    ]
    assert [token.probability for token in found] == pytest.approx([token.probability for token in one_by_one], 1e-4)


def test_instructions_count_and_bfloat16_works(student: LLM2VecGen, student_bf16: LLM2VecGen) -> None:
    named = logit_lens(student, "honey", prompt_name="document")
    assert named == logit_lens(student, "honey", prompt_name=None, prompt=student.prompts["document"])
    assert named != logit_lens(student, "honey", prompt_name=None)
    best = logits_by_hand(student, "honey", None).topk(1).values.flatten().tolist()
    found = logit_lens(student, "honey", top_k=1, prompt_name=None)
    assert [token.logit for token in found] == pytest.approx(best, abs=1e-4)
    low = logit_lens(student_bf16, "honey", top_k=1, prompt_name=None)
    assert [token.logit for token in low] == pytest.approx(best, abs=0.05)


def test_wrong_arguments_are_named(student: LLM2VecGen, monkeypatch: pytest.MonkeyPatch) -> None:
    assert logit_lens(student, []) == []
    with pytest.raises(ValueError, match="top_k must be at least 1, got 0"):
        logit_lens(student, "a", top_k=0)
    with pytest.raises(TypeError, match="Input 1 is not a string but int"):
        logit_lens(student, ["a", 3])  # type: ignore[list-item]
    with pytest.raises(ValueError, match="summary"):
        logit_lens(student, "a", prompt_name="summary")
    head = student.llm.get_output_embeddings()
    plain = type(student.llm).forward

    def scaled(self: Any, *args: Any, **kwargs: Any) -> Any:
        found = plain(self, *args, **kwargs)
        found.logits = found.logits * 3 + 1
        return found

    assert head is not None
    monkeypatch.setattr(type(student.llm), "forward", scaled)
    with pytest.raises(ValueError, match="behind its LM head that is not known"):
        logit_lens(student, "a")


def test_records_make_a_table(student: LLM2VecGen) -> None:
    table = pd.DataFrame(logit_lens(student, TEXTS, top_k=2))
    assert table.shape == (len(TEXTS) * 4 * 2, 8)
    assert list(table.columns)[:5] == ["input", "text", "position", "rank", "token_id"]


@pytest.mark.parametrize("layer", [-1, 2, 1, 0, -3])
@pytest.mark.parametrize("family", list(FAMILIES))
def test_states_of_any_layer_are_those_of_a_plain_pass(family: str, layer: int) -> None:
    model = tiny_model(backbone=tiny_backbone(FAMILIES[family]()))
    found = compression_states(model, TEXTS, layer=layer, prompt_name="query")
    assert found.shape == (len(TEXTS), 4, 64)
    expected = torch.stack([states_by_hand(model, text, layer) for text in TEXTS])
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)


def test_last_states_are_what_the_embedding_is_made_of(student: LLM2VecGen) -> None:
    long = "Rivers carry water from the mountains to the sea. " * 60
    texts = [*TEXTS, long]
    states = compression_states(student, texts, prompt_name="query")
    prompts = student.encode_soft_prompts(texts, prompt_name="query")
    with torch.inference_mode():
        torch.testing.assert_close(student.response_head.soft_prompt(states), prompts, atol=1e-5, rtol=0)


def test_cut_texts_are_told_once(student: LLM2VecGen, caplog: pytest.LogCaptureFixture) -> None:
    compression_states(student, ["bees " * 600, "rivers " * 600, "sea"])
    assert [record.message[:15] for record in caplog.records] == ["2 of the inputs"]


def test_layers_that_are_not_there_are_refused(student: LLM2VecGen) -> None:
    for layer in (3, -4):
        with pytest.raises(ValueError, match=f"layer {layer}: this LLM has 2 layers"):
            compression_states(student, "a", layer=layer)


def test_states_that_are_not_finite_are_refused() -> None:
    model = tiny_model()
    model.suffix_transformer.suffix.data[-1, 0] = float("nan")
    with pytest.raises(FloatingPointError, match="first is text 0"):
        logit_lens(model, ["a", "b"])


def test_lora_layers_of_the_student_take_part() -> None:
    model = LLM2VecGen.from_base(
        tiny_backbone(), thought_tokens=2, compression_tokens=3, embedding_dim=8, device="cpu",
        lora={"r": 2, "lora_alpha": 64, "target_modules": ["q_proj", "v_proj"]},
    )  # fmt: skip
    plain = compression_states(model, TEXTS)
    torch.manual_seed(0)
    for name, parameter in model.llm.named_parameters():
        if ".lora_B." in name:
            torch.nn.init.normal_(parameter)
    states = compression_states(model, TEXTS)
    assert (states - plain).abs().max() > 0.01
    prompts = model.encode_soft_prompts(TEXTS)
    with torch.inference_mode():
        torch.testing.assert_close(model.response_head.soft_prompt(states), prompts, atol=1e-5, rtol=1e-4)
