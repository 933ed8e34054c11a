"""Checkpoints that the host's trainer leaves behind, so that a stopped run can go on."""

from __future__ import annotations

from pathlib import Path

from transformers.trainer import TRAINER_STATE_NAME


def last_checkpoint(folder: Path) -> Path | None:
    """The newest checkpoint that was written to its end: the host writes its state last.

    Args:
        folder: Folder of the checkpoints, which need not exist.

    Returns:
        Its directory, or ``None``.

    Example:
        >>> import tempfile
        >>> folder = Path(tempfile.mkdtemp())
        >>> for step in (5, 10, 15):
        ...     (folder / f"checkpoint-{step}").mkdir()
        >>> for step in (5, 10):
        ...     _ = (folder / f"checkpoint-{step}" / "trainer_state.json").write_text("{}")
        >>> last_checkpoint(folder).name, steps_done(last_checkpoint(folder))
        ('checkpoint-10', 10)
    """
    found = [path for path in folder.glob("checkpoint-*") if (path / TRAINER_STATE_NAME).exists()]
    return max(found, key=steps_done, default=None)


def steps_done(checkpoint: Path) -> int:
    """Optimizer steps after which a checkpoint was written."""
    return int(checkpoint.name.rpartition("-")[2])
