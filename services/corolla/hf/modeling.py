"""Causal language models whose blocks are remote: embedding, final norm, head and sampling run in this process."""

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, Self, cast

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

from corolla.chassis.errors import CheckpointError
from corolla.chassis.weight_formats import full_dtype_name
from corolla.hf.blocks import RemoteBlocks
from corolla.hf.cache import RemotePastKeyValues
from corolla.hf.connection import DEFAULT_ROUTER, Connection, cache_salt
from corolla.hf.defaults import served_defaults
from corolla.hf.generation import RemoteGenerationMixin
from corolla.hf.hop_sessions import RemoteSpan
from corolla.hf.loading import NotPickled, read_options
from corolla.hf.positions import PositionRules
from corolla.hf.refusals import UNSUPPORTED_OPTIONS, RefusedMethods
from corolla.hf.vocabulary import num_tokens_of, require_token_ids
from corolla.models.checkpoint import GGUF_FILE, Checkpoint
from corolla.models.edges import Edges, load_edges
from corolla.wire.span import Span
from corolla.wire.tensors import DTYPES

# `return_dict`, and the arguments that `generate` of transformers passes on to any model.
_HARMLESS = frozenset({"return_dict", "tokenizer", "assistant_tokenizer"})

_NO_LABEL = -100
"""The label that transformers ignores in a loss."""


