"""Latent messages: exact round trips, no changed byte gets through, and only the sender's LLM reads them."""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import save

from llm2vec_gen_st import LLM2VecGen
from llm2vec_gen_st.base_reference import BaseReference
from llm2vec_gen_st.fingerprint import student_fingerprint
from llm2vec_gen_st.interpret import (
    LatentMessage,
    MessageError,
    Transcript,
    answer_messages,
    receive_message,
    send_messages,
)
from llm2vec_gen_st.testing import tiny_backbone, tiny_model

TEXTS = ["where do polar bears live?", "", "Who makes honey?"]
BASE = BaseReference("tiny", "main", "0123456789abcdef", None)
DATA = LatentMessage(torch.arange(6).reshape(2, 3) / 7, BASE, "f" * 16).to_bytes()

floats = st.floats(width=32, allow_nan=False, allow_infinity=False)


@given(
    rows=st.integers(1, 4).flatmap(
        lambda width: st.lists(st.lists(floats, min_size=width, max_size=width), min_size=1, max_size=4)
    ),
    name=st.text(max_size=20),
    revision=st.none() | st.text(max_size=5),
    sample=st.none() | st.just("0" * 128),
)
@settings(max_examples=50)
def test_round_trip_is_exact(rows: list[list[float]], name: str, revision: str | None, sample: str | None) -> None:
    name = name.encode("utf-8", "replace").decode()
    revision = None if revision is None else revision.encode("utf-8", "replace").decode()
    message = LatentMessage(torch.tensor(rows), BaseReference(name, revision, "0" * 16, sample), "a" * 16)
    again = LatentMessage.from_bytes(message.to_bytes())
    assert again.soft_prompt.dtype == torch.float32
    assert again.soft_prompt.numpy().tobytes() == message.soft_prompt.numpy().tobytes()
    assert (again.base, again.student) == (message.base, message.student)


@given(position=st.integers(0, len(DATA) - 1), change=st.integers(1, 255))
@settings(max_examples=300)
def test_any_changed_byte_is_refused(position: int, change: int) -> None:
    damaged = bytearray(DATA)
    damaged[position] ^= change
    with pytest.raises(MessageError):
        LatentMessage.from_bytes(bytes(damaged))


def test_every_single_flipped_bit_is_refused() -> None:
    for position in range(len(DATA)):
        for bit in range(8):
            damaged = bytearray(DATA)
            damaged[position] ^= 1 << bit
            with pytest.raises(MessageError):
                LatentMessage.from_bytes(bytes(damaged))


@given(data=st.binary(max_size=80) | st.builds(lambda cut: DATA[:cut], st.integers(0, len(DATA) - 1)))
@settings(max_examples=200)
def test_other_bytes_and_parts_are_refused(data: bytes) -> None:
    for found in (data, DATA + data[:1] + b"\0", data + DATA):
        if found != DATA:
            with pytest.raises(MessageError):
                LatentMessage.from_bytes(found)


def test_damage_is_told_with_both_checksums() -> None:
    damaged = DATA[:-1] + bytes([DATA[-1] ^ 1])
    stated = re.search(rb"sha256:[0-9a-f]{64}", DATA)
    assert stated is not None
    zeros = DATA.replace(stated[0], b"sha256:" + b"0" * 64)
    assert stated[0] == b"sha256:" + hashlib.sha256(zeros).hexdigest().encode()
    found = hashlib.sha256(zeros[:-1] + damaged[-1:]).hexdigest()
    with pytest.raises(MessageError, match=rf"{stated[0].decode()}, but that of the bytes received is sha256:{found}"):
        LatentMessage.from_bytes(damaged)


def summed(header: Any, data: bytes = b"", length: int | None = None) -> bytes:
    """A file with a right checksum, whatever else is in it."""
    text = json.dumps(header).encode()
    found = (len(text) if length is None else length).to_bytes(8, "little") + text + data
    return found.replace(b"sha256:" + 64 * b"0", b"sha256:" + hashlib.sha256(found).hexdigest().encode())


