"""Settings of a store that its users keep beside its documents."""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping

from langchain_llm2vec_gen.store.database import Database


class Settings(MutableMapping[str, str]):
    """Texts that the user of a store keeps in it, by name."""

    _PREFIX = "user."

    def __init__(self, database: Database) -> None:
        self._database = database

    def __getitem__(self, key: str) -> str:
        with self._database.reading() as snapshot:
            value = snapshot.setting(self._PREFIX + key)
        if value is None:
            raise KeyError(key)
        return value

    def __setitem__(self, key: str, value: str) -> None:
        with self._database.changing() as transaction:
            transaction.set(self._PREFIX + key, value)

    def __delitem__(self, key: str) -> None:
        self[key]
        with self._database.changing() as transaction:
            transaction.set(self._PREFIX + key, None)

    def __iter__(self) -> Iterator[str]:
        with self._database.reading() as snapshot:
            known = snapshot.settings()
        return (key.removeprefix(self._PREFIX) for key in known if key.startswith(self._PREFIX))

    def __len__(self) -> int:
        return sum(1 for _ in self)
