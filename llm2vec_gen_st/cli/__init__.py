"""The command ``llm2vec-gen``: a thin shell over the package's public functions.

Everything heavy is imported inside the commands, so that ``--help`` answers at once.
"""

from __future__ import annotations

from llm2vec_gen_st.cli.main import app

__all__ = ["app"]
