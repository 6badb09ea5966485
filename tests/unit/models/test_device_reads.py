"""Tensors that are read straight to a device are those that transformers would have read, and take no host memory."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from corolla.chassis.errors import CheckpointError, InternalError
from corolla.models import chunked_reads, cut_model
from corolla.models.checkpoint import Checkpoint
from corolla.models.chunked_reads import ChunkedTensor, Room, open_tensors, read_deferred, read_to
from corolla.models.edges import load_edges
from corolla.models.families import FAMILIES
from corolla.models.quantization import quantizer
from corolla.models.span_model import load_span, make_span
from corolla.models.weights import find_weights
from corolla.wire.span import Span
from tests.checkpoints import make_tiny_checkpoint
from tests.gguf_files import make_tiny_gguf

CPU = torch.device("cpu")


@pytest.fixture
def straight(monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU is a device to which tensors are read straight, in chunks of a few rows."""
    monkeypatch.setattr(chunked_reads, "CHUNK_BYTES", 100)
    monkeypatch.setattr(chunked_reads, "BUFFER_BYTES", 1000)
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


@pytest.mark.parametrize(
    "family",
    [
        pytest.param(family, marks=() if family in ("gpt_oss", "llama") else pytest.mark.full)
        for family in sorted(FAMILIES)
    ],
)
def test_a_made_up_block_is_the_same(tmp_path: Path, request: pytest.FixtureRequest, family: str) -> None:
    checkpoint = Checkpoint.from_pretrained(str(make_tiny_checkpoint(family, tmp_path / family, num_blocks=4)))

    def state() -> dict[str, Tensor]:
        base: Any = next(iter(make_span(checkpoint, Span(3, 4), dtype=torch.bfloat16).modules()))
        return {name: each.clone() for name, each in (*base.named_parameters(), *base.named_buffers())}

    expected = state()
    request.getfixturevalue("straight")
    assert_same(state(), expected)


def test_a_model_of_a_gguf_file_is_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    monkeypatch.setenv("COROLLA_CACHE", str(tmp_path / "cache"))
    checkpoint = Checkpoint.from_pretrained(str(make_tiny_gguf("llama", tmp_path)[1]))
    expected = states(checkpoint, torch.bfloat16)
    request.getfixturevalue("straight")
    assert_same(states(checkpoint, torch.bfloat16), expected)


@pytest.mark.usefixtures("straight")
@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_no_more_than_a_buffer_is_read_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str) -> None:
    """The same holds for experts that the files hold one by one, and the model in one tensor."""
    sizes: list[int] = []
    read_rows = ChunkedTensor.rows

    def rows(tensor: ChunkedTensor, start: int, end: int, room: Room) -> Tensor:
        part = read_rows(tensor, start, end, room)
        sizes.append(part.nbytes)
        return part

    monkeypatch.setattr(ChunkedTensor, "rows", rows)
    checkpoint = Checkpoint.from_pretrained(str(make_tiny_checkpoint(family, tmp_path / family, num_blocks=4)))
    span = load_span(checkpoint, Span(0, 4), dtype=torch.bfloat16)
    assert max(sizes) <= 1000
    large = sum(
        each.numel() for module in span.modules() for each in module.parameters(recurse=False) if each.dim() > 1
    )
    assert sum(sizes) == large * torch.float32.itemsize, "each large tensor is read once, from a file in float32"


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
@pytest.mark.parametrize("is_in_a_shard", [True, False])
@pytest.mark.parametrize("num_threads", [1, 4])
def test_a_pinned_buffer_is_not_filled_while_the_device_still_copies_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_in_a_shard: bool, num_threads: int
) -> None:
    """The doubles do what a GPU would still have to do only when it is waited for; they check what torch checks."""
    numbers = [torch.randn(num_rows, 30).to(torch.bfloat16) for num_rows in (100, 30, 7, 40)]
    save_file({str(index): each for index, each in enumerate(numbers)}, tmp_path / "model.safetensors")
    work: list[Callable[[], object]] = []
    num_done = 0
    num_pinned = 0
    lock = threading.Lock()

    def do(num_works: int) -> None:
        nonlocal num_done
        with lock:
            for each in work[num_done:num_works]:
                each()
            num_done = max(num_done, num_works)

    class Event:
        def record(self, stream: str) -> None:
            assert stream == "computing", "the stream of the thread's own device may be another one"
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
        with lock:
            num_pinned += pin_memory
        made = torch.zeros(*size, **options)
        return made.as_subclass(Pinned) if pin_memory else made.as_subclass(OnDevice) if "device" in options else made

    with open_tensors(find_weights(tmp_path), {str(index): str(index) for index in range(len(numbers))}) as opened:
        shard = [ChunkedTensor(each, torch.float32) for each in opened.values()]
        made = [deferred(each) for each in numbers]
        monkeypatch.setattr(torch.cuda, "Event", Event)
        monkeypatch.setattr(torch.cuda, "current_stream", {CPU: "computing"}.__getitem__)
        monkeypatch.setattr(torch, "empty", empty)
        found = list(read_to(CPU, shard if is_in_a_shard else made, is_pinned=True, num_threads=num_threads))
    assert num_done < len(work), "nothing waits for the last copies"
    do(len(work))
    for tensor, expected in zip(found, numbers, strict=True):
        assert torch.equal(tensor.as_subclass(torch.Tensor), expected.float())
    most_reading = num_threads if is_in_a_shard else 1
    assert num_pinned == most_reading + 2


