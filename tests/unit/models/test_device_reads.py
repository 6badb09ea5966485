"""Tensors that are read straight to a device are those that transformers would have read, and take no host memory."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from corolla.chassis.errors import CheckpointError, InternalError
from corolla.models import chunked_reads, cut_model, device_reads
from corolla.models.checkpoint import Checkpoint
from corolla.models.chunked_reads import ChunkedTensor
from corolla.models.device_reads import DeviceReader, read_deferred
from corolla.models.edges import load_edges
from corolla.models.families import FAMILIES
from corolla.models.quantization import quantizer
from corolla.models.span_model import load_span
from corolla.wire.span import Span
from tests.checkpoints import make_tiny_checkpoint
from tests.gguf_files import make_tiny_gguf

CPU = torch.device("cpu")


@pytest.fixture
def straight(monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU is a device to which tensors are read straight, in chunks of a few rows."""
    monkeypatch.setattr(chunked_reads, "CHUNK_BYTES", 100)
    monkeypatch.setattr(device_reads, "BUFFER_BYTES", 1000)
    monkeypatch.setattr(cut_model, "CPU", torch.device("meta"))


def states(checkpoint: Checkpoint, dtype: torch.dtype) -> dict[str, Tensor]:
    last = checkpoint.num_blocks
    base = next(iter(load_span(checkpoint, Span(last - 3, last), dtype=dtype).modules()))
    models = dict(zip(("embedding", "head"), load_edges(checkpoint, dtype=dtype).modules, strict=True))
    return {
        f"{part} {name}": tensor
        for part, model in {"span": base, **models}.items()
        for name, tensor in (*model.named_parameters(), *model.named_buffers())
    }


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        assert tensor.dtype == expected[name].dtype, name
        assert tensor.is_contiguous() == expected[name].is_contiguous(), name
        assert torch.equal(tensor, expected[name]), name


@pytest.mark.parametrize(
    "family",
    [
        pytest.param(family, marks=() if family in ("gpt2", "gpt_oss", "llama", "qwen3_moe") else pytest.mark.full)
        for family in sorted(FAMILIES)
    ],
)
@pytest.mark.parametrize("dtype", [torch.bfloat16], ids=str)
def test_a_model_is_the_same(tmp_path: Path, request: pytest.FixtureRequest, family: str, dtype: torch.dtype) -> None:
    checkpoint = Checkpoint.from_pretrained(str(make_tiny_checkpoint(family, tmp_path / family, num_blocks=4)))
    expected = states(checkpoint, dtype)
    request.getfixturevalue("straight")
    assert_same(states(checkpoint, dtype), expected)


def test_a_model_of_a_gguf_file_is_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    monkeypatch.setenv("COROLLA_CACHE", str(tmp_path / "cache"))
    checkpoint = Checkpoint.from_pretrained(str(make_tiny_gguf("llama", tmp_path)[1]))
    expected = states(checkpoint, torch.bfloat16)
    request.getfixturevalue("straight")
    assert_same(states(checkpoint, torch.bfloat16), expected)


@pytest.mark.usefixtures("straight")
def test_no_more_than_a_buffer_is_read_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    read_rows = ChunkedTensor.rows

    def rows(tensor: ChunkedTensor, start: int, end: int) -> Tensor:
        part = read_rows(tensor, start, end)
        sizes.append(part.nbytes)
        return part

    monkeypatch.setattr(ChunkedTensor, "rows", rows)
    checkpoint = Checkpoint.from_pretrained(str(make_tiny_checkpoint("llama", tmp_path / "llama", num_blocks=4)))
    span = load_span(checkpoint, Span(0, 4), dtype=torch.bfloat16)
    assert max(sizes) <= 1000
    large = sum(
        each.numel() for module in span.modules() for each in module.parameters(recurse=False) if each.dim() > 1
    )
    assert sum(sizes) == large * torch.float32.itemsize, "each large tensor is read once, from a file in float32"


