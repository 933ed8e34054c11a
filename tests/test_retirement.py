"""Rows that have ended leave their batch; what is written in the others stays what plain ``generate`` writes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from transformers import (
    Gemma3TextConfig,
    GenerationConfig,
    GPT2Config,
    Lfm2Config,
    LlamaConfig,
    MistralConfig,
    PretrainedConfig,
    PreTrainedModel,
    Qwen3Config,
    RwkvConfig,
)

from llm2vec_gen_st.responses.retirement import Written, generate_rows
from llm2vec_gen_st.testing import tiny_backbone

ROWS, WIDTH, LONGEST = 9, 12, 30
SHAPE: dict[str, Any] = {
    "vocab_size": 320, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "bos_token_id": None, "eos_token_id": 2, "pad_token_id": 0, "initializer_range": 0.2,
}  # fmt: skip
RETIRING = {
    "llama": LlamaConfig(**SHAPE),
    "qwen3": Qwen3Config(**SHAPE, head_dim=16),
    "sliding window": MistralConfig(**SHAPE, sliding_window=8),
    "sliding window and all": Gemma3TextConfig(
        **{**SHAPE, "initializer_range": 0.05}, head_dim=16, sliding_window=8,
        layer_types=["sliding_attention", "full_attention"],
    ),
    "learned positions": GPT2Config(
        vocab_size=320, n_embd=64, n_layer=2, n_head=4, bos_token_id=None, eos_token_id=2, initializer_range=0.2
    ),
}  # fmt: skip
ALL_TO_THE_END = {"convolutions": Lfm2Config(**SHAPE, layer_types=["conv", "full_attention"])}


def _prompts() -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids and mask (9, 12), with 0 to 8 tokens of padding."""
    ids = torch.randint(5, 320, (ROWS, WIDTH), generator=torch.Generator().manual_seed(0))
    mask = (torch.arange(WIDTH) >= torch.arange(ROWS)[:, None]).long()
    return ids * mask, mask


def _config(**changes: Any) -> GenerationConfig:
    values = {"max_new_tokens": LONGEST, "do_sample": False, "pad_token_id": 0, "num_beams": 1, **changes}
    return GenerationConfig(**values)


def _plain(llm: PreTrainedModel, ends: list[int]) -> list[list[int]]:
    """What plain ``generate`` writes, without end-of-text."""
    ids, mask = _prompts()
    config = _config(eos_token_id=ends or None)
    if not ends:
        llm.generation_config.eos_token_id = None  # type: ignore[union-attr]
    found = llm.generate(input_ids=ids, attention_mask=mask, generation_config=config)  # type: ignore[operator]
    rows = found[:, WIDTH:].tolist()
    return [row[: next((place for place, token in enumerate(row) if token in ends), len(row))] for row in rows]


def _ends_at_different_times(llm: PreTrainedModel) -> list[int]:
    """Several end-of-text tokens, chosen so that rows end at different times."""
    return [row[4 + 2 * number] for number, row in enumerate(_plain(llm, [])) if number % 2 == 0]


@contextmanager
def _batches(llm: PreTrainedModel) -> Iterator[list[int]]:
    """Rows of each forward pass."""
    seen: list[int] = []
    handle = llm.register_forward_pre_hook(
        lambda module, _, inputs: seen.append(len(inputs["input_ids"])), with_kwargs=True
    )
    try:
        yield seen
    finally:
        handle.remove()


def _written(llm: PreTrainedModel, ends: list[int], **changes: Any) -> list[Written]:
    with torch.inference_mode():
        return generate_rows(llm, *_prompts(), _config(**changes), ends)


