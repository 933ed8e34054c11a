"""What users give to a store, checked before anything is written."""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

_BLOCK = 65_536
_DEEPEST = 500  # SQLite reads a thousand levels, Python's JSON about as many.
_SURROGATE = re.compile("[\ud800-\udfff]")


def as_texts(texts: Iterable[str]) -> list[str]:
    """Texts as a list.

    Raises:
        TypeError: If one is not a text; names its position.
    """
    if isinstance(texts, str):
        raise TypeError("texts must be an iterable of texts, not one text.")
    found = list(texts)
    for position, text in enumerate(found):
        if not isinstance(text, str):
            raise TypeError(f"Text {position} is not a text but {type(text).__name__}: {str(text)[:80]!r}.")
    return found


def as_vectors(embeddings: Any) -> np.ndarray:
    """Ready-made vectors as (N, D) float32; lists, arrays of any float type, torch tensors and memory maps.

    Raises:
        ValueError: If they are not a matrix of finite numbers; names the first bad row.

    Example:
        >>> as_vectors([[1, 0], [0.5, 0.5]]).dtype, as_vectors([]).shape
        (dtype('float32'), (0, 0))
    """
    if hasattr(embeddings, "detach"):
        embeddings = embeddings.detach().cpu().float().numpy()
    elif isinstance(embeddings, Iterable) and not isinstance(embeddings, Sequence | np.ndarray):
        embeddings = list(embeddings)
    try:
        with np.errstate(over="ignore"):
            vectors = np.asarray(embeddings, dtype=np.float32, order="C")
    except (ValueError, TypeError) as error:
        raise ValueError(f"Embeddings must be a matrix (N, D) of numbers ({error}).") from None
    if vectors.size == 0 and vectors.ndim < 2:
        return np.zeros((0, 0), np.float32)
    if vectors.ndim != 2 or (len(vectors) and not vectors.shape[1]):
        raise ValueError(f"Embeddings must be a matrix (N, D), got the shape {vectors.shape}.")
    for start in range(0, len(vectors), _BLOCK):
        finite = np.isfinite(vectors[start : start + _BLOCK]).all(axis=1)
        if not finite.all():
            raise ValueError(f"Embedding {start + int(np.argmin(finite))} has a value that is not a finite float32.")
    return vectors


def as_vector(embedding: Any) -> np.ndarray:
    """One vector (D) float32.

    Raises:
        ValueError: If it is not a row of finite numbers.
    """
    vectors = as_vectors((embedding if hasattr(embedding, "detach") else np.asarray(embedding))[None])
    if vectors.ndim == 2 and len(vectors) == 1:
        return vectors[0]
    raise ValueError(f"One vector is needed, got an array of shape {np.shape(embedding)}.")


def as_ids(ids: Iterable[str | None] | None, count: int) -> tuple[list[str], bool]:
    """Identifiers, new ones where none is given.

    Args:
        ids: ``count`` identifiers, some of them perhaps None; or None.
        count: Number of documents.

    Returns:
        The identifiers, and whether some of them were given and so may be known already.

    Raises:
        ValueError: If their number is another, one comes twice, or one is not a text that can be stored.
    """
    if ids is None:
        return _new_ids(count), False
    given = list(ids)
    if len(given) != count:
        raise ValueError(f"There are {count} texts but {len(given)} ids.")
    fresh = iter(_new_ids(sum(id is None for id in given)))
    found: dict[str, int] = {}
    for position, id in enumerate(given):
        if id is None:
            id = next(fresh)
        if not isinstance(id, str):
            raise ValueError(f"Id {position} is not a text but {type(id).__name__}: {id!r}.")
        if "\0" in id or any("\ud800" <= character <= "\udfff" for character in id):
            raise ValueError(f"Id {position}, {id!r}, has a NUL or a lone surrogate, which cannot be stored.")
        if id in found:
            raise ValueError(f"The id {id!r} comes twice: at {found[id]} and at {position}. Nothing was written.")
        found[id] = position
    return list(found), True


def as_json(metadatas: Iterable[Mapping[str, Any] | None] | None, count: int) -> list[str]:
    """Metadata as JSON objects, empty ones if there are none.

    Raises:
        ValueError: If their number is another, or one is not a dictionary that can be written as JSON; names its
            position.
    """
    if metadatas is None:
        return ["{}"] * count
    if isinstance(metadatas, Mapping):
        raise ValueError("metadatas must be a list of dictionaries, one for each text, not one dictionary.")
    found = [_object(metadata, position) for position, metadata in enumerate(metadatas)]
    if len(found) != count:
        raise ValueError(f"There are {count} texts but {len(found)} metadatas.")
    return found


def _object(given: Mapping[str, Any] | None, position: int) -> str:
    if given is not None and not isinstance(given, Mapping):
        raise ValueError(
            f"Metadata {position} is not a dictionary but {type(given).__name__}: {str(given)[:80]!r}. Nothing was "
            "written; give a dictionary, or None for no metadata."
        )
    metadata = dict(given or {})
    try:
        if not all(isinstance(key, str) for key in metadata):
            raise TypeError("its keys must be texts")
        text = json.dumps(metadata, allow_nan=False, default=_plain, ensure_ascii=False)
        if text.count("{") + text.count("[") > _DEEPEST and _depth(metadata) > _DEEPEST:
            raise RecursionError
    except RecursionError:
        raise ValueError(f"Metadata {position} is nested more than {_DEEPEST} levels deep.") from None
    except (TypeError, ValueError) as error:
        raise ValueError(f"Metadata {position} cannot be stored as JSON: {error}.") from None
    # Only lone surrogates are escaped: SQLite's texts cannot hold them, and some versions find no escaped names.
    return _SURROGATE.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def _depth(value: Any) -> int:
    depth, level = 0, [value]
    while level:
        depth += 1
        inner = (item.values() if isinstance(item, dict) else item for item in level)
        level = [found for items in inner for found in items if isinstance(found, dict | list | tuple)]
    return depth


def _plain(value: Any) -> Any:
    if isinstance(value, np.generic):
        return value.item()
    hint = "; write it as an ISO text" if hasattr(value, "isoformat") else ""
    raise TypeError(f"{value!r} is a {type(value).__name__}{hint}")


def _new_ids(count: int) -> list[str]:
    digits = secrets.token_hex(16 * count)
    return [digits[32 * number : 32 * number + 32] for number in range(count)]
