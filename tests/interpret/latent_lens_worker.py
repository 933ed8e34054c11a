"""Builds an index and stops at a given place, to be killed there: ``latent_lens_worker.py FOLDER reading|moving``."""

from __future__ import annotations

import itertools
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from llm2vec_gen_st.interpret import build_latent_lens
from llm2vec_gen_st.testing import tiny_model


def stop_here() -> None:
    """Tell the parent, and wait to be killed."""
    print("here", flush=True)
    time.sleep(600)


def corpus(stop: bool) -> Iterator[str]:
    """Texts; behind the hundredth the worker stops, or the corpus ends."""
    for number in itertools.count():
        if number == 100:
            if not stop:
                return
            stop_here()
        yield f"River {number} carries water to the sea."


if __name__ == "__main__":
    folder, place = Path(sys.argv[1]), sys.argv[2]
    if place == "moving":
        os.replace, replace = (
            lambda source, target: stop_here() if Path(target) == folder else replace(source, target),
            os.replace,
        )
    build_latent_lens(tiny_model(), corpus(place == "reading"), folder, batch_size=10, progress=False)
