"""Built-in students beside mean pooling, their teachers and each other, on STSBenchmark and Banking77.

    python benchmarks/quality/evaluate.py DATA/eval --split dev    # for choices, every route
    python benchmarks/quality/evaluate.py DATA/eval --split test --banking-route document

Neither task has queries that a passage answers, so a text can go behind the document's instruction, behind the query's,
or behind the one that our evaluation gives to Banking77. With ``--split dev`` every student is scored on all of them,
on the development split of STSBenchmark and on rows of Banking77's training split; test splits are not read.
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
from llm2vec_gen_st.evaluation.instructions import built_in_instructions
from llm2vec_gen_st.files import write_json
from llm2vec_gen_st.modules.suffix_transformer import pad_right
from llm2vec_gen_st.prompts import DOCUMENT, QUERY
from llm2vec_gen_st.teachers import load_teacher
from llm2vec_gen_st.text import TextTokenizer

ROUTES = {
    "document": DOCUMENT,
    "query": QUERY,
    "instruction": built_in_instructions()["Banking77Classification"],
}


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


def behind(model: LLM2VecGen, prompt: str) -> Embed:
    """The student, every text behind one instruction."""
    return lambda texts: model.encode(list(texts), prompt=prompt, batch_size=64, show_progress_bar=True)


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
    sts_route: Annotated[str, typer.Option(help=f"one of {', '.join(ROUTES)}")] = "document",
    banking_route: Annotated[str, typer.Option(help=f"one of {', '.join(ROUTES)}")] = "document",
    dtype: str = "bfloat16",
    output: Path | None = None,
) -> None:
    """Print one table, and write it as JSON."""
    students = students or ["llm2vec-gen-smollm2-135m", "llm2vec-gen-smollm2-135m-self"]
    if len({Path(name).name for name in students}) < len(students):
        raise typer.BadParameter("two students have the same name, and would share a row; rename one's directory")
    backbone = load_backbone(SMOLLM2_ID, model_kwargs={"dtype": dtype})
    systems: dict[str, tuple[Embed, Embed]] = {
        name: (embed, embed)
        for name, embed in (
            ("SmolLM2-135M, mean pooling", in_batches(mean_pooling(backbone))),
            ("SmolLM2-135M as teacher 'self'", in_batches(load_teacher("self", backbone).embed)),
            ("all-MiniLM-L6-v2", in_batches(load_teacher("all-MiniLM-L6-v2").embed)),
        )
    }
    for name in students:
        model = LLM2VecGen(name, backbone=backbone)
        if split == "test":
            systems[Path(name).name] = (behind(model, ROUTES[sts_route]), behind(model, ROUTES[banking_route]))
        else:
            for route, prompt in ROUTES.items():
                systems[f"{Path(name).name}, {route}"] = (behind(model, prompt), behind(model, prompt))
    results: dict[str, dict[str, float]] = {}
    for name, (for_sts, for_banking) in systems.items():
        start = time.perf_counter()
        scores = {"STSBenchmark": sts(for_sts, data / "STSBenchmark" / f"{split}.jsonl")}
        accuracies = banking77(for_banking, data / "Banking77Classification", "test" if split == "test" else "train")
        scores.update({f"Banking77, {way}": accuracy for way, accuracy in accuracies.items()})
        results[name] = {**scores, "seconds": time.perf_counter() - start}
        print(name, results[name], flush=True)
    low, high = results["SmolLM2-135M, mean pooling"], results["all-MiniLM-L6-v2"]
    table = Table(title=f"{split}; LLM in {dtype}; routes on test: {sts_route}, {banking_route}")
    tasks = [task for task in low if task != "seconds"]
    for column in ("system", *(heading for task in tasks for heading in (task, "gap closed"))):
        table.add_column(column)
    for name, scores in results.items():
        cells = [name]
        for task in tasks:
            scores[f"{task} gap closed"] = closed = (scores[task] - low[task]) / (high[task] - low[task])
            cells += [f"{scores[task]:.4f}", f"{100 * closed:.0f} %"]
        table.add_row(*cells)
    Console(width=140).print(table)
    if output is not None:
        routes = list(ROUTES) if split != "test" else [sts_route, banking_route]
        write_json(output, {"split": split, "routes": routes, "dtype": dtype, "results": results})


if __name__ == "__main__":
    typer.run(main)
