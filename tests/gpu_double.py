"""A GPU on a processor: what it was given is computed as late as its rules allow, and what breaks a rule is refused.

Tensors on `cuda:0` are wrappers. An operator on them only notes work in the current stream; numbers come to be when
something waits for that work. So a buffer of the host that is written again too early brings wrong numbers, and one
that is read too early still has the old ones. The rules are those of CUDA and of torch's allocators:

- Work of two streams that touches the same memory needs an event between them.
- Memory that goes back while another stream may still use it was told so (`record_stream`).
- A division by a number of the host multiplies by its reciprocal, which may round otherwise.
- In a capture nothing waits, copies from the host, or takes a workspace for the first time; what was made there stays
  there, and a pool serves no more once all its graphs are gone.
"""

import ctypes
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Final

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

_aten = torch.ops.aten
GPU: Final = torch.device("cuda", 0)
_CPU: Final = torch.device("cpu")
_WAITING: Final = (_aten._local_scalar_dense, _aten.equal, _aten.is_nonzero, _aten.nonzero)
_WITH_WORKSPACE: Final = (_aten.mm, _aten.addmm, _aten.bmm, _aten.baddbmm)
_COPIES: Final = (_aten.copy_, _aten._to_copy)
_DIVISIONS: Final = (_aten.div.Tensor, _aten.div_.Tensor)

Clock = dict[int, int]


class BrokenRule(AssertionError):
    """Something that a GPU would do wrongly without a word."""


class Memory:
    """What several wrappers share: the allocation that they are views of.

    Attributes:
        stream: the stream that it was taken for.
        graph: the recording whose pool it lies in; None: it lies in no pool.
        recorded: the streams that the allocator was told about.
        written: the stream and number of the last work that writes it.
        reads: the same of the works that read it since.
    """

    def __init__(self, stream: "Stream", graph: "Graph | None") -> None:
        self.stream, self.graph = stream, graph
        self.recorded = {stream.number}
        self.written: tuple[int, int] | None = None
        self.reads: set[tuple[int, int]] = set()
        self.num_tensors = 0

    def give_back(self) -> None:
        """Notes that a tensor is gone; with the last one, the stream that took the memory may use it anew."""
        self.num_tensors -= 1
        if self.num_tensors or self.graph is not None:
            return
        for number, count in {*self.reads, *filter(None, (self.written,))}:
            if number not in self.recorded and self.stream.clock.get(number, 0) < count:
                self.stream.gpu.broken.append(f"memory goes back while stream {number} uses it")


@dataclass(eq=False)
class Cell:
    """What works know of a tensor, so that they do not keep it alive; `held` has its numbers once they are made."""

    memory: Memory
    held: Tensor | None = None


class GpuTensor(torch.Tensor):
    """A tensor on the GPU."""

    cell: Cell

    @staticmethod
    def __new__(cls, like: Tensor, cell: Cell) -> "GpuTensor":
        made: Any = torch.Tensor._make_wrapper_subclass(
            cls, like.size(), strides=like.stride(), dtype=like.dtype, device=GPU
        )
        made.cell = cell
        cell.memory.num_tensors += 1
        weakref.finalize(made, cell.memory.give_back)
        return made  # type: ignore[no-any-return]

    def record_stream(self, stream: Any) -> None:
        self.cell.memory.recorded.add(stream.number)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        raise BrokenRule(f"{func} outside of the double")


