"""The host's trainer, made to go on after a stop: which checkpoint counts, and what is said when one cannot be used."""

from __future__ import annotations

import json
import shutil
import zipfile
import zlib
from abc import abstractmethod
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from sentence_transformers import SentenceTransformerTrainer
from transformers import TrainerCallback
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_callback import TrainerState

from llm2vec_gen_st.modules.tensors import CheckpointError

KEPT = 2


def last_checkpoint(folder: Path, *, but: Path | None = None) -> Path | None:
    """The newest checkpoint that was written to its end: the host writes its state last.

    Newer is what has done more steps; what the clock said then does not count.

    Args:
        folder: Folder of the checkpoints, which need not exist.
        but: One that does not count.

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
    return max((path for path in _whole(folder) if path != but), key=steps_done, default=None)


def steps_done(checkpoint: Path) -> int:
    """Optimizer steps after which a checkpoint was written."""
    return int(checkpoint.name.rpartition("-")[2])


class KeepNewest(TrainerCallback):
    """Deletes all but the two checkpoints with the most steps.

    The host's ``save_total_limit`` goes by the times of files: when the clock is set back it deletes the newest one.
    """

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Called by the host when a checkpoint has been written."""
        if state.is_world_process_zero:
            for checkpoint in sorted(_whole(Path(args.output_dir)), key=steps_done)[:-KEPT]:
                shutil.rmtree(checkpoint, ignore_errors=True)


class ResumableTrainer(SentenceTransformerTrainer):
    """SentenceTransformerTrainer whose checkpoints hold what is trained, and no LLM.

    Resuming reads them into the model in memory; the host would load a whole second LLM.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.add_callback(KeepNewest())

    @abstractmethod
    def load_trained(self, checkpoint: Path) -> None:
        """Read what is trained from a checkpoint into the model in memory."""

    def run_to(self, steps: int, checkpoint: Path | None) -> None:
        """Train to the end, from a checkpoint on if there is one.

        Args:
            steps: Steps of the whole run.
            checkpoint: As :func:`last_checkpoint` gives it.

        Raises:
            CheckpointError: If a file of the checkpoint cannot be read; names it and the way on.
            OSError: If a checkpoint cannot be written.
        """
        if checkpoint is not None:
            check_checkpoint(checkpoint)
        if checkpoint is not None and steps_done(checkpoint) >= steps:
            # The host would take one more step than asked for.
            self.load_trained(checkpoint)
            self.state = TrainerState.load_from_json(str(checkpoint / TRAINER_STATE_NAME))
        else:
            self.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        """What is trained, and settings; the host would add the tokenizer and a pickle of its arguments."""
        if not self.args.should_save:
            return
        folder = output_dir if output_dir is not None else self.args.output_dir
        assert folder is not None
        self.model.save_pretrained(folder, create_model_card=False)

    def _load_from_checkpoint(self, checkpoint_path: str, *args: Any) -> None:
        self.load_trained(Path(checkpoint_path))

    def _save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        """Write a checkpoint, or leave nothing of it."""
        try:
            super()._save_checkpoint(*args, **kwargs)
        # torch raises RuntimeError where the system says that the disk is full.
        except (OSError, RuntimeError, SafetensorError) as error:
            folder = Path(str(self.args.output_dir)) / f"checkpoint-{self.state.global_step}"
            if self.is_world_process_zero():
                shutil.rmtree(folder, ignore_errors=True)
            raise OSError(
                f"{folder} could not be written ({type(error).__name__}: {error}). If the disk is full, make room and "
                f"repeat the command; it will {_way_on(folder)}."
            ) from error


def check_checkpoint(checkpoint: Path) -> None:
    """Read all that a checkpoint's files say of their own integrity.

    Args:
        checkpoint: Its folder.

    Raises:
        CheckpointError: If a file is damaged; names it, and what to do.
    """
    for path in sorted(path for path in checkpoint.rglob("*") if path.suffix in (".pt", ".pth", ".safetensors")):
        damage = _damage(path)
        if damage is not None:
            raise CheckpointError(
                f"{path} is damaged ({damage}), so training cannot go on from {checkpoint.name}. Delete the folder "
                f"{checkpoint} and repeat the command; it will {_way_on(checkpoint)}."
            )


def _damage(path: Path) -> str | None:
    try:
        if path.suffix == ".safetensors":
            with safe_open(str(path), framework="pt"):
                return None
        # What torch writes is a zip file with a checksum of each part; nothing is unpickled here.
        with zipfile.ZipFile(path) as archive:
            broken = archive.testzip()
        return None if broken is None else f"checksum of {broken}"
    except (OSError, EOFError, zipfile.BadZipFile, zlib.error, SafetensorError) as error:
        return f"{type(error).__name__}: {error}"


def _way_on(without: Path) -> str:
    before = last_checkpoint(without.parent, but=without)
    return "start from the beginning of this stage" if before is None else f"go on from {before.name}"


def _whole(folder: Path) -> list[Path]:
    return [path for path in folder.glob("checkpoint-*") if _is_whole(path / TRAINER_STATE_NAME)]


def _is_whole(state: Path) -> bool:
    """Whether the file that is written last is there, to its own end."""
    try:
        json.loads(state.read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        return False
    return True
