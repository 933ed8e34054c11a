"""A tiny base model on disk, as a checkpoint refers to it."""

from __future__ import annotations

from pathlib import Path

import pytest

from llm2vec_gen_st.testing import tiny_backbone


@pytest.fixture(scope="session")
def llama_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    backbone = tiny_backbone()
    backbone.llm.save_pretrained(folder)
    backbone.tokenizer.save_pretrained(folder)
    return folder