class Stream:
    """A queue of works that run in their order."""

    def __init__(self, _device: Any = None) -> None:
        self.gpu = Gpu.current
        self.number = len(self.gpu.streams)
        self.gpu.streams.append(self)
        self.works: list[Callable[[], None]] = []
        self.num_done = 0
        # Up to which work of each stream everything comes before what is launched next.
        self.clock: Clock = {}
        self.device = GPU

    def launch(self, work: Callable[[], None], reads: set[Memory], writes: set[Memory]) -> None:
        merge(self.clock, self.gpu.host)
        for memory in reads | writes:
            before = {memory.written} | (memory.reads if memory in writes else set())
            for number, count in filter(None, before):
                if self.clock.get(number, 0) < count and number != self.number:
                    raise BrokenRule(f"stream {self.number} does not wait for what stream {number} does there")
        clock = dict(self.clock)

        def after_others() -> None:
            self.gpu.run({number: count for number, count in clock.items() if number != self.number})
            work()

        self.works.append(after_others)
        stamp = (self.number, len(self.works))
        self.clock[self.number] = len(self.works)
        for memory in reads:
            memory.reads.add(stamp)
        for memory in writes:
            memory.written, memory.reads = stamp, set()

    def renew(self) -> "Stream":
        """Begins anew on the present double: a program keeps its streams while tests take another double."""
        if self.gpu is not Gpu.current:
            Stream.__init__(self)
        return self

    def wait_stream(self, other: "Stream") -> None:
        merge(self.renew().clock, other.renew().clock)

    def wait_event(self, event: "Event") -> None:
        merge(self.clock, event.clock)

    def synchronize(self) -> None:
        self.gpu.wait(self.clock)


