"""What kind of checkpoint a directory holds."""

from __future__ import annotations

from enum import Enum
from pathlib import Path

from llm2vec_gen_st.modules.config import read_json
from llm2vec_gen_st.modules.tensors import CheckpointError

MODULES_FILE = "modules.json"
HOST_CONFIG_FILE = "config_sentence_transformers.json"
ADAPTER_CONFIG_FILE = Path("encoder", "adapter_config.json")
OUR_MODULES = "llm2vec_gen_st."
STOCK_MODULES = "sentence_transformers."


class Form(Enum):
    """The kinds of checkpoint."""

    OURS = "ours"
    OFFICIAL = "official"


def read_modules(directory: Path) -> list[tuple[str, str]]:
    """The entries of ``modules.json``.

    Args:
        directory: The checkpoint.

    Returns:
        Class and subfolder of each module.

    Raises:
        CheckpointError: If the file is not what it should be.
    """
    path = directory / MODULES_FILE
    try:
        return [(str(entry["type"]), str(entry["path"])) for entry in read_json(path)]
    except (KeyError, TypeError) as error:
        raise CheckpointError(f"{path}: expected a list of objects with type and path.") from error


def recognise(directory: Path) -> Form:
    """Tell the kinds of checkpoint apart.

    Args:
        directory: The checkpoint.

    Returns:
        Its kind.

    Raises:
        CheckpointError: If it is none that a student can be loaded from; says what was looked for.
    """
    if (directory / MODULES_FILE).is_file():
        types = [reference for reference, _ in read_modules(directory)]
        if types and types[0].startswith(OUR_MODULES):
            return Form.OURS
        names = ", ".join(name.rpartition(".")[2] for name in types)
        raise CheckpointError(
            f"{directory} is a plain sentence-transformers model ({names}), "
            "such as export_native writes: it embeds, but holds no student to decode or train. "
            f"Load it with SentenceTransformer({str(directory)!r})."
        )
    if (directory / ADAPTER_CONFIG_FILE).is_file():
        return Form.OFFICIAL
    raise CheckpointError(
        f"{directory} is not a checkpoint: it has neither {MODULES_FILE} (written by LLM2VecGen.save_pretrained) nor "
        f"{ADAPTER_CONFIG_FILE} (the authors' format). To start an untrained student on a base model use "
        "LLM2VecGen.from_base."
    )
