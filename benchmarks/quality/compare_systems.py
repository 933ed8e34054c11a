"""All systems on the same real tasks: quality, what a query costs, and how fast queries go through.

    python benchmarks/quality/compare_systems.py DATA/eval WORK --responses WORK/responses --split dev

Systems that learn are trained into WORK first (once). Tasks that have been run are not run again: the command can be
stopped and repeated, and systems be added by ``--only``. Choices are made with ``--split dev``; ``test`` is the end.
"""

from __future__ import annotations

import gc
import json
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Annotated

import typer
from sentence_transformers import SentenceTransformer
from systems import SYSTEMS, System, Workshop

from llm2vec_gen_st.baselines import build
from llm2vec_gen_st.evaluation import EvaluationError, evaluate
from llm2vec_gen_st.evaluation.local import local_tasks
from llm2vec_gen_st.evaluation.report import write_report
from llm2vec_gen_st.files import write_json

# Sets with rows for choices; retrieval sets have none, so choices never see them.
DEV = ("STSBenchmark", "AmazonCounterfactualClassification", "MTOPDomainClassification", "MRPC")
TEST = (
    "STS13",
    "STS16",
    "STSBenchmark",
    "AmazonCounterfactualClassification",
    "Banking77Classification",
    "MTOPDomainClassification",
    "BiomedicalTitlesClustering",
    "TweetShortTextClustering",
    "MRPC",
    "NovelEvalReranking",
    "LegalSummarization",
    "MSMARCOSubset",
    "AdvBenchIR",
)
COSTS = "costs.json"
SPEED_QUERIES, SPEED_ROUNDS = 32, 3


def speeds(models: Sequence[SentenceTransformer], queries: list[str]) -> list[float]:
    """Median queries a second of each model; they take turns, after a first round on other queries."""
    parts = [queries[start : start + SPEED_QUERIES] for start in range(0, len(queries), SPEED_QUERIES)]
    found: list[list[float]] = [[] for _ in models]
    for part in parts[: SPEED_ROUNDS + 1]:
        for model, measured in zip(models, found, strict=True):
            start = time.perf_counter()
            model.encode_query(part, batch_size=SPEED_QUERIES, show_progress_bar=False)
            measured.append(len(part) / (time.perf_counter() - start))
    return [median(measured[1:]) for measured in found]


def cost_table(costs: dict[str, dict[str, float]]) -> str:
    """Costs as Markdown: what the systems say of themselves, and the measured speeds."""
    lines = [
        "| system | LLM passes a query | tokens written a query | learned from the queries | "
        "queries/s, mean pooling = 1 | queries/s |",
        "|---|---:|---:|---|---:|---:|",
    ]
    for name, cost in costs.items():
        system = SYSTEMS[name]
        learned = "yes" if system.learned else "no"
        lines.append(
            f"| {name} | {system.passes} | {system.generated} | {learned} | {cost['relative_speed']:.2f} | "
            f"{cost['queries_per_second']:.1f} |"
        )
    return "\n".join([*lines, ""])


def read_costs(output: Path) -> dict[str, dict[str, float]]:
    """Measured speeds of the systems that have been measured."""
    path = output / COSTS
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def run(name: str, system: System, shop: Workshop, data: Path, wanted: Sequence[str], split: str, output: Path) -> None:
    """One system on those of the wanted tasks that are for it, and its cost."""
    folders = [folder for folder in wanted if system.folders is None or folder in system.folders]
    if not folders:
        print(f"{name}: none of these tasks is for it", flush=True)
        return
    model = system.make(shop)
    tasks = [task for folder in folders for task in local_tasks(data / folder, split=split)]
    try:
        evaluate(model, tasks, output, name=name, instructions=system.instructions, batch_size=64)
    except EvaluationError as error:
        # The other systems are not to wait for it; the same call tries it again.
        print(f"{name}: {error}", flush=True)
    costs = read_costs(output)
    if name not in costs:
        queries = list(shop.rows["query"])[: SPEED_QUERIES * (SPEED_ROUNDS + 1)]
        own, of_mean = speeds([model, build("mean", shop.backbone())], queries)
        costs[name] = {"queries_per_second": own, "relative_speed": own / of_mean}
        write_json(output / COSTS, costs)


def main(
    data: Path,
    work: Path,
    responses: Annotated[Path, typer.Option(help="what `llm2vec-gen respond` wrote")],
    split: Annotated[str, typer.Option(help="dev (choices) or test (once, at the end)")] = "dev",
    output: Annotated[Path | None, typer.Option(help="results; beside this file if not given")] = None,
    only: Annotated[list[str] | None, typer.Option(help="names of systems; all if not given")] = None,
    task: Annotated[list[str] | None, typer.Option(help="names of tasks; all of the split if not given")] = None,
    baseline: str = "llm2vec",
    dtype: str = "bfloat16",
    mntp_steps: int = 300,
    simcse_steps: int = 100,
    pair_steps: int = 100,
    student_steps: int = 0,
) -> None:
    """Run what is missing, and write the tables and plots."""
    unknown = sorted(set(only or ()) - SYSTEMS.keys())
    if unknown:
        raise typer.BadParameter(f"unknown systems {unknown}; known are {', '.join(SYSTEMS)}")
    of_split = DEV if split == "dev" else TEST
    if other := sorted(set(task or ()) - set(of_split)):
        raise typer.BadParameter(f"tasks {other} are not of the {split} split; known are {', '.join(of_split)}")
    wanted = [folder for folder in of_split if not task or folder in task]
    output = output or Path(__file__).parent / "results" / f"systems-{split}"
    work.mkdir(parents=True, exist_ok=True)
    shop = Workshop(work, responses, dtype, mntp_steps, simcse_steps, pair_steps, student_steps)
    for name, system in SYSTEMS.items():
        if only and name not in only:
            continue
        print(f"== {name}", flush=True)
        run(name, system, shop, data, wanted, split, output)
        gc.collect()
    costs = read_costs(output)
    have = {folder.name for folder in (output / "results").iterdir()}
    write_report(output, baseline=baseline if baseline in have else None)
    (output / "costs.md").write_text(cost_table(costs), encoding="utf-8")
    print((output / "table.md").read_text(encoding="utf-8"))
    print(cost_table(costs))


if __name__ == "__main__":
    typer.run(main)
