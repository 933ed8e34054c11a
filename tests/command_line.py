"""Running the command line in the test's own process."""

from __future__ import annotations

from typer.testing import CliRunner, Result

from llm2vec_gen_st.cli import app as application


def run(*arguments: object) -> Result:
    return CliRunner().invoke(application, [str(argument) for argument in arguments], env={"COLUMNS": "250"})


def succeed(*arguments: object) -> str:
    result = run(*arguments)
    assert result.exit_code == 0, result.output
    return result.stdout


def fail(*arguments: object) -> str:
    """What a command says that fails in one sentence."""
    result = run(*arguments)
    assert result.exit_code == 1, result.output
    assert "Traceback" not in result.output
    assert result.stderr.startswith("Error: ")
    assert len(result.stderr.strip().splitlines()) == 1
    return result.stderr
