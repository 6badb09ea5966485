"""Both ends of a model: from token ids to the first block's input, from the last block's output to logits.

Both run the family's own code: the embedding is its base model without layers and norm, the head its causal language
model around a base model that only applies the final norm. So scales, learned positions, layer norms and logit caps are
those of `transformers`, bit for bit.
"""

import copy
import functools
import math
import re
import time
from dataclasses import dataclass
from typing import Any, Final, cast

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPastAndCrossAttentions

from corolla.models.checkpoint import Checkpoint
from corolla.models.cut_model import build, cut_class, keep_layers, model_class_of
from corolla.models.families import Family
from corolla.models.linear import replace_linears, tune

_HEAD_REPETITIONS: Final = 5
_MAX_COPIED_BYTES: Final = 256 << 20


class Edges:
    """What the client applies before block 0 and after the last block.

    Attributes:
        is_lookup: whether `embed` only looks rows up, so that for a few tokens it takes microseconds.
    """

    def __init__(self, causal_model: PreTrainedModel, family: Family) -> None:
        base = cast(PreTrainedModel, causal_model.base_model)
        norm = base.get_submodule(family.norm)
        setattr(base, family.norm, nn.Identity())
        setattr(causal_model, causal_model.base_model_prefix, _NormOnly(norm))
        self._embedding_model = base
        self._embedding = base.get_submodule(family.embedding)
        # Then the base model's forward adds nothing but its own overhead, half a millisecond for each token.
        self.is_lookup = not (family.learned_positions or family.bypassed or family.unit_scalars)
        self._head_model = causal_model

    @property
    def config(self) -> PretrainedConfig:
        return self._embedding_model.config

    @property
    def dtype(self) -> torch.dtype:
        return self._embedding_model.dtype

    @property
    def device(self) -> torch.device:
        return self._embedding_model.device

    @property
    def modules(self) -> tuple[PreTrainedModel, PreTrainedModel]:
        """The model that embeds and the one that projects; they share tied weights."""
        return self._embedding_model, self._head_model

    def seconds_of_head(self) -> float:
        """How long the head takes for one row and for eight, by geometric mean: the best of a few times each."""
        return math.sqrt(self._best_seconds(1) * self._best_seconds(8))

    def tune_head(self) -> None:
        """Measures how this machine multiplies by the head's weights fastest.

        A head that is tied to a large embedding has to do with the weights as they are for that.
        """
        large = [weight for weight in self._embedding_model.parameters() if weight.nbytes > _MAX_COPIED_BYTES]
        tune(replace_linears(self._head_model), shared=large)

    @torch.no_grad()
    def embed(self, token_ids: Tensor, position_ids: Tensor) -> Tensor:
        """The input of block 0, `[T, H]` in the model's dtype, for int64 `[T]` ids and `[T]` absolute positions."""
        if self.is_lookup:
            return cast(Tensor, self._embedding(token_ids.to(self.device)))
        return self._first_input(position_ids, input_ids=token_ids.to(self.device).unsqueeze(0))

    @torch.no_grad()
    def embed_given(self, embeddings: Tensor, position_ids: Tensor) -> Tensor:
        """Like `embed`, for `[T, H]` token embeddings or trained ones: adds and scales what the family does then."""
        rows = embeddings.to(device=self.device, dtype=self.dtype).unsqueeze(0)
        return self._first_input(position_ids, inputs_embeds=rows)

    @torch.no_grad()
    def head(self, hidden: Tensor) -> Tensor:
        """Next-token logits, float32 `[R, V]`, of `[R, H]` rows of the last block's output, of any sessions."""
        rows = hidden.to(device=self.device, dtype=self.dtype).unsqueeze(0)
        output = self._head_model(inputs_embeds=rows, use_cache=False)
        return cast(Tensor, output.logits)[0].float().contiguous()

    def _best_seconds(self, num_rows: int) -> float:
        hidden = torch.zeros(num_rows, int(self.config.hidden_size))
        durations = []
        for _ in range(_HEAD_REPETITIONS):
            started = time.perf_counter()
            self.head(hidden)
            durations.append(time.perf_counter() - started)
        return min(durations)

    def _first_input(self, position_ids: Tensor, **tokens: Tensor) -> Tensor:
        positions = position_ids.to(self.device).unsqueeze(0)
        output = self._embedding_model(**tokens, position_ids=positions, use_cache=False)
        return cast(Tensor, output.last_hidden_state)[0]


def load_edges(checkpoint: Checkpoint, *, dtype: torch.dtype, device: torch.device | str = "cpu") -> Edges:
    """Reads embedding, final norm and head, and nothing else.

    Raises:
        CheckpointError: one of them is missing, has another shape than the configuration says, or cannot be read.
    """
    family = checkpoint.family
    config = copy.deepcopy(checkpoint.config)
    causal_class = model_class_of(AutoModelForCausalLM, config)
    cut = cut_class(causal_class, functools.partial(_drop_layers, family=family))
    with checkpoint.open_tensors(edge_tensors(checkpoint)) as tensors:
        model = build(checkpoint, cut, config, tensors, dtype=dtype, attention="sdpa")
    return Edges(cast(Any, model).to(torch.device(device)), family)


def edge_tensors(checkpoint: Checkpoint) -> dict[str, str]:
    """The names of all tensors outside the blocks, each mapped to itself."""
    layer = re.compile(rf"(?:^|\.){re.escape(checkpoint.family.layers)}\.\d+\.")
    return {name: name for name in checkpoint.weight_index if not layer.search(name)}


def _drop_layers(causal_model: PreTrainedModel, *, family: Family) -> None:
    keep_layers(cast(PreTrainedModel, causal_model.base_model), family, range(0))


@dataclass
class _NormedOutput(BaseModelOutputWithPastAndCrossAttentions):
    """A base model's output as every family's head may read it, mixtures of experts included."""

    router_logits: tuple[Tensor, ...] | None = None


class _NormOnly(nn.Module):
    """Stands where the head's forward calls the base model: hidden states in, normed hidden states out."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm

    def forward(self, *_arguments: Any, inputs_embeds: Tensor, **_options: Any) -> _NormedOutput:
        return _NormedOutput(last_hidden_state=self.norm(inputs_embeds))
