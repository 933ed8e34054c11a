"""Metadata filters, in the operators of MongoDB, as SQL conditions on JSON."""

from __future__ import annotations

import json
import math
import operator
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

Scalar = str | int | float | bool | None

_COMPARISONS = {"$gt": ">", "$gte": ">=", "$lt": "<", "$lte": "<="}
_OPERATORS = ("$eq", "$ne", *_COMPARISONS, "$in", "$nin", "$exists", "$not")
_LOGICAL = ("$and", "$or", "$not")
_SIGNS = {"=": operator.eq, ">": operator.gt, ">=": operator.ge, "<": operator.lt, "<=": operator.le}
_NUMBERS = "('integer', 'real')"
_AMONG = "IN (SELECT value FROM json_each(?))"


@dataclass(frozen=True)
class Condition:
    """A condition on the column ``metadata``, and the values of its question marks."""

    sql: str
    values: tuple[Any, ...] = field(default=())

    def negated(self) -> Condition:
        """True where this one is not; a condition on a missing field is false, never unknown."""
        return Condition(f"NOT ({self.sql})", self.values)


def compile_filter(filter: Mapping[str, Any]) -> Condition:
    r"""Translate a filter into SQL.

    Fields are compared by kind: a number only with numbers, a text with texts, true and false with themselves. A field
    that holds a list matches if one of its items does. ``$ne``, ``$nin`` and ``$not`` also match where the field is
    missing. Nested fields are written ``"author.name"`` or ``{"author": {"name": ...}}``; a dot that belongs to a name
    is written ``\\.``.

    Args:
        filter: Fields with a value or with operators (``$eq $ne $gt $gte $lt $lte $in $nin $exists $not``), and
            ``$and``, ``$or``, ``$not``; all of them must hold.

    Returns:
        The condition.

    Raises:
        ValueError: If an operator is not known or a value is of a kind that it cannot compare.

    Example:
        >>> compile_filter({"year": {"$gte": 2020}}).values
        ('$."year"', '$."year"', 2020, '$."year"', '$."year"', 2020)
    """
    if not isinstance(filter, Mapping):
        raise ValueError(f"A filter is a dictionary, got {type(filter).__name__}.")
    return _all(_entry(key, value, ()) for key, value in filter.items())


def canonical(filter: Mapping[str, Any]) -> str:
    """One text for one filter, to remember its result by."""
    return json.dumps(
        filter, sort_keys=True, default=lambda value: repr(value) if _plain(value) is value else _plain(value)
    )


def _entry(key: Any, value: Any, parents: tuple[str, ...]) -> Condition:
    if not isinstance(key, str):
        raise ValueError(f"The keys of a filter are texts, got {key!r}.")
    if key in _LOGICAL and not parents:
        return _logical(key, value)
    if key.startswith("$"):
        known = ", ".join(sorted({*_OPERATORS, *_LOGICAL}))
        raise ValueError(f"Unknown filter operator {key!r} at this place; known are {known}.")
    names = (*parents, *_names(key))
    if not isinstance(value, Mapping):
        return _operator("$eq", value, names)
    operators = [name for name in value if isinstance(name, str) and name.startswith("$")]
    if len(operators) == len(value) and operators:
        return _all(_operator(name, operand, names) for name, operand in value.items())
    if operators:
        raise ValueError(f"The filter on {key!r} mixes operators ({', '.join(operators)}) with names of fields.")
    if not value:
        raise ValueError(f"The filter on {key!r} is empty.")
    return _all(_entry(name, operand, names) for name, operand in value.items())


def _logical(key: str, value: Any) -> Condition:
    if key == "$not":
        return compile_filter(value).negated()
    if not isinstance(value, Sequence) or isinstance(value, str) or not value:
        raise ValueError(f"{key} takes a list of at least one filter, got {value!r}.")
    return _joined([compile_filter(item) for item in value], " AND " if key == "$and" else " OR ")


def _operator(name: str, operand: Any, names: tuple[str, ...]) -> Condition:
    path = _path(names)
    operand = _plain(operand)
    if name == "$exists":
        if not isinstance(operand, bool):
            raise ValueError(f"$exists takes true or false, got {operand!r}.")
        found = Condition("json_type(metadata, ?) IS NOT NULL", (path,))
        return found if operand else found.negated()
    if name == "$not":
        if not isinstance(operand, Mapping) or not operand:
            raise ValueError(f"$not behind a field takes operators, such as {{'$gt': 3}}, got {operand!r}.")
        return _all(_operator(inner, value, names) for inner, value in operand.items()).negated()
    if name in ("$ne", "$nin"):
        return _operator("$eq" if name == "$ne" else "$in", operand, names).negated()
    if name == "$in":
        if not isinstance(operand, list | tuple | set | frozenset):
            raise ValueError(f"$in and $nin take a list of values, got {operand!r}.")
        return _match_any(path, [_plain(value) for value in operand], name)
    if name == "$eq":
        return _match(path, "=", operand, name)
    if name in _COMPARISONS:
        if isinstance(operand, bool) or not isinstance(operand, str | int | float):
            raise ValueError(f"{name} compares numbers or texts, got {operand!r}.")
        return _match(path, _COMPARISONS[name], operand, name)
    raise ValueError(f"Unknown filter operator {name!r}; known are {', '.join(sorted({*_OPERATORS, *_LOGICAL}))}.")


def _plain(value: Any) -> Any:
    """A scalar of NumPy as Python's own, as metadata are stored; others as they are."""
    return value.item() if isinstance(value, np.generic) else value


