r"""Latent chains, latent messages, reconstruction on or off, and refusals: the figures of `frontiers.md`.

    python benchmarks/quality/frontiers.py DATA                        # everything, with the built-in students
    python benchmarks/quality/frontiers.py DATA --only jepa --jepa WITH WITHOUT \
        --output mine --report mine.md                                 # a pair of your own

``DATA`` is a folder with ``queries/train_mix.jsonl.gz``, ``eval/MLQuestions`` and ``eval/STSBenchmark``. Queries are
drawn from those sources of the mix that no built-in student was trained on. Each part writes a file of figures into the
output folder; the tables of all that is there go into the report, between its markers.
"""

from __future__ import annotations

import json
import re
import time
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from frontier_measures import (
    Figure,
    Passages,
    chaining,
    messages,
    places,
    quality,
    responses,
    safety,
    without_reconstruction,
    written_refusals,
)
from select_queries import SOURCES
from transformers.utils import logging as hf_logging

from llm2vec_gen_st import LLM2VecGen
from llm2vec_gen_st.backbone import SMOLLM2_ID, Backbone, load_backbone
from llm2vec_gen_st.files import read_jsonl, write_atomically, write_json
from llm2vec_gen_st.prompts import QUERY
from llm2vec_gen_st.teachers import SELF, load_teacher
from llm2vec_gen_st.teachers.sources import MINILM, SentenceTransformerTeacher

HERE = Path(__file__).parent
# Student to teacher.
STUDENTS = {"llm2vec-gen-smollm2-135m": MINILM, "llm2vec-gen-smollm2-135m-self": SELF}
JEPA_STUDENT = "llm2vec-gen-smollm2-135m-self"
PARTS = ("chaining", "messages", "jepa", "safety")
STEPS = 3
_MAX_CHARACTERS = 300
_CHOOSING = 50


class Bench:
    """The frozen LLM, students on it, and held-out texts, each loaded once.

    Args:
        data: Folder of the data.
        size: Queries a measure (N).
        distractors: Passages beside those that answer a question.
    """

    def __init__(self, data: Path, size: int, distractors: int) -> None:
        self.backbone: Backbone = load_backbone(SMOLLM2_ID)
        random = np.random.default_rng(0)
        mix = read_jsonl(data / "queries" / "train_mix.jsonl.gz")
        held = [row["query"] for row in mix if row["source"] not in SOURCES and len(row["query"]) <= _MAX_CHARACTERS]
        drawn = [held[row] for row in random.permutation(len(held))[: size + _CHOOSING]]
        # The first to report, the others to choose by.
        self.queries, self.choosing = drawn[:size], drawn[size:]
        self.passages = _passages(data / "eval" / "MLQuestions", size, distractors, random)
        self.pairs = list(read_jsonl(data / "eval" / "STSBenchmark" / "dev.jsonl"))[:300]
        self._written: dict[str, str] = {}

    def student(self, name: str) -> LLM2VecGen:
        """A student on the shared LLM."""
        return LLM2VecGen(name, backbone=self.backbone)

    def written(self, queries: list[str]) -> list[str]:
        """The LLM's responses to queries, each written once."""
        new = [query for query in dict.fromkeys(queries) if query not in self._written]
        self._written.update(zip(new, responses(self.backbone, new), strict=True))
        return [self._written[query] for query in queries]

    def judge(self) -> Any:
        """all-MiniLM-L6-v2, which says how alike two answers are."""
        teacher = load_teacher(MINILM)
        assert isinstance(teacher, SentenceTransformerTeacher)
        return teacher.model

    def chaining(self) -> dict[str, Any]:
        """Latent chains of every student."""
        written = self.written(self.queries)
        return {
            name: chaining(
                self.student(name), load_teacher(teacher, self.backbone), self.queries, written, self.passages, STEPS
            )
            for name, teacher in STUDENTS.items()
        }

    def messages(self) -> dict[str, Any]:
        """Latent messages of every student, and where a soft prompt is put."""
        judge = self.judge()
        written, to_choose_by = self.written(self.queries), self.written(self.choosing)
        return {
            name: {
                "places": places(self.student(name), judge, self.choosing, to_choose_by),
                **messages(self.student(name), judge, self.queries, written),
            }
            for name in STUDENTS
        }

    def jepa(self, pair: tuple[str, str] | None) -> dict[str, Any]:
        """Students of the LLM itself, with and without reconstruction."""
        written = self.written(self.queries)
        teacher = load_teacher(SELF, self.backbone)
        with_it, without_it = (self.student(name) for name in pair or (JEPA_STUDENT, JEPA_STUDENT))
        if pair is None:
            without_reconstruction(without_it, [QUERY + query for query in self.queries])
        found: dict[str, Any] = {
            name: quality(model, teacher, self.queries, written, self.passages, self.pairs)
            for name, model in (("on", with_it), ("off", without_it))
        }
        on, off = (model.encode_query(self.queries, batch_size=32) for model in (with_it, without_it))
        found["largest_difference"] = float(np.abs(on - off).max() / np.abs(on).max())
        return found

    def safety(self) -> dict[str, Any]:
        """Requests to be refused beside harmless ones."""
        rows = list(read_jsonl(HERE / "refusal_pairs.jsonl"))
        kinds = {kind: [row[kind] for row in rows] for kind in ("refused", "harmless")}
        return {
            "requests": len(rows),
            "written": {kind: written_refusals(self.backbone, texts) for kind, texts in kinds.items()},
            "students": {name: safety(self.student(name), kinds) for name in STUDENTS},
        }


