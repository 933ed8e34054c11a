"""How far the shipped students' vectors are evened out: strengths on rows for choices, and the one that was taken.

    python benchmarks/quality/whiten_pretrained.py WORK/responses DATA/eval --students FOLDER
    python benchmarks/quality/whiten_pretrained.py WORK/responses --install 0.6

The first prints a table for the students in FOLDER as they were before; the second writes MLP_align into the package,
and a record beside it, which keeps it from being done twice. A run of the recipe does the same at its end.
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
from sentence_transformers import SentenceTransformer
from tasks import Embed, banking77, sts

from llm2vec_gen_st import LLM2VecGen
from llm2vec_gen_st.backbone import SMOLLM2_ID, load_backbone
from llm2vec_gen_st.checkpoints.registry import PRETRAINED
from llm2vec_gen_st.files import write_json
from llm2vec_gen_st.prompts import DOCUMENT
from llm2vec_gen_st.responses import read_responses
from llm2vec_gen_st.training import RECIPES
from llm2vec_gen_st.training.data import student_rows
from llm2vec_gen_st.training.whitening import whiten_alignment, whitening_map

STUDENTS = {"llm2vec-gen-smollm2-135m": "smollm2-135m", "llm2vec-gen-smollm2-135m-self": "smollm2-135m-self"}
STRENGTHS = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)
OWN_RESPONSES = 500
RECORDS = Path(__file__).parent / "records"


def remembered(model: LLM2VecGen) -> Embed:
    """What the heads give, before it is scaled to length 1; each text is encoded once."""
    heads, known = SentenceTransformer(modules=list(model)[:-1]), dict[str, np.ndarray]()

    def embed(texts: Sequence[str]) -> np.ndarray:
        new = [text for text in dict.fromkeys(texts) if text not in known]
        if new:
            known.update(zip(new, heads.encode(new, prompt="", batch_size=64), strict=True))
        return np.stack([known[text] for text in texts])

    return embed


def mapped(embed: Embed, spread_of: np.ndarray, strength: float, prompt: str) -> Embed:
    """Evened out and of length 1, every text behind an instruction."""
    weight, mean = (part.numpy() for part in whitening_map(torch.as_tensor(spread_of), strength))
    if not strength:
        mean = 0 * mean

    def embed_mapped(texts: Sequence[str]) -> np.ndarray:
        vectors = (embed([prompt + text for text in texts]) - mean) @ weight.T
        return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)

    return embed_mapped


def main(
    responses: Path,
    data: Annotated[Path | None, typer.Argument(help="folder of evaluation sets")] = None,
    students: Annotated[Path, typer.Option(help="folder of the students before")] = PRETRAINED,
    rows: Annotated[int, typer.Option(help="texts on which the spread is measured")] = 3000,
    install: Annotated[float | None, typer.Option(help="write this strength into the package")] = None,
    output: Path | None = None,
) -> None:
    """Measure strengths, or install one."""
    if (data is None) == (install is None):
        raise typer.BadParameter("give either the evaluation sets, or --install")
    records = {name: RECORDS / name / "whitening.json" for name in STUDENTS}
    if install is not None and (done := [str(path) for path in records.values() if path.exists()]):
        raise typer.BadParameter(f"the package's students are evened out already: {', '.join(done)}")
    found = read_responses(responses, include=("ok", "cut_off"), partial=True)
    backbone = load_backbone(SMOLLM2_ID, model_kwargs={"dtype": "bfloat16"})
    results: dict[str, dict[str, float]] = {}
    for name, recipe in STUDENTS.items():
        texts = student_rows(found, RECIPES[recipe]).shuffle(seed=RECIPES[recipe].seed)["query"][:rows]
        model = LLM2VecGen(str(students / name), backbone=backbone)
        if data is None:
            assert install is not None
            whiten_alignment(model, texts, install)
            model.response_head.save(str(students / name / "1_ResponseHead"))
            write_json(records[name], {"strength": install, "texts": len(texts), "responses": len(found)})
            continue
        embed = remembered(model)
        spread_of, last = embed(texts), found.select(range(len(found) - OWN_RESPONSES, len(found)))
        for strength in STRENGTHS:
            documents, queries = (mapped(embed, spread_of, strength, prompt) for prompt in (DOCUMENT, ""))
            nearest = (queries(last["query"]) @ documents(last["response"]).T).argmax(axis=1)
            results[f"{name}, {strength:g}"] = {
                "STSBenchmark": sts(documents, data / "STSBenchmark" / "dev.jsonl"),
                **banking77(documents, data / "Banking77Classification", "train"),
                "own response R@1": float((nearest == np.arange(len(nearest))).mean()),
            }
    if results:
        columns = list(next(iter(results.values())))
        table = Table("student, strength", *columns, title=f"development rows; spread of {rows} texts; LLM in bfloat16")
        for label, scores in results.items():
            table.add_row(label, *(f"{scores[column]:.3f}" for column in columns))
        Console(width=140).print(table)
    if output is not None:
        write_json(output, results)


if __name__ == "__main__":
    typer.run(main)
