"""Which tasks are meant: groups of the paper, names of mteb's tasks, and folders."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from llm2vec_gen_st.extras import require

if TYPE_CHECKING:
    from mteb.abstasks import AbsTask

MTEB_ENG = "MTEB(eng, v2)"

MTEB_LITE = (
    "ArguAna",
    "ClimateFEVERHardNegatives",
    "AskUbuntuDupQuestions",
    "ArXivHierarchicalClusteringP2P",
    "MedrxivClusteringP2P.v2",
    "SprintDuplicateQuestions",
    "Banking77Classification",
    "ImdbClassification",
    "BIOSSES",
    "STS17",
)
"""The ten tasks on which the paper compares variants."""

# The twelve sets with passages as documents, each a task of its own: so each can have its own instruction.
BRIGHT = tuple(
    f"Bright{subset}Retrieval"
    for subset in (
        "Biology",
        "EarthScience",
        "Economics",
        "Psychology",
        "Robotics",
        "Stackoverflow",
        "SustainableLiving",
        "Pony",
        "Leetcode",
        "Aops",
        "TheoremQATheorems",
        "TheoremQAQuestions",
    )
)


def is_bright(name: str) -> bool:
    """Whether a task is one of BRIGHT's, with passages or whole pages as documents, or of its later edition.

    Example:
        >>> is_bright("BrightBiologyRetrieval"), is_bright("BrightBiologyLongRetrieval"), is_bright("BrightIdeas")
        (True, True, False)
    """
    plain = name.replace("Long", "").replace("BrightPro", "Bright")
    return plain == "BrightRetrieval" or plain in BRIGHT


GROUPS = ("mteb-lite", "mteb-eng-v2", "bright", "advbench-ir")


def find_tasks(wanted: str | AbsTask | Iterable[str | AbsTask]) -> list[AbsTask]:
    """Turn what a user asks for into mteb tasks.

    Args:
        wanted: One or several of: a group (``mteb-lite``, ``mteb-eng-v2``, ``bright``, ``advbench-ir``), a name of one
            of mteb's tasks, a folder (see :mod:`~llm2vec_gen_st.evaluation.local`), a ready task.

    Returns:
        The tasks, in that order, each once.

    Raises:
        MissingExtraError: If mteb is not installed.
        ValueError: If something is none of these, or two different tasks have the same name.

    Example:
        >>> [task.metadata.name for task in find_tasks("mteb-lite")][:2]
        ['ArguAna', 'ClimateFEVERHardNegatives']
    """
    require("mteb", extra="mteb", why="evaluation")
    if isinstance(wanted, str) or not isinstance(wanted, Iterable):
        wanted = [wanted]
    found: dict[str, AbsTask] = {}
    for item in wanted:
        for task in _named(item) if isinstance(item, str) else [item]:
            known = found.setdefault(task.metadata.name, task)
            if known is not task and known.metadata.dataset != task.metadata.dataset:
                raise ValueError(
                    f"Two different tasks are called {task.metadata.name!r} (data {known.metadata.dataset['path']!r} "
                    f"and {task.metadata.dataset['path']!r}); their results would share a file. Use two outputs."
                )
    if not found:
        raise ValueError(f"No tasks were asked for. Give a group ({', '.join(GROUPS)}), names of tasks, or a folder.")
    return list(found.values())


def _named(name: str) -> Sequence[AbsTask]:
    import mteb

    from llm2vec_gen_st.evaluation.advbench import AdvBenchIR, is_advbench
    from llm2vec_gen_st.evaluation.local import local_tasks

    if name == "mteb-lite":
        return [task for lite in MTEB_LITE for task in mteb.get_benchmark(MTEB_ENG).tasks if task.metadata.name == lite]
    if name == "mteb-eng-v2":
        return list(mteb.get_benchmark(MTEB_ENG).tasks)
    if name == "bright":
        return [mteb.get_task(subset) for subset in BRIGHT]
    if Path(name).is_dir():
        return local_tasks(name)
    if is_advbench(name):
        return [AdvBenchIR()]
    # As in the benchmark where it is a part of that, which takes only the English texts.
    for task in mteb.get_benchmark(MTEB_ENG).tasks:
        if task.metadata.name == name:
            return [task]
    try:
        return [mteb.get_task(name)]
    except KeyError as error:
        raise ValueError(
            f"{name!r} is no group ({', '.join(GROUPS)}), no folder here, and none of mteb's tasks. "
            f"{str(error.args[0]) if error.args else ''}".strip()
        ) from error
