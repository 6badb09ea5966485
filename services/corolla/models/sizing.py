"""How many servers a model needs: what each holds in memory, and how fast its bandwidth lets tokens come. Pure."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from corolla.chassis.errors import SettingsError
from corolla.wire.span import Span

GIB: Final = 1 << 30
MIB: Final = 1 << 20

LIBRARY_BYTES: Final = 1 * GIB
"""What a device's driver, torch's libraries and their workspaces take before any weight is there."""
RECORDING_BYTES: Final = 1 * GIB
"""What recorded steps of all sizes take, and what torch keeps between them."""
_HEAD_ROWS: Final = 64
_LOGIT_BYTES: Final = 8 + 20
"""The last server makes the logits of so many rows at a time, in float32, and as much again for masks and sampling.

A row that draws takes 20 more: two words and a float64 of its random stream, and a float32 for what is drawn.
"""


@dataclass(frozen=True, slots=True)
class BlockSize:
    """What one block takes.

    Attributes:
        weight_bytes: its weights as the server holds them.
        loading_bytes: its weights while they are read: more than afterwards if they are quantised then.
        token_bytes: keys and values of one token; 0 for a block that keeps none.
        window: how many tokens a token sees, itself included; None: all earlier ones.
    """

    weight_bytes: int
    loading_bytes: int
    token_bytes: int
    window: int | None = None

    def session_bytes(self, num_tokens: int, page_tokens: int) -> int:
        """Keys and values of a session of so many tokens, in whole pages; a window may begin within a page."""
        if self.window is not None:
            num_tokens = min(num_tokens, self.window + page_tokens)
        return -(-num_tokens // page_tokens) * page_tokens * self.token_bytes


@dataclass(frozen=True, slots=True)
class ModelSize:
    """What a model takes.

    Attributes:
        name: the model's name.
        blocks: its blocks, in order.
        embedding_bytes: the embedding, which the server of block 0 holds.
        head_bytes: the head, which the server of the last block holds.
        has_tied_edges: whether a server with both ends holds their weights once.
        row_bytes: what one row of a step takes while a block computes it.
        vocab_size: the number of tokens of the vocabulary.
        context_length: the longest session, in tokens.
    """

    name: str
    blocks: tuple[BlockSize, ...]
    embedding_bytes: int
    head_bytes: int
    has_tied_edges: bool
    row_bytes: int
    vocab_size: int
    context_length: int

    @property
    def read_bytes(self) -> int:
        """The bytes that one token reads on its way through the model: all weights but the embedding's."""
        return sum(block.weight_bytes for block in self.blocks) + self.head_bytes

    def edge_bytes(self, span: Span) -> int:
        """What the ends of the model take that a span has."""
        ends = [self.embedding_bytes] * (span.start == 0) + [self.head_bytes] * (span.end == len(self.blocks))
        return max(ends) if self.has_tied_edges and ends else sum(ends)


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
        weight_bytes: the weights of its blocks.
        edge_bytes: embedding and head, as far as the span has them.
        work_bytes: libraries, recorded steps, tensors of a step and adapters.
        session_bytes: keys and values of one session of the demanded length.
        cache_bytes: memory that is left for keys and values.
        read_bytes: what one token reads here in addition to keys and values: the weights, without the embedding.
    """

    span: Span
    weight_bytes: int
    edge_bytes: int
    work_bytes: int
    session_bytes: int
    cache_bytes: int
    read_bytes: int

    def seconds(self, num_rows: int, bandwidth: float) -> float:
        """The least time of a step with one new token of so many sessions, at `bandwidth` bytes per second."""
        return (self.read_bytes + num_rows * self.session_bytes) / bandwidth


@dataclass(frozen=True, slots=True)
class ModelPlan:
    """The servers of one copy of a model, on devices of one kind.

    Attributes:
        servers: the servers, in the order of their blocks.
    """

    servers: tuple[ServerSize, ...]

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
    def max_sessions(self) -> int | None:
        """How many sessions of the demanded length fit; None: the model keeps no keys and values."""
        sizes = [server.session_bytes for server in self.servers if server.session_bytes]
        return min((self.kv_cache_mib * MIB // size for size in sizes), default=None)

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
        plan = ModelPlan(tuple(_server(model, span, memory_bytes, demand) for span in spans))
        if plan.max_sessions is None or plan.max_sessions >= demand.sessions:
            return plan
        if num_servers == len(model.blocks):
            raise _too_small(model, Span(0, 1), memory_bytes, demand)
        num_servers += 1


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
    return server.cache_bytes >= demand.sessions * server.session_bytes and loading <= memory_bytes


def _server(model: ModelSize, span: Span, memory_bytes: int, demand: Demand) -> ServerSize:
    blocks = _of(model, span)
    has_head = span.end == len(model.blocks)
    weights, edges = sum(block.weight_bytes for block in blocks), model.edge_bytes(span)
    logits = _HEAD_ROWS * model.vocab_size * _LOGIT_BYTES if has_head else 0
    step = demand.batch_tokens * model.row_bytes
    work = LIBRARY_BYTES + RECORDING_BYTES + step + logits + demand.adapter_bytes
    return ServerSize(
        span=span,
        weight_bytes=weights,
        edge_bytes=edges,
        work_bytes=work,
        session_bytes=sum(block.session_bytes(demand.session_tokens, demand.page_tokens) for block in blocks),
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
    number, unit = text.strip(), ""
    for unit in _UNITS:
        if number.lower().endswith(unit.lower()):
            number = number[: len(number) - len(unit)].strip()
            break
    else:
        number = ""
    try:
        size = float(number) * _UNITS[unit]
    except ValueError:
        size = math.nan
    if not (math.isfinite(size) and size >= 1):
        raise SettingsError(f"{text} is no size of memory; give one with its unit, such as 24GiB or 80GB")
    return int(size)


_UNITS: Final = {
    "MiB": MIB, "GiB": GIB, "TiB": GIB << 10, "MB": 10**6, "GB": 10**9, "TB": 10**12,
    "Mi": MIB, "Gi": GIB, "Ti": GIB << 10,
}  # fmt: skip
