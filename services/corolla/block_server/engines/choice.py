"""Which engine computes a span: what was asked for, what this machine has, and what gives the right numbers."""

import logging
from typing import Final

import torch

from corolla.block_server.engines import vllm_layers
from corolla.block_server.engines.span_engine import SpanEngine
from corolla.block_server.engines.vllm_engine import VllmEngine
from corolla.chassis.errors import StartupError
from corolla.chassis.weight_formats import EngineName
from corolla.models.checkpoint import Checkpoint
from corolla.models.span_model import load_span, make_span
from corolla.wire.span import Span

log = logging.getLogger(__name__)

VLLM_FAMILIES: Final = frozenset({"gemma2", "gemma3_text", "llama", "mistral", "qwen2", "qwen3"})
"""Families whose blocks `vllm` was compared with transformers' for, token by token."""

VLLM_FORMATS: Final = {"cpu": frozenset[str](), "cuda": frozenset[str]()}
"""Published formats of weights whose kernels were compared with the expanded weights, by type of device."""


def choose_engine(
    wanted: EngineName | str, checkpoint: Checkpoint, device: torch.device, quantization: str = "none"
) -> EngineName:
    """The engine for a checkpoint; `auto` is `vllm` where that is installed and knows family and format.

    Raises:
        StartupError: `vllm` was asked for, and cannot serve this.
    """
    if wanted == "transformers":
        return "transformers"
    objection = _objection(checkpoint, device, quantization)
    if objection is None and wanted == "vllm":
        vllm_layers.check_version()
    if objection is None and vllm_layers.is_installed():
        return "vllm"
    if wanted == "auto":
        log.info("engine chosen", extra={"engine": "transformers", "reason": objection or "vLLM is not installed"})
        return "transformers"
    raise StartupError(f"COROLLA_ENGINE=vllm does not serve this: {objection}. Set it to transformers.")


def load_engine(
    name: EngineName, checkpoint: Checkpoint, span: Span, *, dtype: torch.dtype, device: str, quantization: str = "none"
) -> SpanEngine:
    """Reads a span's weights into an engine.

    Args:
        name: as `choose_engine` gave it.
        dtype, device, quantization: see `load_span`.

    Raises:
        CheckpointError: the weights cannot be had.
        StartupError: the engine cannot run them.
    """
    if name == "transformers":
        return load_span(checkpoint, span, dtype=dtype, device=device, quantization=quantization)
    return VllmEngine.load(checkpoint, span, dtype=dtype, device=torch.device(device))


def make_engine(
    name: EngineName, checkpoint: Checkpoint, span: Span, *, dtype: torch.dtype, device: str, quantization: str = "none"
) -> SpanEngine:
    """An engine like that of `load_engine` with made-up weights: it reads nothing, and computes as long."""
    if name == "transformers":
        return make_span(checkpoint, span, dtype=dtype, device=device, quantization=quantization)
    return VllmEngine.make(checkpoint, span, dtype=dtype, device=torch.device(device))


def _objection(checkpoint: Checkpoint, device: torch.device, quantization: str) -> str | None:
    if checkpoint.family.model_type not in VLLM_FAMILIES:
        known = ", ".join(sorted(VLLM_FAMILIES))
        return f"models of type {checkpoint.family.model_type} are none of its types, which are {known}"
    if quantization != "none":
        return f"it has no COROLLA_QUANTIZATION={quantization}"
    stored = checkpoint.quantization
    if stored is not None and stored.method not in VLLM_FORMATS.get(device.type, frozenset()):
        return f"weights in the format {stored.method} are only expanded, on {device.type}"
    return None