class DistributedModelForCausalLM(NotPickled, RefusedMethods, RemoteGenerationMixin, PreTrainedModel):
    """A causal language model of any supported family, with remote blocks.

    Attributes:
        model_type: the family of the class; None takes any.
        position_rules: how the model counts positions.
        blocks: the remote blocks, which can be counted, sliced, and run without a cache.
    """

    model_type: ClassVar[str | None] = None
    main_input_name = "input_ids"
    # No module of this process is the model without its head.
    base_model_prefix = ""
    _supports_sdpa = True

    def __init__(self, config: PretrainedConfig, *, edges: Edges, blocks: RemoteBlocks) -> None:
        super().__init__(config)
        self.loss_type = "ForCausalLM"
        self.embedding, self.head = edges.modules
        self.edges = edges
        self.position_rules = PositionRules(config)
        self.blocks = blocks
        self.train(False)

    @classmethod
    def from_pretrained(  # type: ignore[override]
        cls,
        name_or_path: str,
        *,
        router: str = DEFAULT_ROUTER,
        dtype: str | torch.dtype | None = None,
        quantization: str = "none",
        kv_cache_dtype: str = "auto",
        revision: str | None = None,
        device: torch.device | str | None = None,
        tenant: str = "public",
        reuse_prefixes: bool = False,
        tls_dir: str | Path | None = None,
        cache_secret: str | None = None,
        adapter: str | None = None,
        **options: Any,
    ) -> Self:
        """Loads embedding, final norm and head, and connects to a router for the blocks.

        Args:
            name_or_path: `"demo"`, a folder, a GGUF file or a hub id, with the weights that the block servers have.
            router: the router's `host:port`.
            dtype: the block servers' dtype, as a torch dtype or its name; None: float32.
            quantization: the quantisation of the block servers' weights: `none`, `int8`, `int4` or `packed`.
            kv_cache_dtype: how the block servers store keys and values: `auto`, `fp8` or `int8`.
            revision: branch, tag or commit on the hub.
            device: the device of embedding, norm and head; None: the CPU.
            reuse_prefixes: whether block servers reuse what they computed for the tenant's texts with the same
                beginning. Set it only with the checkpoint's own embeddings: texts are compared by their tokens.
            tls_dir: folder with `tls.crt`, `tls.key` and `ca.crt` of a library, whose certificate names the tenant;
                else `COROLLA_TLS_DIR`; else the folder of a stack on this machine; else connections have no TLS.
            cache_secret: the client services' secret, at least 32 characters; else `COROLLA_CACHE_SECRET`. It salts the
                digests by which block servers find the tenant's texts; without it, digests depend on the texts alone.
            adapter: name of an adapter that is registered with the router; see `set_adapter`.
            options: options of transformers' models: `torch_dtype` is `dtype`, and `device_map` names the device.

        Raises:
            AdapterNotFound: no adapter has this name.
            AdapterDenied: the adapter is registered for other tenants only.
            SettingsError: the cache secret is too short.
            CheckpointError: the checkpoint is missing or damaged, or its family is not that of this class.
            UnsupportedFamily: no block server serves the checkpoint.
            HubUnavailable: the checkpoint is on the hub, and the hub cannot be reached.
            ValueError: block servers do not have this dtype, quantisation or dtype of keys and values, or an option is
                not supported.
        """
        dtype, device = read_options(options, dtype, device)
        salt = cache_salt(tenant, cache_secret)
        checkpoint = Checkpoint.from_pretrained(name_or_path, revision=revision)
        if cls.model_type not in (None, checkpoint.family.model_type):
            raise CheckpointError(
                f"{name_or_path} is of the family {checkpoint.family.model_type!r}, and {cls.__name__} is for "
                f"{cls.model_type!r}; AutoDistributedModelForCausalLM takes any."
            )
        connection = Connection.to(checkpoint, router, dtype, quantization, tls_dir, kv_cache_dtype)
        run_dtype = DTYPES[full_dtype_name(str(dtype).removeprefix("torch."))]
        remote = RemoteSpan(
            connection=connection,
            span=Span(0, checkpoint.num_blocks),
            hidden_size=checkpoint.hidden_size,
            dtype=run_dtype,
            tenant=tenant,
            # A text may be given step by step, so its length is unknown when the session opens, and the text must keep
            # to the short factors of a longrope embedding.
            context_length=checkpoint.short_factor_length or checkpoint.context_length,
            reuses_prefixes=reuse_prefixes,
            cache_salt=salt,
            adapter=connection.adapter(adapter, tenant),
        )
        edges = load_edges(checkpoint, dtype=run_dtype, device=device)
        model = cls(copy.deepcopy(checkpoint.config), edges=edges, blocks=RemoteBlocks(remote))
        model.generation_config = served_defaults(checkpoint, lambda name: name not in UNSUPPORTED_OPTIONS)
        return model

    def set_adapter(self, name: str | None) -> None:  # type: ignore[override]
        """Sets the adapter of new sessions; None for no adapter. Open sessions keep theirs.

        The adapter changes the blocks' linear layers, not the modules in this process.

        Raises:
            AdapterNotFound: no adapter has this name.
            AdapterDenied: the adapter is registered for other tenants only.
        """
        remote = self.blocks.remote
        self.blocks = RemoteBlocks(replace(remote, adapter=remote.connection.adapter(name, remote.tenant)))

    @classmethod
    def from_config(cls, config: PretrainedConfig, **options: Any) -> Self:
        """Like `from_pretrained`, for the checkpoint that the configuration was read from."""
        name = getattr(config, GGUF_FILE, config.name_or_path)
        if not name:
            raise ValueError("The configuration does not say which checkpoint it belongs to; use `from_pretrained`.")
        return cls.from_pretrained(name, **options)

    def get_input_embeddings(self) -> nn.Module:
        return self.edges.embedding

    def set_input_embeddings(self, value: nn.Module) -> None:
        """Replaces the token embedding; a tied head keeps its weights until `tie_weights`, as in transformers."""
        self._check_edge(value)
        self.edges.embedding = value

    def get_output_embeddings(self) -> nn.Module:
        return self.edges.output_embedding

    def set_output_embeddings(self, new_embeddings: nn.Module) -> None:
        """Replaces the head without its norm, scale and cap."""
        self._check_edge(new_embeddings)
        self.edges.output_embedding = new_embeddings

    def tie_weights(self, *_args: Any, **_options: Any) -> None:
        """Makes the head share the embedding's weights, if the configuration says so."""
        if self.config.tie_word_embeddings:
            self.edges.tie()

    def _check_edge(self, module: nn.Module) -> None:
        weight = getattr(module, "weight", None)
        if not isinstance(weight, Tensor) or weight.dim() != 2 or weight.shape[1] != self.edges.hidden_size:
            raise ValueError(f"The module must have a `weight` of the shape [tokens, {self.edges.hidden_size}].")
        if weight.dtype != self.edges.dtype:
            raise ValueError(f"The module must be of {self.edges.dtype}, as the model is, not of {weight.dtype}.")
        if self.blocks.remote.reuses_prefixes:
            raise ValueError(
                "With `reuse_prefixes`, block servers take equal tokens for equal embeddings; load the model again "
                "without it."
            )

    def train(self, mode: bool = True) -> Self:
        if mode:
            raise ValueError("This model cannot be trained: no gradients flow through remote blocks.")
        return cast(Self, super().train(False))

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        if fn(torch.empty(0, dtype=self.edges.dtype)).dtype != self.edges.dtype:
            raise ValueError("The dtype is that of the block servers; give `from_pretrained` another one as `dtype`.")
        upstream: Any = super()
        upstream._apply(fn, recurse)
        self.edges.find_device()
        return self

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Any = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        """Computes the logits of new tokens. The arguments may be on any device.

        Args:
            input_ids: int64 `[B, T]`; or give `inputs_embeds`, floating point `[B, T, H]`.
            attention_mask: `[B, held + T]`, which begins with the cache's tokens; masked tokens are not sent, and their
                logits are 0.
            position_ids: int64 `[B, T]`, the place of each token in its row; they must count the row's tokens, padding
                left out, unless the model adds learned embeddings of positions. Without them, each token has the
                position that transformers gives it, or a sentence says why not.
            past_key_values: a cache that this library returned, or an empty `DynamicCache`, which becomes one.
            labels: int64 `[B, T]`, to compute a loss.
            use_cache: whether to return a cache; its session lives as long as the cache is referenced.
            logits_to_keep: how many last columns get logits, 0 for all; or int64 `[kept]`, the columns.

        Returns:
            The logits, float32 `[B, kept, V]`, on the device of the head.

        Raises:
            ValueError: an argument needs what remote blocks cannot do, or a token id is outside the vocabulary.
            CorollaError: the chain failed.
        """
        _refuse_unknown(kwargs, self.config)
        given = input_ids if inputs_embeds is None else inputs_embeds
        if given is None or (input_ids is not None and inputs_embeds is not None) or given.shape[1] == 0:
            raise ValueError("Give tokens as `input_ids` or as `inputs_embeds`, one of them, and at least one token.")
        if labels is not None:
            _check_labels(labels, attention_mask, num_tokens_of(self))
        keeps_cache = use_cache if use_cache is not None else bool(getattr(self.config, "use_cache", True))
        held = self.own_cache(past_key_values)
        cache = held if held is not None else self.new_cache(given.shape[1])
        try:
            logits = self._logits(cache, given, attention_mask, position_ids, logits_to_keep)
        finally:
            if held is None and not keeps_cache:
                cache.session.close()
        loss = None
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels.to(logits.device), vocab_size=logits.shape[-1])
        output = CausalLMOutputWithPast(
            loss=loss, logits=cast(Any, logits), past_key_values=cache if keeps_cache else None
        )
        return_dict = kwargs.get("return_dict")
        if return_dict is None:
            return_dict = self.config.return_dict
        return output if return_dict else cast(Any, output.to_tuple())

    def _logits(
        self,
        cache: RemotePastKeyValues,
        given: Tensor,
        attention_mask: Tensor | None,
        position_ids: Tensor | None,
        logits_to_keep: int | Tensor,
    ) -> Tensor:
        session = cache.session
        num_rows, num_columns = given.shape[:2]
        whole = _whole_mask(attention_mask, session.text_mask, num_rows, num_columns)
        mask = whole[:, whole.shape[1] - num_columns :]
        positions = self.position_rules.positions(whole, num_columns, position_ids)
        is_embedded = given.dim() == 3
        where = mask.to(given.device)
        if not is_embedded:
            require_token_ids("input_ids", given[where], num_tokens_of(self))
        columns = _kept_columns(logits_to_keep, num_columns)
        num_last = num_columns - int(columns.min())
        # Block servers find texts again by their tokens, which stand for their embeddings only at counted positions.
        is_counted = torch.equal(positions[mask], (whole.long().cumsum(dim=1) - 1)[:, -num_columns:][mask])
        texts = _texts(given, mask, num_last) if is_counted and not is_embedded else None
        session.prepare(num_rows, num_columns, texts)
        positions = positions + session.num_prefix
        embed = self.edges.embed_given if is_embedded else self.edges.embed
        counts: list[int] = mask.sum(dim=1).tolist()
        hidden = torch.split(embed(given[where], positions[mask]), counts)
        token_ids = torch.full((num_rows, num_columns), -1) if is_embedded else given
        outputs = torch.cat(session.advance(hidden, token_ids, mask, num_last))
        computed = self.edges.head(outputs)
        logits = computed.new_zeros(num_rows, num_last, computed.shape[-1])
        logits[mask[:, num_columns - num_last :].to(logits.device)] = computed
        return logits[:, (columns - (num_columns - num_last)).to(logits.device)]


