"""Options that several commands share, and what they mean."""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from rich.text import Text

    from llm2vec_gen_st.model import LLM2VecGen


class Dtype(str, Enum):
    """Number format of the base model's weights."""

    auto = "auto"
    float32 = "float32"
    bfloat16 = "bfloat16"


Model = Annotated[
    str, typer.Argument(help="Built-in name, name of the paper, directory, or hub id.", show_default=False)
]
DtypeOption = Annotated[Dtype, typer.Option(help="Number format of the base model's weights.")]
BatchSize = Annotated[int, typer.Option(min=1, help="Texts run at once.")]
PromptName = Annotated[
    str, typer.Option(help="Name of the instruction, such as query or document; 'none' for no instruction.")
]


def model_kwargs(dtype: Dtype) -> dict[str, Any]:
    """What is passed on when the base model is loaded.

    Example:
        >>> model_kwargs(Dtype.auto), model_kwargs(Dtype.bfloat16)
        ({}, {'dtype': 'bfloat16'})
    """
    return {} if dtype is Dtype.auto else {"dtype": dtype.value}


def key_and_value(option: str, text: str, form: str = "key=value") -> tuple[str, str]:
    """What stands before and after the first equals sign of an option's text.

    Args:
        option: Name of the option, for the message.
        text: What was written behind it.
        form: How it should have been written, for the message.

    Raises:
        ValueError: If there is no equals sign, or nothing before it.

    Example:
        >>> key_and_value("--set", "suffix_text=a=b")
        ('suffix_text', 'a=b')
    """
    key, equals, value = text.partition("=")
    if not (key and equals):
        raise ValueError(f"{option} {text!r} is not of the form {form}.")
    return key, value


def load_model(model: str, dtype: Dtype) -> LLM2VecGen:
    """Load a student, without a progress bar over its weights."""
    from transformers.utils import logging

    from llm2vec_gen_st.model import LLM2VecGen

    logging.disable_progress_bar()
    return LLM2VecGen(model, model_kwargs=model_kwargs(dtype))


def plain(text: str) -> Text:
    """Text that rich shows as it is, square brackets included."""
    from rich.text import Text

    return Text(text.strip())


def instruction_name(name: str) -> str | None:
    """The name of an instruction as the model's methods take it; ``none`` stands for no instruction.

    Example:
        >>> instruction_name("query"), instruction_name("none")
        ('query', None)
    """
    return None if name == "none" else name