@pytest.mark.usefixtures("straight")
def test_a_missing_tensor_is_named(tmp_path: Path) -> None:
    checkpoint = Checkpoint.from_pretrained(str(make_tiny_checkpoint("llama", tmp_path / "llama", num_blocks=4)))
    lost = next(name for name in checkpoint.weight_index if name.endswith("layers.1.mlp.up_proj.weight"))
    del checkpoint.weight_index[lost]  # type: ignore[attr-defined]
    with pytest.raises(CheckpointError, match=r"lacks 1 tensors, layers\.1\.mlp\.up_proj\.weight"):
        load_span(checkpoint, Span(0, 4), dtype=torch.bfloat16)


def deferred(numbers: Tensor) -> ChunkedTensor:
    class Stored:
        def get_shape(self) -> list[int]:
            return list(numbers.shape)

        def __getitem__(self, index: Any) -> Tensor:
            return numbers[index]

    tensor = ChunkedTensor(Stored(), torch.float32)
    tensor.is_deferred = True
    return tensor


@pytest.mark.usefixtures("straight")
def test_a_stand_in_that_was_copied_does_not_pass_for_weights() -> None:
    tensor = deferred(torch.randn(30, 30))
    model = nn.Linear(30, 30, bias=False)
    model.weight.data = tensor[...].clone()
    with pytest.raises(InternalError, match="1 tensors of the checkpoint were copied"):
        read_deferred(model, [tensor], CPU)


@pytest.mark.usefixtures("straight")
def test_a_pinned_buffer_is_not_filled_while_the_device_still_copies_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The doubles do what a GPU would still have to do only when it is waited for; they check what torch checks."""
    numbers = torch.randn(100, 30).to(torch.bfloat16)
    work: list[Callable[[], object]] = []
    num_done = 0
    num_pinned = 0

    def do(num_works: int) -> None:
        nonlocal num_done
        for each in work[num_done:num_works]:
            each()
        num_done = max(num_done, num_works)

    class Event:
        def record(self) -> None:
            self.num_works = len(work)

        def synchronize(self) -> None:
            do(self.num_works)

    class Pinned(torch.Tensor):
        def to(self, *arguments: Any, **options: Any) -> Tensor:
            assert (arguments, options) == ((CPU,), {"non_blocking": True})
            source = self.as_subclass(torch.Tensor)
            copied = torch.full_like(source, torch.nan)
            work.append(lambda: copied.copy_(source))
            return copied

    class OnDevice(torch.Tensor):
        def copy_(self, source: Tensor, non_blocking: bool = False) -> Tensor:
            assert type(source) is torch.Tensor, "the device reads no memory of the host"
            target = self.as_subclass(torch.Tensor)
            work.append(lambda: target.copy_(source))
            return self

    def empty(*size: Any, pin_memory: bool = False, **options: Any) -> Tensor:
        nonlocal num_pinned
        num_pinned += pin_memory
        return torch.zeros(*size, **options).as_subclass(Pinned if pin_memory else OnDevice)

    reader = DeviceReader(CPU, is_pinned=True)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch, "empty", empty)
    found = reader.read(deferred(numbers))
    assert num_done < len(work), "nothing waits for the last copies"
    do(len(work))
    assert torch.equal(found.as_subclass(torch.Tensor), numbers.float())
    assert num_pinned == 2


def test_layers_are_quantised_one_by_one_as_together() -> None:
    pytest.importorskip("torchao")
    torch.manual_seed(0)
    together, singly = (nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)) for _ in range(2))
    singly.load_state_dict(together.state_dict())
    for model in (together, singly):
        quantize_layer = quantizer(model, "int8")
        assert quantize_layer is not None
        for module in model.modules():
            before = [type(layer.weight.data) for layer in model]
            quantize_layer(module)
            after = [type(layer.weight.data) for layer in model]
            assert sum(one is not other for one, other in zip(before, after, strict=True)) == (module is not model)
    rows = torch.randn(3, 64)
    assert torch.equal(together(rows), singly(rows))
