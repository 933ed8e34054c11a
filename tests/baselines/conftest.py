"""A tiny base model on disk, as a checkpoint refers to it."""

from __future__ import annotations

from pathlib import Path

import pytest

from llm2vec_gen_st.testing import saved_base


@pytest.fixture(scope="session")
def llama_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved_base(tmp_path_factory.mktemp("llama"))
