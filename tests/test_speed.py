"""What is not computed stays not computed: the cheap ratios of the benchmarks, counted rather than timed."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import PreTrainedModel

from llm2vec_gen_st import LLM2VecGen
from llm2vec_gen_st.responses import GenerationSettings, generate_responses
from llm2vec_gen_st.testing import tiny_backbone
from llm2vec_gen_st.text import TextTokenizer

SUFFIX = 8
# Kept to what a retriever needs: extras, plots and command line wait until they are used.
HEAVY = (
    "accelerate",
    "faiss",
    "langchain_core",
    "matplotlib",
    "mteb",
    "peft",
    "pandas",
    "ray",
    "rich",
    "typer",
    "vllm",
)
STARTING = f"""
import json, sys, time
import llm2vec_gen_st
early = sorted({{"torch", "transformers", "sentence_transformers"}} & sys.modules.keys())
import sentence_transformers
before = set(sys.modules)
start = time.process_time()
from llm2vec_gen_st import LLM2VecGen
seconds = time.process_time() - start
print(json.dumps([early, seconds, sorted(set({HEAVY!r}) & (sys.modules.keys() - before))]))
"""


@contextmanager
def _passes(llm: PreTrainedModel) -> Iterator[list[tuple[int, int]]]:
    """Rows and positions of each forward pass through the LLM's layers."""
    seen: list[tuple[int, int]] = []

    def note(_: torch.nn.Module, __: Any, inputs: dict[str, Any]) -> None:
        given = inputs.get("input_ids")
        seen.append(tuple((given if given is not None else inputs["inputs_embeds"]).shape[:2]))

    handle = llm.base_model.register_forward_pre_hook(note, with_kwargs=True)
    try:
        yield seen
    finally:
        handle.remove()


def _positions(seen: list[tuple[int, int]]) -> int:
    return sum(rows * width for rows, width in seen)


def _texts(count: int) -> list[str]:
    chance = random.Random(0)
    return ["".join(chance.choices("QZXJ", k=chance.randint(5, 200))) for _ in range(count)]


def test_mixed_texts_are_hardly_padded_and_take_few_passes(student: LLM2VecGen) -> None:
    texts = _texts(128)
    useful = sum(len(student.preview(text).token_ids) + SUFFIX for text in texts)
    with _passes(student.llm) as seen:
        student.encode(texts, batch_size=32)
    assert sum(rows for rows, _ in seen) >= len(texts)
    # Groups of about 512 positions: smaller ones would leave matrix products slow, larger ones would pad more.
    assert len(seen) <= _positions(seen) / 350
    # Batches in the order given would be padded to twice the useful positions.
    assert _positions(seen) <= 1.1 * useful


def test_instruction_is_run_once_for_all_texts_of_a_batch(student: LLM2VecGen) -> None:
    texts, instruction = ["ABCDEFGHIJKLMNOPQRSTUVWXYZ"[number] * 4 for number in range(16)], "Summarize: " * 10
    tokens = [len(student.preview(instruction + text).token_ids) for text in texts]
    shared = len(student.preview(instruction).token_ids)
    assert shared >= 30
    with _passes(student.llm) as seen:
        student.encode(texts, prompt=instruction, batch_size=16)
    separate = sum(tokens) + SUFFIX * len(texts)
    # Tokens at the border of instruction and text may join, hence the small allowance.
    assert _positions(seen) <= separate - (len(texts) - 1) * (shared - 4)


def test_responses_that_have_ended_are_not_run_on() -> None:
    backbone = tiny_backbone(seed=3)
    plain, queries = TextTokenizer(backbone.tokenizer), [f"{text[:9]}?" for text in _texts(16)]
    settings = GenerationSettings(max_new_tokens=64, temperature=1.0)
    # Sampled from a nearly even distribution, every seventh token or so ends a response.
    backbone.llm.generation_config.eos_token_id = list(range(0, 320, 7))
    with _passes(backbone.llm) as seen:
        responses = generate_responses(backbone, plain, queries, settings)
    steps = [rows for rows, width in seen if width == 1]
    # The first token comes from the prompt's pass, and the end-of-text is a token as well.
    needed = sum(min(response.tokens + 1, settings.max_new_tokens) - 1 for response in responses)
    longest = max(response.tokens for response in responses)
    assert needed < 0.6 * len(queries) * longest, "responses were to end at different times"
    assert sum(steps) <= 1.3 * needed + len(steps)


def test_importing_adds_little_to_the_host() -> None:
    found = subprocess.run([sys.executable, "-c", STARTING], capture_output=True, check=True, text=True)
    early, seconds, heavy = json.loads(found.stdout.splitlines()[-1])
    assert early == []
    assert heavy == []
    assert seconds < 0.6
