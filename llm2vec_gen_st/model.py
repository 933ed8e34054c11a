"""LLM2VecGen: a SentenceTransformer that knows our names and checkpoint forms, and speaks its embeddings."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.modules import Normalize
from torch import nn
from tqdm.auto import trange
from transformers import PreTrainedModel
from typing_extensions import Self

from llm2vec_gen_st.backbone import Backbone, load_backbone, placed_by_loading
from llm2vec_gen_st.checkpoints.card import host_requirements, student_card
from llm2vec_gen_st.encoding import as_texts, check_batch_size, check_finite, empty_like, in_precision, named_options
from llm2vec_gen_st.interpret.decode import as_soft_prompts, decode_ids, decoded_texts, is_soft_prompts
from llm2vec_gen_st.load_options import LoadOptions
from llm2vec_gen_st.modules import ResponseHead, SuffixTransformer
from llm2vec_gen_st.modules.lora import lora_enabled, lora_removed_on_failure
from llm2vec_gen_st.modules.truncation import warn_once_if_cut
from llm2vec_gen_st.prompts import DEFAULT_PROMPTS


@dataclass(frozen=True)
class Preview:
    """What the model reads for a text: the final text, its tokens, and whether it was cut.

    Args:
        text: Instruction and text.
        token_ids: Ids of the text that is kept; the suffix follows as embeddings.
        suffix_length: m + n positions behind them.
        cut: Whether text beyond the limit was dropped.
    """

    text: str
    token_ids: list[int]
    suffix_length: int
    cut: bool


class LLM2VecGen(SentenceTransformer):
    """Embed what the LLM would answer (LLM2Vec-Gen, arXiv 2603.10913), as a SentenceTransformer.

    Args:
        model_name_or_path: A built-in name (``llm2vec-gen-smollm2-135m``), a name of the paper
            (``llm2vec-gen-qwen3-4b``), a directory, or a hub id; our checkpoints and the authors'.
        modules: Ready modules instead of a name.
        device: Device to run on.
        prompts: Instructions by name; they replace saved ones of the same name.
        default_prompt_name: Instruction used by :meth:`encode` when none is named.
        model_kwargs: Passed on to ``AutoModelForCausalLM.from_pretrained`` (``dtype``, ``device_map``, ...).
        processor_kwargs: Passed on to ``AutoTokenizer.from_pretrained``.
        backbone: A loaded base model to share instead of loading it again.
        verify_base: Whether a base model with other weights than the checkpoint's is refused.
        revision: Hub revision of the checkpoint.
        token: Hub token.
        cache_folder: Hub cache.
        local_files_only: Never ask the hub.
        similarity_fn_name: As in SentenceTransformer.
        truncate_dim: As in SentenceTransformer.

    Raises:
        CheckpointError: If a checkpoint's files are not what they should be.
        BaseModelError: If the base model is missing, or its weights are others.

    Example:
        >>> from llm2vec_gen_st.testing import tiny_model
        >>> model = tiny_model()
        >>> model.encode_query(["where do polar bears live?"]).shape
        (1, 48)
    """

    default_huggingface_organization = None

    def __init__(
        self,
        model_name_or_path: str | None = None,
        *,
        modules: list[nn.Module] | None = None,
        device: str | None = None,
        prompts: dict[str, str] | None = None,
        default_prompt_name: str | None = None,
        model_kwargs: dict[str, Any] | None = None,
        processor_kwargs: dict[str, Any] | None = None,
        backbone: Backbone | None = None,
        verify_base: bool = True,
        revision: str | None = None,
        token: bool | str | None = None,
        cache_folder: str | None = None,
        local_files_only: bool = False,
        similarity_fn_name: Any = None,
        truncate_dim: int | None = None,
        **kwargs: Any,
    ) -> None:
        if (model_name_or_path is None) == (modules is None):
            raise ValueError(
                "Give LLM2VecGen a name or path, or ready modules; to start untrained use LLM2VecGen.from_base."
            )
        if (backend := kwargs.get("backend", "torch")) != "torch":
            raise ValueError(f"LLM2VecGen runs on torch; there is no backend {backend!r} for it.")
        saved: dict[str, Any] = {}
        with lora_removed_on_failure(backbone.llm if backbone is not None else None):
            if model_name_or_path is not None:
                from llm2vec_gen_st.checkpoints.loading import load_checkpoint

                checkpoint = load_checkpoint(
                    str(model_name_or_path),
                    LoadOptions(
                        model_kwargs=model_kwargs,
                        processor_kwargs=processor_kwargs,
                        backbone=backbone,
                        verify_base=verify_base,
                        revision=revision,
                        token=token,
                        cache_folder=cache_folder,
                        local_files_only=local_files_only,
                    ),
                )
                modules, saved = checkpoint.modules, checkpoint.config
            if device is None and modules and isinstance(modules[0], SuffixTransformer):
                placed = placed_by_loading(modules[0].llm, model_kwargs)
                device = None if placed is None else str(placed)
            super().__init__(
                modules=modules,
                device=device,
                prompts={**saved.get("prompts", DEFAULT_PROMPTS), **(prompts or {})},
                default_prompt_name=default_prompt_name or saved.get("default_prompt_name"),
                similarity_fn_name=similarity_fn_name or saved.get("similarity_fn_name"),
                truncate_dim=saved.get("truncate_dim") if truncate_dim is None else truncate_dim,
                **kwargs,
            )
        self.model_card_data.local_files_only = True

    @classmethod
    def from_base(
        cls,
        base: str | Backbone,
        *,
        thought_tokens: int = 10,
        compression_tokens: int = 10,
        embedding_dim: int,
        max_seq_length: int = 512,
        normalize: bool = False,
        seed: int = 0,
        prompts: dict[str, str] | None = None,
        device: str | None = None,
        model_kwargs: dict[str, Any] | None = None,
        **suffix_options: Any,
    ) -> Self:
        """An untrained student on a base model (the paper's random start).

        Args:
            base: Hub id, directory, or loaded backbone.
            thought_tokens: m.
            compression_tokens: n.
            embedding_dim: D, the teacher's dimension.
            max_seq_length: Longest input in tokens, suffix included.
            normalize: Whether embeddings are scaled to length 1.
            seed: Seed of the random start.
            prompts: Instructions by name.
            device: Device to run on.
            model_kwargs: Passed on when the base model is loaded.
            **suffix_options: Further options of :class:`~llm2vec_gen_st.modules.SuffixTransformer`.

        Returns:
            The student.
        """
        backbone = load_backbone(base, model_kwargs=model_kwargs) if isinstance(base, str) else base
        with lora_removed_on_failure(backbone.llm):
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(seed)
                suffix = SuffixTransformer(
                    backbone,
                    thought_tokens=thought_tokens,
                    compression_tokens=compression_tokens,
                    max_seq_length=max_seq_length,
                    **suffix_options,
                )
                modules: list[nn.Module] = [suffix, ResponseHead(backbone.hidden_size, embedding_dim)]
            if normalize:
                modules.append(Normalize())
            return cls(modules=modules, prompts=prompts, device=device, model_kwargs=model_kwargs)

    @property
    def suffix_transformer(self) -> SuffixTransformer:
        """The first module: frozen LLM and suffix."""
        module = self[0]
        assert isinstance(module, SuffixTransformer)
        return module

    @property
    def response_head(self) -> ResponseHead:
        """The second module: the two linear heads."""
        module = self[1]
        assert isinstance(module, ResponseHead)
        return module

    @property
    def llm(self) -> PreTrainedModel:
        """The one frozen causal LM, shared by encoding, decoding and answering."""
        return self.suffix_transformer.llm

    @property
    def backbone(self) -> Backbone:
        """The LLM with its tokenizer and reference."""
        return self.suffix_transformer.backbone

    def encode(self, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """Embed texts; as :meth:`SentenceTransformer.encode`, with every input checked.

        Args:
            inputs: A string or any iterable of N strings.
            *args: As in SentenceTransformer.
            **kwargs: As in SentenceTransformer.

        Returns:
            (N, D) float32 array, or what the options ask for.

        Raises:
            TypeError: If an item is not a string; names its position.
            ValueError: If ``batch_size`` is below 1.
            FloatingPointError: If an embedding is not finite; names the input's position.
        """
        texts = as_texts(inputs)
        options = named_options(args, kwargs)
        precision = options.pop("precision", None) or "float32"
        output_value = options.get("output_value", "sentence_embedding")
        check_batch_size(options.get("batch_size", 1))
        with warn_once_if_cut(self.suffix_transformer.text_limit):
            found = super().encode(texts, precision="float32", **options)
        if output_value != "sentence_embedding":
            return found
        check_finite(found)
        if not isinstance(texts, str) and not texts:
            found = empty_like(
                found, options.get("truncate_dim") or self.truncate_dim or self.response_head.embedding_dim
            )
        return found if precision == "float32" else in_precision(found, precision, single=isinstance(texts, str))

    @torch.inference_mode()
    def encode_soft_prompts(
        self,
        inputs: str | Iterable[str],
        *,
        prompt_name: str | None = None,
        prompt: str | None = None,
        batch_size: int = 32,
        show_progress_bar: bool = False,
    ) -> torch.Tensor:
        """MLP_recon of the compression states: what :meth:`decode` turns into text (paper, section 3).

        Args:
            inputs: A string or any iterable of N strings.
            prompt_name: Name of the instruction.
            prompt: The instruction itself.
            batch_size: Texts run at once.
            show_progress_bar: Whether a progress bar is shown.

        Returns:
            (N, n, H) float32 on the CPU; (n, H) for a single string.

        Raises:
            TypeError: If an item is not a string.
            ValueError: If ``batch_size`` is below 1.
            FloatingPointError: If a soft prompt is not finite.
        """
        check_batch_size(batch_size)
        texts = as_texts(inputs)
        rows = [texts] if isinstance(texts, str) else texts
        instruction = self._resolve_prompt(prompt, prompt_name)
        self.eval()
        order = sorted(range(len(rows)), key=lambda row: -len(rows[row]))
        shape = (len(rows), self.suffix_transformer.compression_tokens, self.response_head.hidden_size)
        result = torch.zeros(shape)
        with warn_once_if_cut(self.suffix_transformer.text_limit):
            for start in trange(0, len(rows), batch_size, desc="Batches", disable=not show_progress_bar):
                chosen = order[start : start + batch_size]
                features = self.preprocess([rows[row] for row in chosen], prompt=instruction)
                features = {key: value.to(self.device) for key, value in features.items()}
                states = self.suffix_transformer(features)["compression_states"]
                head = self.response_head
                device = next((parameter.device for parameter in head.parameters()), states.device)
                result[chosen] = head.soft_prompt(states.to(device)).cpu()
        check_finite(result.flatten(1))
        return result[0] if isinstance(texts, str) else result

    def decode(
        self,
        soft_prompts: Any,
        *,
        max_new_tokens: int = 64,
        prompt_name: str | None = None,
        prompt: str | None = None,
        batch_size: int = 32,
        show_progress_bar: bool = False,
    ) -> list[str]:
        """Let the frozen LLM speak embeddings: greedy text of each soft prompt (paper, section 3).

        Args:
            soft_prompts: (N, n, H) from :meth:`encode_soft_prompts`, or texts to take them of; (n, H) if embeddings
                have another width than H, for else it could be n of them.
            max_new_tokens: Longest text in tokens.
            prompt_name: Name of the instruction, for texts.
            prompt: The instruction itself, for texts.
            batch_size: Soft prompts decoded at once.
            show_progress_bar: Whether a progress bar is shown.

        Returns:
            N texts.

        Raises:
            ValueError: If the array has another shape, such as a pooled embedding's, or ``batch_size`` is below 1.
        """
        check_batch_size(batch_size)
        if not is_soft_prompts(soft_prompts):
            soft_prompts = self.encode_soft_prompts(
                soft_prompts, prompt_name=prompt_name, prompt=prompt, batch_size=batch_size
            )
        transformer = self.suffix_transformer
        head = self.response_head
        prompts = as_soft_prompts(soft_prompts, transformer.compression_tokens, head.hidden_size, head.embedding_dim)
        with lora_enabled(self.llm, False):
            rows = decode_ids(
                self.backbone,
                prompts,
                max_new_tokens=max_new_tokens,
                end_ids=transformer.end_of_text_ids,
                batch_size=batch_size,
                progress=show_progress_bar,
            )
        return decoded_texts(self.backbone, rows, end_text=transformer.end_of_response)

    def preview(self, text: str, *, prompt_name: str | None = None, prompt: str | None = None) -> Preview:
        """Show what the model reads for a text.

        Args:
            text: The text.
            prompt_name: Name of the instruction.
            prompt: The instruction itself.

        Returns:
            Final text, token ids, suffix length, and whether text was cut.

        Raises:
            ValueError: If the instruction's name is not known; lists the known ones.
        """
        final = (self._resolve_prompt(prompt, prompt_name) or "") + text
        transformer = self.suffix_transformer
        tokens = transformer.text_tokenizer.ids(final, transformer.text_limit)
        return Preview(final, tokens.ids, transformer.suffix_length, tokens.cut)

    def _get_model_config(self) -> dict[str, Any]:
        """The host's settings, and a requirement that tells a plain SentenceTransformer what it lacks."""
        return super()._get_model_config() | host_requirements()

    def _create_model_card(self, path: str, model_name: str | None = None, train_datasets: Any = None) -> None:
        """Write our own README.md: the host's would describe modules it does not know, and name local paths."""
        name = self.model_card_data.model_id or model_name
        card = student_card(self, None if name and Path(name).exists() else name)
        (Path(path) / "README.md").write_text(card, encoding="utf-8")
