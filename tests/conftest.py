"""Fixtures shared by all tests: one tiny student a session, and no way to the network."""

from __future__ import annotations

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import pytest
import torch

from llm2vec_gen_st import LLM2VecGen
from llm2vec_gen_st.backbone import Backbone
from llm2vec_gen_st.testing import tiny_backbone, tiny_model


@pytest.fixture(scope="session")
def student() -> LLM2VecGen:
    """A tiny float32 student for tests that leave it as it is."""
    return tiny_model()


@pytest.fixture(scope="session")
def student_bf16() -> LLM2VecGen:
    """The same student on a bfloat16 LLM."""
    backbone = tiny_backbone()
    backbone.llm.to(torch.bfloat16)
    return tiny_model(backbone=backbone)


@pytest.fixture
def fresh_student() -> LLM2VecGen:
    """A tiny student that a test may change."""
    return tiny_model()


@pytest.fixture(scope="session")
def backbone(student: LLM2VecGen) -> Backbone:
    """The tiny student's LLM."""
    return student.backbone
