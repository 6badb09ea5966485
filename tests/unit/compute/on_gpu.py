"""A runner whose model and keys and values lie on the GPU of `tests.gpu_double`, with torch's own products."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from corolla.compute.attention import backends
from corolla.compute.span_runner import SpanRunner
from corolla.models import fused, linear, span_model
from corolla.models.checkpoint import Checkpoint
from corolla.models.span_model import load_span
from corolla.wire.span import Span
from tests.gpu_double import GPU, Gpu
from tests.paged_attention import PagedDefinition
from tests.unit.compute.replaying import use_modules


def runner_on(gpu: Gpu, folder: Path, span: Span, **options: Any) -> SpanRunner:
    """Makes a runner, warmed up, with the definition of attention in the place of the kernel that only GPUs have."""
    model = load_span(Checkpoint.from_pretrained(str(folder)), span, dtype=torch.float32)
    move(gpu, model.modules())
    model.device = GPU
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(backends.BACKENDS, "paged", PagedDefinition)
        # Weights are wrappers there, and products are not tried: a GPU's are the only ones that could differ.
        for module in (fused, linear):
            patch.setattr(module, "is_plain", lambda module: type(module) is nn.Linear)
        patch.setattr(span_model, "choose_products", lambda *_, **__: None)
        runner = SpanRunner(
            model,
            **{
                "num_pages": 24, "page_tokens": 8, "max_step_tokens": 16, "attention": "paged",
                "has_scratch_page": True, "max_stack_bytes": 0, **options,
            },
        )  # fmt: skip
    use_modules(runner)
    runner.warm_up()
    return runner


def move(gpu: Gpu, modules: Iterable[nn.Module]) -> None:
    """Puts all parameters and buffers of modules on the GPU; tied ones stay tied."""
    moved: dict[int, nn.Parameter] = {}
    for module in modules:
        for name, parameter in list(module.named_parameters(recurse=False)):
            if id(parameter) not in moved:
                moved[id(parameter)] = nn.Parameter(gpu.put(parameter.data), requires_grad=False)
            setattr(module, name, moved[id(parameter)])
        for name, buffer in list(module.named_buffers(recurse=False)):
            setattr(module, name, gpu.put(buffer))
