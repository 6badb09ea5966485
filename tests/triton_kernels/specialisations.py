"""A start and `corolla kernels build` compile all that serving needs: steps launch no kernel with another key.

Triton compiles a kernel anew for other types, constants and options, for tensors at addresses that 16 does not divide,
and for whole numbers that are 1 or that 16 divides. A caller would wait for that, and a capture would fail.
Launches of one kind, for which a variant asks Triton once, have one key.
"""

import contextlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from triton.backends.compiler import GPUTarget
from triton.compiler import make_backend
from triton.runtime.jit import JITFunction, create_function_from_signature

from corolla.chassis.errors import NonFiniteOutput
from corolla.compute import kernel_build
from corolla.compute.base import RowWork
from corolla.compute.span_runner import SpanRunner
from corolla.kernels.layouts import LAYOUTS
from corolla.kernels.repacking import empty_panels
from corolla.kernels.triton import expert_launches, launches, packed_code
from corolla.kernels.triton.device_code import add_rms_norm
from corolla.kernels.triton.packed_launches import expand_packed
from corolla.kernels.triton.variants import Variant, described, variant
from corolla.models import linear, span_model
from corolla.models.adapters.loading import load_adapter
from corolla.models.adapters.products import SpanAdapter
from corolla.models.checkpoint import Checkpoint
from corolla.models.invariant import InvariantProduct, choose_invariant_product, triton_product
from corolla.models.linear import DenseLinear
from corolla.models.packed.modules import PackedExpertWeights, PackedLinear
from corolla.models.packed.trial import choose_packed_products, failed_trial
from corolla.models.span_model import load_span
from corolla.wire.span import Span
from tests.adapters import make_adapter
from tests.checkpoints import make_tiny_checkpoint
from tests.gguf_files import make_tiny_gguf
from tests.tiers import quick
from tests.triton_kernels import DEVICE
from tests.triton_kernels.ordered_products import install
from tests.triton_kernels.spans import num_packed_experts, take_packed_product

SIZES = [*range(1, 20), 31, 32, 33, 63, 64, 65, 96, 127, 128, 129, 160, 255, 256, 257, 300]
OUTPUTS = ("c", "out")


class Keys:
    """Stands before all launches, and knows the keys by which Triton keeps what it compiles.

    Attributes:
        found: the keys so far, each begins with the kernel's name.
        runs: whether kernels run; otherwise what they write is zero.
    """

    def __init__(self, launch: Callable[..., None]) -> None:
        self.found: set[tuple[str, str]] = set()
        self.runs = True
        self._launch = launch
        self._backend = make_backend(GPUTarget("cuda", 90, 32))
        self._binders: dict[str, Any] = {}
        self._kinds: dict[tuple[Variant, Any], str] = {}

    def key(self, kernel: Any, arguments: tuple[Any, ...], options: dict[str, Any]) -> str:
        """Triton's key of a launch, by Triton's own function."""
        name = kernel.__name__
        if name not in self._binders:
            real = JITFunction(kernel.fn, **kernel.kwargs)
            self._binders[name] = create_function_from_signature(real.signature, real.params, self._backend)
        _, specialization, others = self._binders[name](*arguments, **options)
        return f"{specialization} {sorted(others.items())}"

    def __call__(self, of: Variant, grid: Any, *arguments: Any) -> None:
        kernel, key = of.kernel, self.key(of.kernel, arguments, of.options)
        self.found.add((kernel.__name__, key))
        kind, _ = described(0, arguments)
        assert kind is None or self._kinds.setdefault((of, kind), key) == key
        if self.runs:
            self._launch(of, grid, *arguments)
        for output in OUTPUTS if not self.runs else ():
            if output in kernel.arg_names:
                arguments[kernel.arg_names.index(output)].zero_()


@pytest.fixture
def keys(monkeypatch: pytest.MonkeyPatch) -> Iterator[Keys]:
    found = Keys(launches.launch)

    def take_triton(layers: Iterable[DenseLinear], **_options: Any) -> None:
        runs, found.runs = found.runs, False
        for layer in layers:
            if layer.weight.device.type != "meta":
                choose_invariant_product(layer.weight, layer.bias, {"triton": triton_product})
            layer.invariant = InvariantProduct("triton", triton_product, (1,))
        found.runs = runs

    install(monkeypatch)
    for module in (launches, expert_launches):
        monkeypatch.setattr(module, "launch", found)
    for other in (span_model, linear):
        monkeypatch.setattr(other, "choose_products", take_triton)
    with torch.device(DEVICE):
        yield found


