"""Suffix texts and training rows compared before any training: ridge heads alone, on STSBenchmark dev.

    python benchmarks/quality/compare_starts.py RESPONSES DATA/eval [--suffix FOLDER_OF_A_TRAINED_STUDENT]

Each row fits the folded head on the same queries and responses, and prints the Spearman correlation on 500 development
pairs that take the document route. Nothing here reads a test split.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
import typer
from rich.console import Console
from rich.table import Table
from scipy.stats import spearmanr

from llm2vec_gen_st import LLM2VecGen
from llm2vec_gen_st.backbone import SMOLLM2_ID, load_backbone
from llm2vec_gen_st.files import read_jsonl
from llm2vec_gen_st.prompts import DOCUMENT
from llm2vec_gen_st.responses import read_responses
from llm2vec_gen_st.teachers import teacher_embeddings
from llm2vec_gen_st.training import ridge_heads, suffix_from_text
from llm2vec_gen_st.training.recipes import SUFFIX_TEXT

TEXTS = {
    "recipe": SUFFIX_TEXT,
    "answer only": "\n\nThe answer to this, in one word, is:",
    "gist": "\n\nIn other words, the main topic and the key facts of this passage, in one sentence, are the following:",
}


def main(
    responses: Path,
    data: Path,
    suffix: Annotated[Path | None, typer.Option(help="a trained student whose suffix is compared too")] = None,
    queries: int = 1000,
    pairs: int = 500,
) -> None:
    """Print one row for each suffix and kind of rows."""
    rows = read_responses(responses, include=("ok", "cut_off"), partial=True).shuffle(seed=0).select(range(queries))
    asked, answered = list(rows["query"]), list(rows["response"])
    of_answers = teacher_embeddings(answered, "all-MiniLM-L6-v2")
    of_queries = teacher_embeddings(asked, "all-MiniLM-L6-v2")
    test = list(read_jsonl(data / "STSBenchmark" / "dev.jsonl"))
    test = [test[row] for row in np.random.default_rng(0).permutation(len(test))[:pairs]]
    backbone = load_backbone(SMOLLM2_ID, model_kwargs={"dtype": "bfloat16"})
    table = Table("suffix", "rows", "STSBenchmark dev", "held-out distance")
    for name in [*TEXTS, *(["trained"] if suffix is not None else [])]:
        for kind in ("queries", "queries and documents"):
            model = LLM2VecGen.from_base(backbone, embedding_dim=of_answers.shape[1])
            if name == "trained":
                source = LLM2VecGen(str(suffix), backbone=backbone).suffix_transformer.suffix
                model.suffix_transformer.suffix.data.copy_(source.data)
            else:
                suffix_from_text(model, TEXTS[name])
            texts: Sequence[str] = asked
            labels = of_answers
            if kind != "queries":
                texts = [*asked, *(DOCUMENT + text for text in answered), *(DOCUMENT + text for text in asked)]
                labels = np.concatenate([of_answers, of_answers, of_queries])
            report = ridge_heads(model, texts, labels)
            first, second = (
                torch.nn.functional.normalize(
                    torch.as_tensor(model.encode([row[key] for row in test], prompt_name="document", batch_size=64))
                )
                for key in ("sentence1", "sentence2")
            )
            correlation = spearmanr((first * second).sum(dim=1).numpy(), [row["score"] for row in test]).statistic
            table.add_row(name, kind, f"{correlation:.4f}", f"{report.held_out_loss:.3f}")
    Console(width=100).print(table)


if __name__ == "__main__":
    typer.run(main)