@pytest.mark.parametrize("config", RETIRING.values(), ids=RETIRING.keys())
def test_rows_are_those_of_plain_generate_and_leave_when_they_end(config: PretrainedConfig) -> None:
    llm = tiny_backbone(config).llm
    ends = _ends_at_different_times(llm)
    expected = _plain(llm, ends)
    lengths = [len(row) for row in expected]
    assert len(set(lengths)) >= 3, "rows were to end at different times"
    with _batches(llm) as seen:
        found = _written(llm, ends)
    assert [row.ids for row in found] == expected
    assert [row.ended for row in found] == [length < LONGEST for length in lengths]
    assert not any(row.non_finite for row in found)
    # Never more than an eighth of a batch of ended rows, or one: each step holds the rows that have not ended.
    steps = [sum(length >= step for length in lengths) for step in range(max(lengths) + 1)][:LONGEST]
    assert len(seen) == len(steps)
    assert all(alive <= rows <= alive + max(1, rows // 8) for rows, alive in zip(seen, steps, strict=True))


@pytest.mark.parametrize("config", ALL_TO_THE_END.values(), ids=ALL_TO_THE_END.keys())
def test_llm_whose_cache_cannot_drop_rows_runs_all_to_the_end(config: PretrainedConfig) -> None:
    llm = tiny_backbone(config).llm
    ends = _ends_at_different_times(llm)
    expected = _plain(llm, ends)
    with _batches(llm) as seen:
        assert [row.ids for row in _written(llm, ends)] == expected
    assert set(seen) == {ROWS}


def test_llm_without_a_cache_of_keys_and_values_runs_all_to_the_end() -> None:
    config = RwkvConfig(vocab_size=320, hidden_size=64, num_hidden_layers=2, eos_token_id=2, bos_token_id=0)
    llm = tiny_backbone(config).llm
    with _batches(llm) as seen:
        _written(llm, _ends_at_different_times(llm))
    assert set(seen) == {ROWS}


@pytest.mark.parametrize(
    "own", [{"min_new_tokens": 10}, {"begin_suppress_tokens": [7]}, {"cache_implementation": "static"}], ids=str
)
def test_settings_that_count_from_the_call_run_in_one_call(own: dict[str, Any]) -> None:
    llm = tiny_backbone(RETIRING["llama"]).llm
    ends = _ends_at_different_times(llm)
    for name, value in own.items():
        setattr(llm.generation_config, name, value)
    expected = _plain(llm, ends)
    with _batches(llm) as seen:
        found = _written(llm, ends)
    assert [row.ids for row in found] == expected
    assert not any(row.non_finite for row in found)
    assert set(seen) == {ROWS}


def test_without_end_of_text_every_row_is_cut_off() -> None:
    llm = tiny_backbone(RETIRING["llama"]).llm
    expected = _plain(llm, [])
    found = _written(llm, [])
    assert [row.ids for row in found] == expected
    assert not any(row.ended for row in found)


def test_non_finite_rows_are_told_from_others_whenever_those_leave() -> None:
    llm = tiny_backbone(RETIRING["llama"]).llm
    ends = _ends_at_different_times(llm)
    expected = _plain(llm, ends)
    written = {token for row in expected for token in row} | set(ends) | set(_prompts()[0].flatten().tolist())
    broken = next(token for token in range(5, 320) if token not in written)
    llm.get_input_embeddings().weight.data[broken] = float("nan")
    ids, mask = _prompts()
    ids[[3, 8], -1] = broken
    with torch.inference_mode():
        found = generate_rows(llm, ids, mask, _config(), ends)
    assert [number for number, row in enumerate(found) if row.non_finite] == [3, 8]
    assert all(row.ids == expected[number] for number, row in enumerate(found) if number not in (3, 8))


def test_what_follows_an_end_makes_no_row_non_finite() -> None:
    """Ended rows are fed padding until they leave."""
    llm = tiny_backbone(RETIRING["llama"]).llm
    ends = _ends_at_different_times(llm)
    expected = _plain(llm, ends)
    written = {token for row in expected for token in row} | set(ends) | set(_prompts()[0].flatten().tolist())
    pad = next(token for token in range(5, 320) if token not in written)
    llm.get_input_embeddings().weight.data[pad] = float("nan")
    found = _written(llm, ends, pad_token_id=pad)
    assert [row.ids for row in found] == expected
    assert not any(row.non_finite for row in found)


def test_sampled_rows_are_the_same_in_every_run() -> None:
    llm = tiny_backbone(RETIRING["llama"]).llm
    ends = _ends_at_different_times(llm)
    found = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        found.append(_written(llm, ends, do_sample=True, temperature=1.0, top_k=0))
    assert found[0] == found[1]
    assert found[0] != found[2]
    assert len({len(row.ids) for row in found[0]}) >= 3