class StreamContext:
    """Enters a stream as `torch.cuda.stream` does; if it is never left, the stream stays the current one."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream

    def __enter__(self) -> None:
        gpu = self._stream.renew().gpu
        self._before, gpu.stream = gpu.stream, self._stream

    def __exit__(self, *_failure: object) -> None:
        self._stream.gpu.stream = self._before


class Event:
    """A point in a stream."""

    def __init__(self, **_options: Any) -> None:
        self._gpu = Gpu.current
        self.clock: Clock = {}
        self._is_looked_at = False

    def record(self, stream: Stream | None = None) -> None:
        self._is_looked_at = False
        self.clock = dict((stream or self._gpu.stream).clock)

    def synchronize(self) -> None:
        self._gpu.wait(self.clock, is_event=True)

    def query(self) -> bool:
        """False at the first look since `record`, as the device is never faster than its host."""
        if self._is_looked_at:
            self.synchronize()
        was_looked_at, self._is_looked_at = self._is_looked_at, True
        return was_looked_at


class Graph:
    """What `torch.cuda.CUDAGraph` does."""

    def __init__(self) -> None:
        self._gpu = Gpu.current
        self._works: list[Callable[[], None]] = []
        self._reads: set[Memory] = set()
        self._writes: set[Memory] = set()
        self._is_invalid = False
        self._is_ended = False

    def capture_begin(self, pool: int, capture_error_mode: str, check_input_liveness: bool = False) -> None:
        gpu = self._gpu
        assert capture_error_mode == "thread_local"
        assert gpu.stream.number, "a capture needs a stream of its own"
        if gpu.uses.get(pool) == 0:
            raise RuntimeError("it->second->use_count > 0 INTERNAL ASSERT FAILED")
        gpu.uses[pool] = gpu.uses.get(pool, 0) + 1
        self._pool = pool
        gpu.capture = (gpu.stream, self)

    def add(self, work: Callable[[], None], reads: set[Memory], writes: set[Memory]) -> None:
        self._works.append(work)
        self._reads |= {each for each in reads if each.graph is not self}
        self._writes |= {each for each in writes if each.graph is not self}

    def refuse(self, what: str) -> None:
        self._is_invalid = True
        raise torch.AcceleratorError(f"CUDA error: operation not permitted when stream is capturing: {what}")

    def capture_end(self) -> None:
        self._gpu.capture = None
        if self._is_invalid:
            raise torch.AcceleratorError("CUDA error: operation failed due to a previous error during capture")
        self._is_ended = True

    def replay(self) -> None:
        def run() -> None:
            for work in self._works:
                work()

        self._gpu.stream.launch(run, self._reads, self._writes)

    def __del__(self) -> None:
        # A capture that failed keeps its pool.
        if self._is_ended:
            self._gpu.uses[self._pool] -= 1


class Gpu(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The device.

    Attributes:
        waits: what made the host wait for the device, other than events.
        num_read: how many copies to the host were begun.
        workspaces: the streams for which products have taken a workspace.
        broken: rules that were broken when a tensor went away.
        uses: how many graphs use each pool, by what torch calls it.
    """

    current: ClassVar["Gpu"]

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        Gpu.current = self
        self.streams: list[Stream] = []
        self.stream = Stream()
        self.host: Clock = {}
        self.waits: list[str] = []
        self.num_read = 0
        self.workspaces: set[int] = set()
        self.broken: list[str] = []
        self.uses: dict[Any, int] = {}
        self.capture: tuple[Stream, Graph] | None = None
        self._pinned: dict[int, Tensor] = {}

    def run(self, clock: Clock) -> None:
        """Does the work of streams up to these numbers."""
        for number, count in clock.items():
            stream = self.streams[number]
            while stream.num_done < count:
                work = stream.works[stream.num_done]
                stream.works[stream.num_done] = _done
                stream.num_done += 1
                with torch.inference_mode():
                    work()

    def wait(self, clock: Clock, *, is_event: bool = False, what: str = "synchronize") -> None:
        if self.capture is not None:
            self.capture[1].refuse(what)
        if not is_event:
            self.waits.append(what)
        self.run(clock)
        merge(self.host, clock)

    def pinned(self, tensor: Tensor) -> Tensor:
        """Makes the memory of a tensor pinned; it stays alive, so that no other tensor gets it."""
        self._pinned[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    def is_pinned(self, tensor: Tensor) -> bool:
        return tensor.untyped_storage().data_ptr() in self._pinned

    def put(self, tensor: Tensor) -> "GpuTensor":
        """A tensor on the GPU with these numbers, which have been there for long."""
        return GpuTensor(tensor, Cell(Memory(self.streams[0], None), tensor.clone()))

    def numbers(self, tensor: Tensor) -> Tensor:
        """What a tensor on the GPU has once all its work is done."""
        assert isinstance(tensor, GpuTensor)
        self.run({stream.number: len(stream.works) for stream in self.streams})
        assert tensor.cell.held is not None
        return tensor.cell.held

    def has_made(self, tensor: Tensor) -> bool:
        """True if the work that makes a tensor is done."""
        assert isinstance(tensor, GpuTensor)
        return tensor.cell.held is not None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        on_gpu = [each for each in tensors if isinstance(each, GpuTensor)]
        target = next((each for each in (*args, *kwargs.values()) if isinstance(each, torch.device)), None)
        if not on_gpu and (target is None or target.type != "cuda"):
            return func(*args, **kwargs)
        if torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd"):
            with self:
                return func.decompose(*args, **kwargs)
        name = func.overloadpacket
        if name in _COPIES and (len(on_gpu) < len(tensors) or target == _CPU):
            return self._copy(func, args, kwargs)
        if strangers := [each for each in tensors if not isinstance(each, GpuTensor) and each.dim()]:
            raise RuntimeError(f"{func}: a tensor {tuple(strangers[0].shape)} is on the CPU, others are on cuda:0")
        if name in _WAITING:
            self.wait(self.stream.clock, what=str(func))
            result = func(*_held(_cells(args)), **_held(_cells(kwargs)))
            return GpuTensor(result, Cell(self._memory(), result)) if isinstance(result, Tensor) else result
        return self._launch(func, args, kwargs)

    def _memory(self) -> Memory:
        return Memory(self.stream, self._graph)

    @property
    def _graph(self) -> Graph | None:
        return self.capture[1] if self.capture is not None and self.capture[0] is self.stream else None

    def _launch(self, func: Any, args: Any, kwargs: Any) -> Any:
        if func.overloadpacket in _WITH_WORKSPACE:
            self._take_workspace()
        if func in _DIVISIONS and not isinstance(args[1], GpuTensor):
            # torch's kernel for CUDA does so, in the type in which it computes.
            computed = torch.float64 if args[0].dtype == torch.float64 else torch.float32
            number = torch.as_tensor(args[1], dtype=computed).reciprocal()
            func = _aten.mul.Tensor if func is _aten.div.Tensor else _aten.mul_.Tensor
            args = (args[0], number.item())
        shapes = tree_map_only(GpuTensor, _meta, (args, kwargs))
        if "device" in shapes[1]:
            shapes[1]["device"] = torch.device("meta")
        made = func(*shapes[0], **shapes[1])
        aliases, reads, writes = _aliases(func, args, kwargs)
        outputs = made if isinstance(made, list | tuple) else (made,)
        results = [self._wrapped(func, number, like, aliases) for number, like in enumerate(outputs)]
        cells, options = _cells(args), _cells(kwargs)
        if "device" in options:
            options["device"] = _CPU
        made_cells = [each.cell if isinstance(each, GpuTensor) else None for each in results]

        def run() -> None:
            found = func(*_held(cells), **_held(options))
            for cell, held in zip(made_cells, found if isinstance(found, list | tuple) else (found,), strict=True):
                if cell is not None:
                    cell.held = held

        self._queue(run, reads, writes | {each.memory for each in made_cells if each is not None} - reads)
        if not isinstance(made, list | tuple):
            return results[0]
        return type(made)(results) if type(made) in (list, tuple) else tuple(results)

    def _take_workspace(self) -> None:
        if self.stream.number not in self.workspaces:
            if self._graph is not None:
                self._graph.refuse("cuBLAS takes a workspace")
            self.workspaces.add(self.stream.number)

    def _wrapped(self, func: Any, number: int, like: Any, aliases: dict[frozenset[str], Any]) -> Any:
        """The result of this number, which is like `like`: an argument, a view of one, or new memory."""
        if not isinstance(like, Tensor):
            return like
        returned = func._schema.returns[min(number, len(func._schema.returns) - 1)].alias_info
        if returned is None:
            return GpuTensor(like, Cell(self._memory()))
        # Parts of a tensor are a list, whose alias has no name of its own.
        source = aliases[frozenset(returned.before_set) or next(iter(aliases))]
        return source if returned.is_write else GpuTensor(like, Cell(source.cell.memory))

    def _queue(self, run: Callable[[], None], reads: set[Memory], writes: set[Memory]) -> None:
        graph = self._graph
        for memory in reads | writes:
            if memory.graph is not None and memory.graph is not graph:
                raise BrokenRule("memory in the pool of a recording is used outside of it")
        if graph is not None:
            graph.add(run, reads, writes)
        else:
            self.stream.launch(run, reads, writes)

    def _copy(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Copies between host and device."""
        is_new = func.overloadpacket is _aten._to_copy
        source = args[0] if is_new else args[1]
        is_late = bool(kwargs.get("non_blocking") or (not is_new and len(args) > 2 and args[2]))
        dtype = kwargs.get("dtype") or source.dtype
        if is_new:
            like = torch.empty(source.shape, dtype=dtype, device="meta")
            to_gpu = not isinstance(source, GpuTensor)
            target = torch.empty(like.shape, dtype=dtype)
            if to_gpu:
                target = GpuTensor(like, Cell(self._memory(), target))
        else:
            target = args[0]
        host, device = (source, target) if isinstance(target, GpuTensor) else (target, source)
        if self._graph is not None:
            self._graph.refuse("a copy between host and device")
        if not self.is_pinned(host):
            if is_late and host is target:
                raise BrokenRule("no event tells when a copy to memory that is not pinned has ended")
            is_late = False
        given = source if is_late or isinstance(source, GpuTensor) else source.clone()
        taker, giver = _cells((target, given))

        def run() -> None:
            to, numbers = _held((taker, giver))
            to.copy_(numbers)

        self.num_read += host is target
        touched = {device.cell.memory}
        self._queue(run, touched if host is target else set(), set() if host is target else touched)
        if not is_late:
            self.wait(self.stream.clock, what=f"a copy {'to' if host is target else 'from'} the host")
        return target


class _Calls(TorchFunctionMode):
    """Calls that torch's own code answers before operators are dispatched."""

    def __init__(self, gpu: Gpu) -> None:
        super().__init__()
        self._gpu = gpu

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.Tensor.pin_memory:
            return self._gpu.pinned(args[0].clone())
        if func is torch.Tensor.tolist and isinstance(args[0], GpuTensor):
            return args[0].cpu().tolist()
        if func is torch.Tensor.is_pinned:
            return self._gpu.is_pinned(args[0])
        if kwargs.pop("pin_memory", False):
            return self._gpu.pinned(func(*args, **kwargs))
        return func(*args, **kwargs)


def _done() -> None:
    """What stands in the place of work that was done, so that the queue keeps nothing alive."""


def merge(clock: Clock, other: Clock) -> None:
    for number, count in other.items():
        clock[number] = max(clock.get(number, 0), count)


def _cells(tree: Any) -> Any:
    return tree_map_only(GpuTensor, lambda tensor: tensor.cell, tree)


def _held(tree: Any) -> Any:
    def held(cell: Cell) -> Tensor:
        if cell.held is None:
            raise BrokenRule("work reads what no work before it has made")
        return cell.held

    return tree_map_only(Cell, held, tree)


def _meta(tensor: Tensor) -> Tensor:
    return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device="meta")


def _aliases(func: Any, args: Any, kwargs: Any) -> tuple[dict[frozenset[str], Any], set[Memory], set[Memory]]:
    """The arguments by the names of their memory, the memory that an operator reads, and what it writes."""
    aliases: dict[frozenset[str], Any] = {}
    reads: set[Memory] = set()
    writes: set[Memory] = set()
    for number, argument in enumerate(func._schema.arguments):
        value = args[number] if number < len(args) else kwargs.get(argument.name)
        found = [leaf for leaf in tree_leaves(value) if isinstance(leaf, GpuTensor)]
        alias = argument.alias_info
        if alias is not None and found:
            aliases[frozenset(alias.before_set)] = found[0]
        (writes if alias is not None and alias.is_write else reads).update(each.cell.memory for each in found)
    return aliases, reads, writes


@contextmanager
def a_gpu() -> Iterator[Gpu]:
    """Gives the calling thread a GPU; `torch.cuda` is that of the double within the context."""
    gpu = Gpu()

    calls: dict[str, Any] = {
        "_lazy_init": lambda: None, "is_available": lambda: True, "synchronize": lambda *_: gpu.wait(_all(gpu)),
        "empty_cache": lambda: None, "current_stream": lambda *_: gpu.stream, "Stream": Stream,
        "stream": StreamContext, "Event": Event, "CUDAGraph": Graph,
        "graph_pool_handle": lambda: len(gpu.uses) + 1,
    }  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        for name, call in calls.items():
            patch.setattr(torch.cuda, name, call)
        patch.setattr(torch._C, "_host_emptyCache", lambda: None, raising=False)
        before = torch._C._only_lift_cpu_tensors()
        torch._C._set_only_lift_cpu_tensors(True)
        try:
            with _guard_of_cuda(), _Calls(gpu), gpu:
                yield gpu
                if gpu.broken:
                    raise BrokenRule("; ".join(gpu.broken))
        finally:
            torch._C._set_only_lift_cpu_tensors(before)


def _all(gpu: Gpu) -> Clock:
    return {stream.number: len(stream.works) for stream in gpu.streams}


@contextmanager
def _guard_of_cuda() -> Iterator[None]:
    """Lets torch's build for processors enter the device of a wrapper, for which nothing has to be done."""
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
    guards = (ctypes.c_void_p * 2).in_dll(library, "_ZN3c104impl26device_guard_impl_registryE")
    before = guards[1]
    guards[1] = guards[0]
    try:
        yield
    finally:
        guards[1] = before
