"""What the page's tests run on: a tiny student, saved too, and a few passages."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

pytest.importorskip("langchain_core")
pytest.importorskip("faiss")

from llm2vec_gen_st import LLM2VecGen
from llm2vec_gen_st.app import passages_store
from llm2vec_gen_st.demo.run import Passage
from llm2vec_gen_st.testing import saved_model

if TYPE_CHECKING:
    from langchain_llm2vec_gen import FaissStore

PASSAGES = [
    Passage("bees", "insects", "Bees turn the nectar of flowers into honey."),
    Passage("bears", "mammals", "Polar bears live on the sea ice.\nThey hunt seals."),
    Passage("markup", "nasty", "<img src=x onerror=\"document.title='hurt'\"> ${6*7} {{6*7}} <b>bold</b>"),
    Passage("rivers", "water", "Rivers carry water to the sea."),
]


@pytest.fixture(scope="session")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A student's folder, its base beside it."""
    return saved_model(tmp_path_factory.mktemp("shown") / "student")


@pytest.fixture(scope="session")
def store(student: LLM2VecGen) -> Iterator[FaissStore]:
    """A store of :data:`PASSAGES` by the session's student."""
    with passages_store(student, PASSAGES) as opened:
        yield opened
