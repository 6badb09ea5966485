"""Which engine computes a span: what was asked for, what this machine has, and what gives the right numbers."""

import gc
import logging
import math
from collections.abc import Callable, Sequence
from typing import Final

import torch
from torch import Tensor

from corolla.block_server.engines import vllm_layers
from corolla.block_server.engines.span_engine import SpanEngine
from corolla.block_server.engines.vllm_engine import VllmEngine
from corolla.block_server.engines.vllm_layers import VLLM_FAMILIES
from corolla.chassis.errors import StartupError
from corolla.chassis.weight_formats import EngineName
from corolla.compute.runner import RowWork, Runner
from corolla.models.checkpoint import Checkpoint
from corolla.models.families import LONG_ROPE, attention_windows, rope_types
from corolla.models.span_model import load_span, make_span
from corolla.wire.span import Span

log = logging.getLogger(__name__)

_TOLERANCES: Final = {torch.float32: 1e-4, torch.bfloat16: 6e-2, torch.float16: 1e-2}
"""How far a block's output may be from that of transformers, as a part of its largest number."""
_CHECKED_TOKENS: Final = (15, 1)


def choose_engine(
    wanted: str,
    checkpoint: Checkpoint,
    *,
    dtype: torch.dtype,
    device: str,
    quantization: str = "none",
    new_runner: Callable[..., Runner] = Runner,
) -> tuple[EngineName, SpanEngine | None]:
    """The engine for a checkpoint; `auto` is `vllm` where that is installed, knows family and format, and is faster.

    Args:
        wanted: `transformers`, `vllm` or `auto`.
        new_runner: `Runner` with this server's settings, which decide whether blocks can be compiled.

    Returns:
        Its name, and the largest block with made-up weights where one was made to find out.

    Raises:
        StartupError: `vllm` was asked for, and cannot serve this.
    """
    if wanted == "transformers":
        return "transformers", None
    objection = _objection(checkpoint, device, quantization)
    if wanted == "vllm":
        vllm_layers.check_version()
        if objection is not None:
            raise StartupError(f"COROLLA_ENGINE=vllm does not serve this: {objection}. Set it to transformers.")
        return "vllm", None
    if objection is None:
        try:
            vllm_layers.check_version()
            if _are_compiled(checkpoint, dtype, device, new_runner):
                log.info("vLLM does not compute the blocks", extra={"reason": "compiled ones are faster"})
                return "transformers", None
            # Whether a kernel has the format, only vLLM knows. Where some blocks have experts, the largest one does.
            largest = checkpoint.largest_block
            return "vllm", make_engine("vllm", checkpoint, Span(largest, largest + 1), dtype=dtype, device=device)
        except StartupError as failure:
            objection = str(failure)
    log.info("vLLM does not compute the blocks", extra={"reason": objection})
    return "transformers", None


def load_engine(
    name: EngineName, checkpoint: Checkpoint, span: Span, *, dtype: torch.dtype, device: str, quantization: str = "none"
) -> SpanEngine:
    """Reads a span's weights into an engine; one block of `vllm` is compared with that of transformers.

    Args:
        name: as `choose_engine` gave it.
        dtype, device, quantization: see `load_span`.

    Raises:
        CheckpointError: the weights cannot be had.
        StartupError: the engine cannot run them, or gives other numbers.
    """
    if name == "transformers":
        return load_span(checkpoint, span, dtype=dtype, device=device, quantization=quantization)
    windows = attention_windows(checkpoint.config)[span.start : span.end]

    def expected_of(index: int) -> tuple[Span, Tensor]:
        block = Span(span.start + index, span.start + index + 1)
        return block, _outputs(load_span(checkpoint, block, dtype=dtype, device=device), block)

    expected: dict[int, tuple[Span, Tensor]] = {}
    if checkpoint.quantization is not None:
        # Before the span is there: expanded, a block is as large as several packed ones, of which none are mixtures.
        expected = {index: expected_of(index) for index in _first_of_each(windows)}
        gc.collect()
    engine = VllmEngine.load(checkpoint, span, dtype=dtype, device=torch.device(device))
    for index in _first_of_each(list(zip(windows, engine.has_experts, strict=True))):
        block, outputs = expected.get(index) or expected_of(index)
        # Where two experts are about equally good for a token, the last bit chooses, and few tokens differ by much.
        of_median = engine.has_experts[index] and dtype != torch.float32
        difference = _difference(_outputs(engine, block), outputs, of_median=of_median)
        if not difference <= _TOLERANCES[dtype]:
            raise StartupError(
                f"vLLM's block {block.start} differs from that of transformers by {difference:.1e} of its size; set "
                "COROLLA_ENGINE to transformers."
            )
    return engine


