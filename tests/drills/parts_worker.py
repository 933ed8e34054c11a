"""Writes a folder of parts with a tiny model; run as a program whose workers are killed in the middle of it."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch

from llm2vec_gen_st.corpus import encode_corpus
from llm2vec_gen_st.responses import write_responses
from llm2vec_gen_st.testing import tiny_model

QUERIES = [f"query {number} " + "bears " * (number % 7) for number in range(90)]


def work(kind: str, folder: Path, corpus: Path) -> None:
    """What one worker does: 30 parts."""
    model = tiny_model()
    if kind == "corpus":
        encode_corpus(model, corpus, folder, rows_per_part=3, keep=["text"], progress=False)
    else:
        write_responses(QUERIES, folder, model.backbone, batch_size=3, max_new_tokens=4, progress=False)


def serve() -> None:
    """Fork a worker for each line of input, since importing takes longer than working."""
    for line in sys.stdin:
        kind, folder, corpus = line.rstrip("\n").split("\t")
        child = os.fork()
        if not child:
            work(kind, Path(folder), Path(corpus))
            os._exit(0)
        os.write(1, f"worker {child}\n".encode())
        _, status = os.waitpid(child, 0)
        os.write(1, f"ended {os.waitstatus_to_exitcode(status)}\n".encode())


if __name__ == "__main__":
    torch.set_num_threads(1)  # threads do not survive a fork
    serve()
