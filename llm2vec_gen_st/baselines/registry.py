"""The baselines by name, so that one command can run any of them on any base model."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, get_args, get_type_hints

from sentence_transformers import SentenceTransformer

from llm2vec_gen_st.backbone import Backbone
from llm2vec_gen_st.baselines.echo import echo
from llm2vec_gen_st.baselines.gircse import gircse
from llm2vec_gen_st.baselines.hyde import hyde
from llm2vec_gen_st.baselines.inbedder import inbedder
from llm2vec_gen_st.baselines.llm2vec import llm2vec
from llm2vec_gen_st.baselines.pooling import last_token, mean_pooling


@dataclass(frozen=True)
class Baseline:
    """One baseline.

    Args:
        name: Its name.
        build: Makes a SentenceTransformer of a base LLM (hub id, directory or backbone) and keyword options.
        summary: What it does, in a line.
        trained: Whether it is meant to be trained; on a plain LLM it then shows only where training starts.
    """

    name: str
    build: Callable[..., SentenceTransformer]
    summary: str
    trained: bool = False


BASELINES: dict[str, Baseline] = {
    baseline.name: baseline
    for baseline in (
        Baseline("mean", mean_pooling, "mean of the plain LLM's states over the text"),
        Baseline("last", last_token, "the plain LLM's state at the last token"),
        Baseline("echo", echo, "text twice, mean over the second (Springer et al. 2024)"),
        Baseline("hyde", hyde, "mean of the query and N made-up answers (Gao et al. 2022)"),
        Baseline("llm2vec", llm2vec, "attention in both directions, MNTP, SimCSE (BehnamGhader et al. 2024)", True),
        Baseline("inbedder", inbedder, "first position of the answer to the instruction (Peng et al. 2024)", True),
        Baseline("gircse", gircse, "soft tokens generated step by step, pooled (Tsai et al. 2025)", True),
    )
}


def build(name: str, made_of: str | Backbone, /, **options: Any) -> SentenceTransformer:
    """Make a baseline by name.

    Args:
        name: One of :data:`BASELINES`.
        made_of: Hub id or directory of a base LLM (or, for a trained baseline, of a trained one), or a loaded backbone.
        **options: Of its constructor; a trained one has an option ``base`` of its own.

    Returns:
        The encoder.

    Raises:
        ValueError: If there is no baseline of this name; lists the known ones.

    Example:
        >>> from llm2vec_gen_st.testing import tiny_backbone
        >>> build("echo", tiny_backbone(), device="cpu").encode(["bees"]).shape
        (1, 64)
    """
    return _named(name).build(made_of, **options)


def known_options(name: str) -> dict[str, type]:
    """Options of a baseline's constructor that can be written as text, each with its kind.

    Args:
        name: One of :data:`BASELINES`.

    Raises:
        ValueError: If there is no baseline of this name.

    Example:
        >>> known_options("hyde")["answers"], "prompts" in known_options("hyde")
        (<class 'int'>, False)
    """
    make = _named(name).build
    hints = get_type_hints(make)
    found: dict[str, type] = {}
    for option, parameter in inspect.signature(make).parameters.items():
        kinds = get_args(hints[option]) or (hints[option],)
        kind = next((kind for kind in (int, float, str) if kind in kinds), None)
        if parameter.kind is parameter.KEYWORD_ONLY and kind is not None:
            found[option] = kind
    return found


def options_from_text(name: str, settings: Mapping[str, str]) -> dict[str, Any]:
    """Options of a baseline's constructor whose values were written as text.

    Args:
        name: One of :data:`BASELINES`.
        settings: Name to text.

    Returns:
        Name to value.

    Raises:
        ValueError: If there is no such option, or its value is of another kind.

    Example:
        >>> options_from_text("hyde", {"answers": "2", "encoder": "all-MiniLM-L6-v2"})
        {'answers': 2, 'encoder': 'all-MiniLM-L6-v2'}
    """
    known, found = known_options(name), {}
    for key, value in settings.items():
        if key not in known:
            raise ValueError(f"The baseline {name!r} has no option {key!r}; known are {', '.join(known)}.")
        try:
            found[key] = known[key](value)
        except ValueError:
            kind = "a whole number" if known[key] is int else "a number"
            raise ValueError(f"The option {key!r} of {name!r} must be {kind}, got {value!r}.") from None
    return found


def _named(name: str) -> Baseline:
    if name not in BASELINES:
        raise ValueError(f"Unknown baseline {name!r}; known are {', '.join(BASELINES)}.")
    return BASELINES[name]