METADATA = {
    "format": "llm2vec-gen-message", "format_version": "1", "checksum": "sha256:" + 64 * "0", "base_id": "tiny",
    "student": "f" * 16,
}  # fmt: skip
TENSOR = {"dtype": "F32", "shape": [1, 2], "data_offsets": [0, 8]}


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (summed([1]), "header is a JSON list"),
        (summed({"__metadata__": 3}), "their format is None, not 'llm2vec-gen-message'"),
        (summed({"__metadata__": {"format": "pt"}}), "their format is 'pt', not 'llm2vec-gen-message'"),
        (save({"soft_prompt": torch.zeros(1, 2)}), "their format is None"),
        (summed({"__metadata__": METADATA | {"format_version": "2"}}), "format_version '2'; only '1' can be read"),
        (summed({"__metadata__": METADATA | {"checksum": "md5"}}), "'md5' is not a checksum"),
        (summed({"__metadata__": METADATA | {"checksum": "\ud800" * 71}}), "is not a checksum"),
        (summed({"__metadata__": METADATA}), "the tensor 'soft_prompt' is missing"),
        (summed({"__metadata__": METADATA | {"more": "1"}, "soft_prompt": TENSOR}, 8 * b"\0"), "'more' is not known"),
        (summed({"__metadata__": METADATA, "more": TENSOR, "soft_prompt": TENSOR}, 8 * b"\0"), "'more' is not known"),
        (
            summed({"__metadata__": {k: v for k, v in METADATA.items() if k != "student"}, "soft_prompt": TENSOR}),
            "the entry 'student' is missing",
        ),
        (summed({"__metadata__": METADATA | {"student": "\x1b[31mtrust me"}, "soft_prompt": TENSOR}, 8 * b"\0"),
         "'student' is not 16 hex"),
        (summed({"__metadata__": METADATA | {"base_fingerprint": "F" * 16}, "soft_prompt": TENSOR}, 8 * b"\0"),
         "'base_fingerprint' is not 16 hex"),
        (summed({"__metadata__": METADATA, "soft_prompt": TENSOR | {"dtype": "F64"}}), "is F64 .1, 2., not F32"),
        (summed({"__metadata__": METADATA, "soft_prompt": TENSOR | {"shape": [2]}}), "of two dimensions"),
        (summed({"__metadata__": METADATA, "soft_prompt": TENSOR | {"shape": [0, 2]}}), "is empty"),
        (summed({"__metadata__": METADATA, "soft_prompt": TENSOR}, 4 * b"\0"), "cannot be read"),
        (summed({"__metadata__": METADATA | {"base_id": 3}, "soft_prompt": TENSOR}, 8 * b"\0"), "cannot be read"),
        (summed({"__metadata__": METADATA, "soft_prompt": TENSOR}, 4 * b"\0" + b"\0\0\x80\x7f"), "not finite"),
        (summed({}, length=2**63), "the first 8 announce"),
        (b"[" * 100_000, "announce"),
        ((100_000).to_bytes(8, "little") + b"[" * 100_000, "damaged one"),
        (b"", "0 bytes are here"),
    ],
)  # fmt: skip
def test_bytes_with_a_right_checksum_are_not_trusted_either(data: bytes, said: str) -> None:
    with pytest.raises(MessageError, match=said) as error:
        LatentMessage.from_bytes(data)
    assert "\n" not in str(error.value)
    str(error.value).encode()


def test_messages_hold_soft_prompts_and_no_text(student: LLM2VecGen, tmp_path: Path) -> None:
    sent = send_messages(student, TEXTS)
    prompts = student.encode_soft_prompts(TEXTS, prompt_name="query")
    for data, prompt, text in zip(sent, prompts, TEXTS, strict=True):
        message = receive_message(student, data)
        torch.testing.assert_close(message.soft_prompt, prompt)
        assert message.base.fingerprint == student.backbone.reference.fingerprint
        assert message.student == student_fingerprint(student, (student.prompts["query"],) * 2)
        [alone] = send_messages(student, text)
        torch.testing.assert_close(receive_message(student, alone).soft_prompt, prompt)
        assert not text or text.encode() not in data
    [other] = send_messages(student, TEXTS[0], prompt_name="document")
    assert receive_message(student, other).student != message.student
    path = tmp_path / "message.safetensors"
    path.write_bytes(sent[0])
    with safe_open(path, "pt") as file:
        assert list(file.keys()) == ["soft_prompt"]
        assert file.metadata()["base_fingerprint"] == student.backbone.reference.fingerprint


def test_another_base_is_refused_with_both_fingerprints(student: LLM2VecGen) -> None:
    other = tiny_model(backbone=tiny_backbone(seed=1))
    [data] = send_messages(student, "honey")
    own, found = student.backbone.reference.fingerprint, other.backbone.reference.fingerprint
    assert own != found
    with pytest.raises(MessageError, match=rf"fingerprint {own}.*fingerprint {found}.*weights differ"):
        receive_message(other, data)
    with pytest.raises(MessageError, match="weights differ"):
        answer_messages(other, [receive_message(student, data)])


