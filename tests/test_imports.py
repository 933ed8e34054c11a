"""Importing the package costs little: nothing is imported that is not needed yet."""

from __future__ import annotations

import subprocess
import sys

HEAVY = {
    *(
        "accelerate",
        "bitsandbytes",
        "datasets",
        "faiss",
        "gguf",
        "gradio",
        "langchain_core",
        "langchain_text_splitters",
    ),
    *("matplotlib", "mteb", "pandas", "peft", "pyarrow", "ray", "scipy", "sklearn", "torchao", "vllm"),
}


def _modules_after(code: str, before: str = "") -> set[str]:
    """Top-level names of the modules that code imports, beyond those imported before it."""
    script = f"""
import sys
{before}
known = set(sys.modules)
{code}
print(*{{name.partition(".")[0] for name in set(sys.modules) - known}})
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


def test_importing_the_package_imports_nothing_heavy() -> None:
    found = _modules_after("import llm2vec_gen_st")
    assert "llm2vec_gen_st" in found
    assert not found & (HEAVY | {"torch", "transformers", "sentence_transformers", "numpy"})


def test_the_model_imports_nothing_heavy_that_its_host_does_not() -> None:
    found = _modules_after("from llm2vec_gen_st import LLM2VecGen", before="import sentence_transformers")
    assert "llm2vec_gen_st" in found
    assert not found & HEAVY
