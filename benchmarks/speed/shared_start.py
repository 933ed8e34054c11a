"""What it saves to run an instruction once for a batch, and to give the LM head contiguous states.

    python benchmarks/speed/shared_start.py

SmolLM2-135M. Encoding: 64 queries of 20 tokens behind an instruction of 30, float32, with and without shared start,
turn by turn. Generation: the first token of 32 prompts of 40 tokens, bfloat16, without and with contiguous states,
each in a process of its own, so that its peak resident memory is its own.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import time
from statistics import median

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from llm2vec_gen_st import LLM2VecGen
from llm2vec_gen_st.backbone import SMOLLM2_ID, load_backbone
from llm2vec_gen_st.modules import suffix_transformer
from llm2vec_gen_st.writing import writing

QUERIES, INSTRUCTION_TOKENS, QUERY_TOKENS, ROUNDS = 64, 30, 20, 5
PROMPTS, PROMPT_TOKENS = 32, 40


def encode_both_ways() -> None:
    """Print times and the largest difference."""
    model = LLM2VecGen("llm2vec-gen-smollm2-135m", device="cpu")
    chance = np.random.default_rng(0)
    words = [" river", " honey", " table", " garden", " letter", " winter", " market", " engine"]
    instruction = "Answer" + " the" * (INSTRUCTION_TOKENS - 2) + ":"
    texts = ["".join(chance.choice(words, QUERY_TOKENS)) for _ in range(QUERIES)]
    lengths = {len(model.preview(instruction + text).token_ids) for text in texts}
    worth = suffix_transformer._WORTH_SHARING
    ways = {"every row runs the instruction": sys.maxsize, "one row runs it": worth}
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    vectors = {}
    for _ in range(ROUNDS + 1):
        for way, least in ways.items():
            suffix_transformer._WORTH_SHARING = least
            start = time.perf_counter()
            vectors[way] = model.encode(texts, prompt=instruction, batch_size=QUERIES)
            seconds[way].append(time.perf_counter() - start)
    first, second = ways
    base = median(seconds[first][1:])
    table = Table("way", "seconds", "speed", title=f"{QUERIES} queries, {sorted(lengths)} tokens with instruction")
    for way in ways:
        table.add_row(way, f"{median(seconds[way][1:]):.2f}", f"{base / median(seconds[way][1:]):.2f}")
    Console(width=100).print(table)
    print(f"largest difference: {np.abs(vectors[first] - vectors[second]).max():.1e}")


def first_token(way: str) -> dict[str, float]:
    """Seconds and growth of the peak resident memory in MB for the first token, in this process."""
    llm = load_backbone(SMOLLM2_ID, model_kwargs={"dtype": "bfloat16"}).llm
    ids = torch.randint(10, 40_000, (PROMPTS, PROMPT_TOKENS), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        llm(input_ids=ids[:1], logits_to_keep=1)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        times = []
        for _ in range(ROUNDS):
            start = time.perf_counter()
            if way == "contiguous":
                with writing(llm):
                    llm(input_ids=ids, logits_to_keep=1, use_cache=True)
            else:
                llm(input_ids=ids, logits_to_keep=1, use_cache=True)
            times.append(time.perf_counter() - start)
    return {"seconds": median(times), "mb": (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024}


def main() -> None:
    """Print both comparisons."""
    encode_both_ways()
    found = {
        way: json.loads(
            subprocess.run([sys.executable, __file__, way], capture_output=True, check=True, text=True).stdout
        )
        for way in ("view", "contiguous")
    }
    table = Table("states that the LM head is given", "seconds", "speed", "peak memory", title="first token")
    for way, values in found.items():
        speed = found["view"]["seconds"] / values["seconds"]
        table.add_row(way, f"{values['seconds']:.2f}", f"{speed:.2f}", f"{values['mb']:,.0f} MB")
    Console(width=100).print(table)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        print(json.dumps(first_token(sys.argv[1])))
    else:
        main()
