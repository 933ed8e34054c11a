"""Writing responses: ours beside plain ``generate`` with fixed batches of unsorted prompts.

    python benchmarks/speed/responses.py                             # 32 prompts, up to 96 tokens each
    python benchmarks/speed/responses.py --continuous --repeats 1    # transformers' continuous batching as well

SmolLM2-135M, float32, greedy. A quarter each of the prompts ask for a name, a sentence, a long text, and for the
subject of a passage. Ours is ``write_responses``, files included. Speed is tokens of the responses, without what
follows their end, per second. Everything runs in one process, turn by turn.
"""

from __future__ import annotations

import random
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from one_process import options, raw_arguments, seconds
from peers import in_turns, median, report, table, target, targets

from llm2vec_gen_st.backbone import SMOLLM2_ID, Backbone, load_backbone
from llm2vec_gen_st.responses import read_responses, write_responses

THINGS = ("honey bees", "tides", "volcanoes", "steel", "glaciers", "whales", "clocks", "lightning")
COUNTRIES = ("France", "Italy", "Japan", "Egypt", "Canada", "Spain", "Greece", "Norway")
SENTENCES = (
    "People have written about {} for a very long time.",
    "Much of what was believed about {} has turned out to be wrong.",
    "Whoever wants to know more about {} should begin with what can be seen every day.",
    "A traveller of the last century reports that {} were spoken of in every village.",
    "Three things are said to matter most about {}: where, when, and for whom.",
)
EVERY = ("ok", "cut_off", "empty", "non_finite")


