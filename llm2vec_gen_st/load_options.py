"""How a checkpoint and the base model under it are fetched and loaded: one value, handed from step to step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from llm2vec_gen_st.backbone import Backbone, load_backbone


@dataclass(frozen=True)
class LoadOptions:
    """Options of :class:`~llm2vec_gen_st.LLM2VecGen` that concern loading.

    Args:
        model_kwargs: Passed on when the base model is loaded.
        processor_kwargs: Passed on when its tokenizer is loaded.
        backbone: A loaded base model to use instead.
        verify_base: Whether a base model with other weights than the checkpoint's is refused.
        revision: Hub revision of the checkpoint.
        token: Hub token.
        cache_folder: Hub cache.
        local_files_only: Never ask the hub.
    """

    model_kwargs: Mapping[str, Any] | None = None
    processor_kwargs: Mapping[str, Any] | None = None
    backbone: Backbone | None = None
    verify_base: bool = True
    revision: str | None = None
    token: bool | str | None = None
    cache_folder: str | None = None
    local_files_only: bool = False

    @classmethod
    def among(cls, keywords: Mapping[str, Any]) -> LoadOptions:
        """The options among keyword arguments, such as the host's for a module's ``load``.

        Args:
            keywords: Name to value; other names are passed over.

        Example:
            >>> LoadOptions.among({"revision": "v2", "backend": "torch"}).revision
            'v2'
        """
        return cls(**{field.name: keywords[field.name] for field in fields(cls) if field.name in keywords})

    @property
    def hub(self) -> dict[str, Any]:
        """What the host's functions that find a checkpoint's files take."""
        return {
            "revision": self.revision,
            "token": self.token,
            "cache_folder": self.cache_folder,
            "local_files_only": self.local_files_only,
        }

    def load_base(self, base_id: str, revision: str | None) -> Backbone:
        """The base model given, or the one a checkpoint names; the hub options hold for it too.

        Args:
            base_id: Hub id or directory that the checkpoint names.
            revision: Its hub revision.

        Returns:
            The backbone.

        Raises:
            BaseModelError: If it cannot be loaded.
        """
        if self.backbone is not None:
            return self.backbone
        hub = {"token": self.token, "cache_dir": self.cache_folder, "local_files_only": self.local_files_only or None}
        given = {key: value for key, value in hub.items() if value is not None}
        return load_backbone(
            base_id,
            revision=revision,
            model_kwargs={**given, **(self.model_kwargs or {})},
            tokenizer_kwargs={**given, **(self.processor_kwargs or {})},
        )
