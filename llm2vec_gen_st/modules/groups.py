"""Rows of a batch run in groups of similar length, so that little is spent on padding."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

import torch

_TOKENS_AT_ONCE_CPU = 512


def tokens_at_once(device: torch.device, most: int) -> int:
    """Padded tokens that a group needs to be run at full speed; larger ones only pad and hold more.

    Args:
        device: Where it is run. A CPU's matrix products get no faster beyond some hundred rows.
        most: The same for an accelerator.

    Example:
        >>> tokens_at_once(torch.device("cpu"), 8192)
        512
    """
    return min(most, _TOKENS_AT_ONCE_CPU) if device.type == "cpu" else most


def similar_lengths(lengths: Sequence[int], budget: int, *, equal: bool = False) -> Iterator[list[int]]:
    """Row numbers in groups whose padded size stays within a budget.

    Args:
        lengths: Tokens of each row.
        budget: Padded tokens a group may have; a longer row is a group of its own.
        equal: Whether the rows of a group must have the same length; else none is padded to more than twice its size.

    Example:
        >>> list(similar_lengths([9, 2, 3], 100))
        [[1, 2], [0]]
    """
    group: list[int] = []
    for row in sorted(range(len(lengths)), key=lambda number: lengths[number]):
        width = lengths[row]
        uneven = bool(group) and width > lengths[group[0]] * (1 if equal else 2)
        if uneven or (group and (len(group) + 1) * width > budget):
            yield group
            group = []
        group.append(row)
    if group:
        yield group


def in_groups(
    run: Callable[[torch.Tensor, int], torch.Tensor], groups: Iterable[Sequence[int]], lengths: torch.Tensor
) -> torch.Tensor:
    """Results of all rows, computed group by group.

    Args:
        run: Results (b, ...) of rows, given their numbers (b) and the tokens of the longest of them.
        groups: Row numbers; each row once.
        lengths: Tokens of each row (B).

    Returns:
        (B, ...), in the order of the rows.

    Example:
        >>> lengths = torch.tensor([9, 2, 3])
        >>> in_groups(lambda rows, width: lengths[rows] * 100 + width, [[1, 2], [0]], lengths).tolist()
        [909, 203, 303]
    """
    found: list[torch.Tensor] = []
    order: list[int] = []
    for group in groups:
        order.extend(group)
        rows = torch.tensor(group, device=lengths.device)
        found.append(run(rows, int(lengths[rows].max())))
    together = torch.cat(found)
    return together[torch.tensor(order).argsort().to(together.device)]