@pytest.mark.usefixtures("straight")
def test_threads_read_at_the_same_time_and_no_further_than_there_are_buffers() -> None:
    begun = threading.Semaphore(0)
    may_read = threading.Semaphore(0)

    class Stored:
        is_plain = True

        def get_shape(self) -> list[int]:
            return [80, 30]

        def lines(self, start: int, end: int, _room: Room) -> Tensor:
            begun.release()
            assert may_read.acquire(timeout=60)
            return torch.full((end - start, 30), float(start))

    reading = read_to(CPU, [ChunkedTensor(Stored(), torch.float32)], num_threads=3)
    with ThreadPoolExecutor(1) as main:
        read = main.submit(next, reading)
        for _ in range(3):
            assert begun.acquire(timeout=60), "three chunks are read at the same time"
        assert not begun.acquire(timeout=0.2), "there are three threads"
        may_read.release(10)
        assert torch.equal(read.result()[:, 0], torch.arange(0, 80, 8.0).repeat_interleave(8))


@pytest.mark.usefixtures("straight")
def test_a_file_that_has_become_shorter_ends_all_reads(tmp_path: Path) -> None:
    save_file({"first": torch.randn(100, 5), "second": torch.randn(1000, 5)}, tmp_path / "model.safetensors")
    with open_tensors(find_weights(tmp_path), {"first": "first", "second": "second"}) as opened:
        with (tmp_path / "model.safetensors").open("r+b") as shard:
            shard.truncate(5000)
        reading = read_to(CPU, [ChunkedTensor(opened[name], torch.float32) for name in opened], num_threads=2)
        assert len(next(reading)) == 100
        with pytest.raises(CheckpointError, match="has become shorter"):
            next(reading)
    assert not [each for each in threading.enumerate() if each.name.startswith("weights")]


@pytest.mark.usefixtures("straight")
def test_no_thread_reads_on_after_a_failure(tmp_path: Path) -> None:
    checkpoint = Checkpoint.from_pretrained(str(make_tiny_checkpoint("llama", tmp_path / "llama", num_blocks=4)))

    def fail(_module: nn.Module) -> None:
        raise ValueError("this layer cannot be quantised")

    with checkpoint.open_tensors({"weight": "lm_head.weight"}) as opened:
        tensor = ChunkedTensor(opened["weight"], torch.float32)
        tensor.is_deferred = True
        model = nn.Linear(1, 1, bias=False)
        model.weight.data = tensor[...]
        with pytest.raises(ValueError, match="cannot be quantised"):
            read_deferred(model, [tensor], CPU, fail)
    assert not [each for each in threading.enumerate() if each.name.startswith("weights")]


def test_layers_are_quantised_one_by_one_as_together() -> None:
    torch.manual_seed(0)
    together, singly = (nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)) for _ in range(2))
    singly.load_state_dict(together.state_dict())
    for model in (together, singly):
        quantize_layer = quantizer(model, "int8")
        assert quantize_layer is not None
        for module in list(model.modules()):
            before = [type(layer) for layer in model]
            quantize_layer(module)
            after = [type(layer) for layer in model]
            assert sum(one is not other for one, other in zip(before, after, strict=True)) == (module is not model)
    rows = torch.randn(3, 64)
    assert torch.equal(together(rows), singly(rows))