def main(
    data: Path,
    only: Annotated[list[str] | None, typer.Option(help=f"Parts to measure: {', '.join(PARTS)}.")] = None,
    jepa: Annotated[
        tuple[str, str] | None, typer.Option(help="Students with and without reconstruction, both of teacher 'self'.")
    ] = None,
    size: Annotated[int, typer.Option(min=10, help="Queries a measure.")] = 100,
    distractors: Annotated[int, typer.Option(help="Passages beside those that answer a question.")] = 300,
    output: Annotated[Path, typer.Option(help="Folder of the figures.")] = HERE / "results" / "frontiers",
    report: Annotated[Path, typer.Option(help="The report that holds the tables.")] = HERE / "frontiers.md",
) -> None:
    """Measure, print and write figures and tables."""
    if jepa is not None and output == HERE / "results" / "frontiers":
        raise typer.BadParameter(
            "--jepa: give --output and --report too, to leave the built-in students' figures alone"
        )
    unknown = set(only or ()) - set(PARTS)
    if unknown:
        raise typer.BadParameter(f"--only {sorted(unknown)[0]}: known parts are {', '.join(PARTS)}")
    hf_logging.disable_progress_bar()
    bench = Bench(data, size, distractors)
    for part in only or PARTS:
        start = time.perf_counter()
        found = bench.jepa(jepa) if part == "jepa" else getattr(bench, part)()
        seconds = time.perf_counter() - start
        write_json(output / f"{part}.json", {"queries": size, "seconds": round(seconds, 1), "found": found})
        print(f"{TABLES[part](found)}\n{part}: {seconds:.0f} s", flush=True)
    if report.exists():
        fill(report, output)


def fill(report: Path, folder: Path) -> None:
    """Put the tables of all figures in a folder between the report's markers."""
    text = report.read_text(encoding="utf-8")
    for file in sorted(folder.glob("*.json")):
        measured = json.loads(file.read_text(encoding="utf-8"))
        name = file.stem
        table = TABLES[name](measured["found"])
        body = f"{table}\n\n{_stated(measured)}"
        pattern = re.compile(rf"(<!-- figures: {re.escape(name)} -->\n).*?(\n<!-- end -->)", re.DOTALL)
        text, count = pattern.subn(lambda match, body=body: match[1] + body + match[2], text)
        if not count:
            raise ValueError(f"{report} has no place for the figures {name!r}.")
    write_atomically(report, lambda temporary: temporary.write_text(text, encoding="utf-8") and None)


def _stated(measured: dict[str, Any]) -> str:
    of_each = measured["found"].get("requests")
    count = f"{measured['queries']} queries" if of_each is None else f"{of_each} requests of each kind"
    return f"n = {count}; in brackets: 95 % bootstrap interval. {measured['seconds']:.0f} s."


def _chaining_table(found: dict[str, Any]) -> str:
    rows = [
        [
            _short(name),
            "text + soft prompt" if row["behind_text"] else "soft prompt",
            str(row["step"]),
            *(_number(row[key]) for key in ("cosine_to_response", "response_first", "passage_mrr")),
            _number(row["response_word_decoded"]),
            f"{row['similarity_to_first']['value']:.2f}",
            f"{row['similarity_to_previous']['value']:.2f}",
            f"{row['distinct_decoded']:.2f}",
        ]
        for name, steps in found.items()
        for row in steps
    ]
    heads = ["student", "LLM reads", "step", "cosine to response", "response first", "passage MRR@10"]
    heads += ["word of response decoded", "cosine to step 0", "to step before", "distinct decoded texts"]
    return _table(heads, rows)


