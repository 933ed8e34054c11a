"""What saved students say of themselves: model card (README.md), and requirements for the host's loader."""

from __future__ import annotations

import importlib.metadata
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sentence_transformers.base.modules import Normalize

from llm2vec_gen_st.base_reference import BaseReference

if TYPE_CHECKING:
    from llm2vec_gen_st.model import LLM2VecGen

DISTRIBUTION = "llm2vec-gen-st"
_PLACE = "path/to/this/folder"


def student_card(model: LLM2VecGen, name: str | None = None) -> str:
    """Card of a student in our own form.

    Args:
        model: The student.
        name: Hub id or name under which it is published, if known.

    Returns:
        Markdown with the hub's metadata block. It never holds a path of this machine.
    """
    transformer, place = model.suffix_transformer, name or _PLACE
    trained = sum(parameter.numel() for module in model for parameter in module.parameters() if parameter.requires_grad)
    return f"""{_metadata(transformer.base)}
# {name or "LLM2Vec-Gen student"}

Embeds a text as the answer that the language model would give to it
([LLM2Vec-Gen](https://arxiv.org/abs/2603.10913)). This folder holds what was trained, {trained:,} numbers; the base
model is loaded from where it is and stays frozen.

Three ways to load it:

```python
# 1. With llm2vec-gen-st (pip install llm2vec-gen-st): embed, and decode embeddings back to text.
from llm2vec_gen_st import LLM2VecGen
model = LLM2VecGen({place!r})

# 2. With sentence-transformers, where llm2vec-gen-st is installed too. The flag is needed because the host asks before
#    it imports another package's classes.
from sentence_transformers import SentenceTransformer
model = SentenceTransformer({place!r}, trust_remote_code=True)

# 3. With sentence-transformers alone: export a copy to stock modules first.
from llm2vec_gen_st.checkpoints import export_native
export_native(LLM2VecGen({place!r}), "native")
model = SentenceTransformer("native")
```

```python
queries = model.encode_query(["Where do polar bears live?"])
passages = model.encode_document(["Polar bears live on the sea ice of the Arctic."])
print(model.similarity(queries, passages))
```

{_table(model)}"""


def native_card(model: LLM2VecGen) -> str:
    """Card of a student exported to stock modules; as :func:`student_card`."""
    return f"""{_metadata(model.suffix_transformer.base)}
# LLM2Vec-Gen student, stock modules

Embeds a text as the answer that the language model would give to it
([LLM2Vec-Gen](https://arxiv.org/abs/2603.10913)). Made of stock sentence-transformers modules, base model included:

```python
from sentence_transformers import SentenceTransformer

model = SentenceTransformer({_PLACE!r})
queries = model.encode_query(["Where do polar bears live?"])
passages = model.encode_document(["Polar bears live on the sea ice of the Arctic."])
print(model.similarity(queries, passages))
```

{_table(model)}"""


def host_requirements() -> dict[str, Any]:
    """What a checkpoint in our form demands of sentence-transformers' own loader.

    Returns:
        The ``requirements`` entry of ``config_sentence_transformers.json``: where this package is missing, loading
        fails with the reason given here. Empty if the package runs uninstalled, where nothing could be compared.
    """
    try:
        importlib.metadata.version(DISTRIBUTION)
    except importlib.metadata.PackageNotFoundError:
        return {}
    reason = (
        "This is an LLM2Vec-Gen student. Load it with llm2vec_gen_st.LLM2VecGen(path), or with "
        "SentenceTransformer(path, trust_remote_code=True) where llm2vec-gen-st is installed; to load it without that "
        "package, ask for a copy made with llm2vec_gen_st.checkpoints.export_native."
    )
    return {"requirements": {DISTRIBUTION: {"specifier": ">=0.1", "reason": reason}}}


def _metadata(base: BaseReference) -> str:
    lines = ["---", "library_name: sentence-transformers", "pipeline_tag: sentence-similarity"]
    if not _is_local(base.id):
        lines.append(f"base_model: {base.id}")
    tags = ("sentence-transformers", "llm2vec-gen", "feature-extraction", "sentence-similarity")
    return "\n".join([*lines, "tags:", *(f"- {tag}" for tag in tags), "---", ""])


def _table(model: LLM2VecGen) -> str:
    transformer, head = model.suffix_transformer, model.response_head
    base = Path(transformer.base.id).name if _is_local(transformer.base.id) else transformer.base.id
    rows = {
        "Base model": f"{base} (fingerprint {transformer.base.fingerprint or 'not taken'})",
        "Suffix": f"{transformer.thought_tokens} thought + {transformer.compression_tokens} compression tokens",
        "Embedding dimension": f"{head.embedding_dim}{', length 1' if isinstance(model[-1], Normalize) else ''}",
        "Hidden size": str(head.hidden_size),
        "Longest input": f"{transformer.max_seq_length} tokens, suffix included",
        "LoRA": f"rank {transformer.lora['r']}" if transformer.lora else "none",
    }
    rows |= {f"Instruction `{key}`": f"`{json.dumps(text, ensure_ascii=False)}`" for key, text in model.prompts.items()}
    return "| | |\n|---|---|\n" + "".join(f"| {key} | {value} |\n" for key, value in rows.items())


def _is_local(base_id: str) -> bool:
    # A hub id is one name, or an owner and a name.
    return base_id.count("/") > 1 or base_id.startswith((".", "/", "~")) or "\\" in base_id or Path(base_id).is_dir()
