"""Recipes as data: one JSON file for each student of the paper, for each family, and for the built-in models.

Every ablation of the paper is a recipe and some overrides (``--set key=value``, or keyword arguments of
:func:`~llm2vec_gen_st.training.train`):

====================================  ==============================================================================
ablation                              overrides
====================================  ==============================================================================
suffix of 2, 6, 20, 50, 100 tokens    ``thought_tokens`` and ``compression_tokens``: 1, 3, 10, 25, 50 each
no thought tokens                     ``thought_tokens=0 compression_tokens=20``
one compression token                 ``thought_tokens=19 compression_tokens=1``
no reconstruction                     ``recon_weight=0``
no alignment                          ``align_weight=0``
the paper's formula of L_align        ``align_reduction=sum`` (the authors' code, and the default, take the mean)
another teacher                       ``--teacher``: any SentenceTransformer, LLM2Vec adapter, or ``self``
another response writer               other data: ``llm2vec-gen respond --model ANOTHER``
LoRA backbone                         ``lora_rank=8`` or ``lora_rank=32``
supervised teacher                    ``--teacher McGill-NLP/LLM2Vec-Qwen3-4B-mntp-supervised``
hard negatives (Table 10)             ``margin_weight=1 document_sources=response``; data with ``negative_query`` and
                                      ``negative_response``
====================================  ==============================================================================
"""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

from llm2vec_gen_st.backbone import recorded_id
from llm2vec_gen_st.training.recipes.reading import load_recipe, shipped_names
from llm2vec_gen_st.training.recipes.recipe import SUFFIX_TEXT, Recipe

logger = logging.getLogger(__name__)

__all__ = ["RECIPES", "SUFFIX_TEXT", "Recipe", "load_recipe", "recipe_for", "resolve"]

RECIPES: dict[str, Recipe] = {name: load_recipe(name) for name in shipped_names()}

DEFAULT = "smollm2-135m"
FALLBACK = "qwen3"

_FAMILIES = (
    ("smollm2-135m", "smollm2-135m"),
    ("qwen3", "qwen3"),
    ("qwen2.5", "qwen2.5"),
    ("llama-3", "llama3"),
)


def recipe_for(base: str) -> str:
    """Name of the recipe for a base model: its own, or its family's, or else, with a warning, Qwen-3's.

    Args:
        base: Hub id or directory of the base model.

    Example:
        >>> recipe_for("Qwen/Qwen3-4B"), recipe_for("models/Qwen3-4B-Base")
        ('qwen3-4b', 'qwen3')
    """
    last = Path(base).name.lower()
    own = [name for name, recipe in RECIPES.items() if recipe.base and Path(recipe.base).name.lower() == last]
    if own:
        # Several built-in models may share one; the plain name is the shortest.
        return min(own, key=len)
    family = next((name for fragment, name in _FAMILIES if fragment in base.lower()), None)
    if family is None:
        logger.warning("There is no recipe for %s; that of %s is used. Name one to choose.", base, FALLBACK)
    return family or FALLBACK


def resolve(
    recipe: str | Path | Recipe | None,
    *,
    base: str | None = None,
    teacher: str | None = None,
    overrides: dict[str, Any] | None = None,
) -> Recipe:
    """The recipe that a call asks for, complete: what the call gives comes before what the recipe says.

    Args:
        recipe: Name, file or recipe; chosen by the base if not given.
        base: The frozen LLM, if not the recipe's.
        teacher: The teacher, if not the recipe's.
        overrides: Fields to replace.

    Returns:
        The recipe, its base named; a directory by its whole path.

    Raises:
        ValueError: If there is no such recipe or field, or nothing names a base.

    Example:
        >>> resolve("qwen3-4b", teacher="self", overrides={"lora_rank": 8}).teacher
        'self'
    """
    if not isinstance(recipe, Recipe):
        recipe = load_recipe(recipe or (recipe_for(base) if base is not None else DEFAULT))
    recipe = recipe.with_overrides(overrides or {})
    named = base or recipe.base
    if named is None:
        raise ValueError("Neither the call nor the recipe names a base model; pass base.")
    return replace(recipe, base=recorded_id(named), teacher=teacher or recipe.teacher)