def _messages_table(found: dict[str, Any]) -> str:
    given = _table(
        ["student", "B is given", "similarity to the answer to the text", "nearest to its own"],
        [
            [_short(name), what, _number(values["similarity"]), _number(values["nearest"])]
            for name, measured in found.items()
            for what, values in measured["answers"].items()
        ],
    )
    where = _table(
        ["student", "place of the soft prompt", "similarity", "nearest to its own"],
        [
            [_short(name), place, _number(values["similarity"]), _number(values["nearest"])]
            for name, measured in found.items()
            for place, values in measured["places"].items()
        ],
    )
    cost = next(iter(found.values()))["cost"]
    sizes = _table(
        ["sent", "positions in B's context", "bytes"],
        [
            ["text", f"{cost['text_tokens']:.1f} tokens", f"{cost['text_bytes']:.0f}"],
            ["latent message", f"{cost['vectors']} vectors", f"{cost['message_bytes']:.0f}"],
        ],
    )
    return f"{given}\n\nOn other queries, to choose the place by:\n\n{where}\n\nWhat is sent, on average:\n\n{sizes}"


def _jepa_table(found: dict[str, Any]) -> str:
    keys = ("sts", "passage_mrr", "response_first", "response_word_decoded", "another_response_word_decoded")
    heads = ["reconstruction", "STSBenchmark, dev", "passage MRR@10", "response first", "word of response decoded"]
    table = _table(
        [*heads, "word of another response"],
        [[name, *(_number(found[name][key]) for key in keys)] for name in ("on", "off")],
    )
    return (
        f"{table}\n\nLargest difference of the two embeddings: {found['largest_difference']:.1e} of the largest value."
    )


def _safety_table(found: dict[str, Any]) -> str:
    rows = [["the LLM itself, in words", kind, _number(value), "", ""] for kind, value in found["written"].items()]
    rows += [
        [
            _short(name),
            kind,
            _number(values["decoded_refuses"]),
            _number(values["refusal_mass"], percent=True),
            _number(values["request_mass"], percent=True),
        ]
        for name, measured in found["students"].items()
        for kind, values in measured["kinds"].items()
    ]
    heads = ["", "requests", "refusing texts", "lens: refusal words", "lens: words of the request"]
    more = ", ".join(
        f"{measured['more_refusal_in_refused']:.0%} (student {_short(name)})"
        for name, measured in found["students"].items()
    )
    return f"{_table(heads, rows)}\n\nPairs in which the refused request has more of the refusal words: {more}."


TABLES = {
    "chaining": _chaining_table,
    "messages": _messages_table,
    "jepa": _jepa_table,
    "safety": _safety_table,
}


def _table(heads: list[str], rows: list[list[str]]) -> str:
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (heads, ["---"] * len(heads), *rows))


def _number(found: Figure, *, percent: bool = False) -> str:
    values = [found[key] for key in ("value", "low", "high")]
    if percent:
        value, low, high = (100 * number for number in values)
        return f"{value:.2f} % [{low:.2f}, {high:.2f}]"
    value, low, high = values
    return f"{value:.2f} [{low:.2f}, {high:.2f}]"


def _short(student: str) -> str:
    return f"of {STUDENTS[student]}"


def _passages(folder: Path, size: int, distractors: int, random: np.random.Generator) -> Passages:
    """Questions with their passages first, then others; no passage twice."""
    texts = {row["_id"]: row["text"] for row in read_jsonl(folder / "corpus.jsonl.gz")}
    asked = {row["_id"]: row["text"] for row in read_jsonl(folder / "queries.jsonl")}
    lines = (folder / "qrels.tsv").read_text(encoding="utf-8").splitlines()[1:]
    right = {question: passage for question, passage, _ in (line.split("\t") for line in lines)}
    questions: list[str] = []
    found: dict[str, None] = {}
    for row in random.permutation(sorted(right)):
        if len(questions) < size and texts[right[row]] not in found:
            questions.append(asked[row])
            found[texts[right[row]]] = None
    for row in random.permutation(sorted(texts)):
        if len(found) < size + distractors:
            found.setdefault(texts[row])
    return Passages(questions, list(found))


if __name__ == "__main__":
    typer.run(main)