def _refuse_unknown(kwargs: dict[str, Any], config: PretrainedConfig) -> None:
    asked = {name: True for name in ("output_attentions", "output_hidden_states") if getattr(config, name, False)}
    for name, value in (asked | kwargs).items():
        if value is not None and value is not False and name not in _HARMLESS:
            raise ValueError(f"`{name}` is not supported over remote blocks.")


def _whole_mask(mask: Any, held: Tensor | None, num_rows: int, num_columns: int) -> Tensor:
    """The mask of all columns, bool `[B, held + T]` on the CPU.

    Args:
        held: the mask of the text in the cache, bool `[B, held]`; None: there is none.
    """
    if held is None or len(held) != num_rows:
        held = torch.ones(num_rows, 0 if held is None else held.shape[1], dtype=torch.bool)
    if mask is None:
        if not held.all():
            raise ValueError("`attention_mask` is missing, and the cache holds padding; give the mask of all tokens.")
        return torch.ones(num_rows, held.shape[1] + num_columns, dtype=torch.bool)
    if not isinstance(mask, Tensor) or mask.shape != (num_rows, held.shape[1] + num_columns):
        raise ValueError(
            f"`attention_mask` must have the shape [{num_rows}, {held.shape[1] + num_columns}]: all tokens, those in "
            f"the cache too; not {list(mask.shape) if isinstance(mask, Tensor) else type(mask).__name__}."
        )
    whole = mask.bool().cpu()
    if not torch.equal(whole[:, : held.shape[1]], held):
        raise ValueError("`attention_mask` must mask the same tokens of the cache as when they were processed.")
    return whole


