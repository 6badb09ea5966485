"""How many servers a model needs: what each holds in memory, and how fast its bandwidth lets tokens come. Pure."""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from corolla.cache.layout import CacheLayout, LayerGroups, stand_in_bytes
from corolla.chassis.errors import SettingsError
from corolla.compute.device_memory import SHARE_OF_ACTIVATIONS, StepSize, reserved_bytes
from corolla.wire.span import Span

GIB: Final = 1 << 30
MIB: Final = 1 << 20

LIBRARY_BYTES: Final = 1 * GIB
"""What a device's driver, torch's libraries and their workspaces take before any weight is there."""


HOST_BYTES: Final = 4 * GIB
"""What the process of a server on a GPU takes of the machine's memory: libraries, buffers, prompts, grammars."""


@dataclass(frozen=True, slots=True)
class BlockSize:
    """What one block takes.

    Attributes:
        weight_bytes: its weights as the server holds them.
        loading_bytes: its weights while they are read: more than afterwards if they are quantised then.
        token_bytes: keys and values of one token; 0 for a block that keeps none.
        window: how many tokens a token sees, itself included; None: all earlier ones.
        state_bytes: recurrent states of a session at one position.
    """

    weight_bytes: int
    loading_bytes: int
    token_bytes: int
    window: int | None = None
    state_bytes: int = 0

    def seen_bytes(self, num_tokens: int) -> int:
        """What the newest of so many tokens reads here."""
        num_seen = num_tokens if self.window is None else min(num_tokens, self.window)
        return num_seen * self.token_bytes + self.state_bytes


@dataclass(frozen=True, slots=True)
class ModelSize:
    """What a model takes.

    Attributes:
        name: the model's name.
        blocks: its blocks, in order.
        embedding_bytes: the embedding, which the server of block 0 holds.
        head_bytes: the head, which the server of the last block holds.
        has_tied_edges: whether a server with both ends holds their weights once.
        step: what a step takes.
        hidden_bytes: the hidden state of one token.
        context_length: the longest session, in tokens.
    """

    name: str
    blocks: tuple[BlockSize, ...]
    embedding_bytes: int
    head_bytes: int
    has_tied_edges: bool
    step: StepSize
    hidden_bytes: int
    context_length: int

    @property
    def read_bytes(self) -> int:
        """The bytes that one token reads on its way through the model: all weights but the embedding's."""
        return sum(block.weight_bytes for block in self.blocks) + self.head_bytes

    def edge_bytes(self, span: Span) -> int:
        """What the ends of the model take that a span has."""
        ends = [self.embedding_bytes] * (span.start == 0) + [self.head_bytes] * (span.end == len(self.blocks))
        return max(ends) if self.has_tied_edges and ends else sum(ends)

    def cache_layout(self, span: Span, page_tokens: int, max_step_tokens: int) -> CacheLayout:
        """How keys, values and states of a span lie in the pages of a server."""
        blocks = self.blocks[span.start : span.end]
        groups = LayerGroups.from_windows(
            [block.window for block in blocks], [index for index, block in enumerate(blocks) if not block.token_bytes]
        )
        token_bytes = max(block.token_bytes for block in self.blocks)
        return CacheLayout(
            groups,
            page_tokens,
            token_bytes or stand_in_bytes(max(block.state_bytes for block in self.blocks)),
            max_step_tokens,
            sum(block.state_bytes for block in blocks),
        )


@dataclass(frozen=True, slots=True)
class Demand:
    """What servers hold at the same time, and how they compute it.

    Attributes:
        sessions: the number of sessions, at least 1.
        session_tokens: the length of each, prompt and answer together.
        page_tokens: tokens of one page of keys and values.
        batch_tokens: the most tokens of one step.
        adapter_bytes: memory for adapters.
    """

    sessions: int
    session_tokens: int
    page_tokens: int
    batch_tokens: int
    adapter_bytes: int = 0


@dataclass(frozen=True, slots=True)
class ServerSize:
    """What one server holds.

    Attributes:
        span: its blocks.
        layout: how keys, values and states of these blocks lie in pages.
        weight_bytes: the weights of its blocks.
        edge_bytes: embedding and head, as far as the span has them.
        work_bytes: libraries, recorded steps, tensors of a step, adapters and holes between them.
        session_bytes: what one session of the demanded length is promised of the memory for keys and values.
        seen_bytes: what a token at the end of such a session reads of its keys, values and states.
        cache_bytes: memory that is left for keys and values.
        read_bytes: what one token reads here in addition to keys and values: the weights, without the embedding.
    """

    span: Span
    layout: CacheLayout
    weight_bytes: int
    edge_bytes: int
    work_bytes: int
    session_bytes: int
    seen_bytes: int
    cache_bytes: int
    read_bytes: int

    def seconds(self, num_rows: int, bandwidth: float) -> float:
        """The least time of a step with one new token of so many sessions, at `bandwidth` bytes per second."""
        return (self.read_bytes + num_rows * self.seen_bytes) / bandwidth


