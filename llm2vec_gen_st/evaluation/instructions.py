"""Generative instructions per task: the built-in ones, those of a file, and those of a model (paper, section 4).

Instructions are kept under the names by which mteb looks up a SentenceTransformer's ``prompts``, most specific first:
``ArguAna-query``, ``STS12`` (all texts of the task), ``Reranking-query``, ``STS`` (all texts of tasks of that type),
``query``, ``document``. So a model that was saved with them gets them from mteb itself.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, cast

from llm2vec_gen_st.model import LLM2VecGen

if TYPE_CHECKING:
    from sentence_transformers import SentenceTransformer

Side = Literal["query", "document", "text"]
"""Which texts of a task an instruction is put before; ``text`` for tasks whose texts are all alike."""

INSTRUCTIONS_FILE = Path(__file__).with_name("instructions.json")
# Tasks that mteb has no name for: in a model's prompts it would only warn about them.
_NOT_IN_MTEB = ("AdvBench-IR-query",)


@cache
def built_in_instructions() -> Mapping[str, str]:
    """The instructions that come with this package: one each for the tasks of MTEB(eng, v2), BRIGHT and AdvBench-IR.

    Returns:
        mteb's name of a prompt to the instruction, unchangeable.

    Example:
        >>> built_in_instructions()["ArguAna-query"]
        'Generate a passage that argues against this claim: '
    """
    return MappingProxyType(_read(INSTRUCTIONS_FILE))


def load_instructions(path: str | Path) -> dict[str, str]:
    """The built-in instructions, with those of a file in their place.

    Args:
        path: A JSON file: an object from a task's name to the instruction put before its queries, or before all its
            texts where these are alike. mteb's own names of prompts (``ArguAna-query``, ``document``) work too.

    Returns:
        mteb's name of a prompt to the instruction.

    Raises:
        ValueError: If the file is not such an object.

    Example:
        >>> import tempfile
        >>> file = Path(tempfile.mkdtemp()) / "mine.json"
        >>> _ = file.write_text('{"ArguAna": "Argue back:", "STS12": "Paraphrase:"}')
        >>> found = load_instructions(file)
        >>> found["ArguAna-query"], found["STS12"], found["STS13"] == built_in_instructions()["STS13"]
        ('Argue back: ', 'Paraphrase: ', True)
    """
    return with_overrides(_read(Path(path)))


def with_overrides(overrides: Mapping[str, str]) -> dict[str, str]:
    """The built-in instructions, with others in their place.

    Args:
        overrides: As the object in the file of :func:`load_instructions`.

    Returns:
        mteb's name of a prompt to the instruction.
    """
    found = dict(built_in_instructions())
    for name, instruction in overrides.items():
        known = name if name in found or f"{name}-query" not in found else f"{name}-query"
        found[known] = _spaced(instruction)
    for name in overrides:
        # Before passages of a task that is not known here the instruction would be wrong, were it a retrieval task.
        if name not in built_in_instructions() and f"{name}-query" not in found and not name.endswith(_SIDES):
            found.setdefault(f"{name}-document", found["document"])
    return found


def instructions_for(model: SentenceTransformer, instructions: Mapping[str, str] | None = None) -> dict[str, str]:
    """The prompts that let mteb find a model's instructions by itself; save the model with them.

    Args:
        model: The model; instructions of its own by the same name are kept.
        instructions: mteb's name of a prompt to the instruction; the built-in ones if not given.

    Returns:
        Prompts by name: ``model.prompts = instructions_for(model)``.

    Example:
        >>> from llm2vec_gen_st.testing import tiny_model
        >>> model = tiny_model()
        >>> model.prompts = instructions_for(model)
        >>> model.prompts["STS12"]
        'Generate a passage that has the same meaning as this sentence: '
    """
    chosen = built_in_instructions() if instructions is None else instructions
    return {name: text for name, text in {**chosen, **_own(model)}.items() if name not in _NOT_IN_MTEB}


def default_instructions(model: SentenceTransformer) -> dict[str, str]:
    """What a model is evaluated with unless told otherwise: a student by the built-in instructions and its own.

    Any other model has been trained with prompts of its own, or with none, and keeps to them.

    Args:
        model: The model.

    Returns:
        mteb's name of a prompt to the instruction.
    """
    return {**(built_in_instructions() if isinstance(model, LLM2VecGen) else {}), **_own(model)}


def instruction_of(instructions: Mapping[str, str], task: str, task_type: str, side: Side, *, default: str = "") -> str:
    """The instruction put before the texts of one side of a task, by mteb's order of precedence.

    Args:
        instructions: mteb's name of a prompt to the instruction.
        task: Name of the task.
        task_type: mteb's type of the task, such as ``STS``.
        side: Which texts.
        default: What texts that are all alike get where nothing else applies.

    Returns:
        The instruction; empty if there is none.

    Example:
        >>> instruction_of(built_in_instructions(), "ArguAna", "Retrieval", "document")
        'Summarize the following passage: '
        >>> instruction_of(built_in_instructions(), "my-questions", "STS", "text")
        'Generate a passage that says the same as this text: '
    """
    names = [task, task_type]
    if side != "text":
        names = [f"{task}-{side}", task, f"{task_type}-{side}", task_type, side]
    if side == "document":
        names += ["passage", "corpus"]  # the host's other names for it
    return next((instructions[name] for name in names if name in instructions), default)


_SIDES = ("-query", "-document")


def _own(model: SentenceTransformer) -> dict[str, str]:
    return {name: text for name, text in model.prompts.items() if text is not None}


def _read(path: Path) -> dict[str, str]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=_unique)
    except (json.JSONDecodeError, UnicodeDecodeError, _RepeatedName) as error:
        raise ValueError(f"{path}: not a JSON object of instructions ({error}).") from error
    wrong = [name for name, text in found.items() if not isinstance(text, str)] if isinstance(found, dict) else None
    if wrong is None or wrong:
        raise ValueError(
            f"{path}: expected a JSON object from task to instruction"
            + (f"; the instruction of {wrong[0]!r} is no text." if wrong else f", found {type(found).__name__}.")
        )
    return {name: _spaced(text) for name, text in cast(dict[str, str], found).items()}


class _RepeatedName(ValueError):
    pass


def _unique(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise _RepeatedName(f"the name {name!r} occurs twice")
        found[name] = value
    return found


def _spaced(instruction: str) -> str:
    """An instruction as it is put before a text: one space between them."""
    return f"{instruction.strip()} " if instruction.strip() else ""
