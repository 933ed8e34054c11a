"""How many held-out queries' embeddings decode to a word of their response that the query does not hold.

    python benchmarks/quality/decodability.py RUN_FOLDER RESPONSES [--most 200]

``RUN_FOLDER`` is what `llm2vec-gen train` wrote, and ``RESPONSES`` what it was trained on, unchanged: else other
queries would be held out. The baseline column decodes with shuffled responses: what agreement by chance would look
like.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from rich.console import Console
from rich.table import Table
from sklearn.feature_extraction.text import ENGLISH_STOP_WORDS

from llm2vec_gen_st import LLM2VecGen
from llm2vec_gen_st.files import write_json
from llm2vec_gen_st.training.data import load_rows, split_held_out
from llm2vec_gen_st.training.recipes import Recipe
from llm2vec_gen_st.training.record import describe, read_record

# Words that any answer may hold, beside the usual stop words; words under four letters are left out anyway.
COMMON = ENGLISH_STOP_WORDS | {
    "different",
    "example",
    "help",
    "important",
    "include",
    "including",
    "known",
    "like",
    "make",
}


def content_words(text: str) -> set[str]:
    """Words of four or more letters that carry content."""
    return {word for word in re.findall(r"[a-z]{4,}", text.lower()) if word not in COMMON}


def main(
    run: Path,
    responses: Path,
    most: Annotated[int, typer.Option(help="held-out queries decoded")] = 200,
    tokens: Annotated[int, typer.Option(help="tokens decoded for each")] = 24,
    output: Path | None = None,
) -> None:
    """Print the shares and some examples."""
    record = read_record(run)
    if record is None:
        raise typer.BadParameter(f"{run} has no record of its training, which tells the held-out queries")
    recipe = Recipe().with_overrides(record["recipe"])
    rows = load_rows(responses, recipe, partial=True)
    if describe(recipe, None, rows, None)["data_sha256"] != record["data_sha256"]:
        raise typer.BadParameter(f"{responses} are not the rows of this run, so some held-out ones were trained on")
    _, held = split_held_out(rows, recipe)
    queries, answers = held["query"][:most], held["response"][:most]
    model = LLM2VecGen(str(run), model_kwargs={"dtype": "bfloat16"})
    prompts = model.encode_soft_prompts(queries, prompt=recipe.query_prompts[0], show_progress_bar=True)
    decoded = model.decode(prompts, max_new_tokens=tokens, show_progress_bar=True)

    def share(targets: list[str]) -> float:
        hits = [
            bool((content_words(text) & content_words(target)) - content_words(query))
            for text, target, query in zip(decoded, targets, queries, strict=True)
        ]
        return float(np.mean(hits))

    shuffled = [answers[row] for row in np.random.default_rng(0).permutation(len(answers))]
    result = {"queries": len(queries), "own response": share(answers), "another response": share(shuffled)}
    table = Table("query", "response", "decoded", title=str(result))
    for row in range(0, len(queries), max(1, len(queries) // 12)):
        table.add_row(queries[row][:80], answers[row][:110], decoded[row][:110])
    Console(width=140).print(table)
    if output is not None:
        write_json(output, result)


if __name__ == "__main__":
    typer.run(main)