@pytest.mark.full
@pytest.mark.parametrize("family", ["mixtral", "gemma2", "qwen3_moe Q4_0"])
def test_steps_launch_what_was_compiled_at_the_start_and_ahead(
    tmp_path: Path, keys: Keys, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    family, _, packed = family.partition(" ")
    quantization, blocks = "packed" if packed else "none", Span(0, 2)
    if packed:
        take_packed_product(monkeypatch)
        folder, file = make_tiny_gguf(family, tmp_path, kind=packed, num_blocks=2)
        checkpoint = Checkpoint.from_pretrained(str(file))
    else:
        folder = make_tiny_checkpoint(family, tmp_path / "model", num_blocks=2)
        checkpoint = Checkpoint.from_pretrained(str(folder))
    span = load_span(checkpoint, blocks, dtype=torch.float32, device=DEVICE, quantization=quantization)
    # A load on a GPU tries packed products. What is not run fails, and would be expanded.
    keys.runs = False
    with monkeypatch.context() as patch:
        for kind in (PackedLinear, PackedExpertWeights):
            patch.setattr(kind, "expand", lambda *_: None)
        choose_packed_products(span.packed_layers, torch.float32)
    keys.runs = True
    runner = SpanRunner(span, num_pages=200, page_tokens=8, attention="triton")
    assert runner.kernel_choices.blocks == "triton"
    assert num_packed_experts(runner) == (2 * len(blocks) if packed else 0)
    adapters: list[SpanAdapter | None] = [None]
    if runner.kernel_choices.adapters == "triton":
        adapters += [load_adapter(make_adapter(folder, tmp_path / "adapter"), span, 2)]
    runner.warm_up()
    known, keys.found, keys.runs = keys.found, set(), False
    for adapter in adapters:
        for parts in (*((size,) for size in SIZES), (1, 1), (1, 1, 1), (40, 1), (1, 70, 3)):
            caches = [runner.new_cache() for _ in parts]
            for cache, size in zip(caches, parts, strict=True):
                cache.reserve(size + 1)
            hidden = torch.zeros(sum(parts), span.hidden_size)
            rows = [RowWork(cache, 0, size, adapter=adapter) for cache, size in zip(caches, parts, strict=True)]
            # Kernels that do not run leave what memory held, and that may be no number.
            with contextlib.suppress(NonFiniteOutput):
                runner.forward(rows, hidden, blocks)
            for cache in caches:
                cache.clear()
    served, keys.found = keys.found, set()
    assert served - known == set()
    assert len({name for name, _ in served}) >= (5 if family == "gemma2" else 8)
    monkeypatch.setattr(kernel_build, "is_interpreted", lambda: False)
    assert len(list(kernel_build.build_kernels(checkpoint, [90], torch.float32, 8, quantization=quantization))) == 1
    assert served - keys.found == set()


@pytest.mark.parametrize("num_outputs", quick([40, 1000, 9008], 9008))
def test_packed_products_of_every_size_are_compiled_at_start(
    keys: Keys, num_outputs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A layer on a GPU does this.
    monkeypatch.setattr(PackedLinear, "forward", PackedLinear.on_gpu)
    layout = LAYOUTS["Q6_K"]
    layer = PackedLinear(256, num_outputs, layout)
    layer.panels = empty_panels(num_outputs, 256, layout).fill_(0x11)
    keys.runs = False
    for dtype in (torch.float16, torch.float32):
        failed_trial(layer, dtype)
    ids = torch.zeros(400, dtype=torch.int64)
    expand_packed(layout, ids[:1], layer.panels, torch.float16)
    known = set(keys.found)
    for size in SIZES:
        for dtype in (torch.float16, torch.float32):
            layer.on_gpu(torch.zeros(size, 256, dtype=dtype))
        # An address that 16 does not divide.
        expand_packed(layout, ids[1 : 1 + size], layer.panels, torch.float16)
    assert keys.found - known == set()
    assert {name for name, _ in known} == {"multiply_packed", "expand_packed"}


NUMBERS = [0, 1, 2, 15, 16, 17, 32, -1, -16, 2**31 - 1, 2**31, -(2**31), -(2**31) - 1, 2**63, True, False, 1.0, 16.0]


def test_launches_of_one_kind_have_one_key_in_triton(keys: Keys) -> None:
    whole = torch.zeros(64, dtype=torch.uint8)
    tensors = [whole, whole[16:], whole[8:], whole[1:], whole.float(), whole.float()[1:], whole.int(), None]
    kinds: dict[Any, set[str]] = {}
    for kernel, count, names in (
        (add_rms_norm, 8, ("HAS_DELTA", "HAS_MULTIPLIER", "NORM", "BLOCK")),
        # Triton does not look at addresses or values of two parameters.
        (packed_code.expand_packed, 7, ("layout", "COUNT", "ROWS")),
    ):
        of = variant(kernel, **dict.fromkeys(names, 1), num_warps=4)
        plain = [whole] * count
        for place in range(count):
            for each in (*tensors, *NUMBERS):
                arguments = (*plain[:place], each, *plain[place + 1 :])
                kind, _ = described(0, arguments)
                if kind is not None:
                    kinds.setdefault((of, kind), set()).add(keys.key(kernel, arguments, of.options))
    assert {len(found) for found in kinds.values()} == {1}
    # Each dtype, a float, None, and three kinds of whole numbers, at each place.
    assert len(kinds) == 2 + (8 + 7) * 7
