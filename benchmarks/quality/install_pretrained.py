"""Put a trained student into the package: adapter and model card there, recipe, log and loss plot beside this file.

python benchmarks/quality/install_pretrained.py RUN_FOLDER NAME [--after RECORD_FOLDER]
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer
from select_queries import SOURCES

from llm2vec_gen_st import LLM2VecGen
from llm2vec_gen_st.checkpoints.registry import PRETRAINED
from llm2vec_gen_st.files import read_rows
from llm2vec_gen_st.training.report import write_log

RECORDS = Path(__file__).parent / "records"
NOT_SHIPPED = "training"


def training_section(run: Path, earlier: Path | None) -> str:
    """What the model card says about how the student was trained."""
    record = json.loads((run / NOT_SHIPPED / "recipe.json").read_text(encoding="utf-8"))
    recipe = record["recipe"]
    queries = f"{record['rows']:,}"
    if earlier is not None:
        before = json.loads((earlier / "recipe.json").read_text(encoding="utf-8"))
        queries = f"{before['rows']:,}, and in a later run {queries},"
    sources = "\n".join(f"| {source} | {licence} |" for source, licence in sorted(SOURCES.items()))
    return f"""
## Training

Self-supervised: the base model wrote a response to each of {queries} unlabeled queries. For a query, the
student was trained to give the embedding that the teacher (`{record["teacher"]}`) gives to that response, and to make
the frozen base model write the response from the student's soft prompt. Texts that also served as documents, with the
document's instruction before them and themselves as target: {" and ".join(recipe["document_sources"])}. No text of an
evaluation set was used.{whitened(recipe)}
Base model, queries and responses are English; like its base model this one is small, makes mistakes, and repeats what
its data holds.

Queries came from these sets, whose licences allow commercial use (Creative Commons ones ask for attribution, those with
"SA" for the same licence on adapted data):

| queries | licence |
|---|---|
{sources}

The adapter is under the MIT licence; the base model, SmolLM2-135M-Instruct, under Apache-2.0.
"""


def whitened(recipe: Mapping[str, object]) -> str:
    """What the model card says about the last step of the recipe, if it has it."""
    if not recipe.get("whitening"):
        return ""
    return f"""
The student's vectors were then evened out along their principal axes, in closed form and without labels (whitening of
strength {recipe["whitening"]}, folded into MLP_align)."""


def keep_record(run: Path, folder: Path) -> None:
    """Copy what tells how a run went."""
    folder.mkdir(parents=True, exist_ok=True)
    for file in ("recipe.json", "ridge_start.json", "ridge_end.json"):
        if (run / NOT_SHIPPED / file).exists():
            shutil.copyfile(run / NOT_SHIPPED / file, folder / file)
    write_log(folder, read_rows(run / NOT_SHIPPED / "log.jsonl"))


def main(
    run: Path,
    name: str,
    after: Annotated[Path | None, typer.Option(help="record of the run that this one went on from")] = None,
) -> None:
    """Copy a finished run's student, and print its size."""
    target = PRETRAINED / name
    shutil.rmtree(target, ignore_errors=True)
    LLM2VecGen(str(run)).save_pretrained(str(target), model_name=name)
    card = target / "README.md"
    card.write_text(card.read_text(encoding="utf-8") + training_section(run, after), encoding="utf-8")
    keep_record(run, RECORDS / name)
    size = sum(path.stat().st_size for path in target.rglob("*") if path.is_file())
    print(f"{target.name}: {size / 1e6:.2f} MB")


if __name__ == "__main__":
    typer.run(main)
