"""Soft prompts back to text: this package's batched decoding with a cache, and the authors' loop, turn by turn.

    python benchmarks/speed/decode.py                         # 16 texts of up to 64 tokens
    python benchmarks/speed/decode.py --texts 2 --repeats 1

Each system decodes the soft prompts that it computed itself from the same texts. The authors' loop stops at an end
token only for one text at a time, and runs the whole text through the LLM again for every token. In bfloat16 another
token may be the likeliest now and then; how many texts are the same is in the table.
"""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial

from encode import mixed_texts
from peers import Peers, arguments, in_turns, median, peak, report, settings, table, target, targets

SHORT = "ours, bfloat16"
OURS = ("ours", SHORT)
QUESTIONS = (
    "Where do polar bears live?",
    "How is cheese made?",
    "Why is the sky blue?",
    "What does a lawyer do?",
    "How do I learn to play the guitar?",
    "What is photosynthesis?",
    "Who painted the ceiling of the Sistine Chapel?",
    "What are the causes of inflation?",
    "How can I fall asleep faster?",
    "What is the capital of Australia?",
    "How do vaccines work?",
    "Write a short poem about the sea.",
    "What is the difference between a virus and a bacterium?",
    "How do I sort a list in Python?",
    "Why do leaves change colour in autumn?",
    "What should I pack for a week in the mountains?",
)


def main() -> None:
    """Measure, and print and write the tables."""
    parser = arguments(__doc__ or "", "decode")
    parser.add_argument("--texts", type=int, default=len(QUESTIONS))
    parser.add_argument("--tokens", type=int, default=64, help="longest text decoded")
    given = parser.parse_args()
    peers = Peers(given.work, given.threads)
    texts = [*QUESTIONS, *mixed_texts(max(0, given.texts - len(QUESTIONS)))][: given.texts]
    with ExitStack() as stack:
        systems = {name: stack.enter_context(peers.ours(name)) for name in OURS}
        systems["theirs"] = stack.enter_context(peers.theirs("theirs"))
        systems["ours"].ask("load")
        systems[SHORT].ask("load", dtype="bfloat16")
        systems["theirs"].ask("load", checkpoint=str(peers.checkpoint))
        for worker in systems.values():
            worker.ask("prompts", texts=texts)
            worker.ask("decode", tokens=4, first=1)
        runs = in_turns(
            {
                name: partial(worker.ask, "decode", tokens=given.tokens, first=len(texts))
                for name, worker in systems.items()
            },
            given.repeats,
        )
    tokens, expected = runs["theirs"][-1]["tokens"], runs["theirs"][-1]["texts"]
    equal = {
        name: sum(one == other for one, other in zip(found[-1]["texts"], expected, strict=True))
        for name, found in runs.items()
    }
    seconds = {name: median(found) for name, found in runs.items()}
    rows = [
        [
            name,
            f"{seconds[name]:.2f}",
            f"{seconds['theirs'] / seconds[name]:.1f}",
            f"{tokens / seconds[name]:.1f}",
            f"{peak(found):,.0f}",
            str(equal[name]),
        ]
        for name, found in runs.items()
    ]
    parts = [
        f"{len(texts)} texts, at most {given.tokens} tokens each, {tokens} in all; float32 where nothing else is said, "
        f"{given.threads} threads, median of {given.repeats}.",
        table(["way", "seconds", "speed", "tokens/s", "peak memory, MB", "texts equal to theirs"], rows),
        targets([target(f"speed of {name}", seconds["theirs"] / seconds[name], 25, at_most=False) for name in OURS]),
    ]
    report(given.output, parts, {"arguments": settings(given), "runs": runs})


if __name__ == "__main__":
    main()