def make_engine(
    name: EngineName, checkpoint: Checkpoint, span: Span, *, dtype: torch.dtype, device: str, quantization: str = "none"
) -> SpanEngine:
    """An engine like that of `load_engine` with made-up weights: it reads nothing, and computes as long."""
    if name == "transformers":
        return make_span(checkpoint, span, dtype=dtype, device=device, quantization=quantization)
    return VllmEngine.make(checkpoint, span, dtype=dtype, device=torch.device(device))


def _objection(checkpoint: Checkpoint, device: str, quantization: str) -> str | None:
    config, model_type = checkpoint.config, checkpoint.family.model_type
    family = VLLM_FAMILIES.get(model_type)
    if family is None:
        return f"its families are {', '.join(sorted(VLLM_FAMILIES))}, and this is {model_type}"
    for name, value in family.required.items():
        if getattr(config, name, value) != value:
            return f"its layers of the family {model_type} know {name}={value} only"
    if LONG_ROPE in rope_types(config):
        return "vLLM chooses the factors of a longrope embedding for the model, and transformers for each text"
    if quantization != "none":
        return f"it has no COROLLA_QUANTIZATION={quantization}"
    if torch.device(device).type != "cpu":
        return f"it runs on processors only so far, and this is {device}"
    return None


def _are_compiled(checkpoint: Checkpoint, dtype: torch.dtype, device: str, new_runner: Callable[..., Runner]) -> bool:
    """Whether `transformers` runs plain blocks whole here, by compiled functions."""
    if checkpoint.quantization is not None:
        return False
    largest = Span(checkpoint.largest_block, checkpoint.largest_block + 1)
    return new_runner(make_span(checkpoint, largest, dtype=dtype, device=device), num_pages=1).compiled is not None


def _first_of_each(kinds: Sequence[object]) -> list[int]:
    """The index of the first block of each kind."""
    return sorted(map(kinds.index, set(kinds)))


def _outputs(engine: SpanEngine, block: Span) -> Tensor:
    """What a block gives for a short prompt and the next token, float32; NaN throughout if a number is not finite."""
    runner = Runner(engine, num_pages=len(engine.span) + 1, tuning_budget_s=0)
    cache = runner.new_cache()
    cache.reserve(sum(_CHECKED_TOKENS))
    generator = torch.Generator().manual_seed(0)
    parts = []
    for num_tokens in _CHECKED_TOKENS:
        hidden = torch.randn(num_tokens, engine.hidden_size, generator=generator)
        rows = [RowWork(cache, cache.num_tokens, num_tokens)]
        output = runner.forward_each(rows, hidden, block)
        parts.append(output.hidden.float() if all(output.finite) else torch.full_like(hidden, math.nan))
    return torch.cat(parts)


def _difference(outputs: Tensor, expected: Tensor, *, of_median: bool) -> float:
    """How far two outputs are from each other, as a part of the largest number: of the median token, or the worst."""
    of_tokens = (outputs - expected).abs().amax(dim=-1)
    return float((of_tokens.median() if of_median else of_tokens.max()) / expected.abs().max())