def _match(path: str, sign: str, value: Any, name: str) -> Condition:
    """Whether the field, or an item of it if it is a list, compares to a value; never NULL."""
    if value is None:
        return _of_kind(path, "('null')")
    if isinstance(value, bool):
        return _of_kind(path, "('true')" if value else "('false')")
    if isinstance(value, str):
        if any("\ud800" <= character <= "\udfff" for character in value):
            raise ValueError(f"The text {value!r} in a filter has a lone surrogate, which cannot be searched for.")
        return _text(path, sign, (value,), f"{sign} ?", value)
    if isinstance(value, int | float):
        if isinstance(value, int) and not -(2**63) <= value < 2**63:
            raise ValueError(f"The number {value} in a filter has more than 64 bits.")
        if value != value:
            raise ValueError("NaN in a filter compares with nothing.")
        if isinstance(value, int) or math.isinf(value):
            return _of_kind(path, _NUMBERS, f"{sign} ?", value)
        # Read by SQLite as the stored number was: it may round the last digit otherwise than Python.
        return _of_kind(path, _NUMBERS, f"{sign} json_extract(?, '$')", json.dumps(value))
    hint = "; write dates as ISO texts" if hasattr(value, "isoformat") else ""
    raise ValueError(f"{name} takes a text, a number, true, false or None, got {type(value).__name__}{hint}.")


def _match_any(path: str, values: Collection[Any], name: str) -> Condition:
    """Whether the field, or an item of it, equals one of some values."""
    texts: list[str] = []
    numbers: list[float] = []
    conditions: list[Condition] = []
    for value in values:
        alone = _match(path, "=", value, name)
        if isinstance(value, str) and "\0" not in value:
            texts.append(value)
        elif isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
            numbers.append(value)
        else:
            conditions.append(alone)
    # As one list each: SQLite limits how many values a statement has.
    if texts:
        conditions.append(_text(path, "=", tuple(texts), _AMONG, json.dumps(texts, ensure_ascii=False)))
    if numbers:
        conditions.append(_of_kind(path, _NUMBERS, _AMONG, json.dumps(numbers)))
    return _joined(conditions, " OR ") if conditions else Condition("0")


def _of_kind(path: str, kinds: str, compared: str = "", *values: Any) -> Condition:
    """Whether the field, or an item of it, is of one of some JSON kinds and compares as told."""
    scalar = f"json_type(metadata, ?) IN {kinds}" + (compared and f" AND json_extract(metadata, ?) {compared}")
    item = f"item.type IN {kinds}" + (compared and f" AND item.value {compared}")
    sql = (
        f"CASE json_type(metadata, ?) WHEN 'array' THEN EXISTS (SELECT 1 FROM json_each(metadata, ?) AS item "
        f"WHERE {item}) ELSE coalesce({scalar}, 0) END"
    )
    places = (path, path) if compared else (path,)
    return Condition(sql, (path, path, *values, *places, *values))


def _text(path: str, sign: str, texts: tuple[str, ...], compared: str, *values: Any) -> Condition:
    inner = _of_kind(path, "('text')", compared, *values)
    # Some versions of SQLite cut the texts that they take out of JSON at a NUL.
    sql = f"CASE WHEN instr(metadata, '\\u0000') THEN text_matches(metadata, ?, ?, ?) ELSE {inner.sql} END"
    return Condition(sql, (path, sign, json.dumps(texts), *inner.values))


def text_matches(metadata: str, path: str, sign: str, texts: str) -> bool:
    """What ``text_matches`` does in the SQL of a condition, for metadata with a NUL in it.

    Args:
        metadata: A JSON object.
        path: A path as the conditions have it.
        sign: ``=``, ``>``, ``>=``, ``<`` or ``<=``.
        texts: A JSON list of texts, one of which the field or an item of it has to compare to.

    Example:
        >>> text_matches('{"a": ["b", "c"]}', '$."a"', "=", '["c", "d"]')
        True
    """
    value = json.loads(metadata)
    for name in path[3:-1].split('"."'):
        if not isinstance(value, dict) or name not in value:
            return False
        value = value[name]
    items = [item for item in (value if isinstance(value, list) else [value]) if isinstance(item, str)]
    return any(_SIGNS[sign](item, text) for item in items for text in json.loads(texts))


def _names(key: str) -> list[str]:
    r"""Names of a dotted field.

    Example:
        >>> _names(r"author.first\.name")
        ['author', 'first.name']
    """
    names = [name.replace("\\.", ".") for name in re.split(r"(?<!\\)\.", key)]
    if not all(names):
        raise ValueError(f"The filter key {key!r} has an empty name.")
    return names


def _path(names: tuple[str, ...]) -> str:
    for name in names:
        if any(character in '"\\' or character < " " or "\ud800" <= character <= "\udfff" for character in name):
            raise ValueError(
                f"The name {name!r} cannot be filtered by: it has a quote, backslash, control character or lone "
                "surrogate."
            )
    return "$" + "".join(f'."{name}"' for name in names)


def _all(conditions: Any) -> Condition:
    return _joined(list(conditions), " AND ")


def _joined(conditions: list[Condition], word: str) -> Condition:
    if not conditions:
        return Condition("1")
    if len(conditions) == 1:
        return conditions[0]
    # Halved again and again: SQLite nests a chain as deep as it is long, and refuses more than a thousand levels.
    half = len(conditions) // 2
    left, right = _joined(conditions[:half], word), _joined(conditions[half:], word)
    return Condition(f"({left.sql}){word}({right.sql})", left.values + right.values)
