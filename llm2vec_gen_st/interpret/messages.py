"""Latent messages: one agent's soft prompt, sent to another agent that runs the same frozen LLM."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save

from llm2vec_gen_st.backbone import embedding_weight
from llm2vec_gen_st.base_reference import BaseReference, compare_bases
from llm2vec_gen_st.encoding import as_rows, instruction_options
from llm2vec_gen_st.fingerprint import student_fingerprint
from llm2vec_gen_st.interpret.decode import decode_ids
from llm2vec_gen_st.modules.lora import lora_enabled
from llm2vec_gen_st.reasoning import control_ids, ends_inside, without_reasoning, written_text
from llm2vec_gen_st.text import chat_frame

if TYPE_CHECKING:
    from llm2vec_gen_st.model import LLM2VecGen

FORMAT = "llm2vec-gen-message"
FORMAT_VERSION = "1"

Place: TypeAlias = Literal["user", "prefix"]

_TENSOR = "soft_prompt"
_CHECKSUM = "sha256:"
_UNSUMMED = _CHECKSUM + 64 * "0"
_REQUIRED = frozenset({"format", "format_version", "checksum", "base_id", "student"})
_OPTIONAL = frozenset({"base_revision", "base_fingerprint", "base_embedding_sample"})


class MessageError(ValueError):
    """Bytes are no latent message, are damaged, or are meant for another LLM; the message names what was found."""


# Compared as objects: tensors have no one answer to whether they are equal.
@dataclass(frozen=True, eq=False)
class LatentMessage:
    """What one agent tells another.

    Args:
        soft_prompt: (n, H) float32.
        base: The frozen LLM that reads it, which must be the receiver's too.
        student: 16 hexadecimal digits that stand for the sender's suffix, heads and instruction
            (:func:`~llm2vec_gen_st.fingerprint.student_fingerprint`); the receiver's may be others.
    """

    soft_prompt: torch.Tensor = field(repr=False)
    base: BaseReference
    student: str

    def to_bytes(self) -> bytes:
        """The message as the bytes of a safetensors file, with a SHA-256 of all of them in its metadata.

        Example:
            >>> message = LatentMessage(torch.ones(2, 3), BaseReference("tiny", fingerprint="0" * 16), "1" * 16)
            >>> bool((LatentMessage.from_bytes(message.to_bytes()).soft_prompt == message.soft_prompt).all())
            True
        """
        metadata = {
            "format": FORMAT,
            "format_version": FORMAT_VERSION,
            "checksum": _UNSUMMED,
            "student": self.student,
            "base_id": self.base.id,
            "base_revision": self.base.revision,
            "base_fingerprint": self.base.fingerprint,
            "base_embedding_sample": self.base.embedding_sample,
        }
        ready = self.soft_prompt.detach().to("cpu", torch.float32).contiguous()
        data = save({_TENSOR: ready}, metadata={key: value for key, value in metadata.items() if value is not None})
        # The checksum is that of the file with zeros in its place, so that no byte is left out of it.
        return data.replace(_bytes(_UNSUMMED), _bytes(_CHECKSUM + hashlib.sha256(data).hexdigest()), 1)

    @classmethod
    def from_bytes(cls, data: bytes) -> LatentMessage:
        """Read a message, trusting nothing in it.

        Args:
            data: What :meth:`to_bytes` made.

        Returns:
            The message, exactly as it was sent.

        Raises:
            MessageError: If the bytes are something else, of another version, or any of them has changed.
        """
        header = _header(data)
        metadata = header.get("__metadata__")
        if not isinstance(metadata, dict) or metadata.get("format") != FORMAT:
            found = metadata.get("format") if isinstance(metadata, dict) else None
            raise MessageError(f"These bytes are no latent message: their format is {found!r:.80}, not {FORMAT!r}.")
        if metadata.get("format_version") != FORMAT_VERSION:
            raise MessageError(
                f"This message has format_version {metadata.get('format_version')!r:.80}; only {FORMAT_VERSION!r} can "
                "be read here. Update llm2vec-gen-st, or let the sender do so."
            )
        _check_sum(data, metadata.get("checksum"))
        # From here on the bytes are those that someone summed, though perhaps not those that to_bytes makes.
        _check_content(header, metadata)
        try:
            soft_prompt = load(data)[_TENSOR]
        except SafetensorError as error:
            raise MessageError(f"This message's soft prompt cannot be read: {error}") from error
        if not torch.isfinite(soft_prompt).all():
            raise MessageError("This message's soft prompt holds values that are not finite; ask for it again.")
        base = BaseReference(
            metadata["base_id"],
            metadata.get("base_revision"),
            metadata.get("base_fingerprint"),
            metadata.get("base_embedding_sample"),
        )
        return cls(soft_prompt, base, metadata["student"])


@dataclass(frozen=True)
class Transcript:
    """What passed between two agents, in words that people can read.

    Args:
        message: Which of the messages, from 0.
        student: The sender's suffix, heads and instruction, see :class:`LatentMessage`.
        base: Fingerprint of the LLM that both agents run; ``None`` if its weights cannot be fingerprinted.
        vectors: Vectors sent (n).
        decoded: What the soft prompt says, decoded by the receiver's LLM. It need not be all that the receiver took
            from the vectors.
        answer: What the receiver answered.
    """

    message: int
    student: str
    base: str | None
    vectors: int
    decoded: str
    answer: str


def send_messages(
    model: LLM2VecGen,
    texts: str | Iterable[str],
    *,
    prompt_name: str | None = "query",
    prompt: str | None = None,
    batch_size: int = 32,
) -> list[bytes]:
    """Put texts into messages that hold their soft prompts, and nothing of their wording.

    Args:
        model: The sending agent's student.
        texts: A string or any iterable of N strings.
        prompt_name: Name of the instruction.
        prompt: The instruction itself, instead.
        batch_size: Texts run at once.

    Returns:
        N byte strings, each a whole safetensors file for :func:`receive_message`.

    Raises:
        TypeError: If a text is not a string.
        ValueError: If the LLM's weights are in a form that no receiver could compare with its own.

    Example:
        >>> from llm2vec_gen_st.testing import tiny_model
        >>> model = tiny_model()
        >>> [data] = send_messages(model, "who makes honey?")
        >>> receive_message(model, data).soft_prompt.shape
        torch.Size([4, 64])
    """
    base = model.backbone.reference
    if base.fingerprint is None and base.embedding_sample is None:
        raise ValueError(
            f"The weights of {base.id} are quantized or offloaded as a whole, so a receiver could not tell whether its "
            "LLM is the same; load the base model in bfloat16 or float32 to send messages."
        )
    if Path(base.id).exists():
        # A receiver has no use for a place on the sender's disk.
        base = BaseReference(Path(base.id).name, base.revision, base.fingerprint, base.embedding_sample)
    rows = as_rows(texts)
    instruction = instruction_options(prompt_name, prompt)
    soft_prompts = model.encode_soft_prompts(rows, batch_size=batch_size, **instruction)
    # What is put before the texts is a part of how the sender makes its vectors.
    before = model.preview("", **instruction).text
    student = student_fingerprint(model, (before, before))
    return [LatentMessage(soft_prompt, base, student).to_bytes() for soft_prompt in soft_prompts]


def receive_message(model: LLM2VecGen, data: bytes) -> LatentMessage:
    """Read a message, and refuse one that is damaged or made for another LLM.

    Args:
        model: The receiving agent's student; only its frozen LLM must be the sender's.
        data: The bytes.

    Returns:
        The message.

    Raises:
        MessageError: If the bytes are no whole message, or its LLM has other weights; names both.
    """
    message = LatentMessage.from_bytes(data)
    _check_receiver(model, message)
    return message


@torch.inference_mode()
def answer_messages(
    model: LLM2VecGen,
    messages: Sequence[LatentMessage],
    *,
    place: Place = "prefix",
    max_new_tokens: int = 64,
    batch_size: int = 32,
) -> list[Transcript]:
    """Let the receiving agent's LLM answer messages without seeing the texts they were made of.

    Args:
        model: The receiving agent's student, whose frozen LLM answers, greedily.
        messages: M messages.
        place: ``"prefix"`` puts nothing around the soft prompt, which is trained to be continued by the response, so
            the answer is what it decodes to; with the built-in students such answers came nearest to those to the text
            (``benchmarks/quality/frontiers.md``). ``"user"`` puts it where the chat template has the user's message.
        max_new_tokens: Longest answer and longest decoded text, in tokens.
        batch_size: Messages answered at once.

    Returns:
        M transcripts.

    Raises:
        MessageError: If a message was made for another LLM.

    Example:
        >>> from llm2vec_gen_st.testing import tiny_model
        >>> model = tiny_model()
        >>> received = [receive_message(model, data) for data in send_messages(model, ["honey", "a river"])]
        >>> [transcript.vectors for transcript in answer_messages(model, received, max_new_tokens=4)]
        [4, 4]
    """
    for message in messages:
        _check_receiver(model, message)
    embed, weight = model.llm.get_input_embeddings(), embedding_weight(model.llm)
    tokenizer = model.backbone.tokenizer
    frame = chat_frame(tokenizer) if place == "user" else ([], [])
    control, inside = control_ids(tokenizer), ends_inside(str(tokenizer.decode(frame[1])))
    before, behind = (embed(torch.tensor(ids, dtype=torch.long, device=weight.device)).float().cpu() for ids in frame)
    sizes = [len(message.soft_prompt) for message in messages]
    decoded, answers = [""] * len(messages), [""] * len(messages)
    with lora_enabled(model.llm, False):
        for size in sorted(set(sizes)):
            group = [number for number, found in enumerate(sizes) if found == size]
            soft_prompts = torch.stack([messages[number].soft_prompt for number in group])
            said = model.decode(soft_prompts, max_new_tokens=max_new_tokens, batch_size=batch_size)
            answered = said
            if len(before) + len(behind):
                around = torch.stack([torch.cat([before, vectors, behind]) for vectors in soft_prompts])
                rows = decode_ids(model.backbone, around, max_new_tokens=max_new_tokens, batch_size=batch_size)
                answered = [written_text(tokenizer, row, control) for row in rows]
            for number, its_text, its_answer in zip(group, said, answered, strict=True):
                decoded[number], answers[number] = its_text, without_reasoning(its_answer, inside=inside)
    return [
        Transcript(number, message.student, message.base.fingerprint, sizes[number], decoded[number], answers[number])
        for number, message in enumerate(messages)
    ]


def _check_receiver(model: LLM2VecGen, message: LatentMessage) -> None:
    own = model.backbone.reference
    compared = compare_bases(message.base, own)
    if compared is None:
        raise MessageError(
            f"This message was made for the base model {message.base}, which cannot be compared with the one here, "
            f"{own}."
        )
    same, what = compared
    if not same:
        raise MessageError(
            f"This message was made for the base model {message.base}, but the one here is {own}. Their {what} differ, "
            "so it would be read as something else. Load the sender's base model to read it."
        )
    if message.soft_prompt.ndim != 2 or message.soft_prompt.shape[1] != model.response_head.hidden_size:
        raise MessageError(
            f"This message's soft prompt has shape {tuple(message.soft_prompt.shape)}; the LLM here reads "
            f"(n, {model.response_head.hidden_size})."
        )


def _header(data: bytes) -> dict[str, Any]:
    """The header of a safetensors file, by its published layout: a length of 8 bytes, then JSON."""
    length = int.from_bytes(data[:8], "little")
    if len(data) < 8 or length > len(data) - 8:
        raise MessageError(
            f"These bytes are no latent message, or a part of one: {len(data)} bytes are here, and the first 8 "
            f"announce {length + 8} or more."
        )
    try:
        header = json.loads(data[8 : 8 + length])
    except (ValueError, RecursionError) as error:
        raise MessageError(f"These bytes are no latent message, or a damaged one: {error}") from error
    if not isinstance(header, dict):
        raise MessageError(f"These bytes are no latent message: their header is a JSON {type(header).__name__}.")
    return header


def _check_sum(data: bytes, stated: object) -> None:
    if not isinstance(stated, str) or len(stated) != len(_UNSUMMED) or data.count(_bytes(stated)) != 1:
        raise MessageError(f"This message is damaged: {str(stated)[:80]!r} is not a checksum that stands in it once.")
    found = _CHECKSUM + hashlib.sha256(data.replace(_bytes(stated), _bytes(_UNSUMMED))).hexdigest()
    if found != stated:
        raise MessageError(
            f"This message is damaged: its checksum is {stated}, but that of the bytes received is {found}. Ask for it "
            "again."
        )


def _bytes(text: str) -> bytes:
    # JSON can spell lone surrogates, which have no bytes.
    return text.encode("utf-8", "replace")


def _check_content(header: Mapping[str, Any], metadata: Mapping[str, Any]) -> None:
    problems = [f"the entry {key!r} is missing" for key in sorted(_REQUIRED - metadata.keys())]
    problems += [f"the entry {key!r} is not known" for key in sorted(metadata.keys() - _REQUIRED - _OPTIONAL)]
    problems += [f"the tensor {name!r} is not known" for name in sorted(header.keys() - {_TENSOR, "__metadata__"})]
    # They are shown to people as they are.
    problems += [
        f"the entry {key!r} is not 16 hexadecimal digits"
        for key in ("student", "base_fingerprint")
        if key in metadata and not re.fullmatch("[0-9a-f]{16}", metadata[key])
    ]
    tensor = header.get(_TENSOR)
    if not isinstance(tensor, dict):
        problems.append(f"the tensor {_TENSOR!r} is missing")
    elif tensor.get("dtype") != "F32" or not isinstance(tensor.get("shape"), list) or len(tensor["shape"]) != 2:
        problems.append(
            f"the tensor {_TENSOR!r} is {tensor.get('dtype')} {tensor.get('shape')}, not F32 of two dimensions"
        )
    elif 0 in tensor["shape"]:
        problems.append(f"the tensor {_TENSOR!r} of shape {tensor['shape']} is empty")
    if problems:
        raise MessageError("This message is not one that this version can read: " + "; ".join(problems) + ".")