def prompts(count: int) -> list[str]:
    """Prompts of 6 to about 170 words, in random order.

    Args:
        count: How many.

    Returns:
        The prompts, the same in every run.
    """
    chance = random.Random(0)
    found = []
    for number in range(count):
        thing = THINGS[number // 4 % len(THINGS)]
        passage = " ".join(chance.choice(SENTENCES).format(thing) for _ in range(chance.randint(3, 12)))
        found.append(
            [
                f"What is the capital of {COUNTRIES[number // 4 % len(COUNTRIES)]}?",
                f"In one short sentence, what is the main use of {thing}?",
                f"Write a long and detailed text about {thing}.",
                f"{passage}\n\nWhat is this passage about? Answer in a few words.",
            ][number % 4]
        )
    chance.shuffle(found)
    return found


def main() -> None:
    """Measure, and print and write the tables."""
    parser = options(__doc__ or "", "responses")
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--max-new-tokens", type=int, default=96)
    parser.add_argument("--base", default=SMOLLM2_ID, help="hub id or directory of the LLM")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--continuous", action="store_true", help="transformers' continuous batching as well")
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    backbone = load_backbone(given.base, model_kwargs={"dtype": given.dtype})
    backbone.llm.to(given.device)
    asked = prompts(given.prompts)

    def ours() -> dict[str, Any]:
        with tempfile.TemporaryDirectory() as folder:
            took, _ = seconds(
                lambda: write_responses(
                    asked, folder, backbone, batch_size=given.batch_size, max_new_tokens=given.max_new_tokens,
                    progress=False,
                )
            )  # fmt: skip
            rows = sorted(read_responses(folder, include=EVERY), key=lambda row: int(row["id"]))
        return {
            "seconds": took,
            "texts": [row["response"] for row in rows],
            "tokens": [row["response_tokens"] for row in rows],
        }

    def plain() -> dict[str, Any]:
        took, rows = seconds(lambda: generate(backbone, asked, given.batch_size, given.max_new_tokens))
        return {"seconds": took, **rows}

    def continuous() -> dict[str, Any]:
        took, rows = seconds(lambda: generate_continuously(backbone, asked, given.max_new_tokens))
        return {"seconds": took, **rows}

    ways = {"plain `generate`, unsorted": plain, "ours": ours}
    if given.continuous:
        ways["transformers' continuous batching"] = continuous
    with row_steps(backbone) as counted:
        runs = in_turns({name: _counting(way, counted) for name, way in ways.items()}, given.repeats)
    summarize(given, runs)


def summarize(given: Any, runs: dict[str, list[dict[str, Any]]]) -> None:
    """Print and write the tables."""
    base = next(iter(runs))
    rates = {name: sum(found[0]["tokens"]) / median(found) for name, found in runs.items()}
    reference = runs[base][0]["texts"]
    rows = [
        [
            name,
            f"{rates[name] / rates[base]:.2f}",
            f"{rates[name]:.1f}",
            f"{median(found):.1f}",
            f"{sum(found[0]['tokens']):,}",
            f"{found[0]['prompt_positions']:,}" if found[0]["row_steps"] else "",
            f"{found[0]['row_steps']:,}" if found[0]["row_steps"] else "",
            f"{sum(one == other for one, other in zip(found[0]['texts'], reference, strict=True))} of {len(reference)}",
        ]
        for name, found in runs.items()
    ]
    heads = ["way", "speed", "tokens/s", "seconds", "tokens", "positions of prompts", "rows × steps", "same responses"]
    lengths = sorted(runs[base][0]["tokens"])
    quarters = ", ".join(str(lengths[round(share * (len(lengths) - 1))]) for share in (0, 0.25, 0.5, 0.75, 1))
    ratio = rates["ours"] / rates[base]
    bare = {name: [_without_texts(run) for run in found] for name, found in runs.items()}
    report(
        given.output,
        [
            f"{given.base.split('/')[-1]}, {given.dtype}; {given.prompts} prompts, batches of {given.batch_size}, "
            f"up to {given.max_new_tokens} tokens; lengths of responses (least, quartiles, longest): {quarters}; "
            f"{given.threads} threads, median of {given.repeats}.",
            table(heads, rows),
            targets([target("speed / plain `generate`", ratio, 1.5, at_most=False)]),
        ],
        {"arguments": raw_arguments(given), "runs": bare},
    )


def generate(backbone: Backbone, asked: list[str], batch_size: int, longest: int) -> dict[str, Any]:
    """The usual way: fixed batches in the order given, padded, each until its last row ends."""
    tokenizer, llm = backbone.tokenizer, backbone.llm
    texts, tokens = [], []
    for start in range(0, len(asked), batch_size):
        chats = [[{"role": "user", "content": prompt}] for prompt in asked[start : start + batch_size]]
        inputs = tokenizer.apply_chat_template(
            chats, add_generation_prompt=True, padding=True, return_tensors="pt", return_dict=True,
            tokenizer_kwargs={"padding_side": "left"},
        ).to(llm.device)  # fmt: skip
        ids = llm.generate(
            **inputs, max_new_tokens=longest, do_sample=False, pad_token_id=tokenizer.eos_token_id
        )[:, inputs["input_ids"].shape[1] :]  # fmt: skip
        for row in ids.tolist():
            kept = row[: row.index(tokenizer.eos_token_id)] if tokenizer.eos_token_id in row else row
            tokens.append(len(kept))
            texts.append(tokenizer.decode(kept, skip_special_tokens=True).strip())
    return {"texts": texts, "tokens": tokens}


def generate_continuously(backbone: Backbone, asked: list[str], longest: int) -> dict[str, Any]:
    """Transformers' continuous batching, with a cache of the size that is needed."""
    from transformers import ContinuousBatchingConfig, GenerationConfig

    tokenizer = backbone.tokenizer
    chats = [[{"role": "user", "content": prompt}] for prompt in asked]
    inputs = tokenizer.apply_chat_template(chats, add_generation_prompt=True, return_dict=True)["input_ids"]
    found = backbone.llm.generate_batch(
        inputs,
        generation_config=GenerationConfig(
            max_new_tokens=longest, do_sample=False, eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.eos_token_id,
        ),
        continuous_batching_config=ContinuousBatchingConfig(num_blocks=512, page_size=32, max_batch_tokens=512),
        warmup=False,
    )  # fmt: skip
    by_prompt = {tuple(one.prompt_ids): one.generated_tokens for one in found.values()}
    rows = [by_prompt[tuple(ids)] for ids in inputs]
    kept = [row[: row.index(tokenizer.eos_token_id)] if tokenizer.eos_token_id in row else row for row in rows]
    return {
        "texts": [tokenizer.decode(row, skip_special_tokens=True).strip() for row in kept],
        "tokens": [len(row) for row in kept],
    }


@contextmanager
def row_steps(backbone: Backbone) -> Iterator[dict[str, int]]:
    """Counts positions of prompts, padding included, and rows of decoding steps, while this lasts."""
    counted = {"prompt_positions": 0, "row_steps": 0}

    def count(_: Any, __: Any, inputs: dict[str, Any]) -> None:
        ids = inputs.get("input_ids")
        if ids is not None:
            counted["row_steps" if ids.shape[1] == 1 else "prompt_positions"] += ids.numel()

    handle = backbone.llm.register_forward_pre_hook(count, with_kwargs=True)
    try:
        yield counted
    finally:
        handle.remove()


def _without_texts(run: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in run.items() if key != "texts"}


def _counting(way: Any, counted: dict[str, int]) -> Any:
    def run() -> dict[str, Any]:
        counted.update(dict.fromkeys(counted, 0))
        return {**way(), **counted}

    return run


if __name__ == "__main__":
    main()