def _check_labels(labels: Tensor, mask: Any, num_tokens: int) -> None:
    """Checks the labels of a loss, int64 `[B, T]`, with the mask `[B, held + T]`, if there is one."""
    require_token_ids("labels", labels[labels != _NO_LABEL], num_tokens)
    if isinstance(mask, Tensor) and mask.dim() == 2 and mask.shape[1] >= labels.shape[1]:
        predicts = mask[:, mask.shape[1] - labels.shape[1] :].bool().to(labels.device)
        if (labels[:, 1:] != _NO_LABEL)[~predicts[:, :-1]].any():
            raise ValueError("`labels` has a token after padding, which has no logits; set it to -100.")


def _texts(token_ids: Tensor, mask: Tensor, num_last: int) -> list[list[int]]:
    """Each row's tokens up to the first one whose logits are wanted, from int64 and bool `[B, T]`."""
    num_wanted = mask[:, mask.shape[1] - num_last :].sum(dim=1).tolist()
    rows = [row[its_mask].tolist() for row, its_mask in zip(token_ids.cpu(), mask, strict=True)]
    return [row[: len(row) - max(0, num - 1)] for row, num in zip(rows, num_wanted, strict=True)]


def _kept_columns(logits_to_keep: int | Tensor, num_columns: int) -> Tensor:
    if isinstance(logits_to_keep, Tensor):
        return torch.arange(num_columns)[logits_to_keep.cpu()]
    return torch.arange(num_columns)[-logits_to_keep:] if logits_to_keep else torch.arange(num_columns)
