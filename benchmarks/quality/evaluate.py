"""Built-in students beside mean pooling, their teachers and each other, on STSBenchmark and Banking77.

    python benchmarks/quality/evaluate.py DATA/eval --split test

Symmetric tasks have no queries, so every text takes the document route. With ``--split dev`` only the development
split of STSBenchmark is read: that is the one on which choices are made.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
import typer
from rich.console import Console
from rich.table import Table
from tasks import Embed, banking77, sts

from llm2vec_gen_st import LLM2VecGen
from llm2vec_gen_st.backbone import SMOLLM2_ID, Backbone, load_backbone
from llm2vec_gen_st.files import write_json
from llm2vec_gen_st.modules.suffix_transformer import pad_right
from llm2vec_gen_st.teachers import load_teacher
from llm2vec_gen_st.text import TextTokenizer


def mean_pooling(backbone: Backbone) -> Embed:
    """The plain LLM: mean over all tokens of the text, no instruction; for one batch."""
    plain = TextTokenizer(backbone.tokenizer)

    @torch.inference_mode()
    def embed(texts: Sequence[str]) -> np.ndarray:
        batch = pad_right([plain.ids(text, 512).ids for text in texts])
        hidden = backbone.llm.base_model(input_ids=batch["input_ids"], use_cache=False).last_hidden_state
        mask = batch["attention_mask"][..., None].float()
        return ((hidden.float() * mask).sum(dim=1) / mask.sum(dim=1)).numpy()

    return embed


def in_batches(embed: Embed, batch_size: int = 64) -> Embed:
    """Call a function of one batch on as many texts as there are, those of similar length together."""

    def embed_all(texts: Sequence[str]) -> np.ndarray:
        order = sorted(range(len(texts)), key=lambda row: len(texts[row]))
        starts = range(0, len(order), batch_size)
        found = np.concatenate([embed([texts[row] for row in order[start : start + batch_size]]) for start in starts])
        return found[np.argsort(order)]

    return embed_all


def main(
    data: Path,
    split: Annotated[str, typer.Option(help="dev (choices) or test (report)")] = "test",
    students: Annotated[list[str] | None, typer.Option(help="names or directories")] = None,
    route: Annotated[str, typer.Option(help="prompt name used for all texts")] = "document",
    dtype: str = "bfloat16",
    output: Path | None = None,
) -> None:
    """Print one table, and write it as JSON."""
    backbone = load_backbone(SMOLLM2_ID, model_kwargs={"dtype": dtype})
    systems: dict[str, Embed] = {
        "SmolLM2-135M, mean pooling": in_batches(mean_pooling(backbone)),
        "SmolLM2-135M as teacher 'self'": in_batches(load_teacher("self", backbone).embed),
        "all-MiniLM-L6-v2": in_batches(load_teacher("all-MiniLM-L6-v2").embed),
    }
    for name in students or ["llm2vec-gen-smollm2-135m", "llm2vec-gen-smollm2-135m-self"]:
        model = LLM2VecGen(name, backbone=backbone)
        systems[Path(name).name] = lambda texts, model=model: model.encode(  # type: ignore[misc]
            list(texts), prompt_name=route, batch_size=64, show_progress_bar=True
        )
    results: dict[str, dict[str, float]] = {}
    for name, embed in systems.items():
        start = time.perf_counter()
        results[name] = {"STSBenchmark": sts(embed, data / "STSBenchmark" / f"{split}.jsonl")}
        if split == "test":
            results[name]["Banking77"] = banking77(embed, data / "Banking77Classification")
        results[name]["seconds"] = time.perf_counter() - start
        print(name, results[name], flush=True)
    low, high = results["SmolLM2-135M, mean pooling"], results["all-MiniLM-L6-v2"]
    table = Table(title=f"{split} split; texts by the {route} route; LLM in {dtype}")
    tasks = [task for task in low if task != "seconds"]
    for column in ("system", *(heading for task in tasks for heading in (task, "gap closed"))):
        table.add_column(column)
    for name, scores in results.items():
        cells = [name]
        for task in tasks:
            scores[f"{task} gap closed"] = closed = (scores[task] - low[task]) / (high[task] - low[task])
            cells += [f"{scores[task]:.4f}", f"{100 * closed:.0f} %"]
        table.add_row(*cells)
    Console(width=120).print(table)
    if output is not None:
        write_json(output, {"split": split, "route": route, "dtype": dtype, "results": results})


if __name__ == "__main__":
    typer.run(main)
