"""Changes a store step by step and tells of each; run as a program that is killed in the middle of it."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import numpy as np
from langchain_llm2vec_gen.store import FaissStore

DIMENSION = 8
NAMES = 200
KINDS = ("add", "delete", "save", "add", "compact")

Documents = dict[str, tuple[str, np.ndarray]]


def script(step: int) -> tuple[str, list[str], np.ndarray]:
    """What is done in a step: its kind, the ids it concerns, and their new vectors."""
    generator = np.random.default_rng(step)
    kind = KINDS[step % len(KINDS)]
    count = int(generator.integers(1, 60)) if kind == "add" else int(generator.integers(1, 20))
    ids = [f"d{number}" for number in generator.choice(NAMES, count, replace=False)]
    return kind, ids if kind in ("add", "delete") else [], generator.normal(size=(count, DIMENSION)).astype(np.float32)


def after(step: int, documents: Documents) -> Documents:
    """The documents there are when a step is done."""
    kind, ids, vectors = script(step)
    changed = dict(documents)
    for id, vector in zip(ids, vectors, strict=False):
        changed.pop(id, None)
        if kind == "add":
            changed[id] = (f"{id} of step {step}", vector)
    return changed


def work(path: Path, index: str, step: int) -> None:
    """Go on from a step until killed."""
    store = FaissStore(path, index=index)
    while True:
        kind, ids, vectors = script(step)
        tell(f"start {kind} {step}")
        if kind == "add":
            metadatas = [{"step": step}] * len(ids)
            store.add_embeddings([f"{id} of step {step}" for id in ids], vectors, metadatas, ids)
        elif kind == "delete":
            store.delete(ids)
        elif kind == "save":
            store.save()
        else:
            store.compact()
        tell(f"done {kind} {step}")
        step += 1


def tell(line: str) -> None:
    os.write(1, f"{line}\n".encode())


def serve() -> None:
    """Fork a worker for each line of input, since importing takes longer than working."""
    for line in sys.stdin:
        index, step, path = line.rstrip("\n").split(" ", 2)
        child = os.fork()
        if not child:
            work(Path(path), index, int(step))
        tell(f"worker {child}")
        os.waitpid(child, 0)
        tell("ended")


if __name__ == "__main__":
    serve()
