"""What can be wrong with a store."""

from __future__ import annotations


class StoreError(ValueError):
    """A store cannot be opened or used as asked; the message names the file and says what to do."""