@dataclass(frozen=True, slots=True)
class ModelPlan:
    """The servers of one copy of a model, on devices of one kind.

    Attributes:
        servers: the servers, in the order of their blocks.
        session_tokens: the demanded length of a session.
        host_bytes: memory of the machine that each server needs.
        most_host_bytes: memory of the machine with which a server keeps boundary activations of all demanded tokens.
    """

    servers: tuple[ServerSize, ...]
    session_tokens: int
    host_bytes: int
    most_host_bytes: int

    @property
    def capacity_blocks(self) -> int:
        """The most blocks of a server."""
        return max(len(server.span) for server in self.servers)

    @property
    def weights_mib(self) -> int:
        """Memory in MiB that the weights of any server fit into, ends included."""
        return -(-max(server.weight_bytes + server.edge_bytes for server in self.servers) // MIB)

    @property
    def kv_cache_mib(self) -> int:
        """Memory in MiB for keys and values that each server has."""
        return min(server.cache_bytes for server in self.servers) // MIB

    @property
    def max_sessions(self) -> int:
        """How many sessions of the demanded length fit."""
        cache_bytes = self.kv_cache_mib * MIB
        return min(server.layout.num_sessions(cache_bytes, self.session_tokens) for server in self.servers)

    def tokens_per_second(self, num_streams: int, bandwidth: float) -> float:
        """The most tokens per second of so many streams together, if memory alone takes time.

        Streams go round as one microbatch for each server, as far as there are streams for it. A microbatch passes one
        server after another, and a server computes one microbatch at a time: the slower of the two counts.

        Args:
            num_streams: sessions that decode at a time, each as long as demanded.
            bandwidth: bytes per second that each device reads.
        """
        num_microbatches = min(num_streams, len(self.servers))
        num_rows = math.ceil(num_streams / num_microbatches)
        times = [server.seconds(num_rows, bandwidth) for server in self.servers]
        return num_streams / max(sum(times), num_microbatches * max(times))


def plan_servers(model: ModelSize, memory_bytes: int, demand: Demand) -> ModelPlan:
    """Cuts a model into as few spans as fit into devices of this memory, as even as they can be.

    Servers of a pool have one size for keys and values, whatever span they get: all have room for the demand.

    Raises:
        SettingsError: a server of one block does not fit.
    """
    num_servers = len(_greedy(model, memory_bytes, demand))
    while True:
        spans = _evenest(model, memory_bytes, demand, num_servers)
        plan = _plan(model, [_server(model, span, memory_bytes, demand) for span in spans], demand)
        if plan.max_sessions >= demand.sessions:
            return plan
        if num_servers == len(model.blocks):
            raise _too_small(model, Span(0, 1), memory_bytes, demand)
        num_servers += 1


def weights_room(model: ModelSize, memory_bytes: int, demand: Demand) -> tuple[int, int]:
    """Returns how many blocks fit into a device with room for the demand, and the bytes for their weights and ends."""
    num_blocks = len(model.blocks)
    for length in range(num_blocks, 0, -1):
        span = _within(num_blocks, length)
        if _fits(model, span, memory_bytes, demand):
            server = _server(model, span, memory_bytes, demand)
            left = max(0, server.cache_bytes - demand.sessions * server.session_bytes)
            return length, server.weight_bytes + server.edge_bytes + left
    return 0, 0


def _within(num_blocks: int, length: int) -> Span:
    """A span of this length that reaches the model's ends only if it must."""
    start = min(1, num_blocks - length)
    return Span(start, start + length)


def _plan(model: ModelSize, servers: Sequence[ServerSize], demand: Demand) -> ModelPlan:
    activations = demand.sessions * demand.session_tokens * model.hidden_bytes
    # Experts of a block are joined where they are read.
    fixed = HOST_BYTES + max(block.loading_bytes for block in model.blocks)
    # A server gives them a part of the memory that its limit leaves.
    most = max(2 * (fixed + activations), fixed + SHARE_OF_ACTIVATIONS * activations)
    return ModelPlan(tuple(servers), demand.session_tokens, fixed + activations, most)


def _evenest(model: ModelSize, memory_bytes: int, demand: Demand, num_servers: int) -> list[Span]:
    """The spans of at most so many servers that fit into the least memory."""
    least, most = 0, memory_bytes
    while most - least > MIB:
        middle = (least + most) // 2
        try:
            is_enough = len(_greedy(model, middle, demand)) <= num_servers
        except SettingsError:
            is_enough = False
        least, most = (least, middle) if is_enough else (middle, most)
    return _greedy(model, most, demand)


def _greedy(model: ModelSize, memory_bytes: int, demand: Demand) -> list[Span]:
    spans: list[Span] = []
    start, num_blocks = 0, len(model.blocks)
    while start < num_blocks:
        fitting = [
            end for end in range(start + 1, num_blocks + 1) if _fits(model, Span(start, end), memory_bytes, demand)
        ]
        # More blocks can take less only where the last one shares the head with the embedding, so the largest counts.
        if not fitting:
            raise _too_small(model, Span(start, start + 1), memory_bytes, demand)
        start = fitting[-1]
        spans.append(Span(spans[-1].end if spans else 0, start))
    return spans


def _fits(model: ModelSize, span: Span, memory_bytes: int, demand: Demand) -> bool:
    server = _server(model, span, memory_bytes, demand)
    # One block at a time is read and quantised.
    extra = max(block.loading_bytes - block.weight_bytes for block in _of(model, span))
    loading = server.weight_bytes + extra + server.edge_bytes + LIBRARY_BYTES
    num_sessions = server.layout.num_sessions(max(0, server.cache_bytes), demand.session_tokens)
    return num_sessions >= demand.sessions and loading <= memory_bytes


def _server(model: ModelSize, span: Span, memory_bytes: int, demand: Demand) -> ServerSize:
    blocks = _of(model, span)
    has_head = span.end == len(model.blocks)
    weights, edges = sum(block.weight_bytes for block in blocks), model.edge_bytes(span)
    step = model.step.num_bytes(demand.batch_tokens, has_head=has_head)
    work = LIBRARY_BYTES + reserved_bytes(memory_bytes, step, demand.adapter_bytes)
    layout = model.cache_layout(span, demand.page_tokens, demand.batch_tokens)
    return ServerSize(
        span=span,
        layout=layout,
        weight_bytes=weights,
        edge_bytes=edges,
        work_bytes=work,
        session_bytes=layout.session_bytes(demand.session_tokens),
        seen_bytes=sum(block.seen_bytes(demand.session_tokens) for block in blocks),
        cache_bytes=memory_bytes - weights - edges - work,
        read_bytes=weights + (model.head_bytes if has_head else 0),
    )


def _of(model: ModelSize, span: Span) -> Sequence[BlockSize]:
    return model.blocks[span.start : span.end]


def _too_small(model: ModelSize, span: Span, memory_bytes: int, demand: Demand) -> SettingsError:
    server = _server(model, span, memory_bytes, demand)
    needed = memory_bytes - server.cache_bytes + demand.sessions * server.session_bytes
    needed = max(needed, model.blocks[span.start].loading_bytes + server.edge_bytes + LIBRARY_BYTES)
    return SettingsError(
        f"block {span.start} of {model.name} needs {needed / GIB:.1f} GiB with keys and values for {demand.sessions} "
        f"sessions of {demand.session_tokens} tokens, and the device has {memory_bytes / GIB:.1f} GiB: take a larger "
        "one, fewer or shorter sessions, or weights of fewer bits"
    )


def parse_bytes(text: str) -> int:
    """The bytes that a size names: 24GiB, 22.5Gi, 80GB or 512MiB.

    Raises:
        SettingsError: the text does not name a size.
    """
    match = re.fullmatch(r"\s*(\d{0,15}\.?\d{1,15})\s*([a-z]+)\s*", text, re.ASCII | re.IGNORECASE)
    size = float(match[1]) * _UNITS.get(match[2].lower(), 0) if match else 0
    if size < 1:
        raise SettingsError(f"{text} is no size of memory; give one with its unit, such as 24GiB or 80GB")
    return int(size)


_UNITS: Final = {
    "mib": MIB, "gib": GIB, "tib": GIB << 10, "mb": 10**6, "gb": 10**9, "tb": 10**12,
    "mi": MIB, "gi": GIB, "ti": GIB << 10,
}  # fmt: skip
