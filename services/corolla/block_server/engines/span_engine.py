"""What computes the blocks of a span, as the runner sees it. Keys and values are the runner's, whatever the engine."""

from typing import Protocol

import torch
from transformers import PretrainedConfig

from corolla.models.adapters.products import AdapterBatch
from corolla.models.families import Family
from corolla.models.fused import PackedLayers
from corolla.models.span_model import LinearPlace
from corolla.wire.span import Span


class SpanEngine(Protocol):
    """Blocks `[span.start, span.end)` of a model, without embedding, final norm and head.

    Attributes:
        config: the model's configuration, cut to the span.
        packs_rows: whether rows of different sessions may be packed into one call.
        keeps_threads: whether products go on with as many threads as they first had.
        fused: runs packed rows; None where only the family's own code does.
        adapters: of the batch that the family's own code is about to run; None where no row has one.
    """

    span: Span
    family: Family
    dtype: torch.dtype
    device: torch.device
    packs_rows: bool
    keeps_threads: bool
    adapters: AdapterBatch | None

    @property
    def config(self) -> PretrainedConfig: ...

    @property
    def fused(self) -> PackedLayers | None: ...

    @property
    def hidden_size(self) -> int: ...

    @property
    def nbytes(self) -> int: ...

    def layer_indices(self, blocks: Span) -> range: ...

    def make_fused(self, tuning_budget_s: float = 2.0) -> None: ...

    def set_attention(self, implementation: str) -> None: ...

    def linear_place(self, layer: int, path: str) -> LinearPlace | None: ...

    def take_adapters(self) -> None: ...