def test_bases_without_fingerprint_are_told_by_their_embedding_or_refused(student: LLM2VecGen) -> None:
    message = receive_message(student, send_messages(student, "honey")[0])
    quantized = replace(message, base=replace(message.base, fingerprint=None))
    assert receive_message(student, quantized.to_bytes()).base.fingerprint is None
    wrong = replace(quantized, base=replace(quantized.base, embedding_sample="00" * 64))
    with pytest.raises(MessageError, match="input embeddings differ"):
        receive_message(student, wrong.to_bytes())
    unknown = replace(message, base=BaseReference("tiny"))
    with pytest.raises(MessageError, match="cannot be compared"):
        receive_message(student, unknown.to_bytes())
    model = tiny_model()
    model.suffix_transformer.base = BaseReference("tiny")
    with pytest.raises(ValueError, match="load the base model in bfloat16 or float32"):
        send_messages(model, "honey")


def test_places_on_the_senders_disk_are_not_sent(tmp_path: Path) -> None:
    model = tiny_model()
    folder = tmp_path / "secret" / "base"
    folder.mkdir(parents=True)
    model.suffix_transformer.base = replace(model.suffix_transformer.base, id=str(folder))
    [data] = send_messages(model, "honey")
    assert b"secret" not in data
    assert receive_message(model, data).base.id == "base"


def test_answers_come_from_the_soft_prompt_in_the_chat_format(student: LLM2VecGen) -> None:
    received = [receive_message(student, data) for data in send_messages(student, TEXTS)]
    found = answer_messages(student, received, place="user", max_new_tokens=6)
    tokenizer, embed = student.tokenizer, student.llm.get_input_embeddings()
    around = [tokenizer(text)["input_ids"] for text in ("<|im_start|>user\n", "<|im_end|>\n<|im_start|>assistant\n")]
    before, behind = (embed(torch.tensor(ids)) for ids in around)
    for transcript, message in zip(found, received, strict=True):
        rows = torch.cat([before, message.soft_prompt, behind])
        answer = []
        with torch.inference_mode():
            for _ in range(6):
                token = int(student.llm(inputs_embeds=rows[None]).logits[0, -1].argmax())
                if token == tokenizer.eos_token_id:
                    break
                answer.append(token)
                rows = torch.cat([rows, embed(torch.tensor([token]))])
        assert transcript.answer == str(tokenizer.decode(answer, skip_special_tokens=True)).strip()
        assert transcript.decoded == student.decode(message.soft_prompt, max_new_tokens=6)[0]
        assert transcript.vectors == 4
        assert (transcript.student, transcript.base) == (message.student, message.base.fingerprint)
    as_prefix = answer_messages(student, received, max_new_tokens=6)
    assert [item.answer for item in as_prefix] == [item.decoded.strip() for item in found]
    assert any(one.answer != other.answer for one, other in zip(as_prefix, found, strict=True))
    assert pd.DataFrame([asdict(item) for item in found]).shape == (3, 6)


def test_students_of_one_base_understand_each_other(student: LLM2VecGen) -> None:
    """Also with another number of compression tokens, and mixed in one batch."""
    longer = LLM2VecGen.from_base(
        student.backbone, thought_tokens=1, compression_tokens=7, embedding_dim=8, device="cpu", seed=3
    )
    sent = [*send_messages(student, "honey"), *send_messages(longer, "ice"), *send_messages(student, "a river")]
    received = [receive_message(student, data) for data in sent]
    found = answer_messages(student, received, place="user", max_new_tokens=4)
    assert [item.message for item in found] == [0, 1, 2]
    assert [item.vectors for item in found] == [4, 7, 4]
    alone: list[Transcript] = [
        answer_messages(student, [message], place="user", max_new_tokens=4)[0] for message in received
    ]
    assert [(item.decoded, item.answer) for item in found] == [(item.decoded, item.answer) for item in alone]
    assert found[0].student == found[2].student != found[1].student
    assert answer_messages(student, []) == []
    assert send_messages(student, []) == []


def test_an_unfitting_shape_is_refused(student: LLM2VecGen) -> None:
    message = receive_message(student, send_messages(student, "honey")[0])
    narrow = replace(message, soft_prompt=message.soft_prompt[:, :8])
    with pytest.raises(MessageError, match=r"shape \(4, 8\); the LLM here reads \(n, 64\)"):
        receive_message(student, narrow.to_bytes())
