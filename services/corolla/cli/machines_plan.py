"""`corolla plan --machines FILE`: which blocks a router would give to unlike machines, and how fast tokens can come."""

import json
import math
import sys
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from rich import box
from rich.console import Console
from rich.table import Table

from corolla.chassis.errors import NoChain, SettingsError, SpanRefused, StartupError
from corolla.compute.gpus import GPUS, DeviceKind
from corolla.compute.sizing import GIB, Demand, ModelSize, parse_bytes, weights_room
from corolla.planning.planner import Candidate, PlannedHop, plan
from corolla.router.placement import HostedSpan, WeightMemory, choose_span
from corolla.router.rebalancing import Member, next_move
from corolla.router.settings import RouterSettings
from corolla.wire.span import Span, gaps

STREAMS: Final = (1, 8, 32)
_MOST_MACHINES: Final = 256
_MOST_MOVES: Final = 64
_MAX_BYTES: Final = 1 << 20


class MachineRow(BaseModel):
    """One table `[[machine]]` of the file: machines of one kind.

    Attributes:
        count: How many of them there are.
        gpu: What `--gpu` takes; it says memory and bandwidth.
        memory: The memory of its device, such as 24GiB.
        bandwidth: GB/s that the device reads.
        link: Gbit/s to the others.
        latency: Milliseconds from it to the others.
    """

    model_config = ConfigDict(extra="forbid")

    name: str = Field(min_length=1, max_length=64)
    count: int = Field(1, ge=1, le=_MOST_MACHINES)
    gpu: str | None = None
    memory: str | None = None
    bandwidth: float | None = Field(None, gt=0)
    link: float = Field(1.0, gt=0)
    latency: float = Field(0.5, ge=0)

    def kind(self) -> DeviceKind:
        """The device. Raises SettingsError if the table does not say enough."""
        if self.gpu is not None:
            if self.gpu not in GPUS:
                raise SettingsError(f"{self.name}: gpu {self.gpu} is not known: give memory and bandwidth")
            return GPUS[self.gpu]
        if self.memory is None or self.bandwidth is None:
            raise SettingsError(f"{self.name}: give gpu, or memory and bandwidth")
        return DeviceKind(self.name, parse_bytes(self.memory), self.bandwidth * 1e9)


@dataclass(frozen=True, slots=True)
class PlacedMachine:
    """A machine, and the span that the router would give it.

    Attributes:
        span: None: not even one block fits.
        speed: Tokens per second through one block.
        link_seconds: The time for the hidden state of one token to the next machine.
    """

    name: str
    kind: DeviceKind
    span: Span | None
    speed: float
    link_seconds: float

    def seconds(self, blocks: Span, num_blocks: int, head_blocks: float) -> float:
        """The time of a step through these of its blocks."""
        return (len(blocks) + (head_blocks if blocks.end == num_blocks else 0.0)) / self.speed


@dataclass(frozen=True, slots=True)
class MachinesPlan:
    """What unlike machines serve together.

    Attributes:
        machines: In the order of the file.
        uncovered: The blocks that no machine holds.
        hops: The machines of the cheapest chain, by their places in `machines`, and the blocks of each.
        block_seconds: The time of a step in each hop.
        link_seconds: The time from each hop to the next one, and from the last one back to the first.
    """

    machines: Sequence[PlacedMachine]
    uncovered: Sequence[Span]
    hops: Sequence[tuple[int, Span]]
    block_seconds: Sequence[float]
    link_seconds: Sequence[float]

    def tokens_per_second(self, num_streams: int) -> float:
        """The most tokens per second of so many streams, if weights and links alone take time.

        Streams go round as microbatches, one for each hop as far as there are streams.
        """
        num_microbatches = min(num_streams, len(self.hops))
        round_s = sum(self.block_seconds) + (sum(self.link_seconds) if len(self.hops) > 1 else 0.0)
        return num_streams / max(round_s, num_microbatches * max(self.block_seconds))


def read_machines(path: Path) -> list[MachineRow]:
    """Reads the tables `[[machine]]` of a TOML file. Raises StartupError if it has none, or one that is not valid."""
    try:
        text = path.read_bytes()
        if len(text) > _MAX_BYTES:
            raise StartupError(f"{path} is too large for a list of machines")
        found = tomllib.loads(text.decode()).get("machine")
    except OSError as failure:
        raise StartupError(f"cannot read {path}: {failure.strerror}") from None
    except ValueError as failure:
        raise StartupError(f"{path} is no TOML: {failure}") from None
    if not isinstance(found, list) or not found:
        raise StartupError(f"{path} has no table [[machine]] with a name, and gpu or memory and bandwidth")
    try:
        rows = [MachineRow.model_validate(each) for each in found]
        for row in rows:
            row.kind()
    except ValidationError as failure:
        place, *_ = failure.errors()
        raise StartupError(f"{path}: {'.'.join(map(str, place['loc']))}: {place['msg']}") from None
    if sum(row.count for row in rows) > _MOST_MACHINES:
        raise StartupError(f"{path} has more than {_MOST_MACHINES} machines")
    return rows


def plan_machines(model: ModelSize, rows: Sequence[MachineRow], demand: Demand) -> MachinesPlan:
    """Places machines one after the other as a router does, and lets it move them until no move pays."""
    num_blocks = len(model.blocks)
    block_bytes = sum(block.weight_bytes for block in model.blocks) / num_blocks
    head_blocks = model.head_bytes / block_bytes
    machines: list[PlacedMachine] = []
    members: dict[int, Member] = {}
    for row in rows:
        kind = row.kind()
        most, room_bytes = weights_room(model, kind.memory_bytes, demand)
        memory = WeightMemory(
            room_bytes / block_bytes, max(model.embedding_bytes, model.head_bytes) / block_bytes, model.has_tied_edges
        )
        speed = (kind.bandwidth or 0.0) / block_bytes
        link_s = model.hidden_bytes * 8 / (row.link * 1e9) + row.latency / 1e3
        for number in range(1, row.count + 1):
            name = row.name if row.count == 1 else f"{row.name}-{number}"
            hosted = [each.hosted for each in members.values()]
            try:
                span = choose_span(hosted, num_blocks, most, speed, head_blocks, memory, row.name)
            except SpanRefused:
                machines.append(PlacedMachine(name, kind, None, speed, link_s))
                continue
            hosted_span = HostedSpan(span, speed, head_blocks, row.name)
            members[len(machines)] = Member(str(len(machines)), hosted_span, True, most, memory)
            machines.append(PlacedMachine(name, kind, span, speed, link_s))
    _move(members, num_blocks)
    machines = [
        replace(each, span=members[index].hosted.span) if index in members else each
        for index, each in enumerate(machines)
    ]
    spans = [each.span for each in machines if each.span is not None]
    uncovered = gaps(spans, Span(0, num_blocks))
    hops = _cheapest(machines, num_blocks)
    chain = [machines[index] for index, _ in hops]
    times = [each.seconds(blocks, num_blocks, head_blocks) for each, (_, blocks) in zip(chain, hops, strict=True)]
    return MachinesPlan(machines, uncovered, hops, times, [each.link_seconds for each in chain])


def _move(members: dict[int, Member], num_blocks: int) -> None:
    min_gain = RouterSettings.model_fields["rebalance_min_gain"].default
    for _ in range(_MOST_MOVES):
        move = next_move(list(members.values()), num_blocks, min_gain=min_gain)
        if move is None:
            return
        index = int(move.server_id)
        members[index] = replace(members[index], hosted=replace(members[index].hosted, span=move.span))


def _cheapest(machines: Sequence[PlacedMachine], num_blocks: int) -> list[tuple[int, Span]]:
    """The hops of the cheapest chain; none if some blocks have no machine. Routers know no links, as here."""
    candidates = [
        Candidate(str(index), each.name, "", each.span, 1 / each.speed)
        for index, each in enumerate(machines)
        if each.span is not None
    ]
    try:
        hops: Sequence[PlannedHop] = plan(candidates, num_blocks).hops
    except NoChain:
        return []
    return [(int(hop.server.server_id), hop.span) for hop in hops]


def show_machines(model: ModelSize, found: MachinesPlan, *, as_json: bool) -> int:
    """Prints the plan. Returns the exit status: 1 if some blocks have no machine."""
    if as_json:
        sys.stdout.write(json.dumps(_facts(model, found)) + "\n")
        return int(bool(found.uncovered))
    console = Console(highlight=False)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, header_style="dim")
    table.add_column("machine", overflow="fold")
    for heading in ("blocks", "weights", "in the chain", "step", "to the next"):
        table.add_column(heading, justify="right", no_wrap=True)
    hops = dict(found.hops)
    times = dict(zip(hops, found.block_seconds, strict=True))
    for index, each in enumerate(found.machines):
        if each.span is None:
            table.add_row(each.name, "none fits")
            continue
        weights = sum(block.weight_bytes for block in model.blocks[each.span.start : each.span.end])
        weights += model.edge_bytes(each.span)
        in_chain: list[str] = []
        if index in hops:
            in_chain = [str(hops[index]), f"{times[index] * 1e3:.1f} ms", f"{each.link_seconds * 1e3:.2f} ms"]
        table.add_row(each.name, str(each.span), f"{weights / GIB:.2f} GiB", *in_chain)
    console.print(table)
    if found.uncovered:
        num_missing = sum(map(len, found.uncovered))
        missing = sum(block.weight_bytes for span in found.uncovered for block in model.blocks[span.start : span.end])
        spans = ", ".join(map(str, found.uncovered))
        console.print(f"blocks {spans} have no machine: add memory for {num_missing} blocks, {missing / GIB:.2f} GiB")
        return 1
    speeds = ", ".join(f"{count}: {found.tokens_per_second(count):.0f}" for count in STREAMS)
    console.print(f"at most, by bandwidths and links, tokens/s of streams: {speeds}")
    return 0


def _facts(model: ModelSize, found: MachinesPlan) -> dict[str, Any]:
    hops = dict(found.hops)
    return {
        "model": model.name,
        "machines": [
            {
                "name": each.name,
                "blocks": None if each.span is None else [each.span.start, each.span.end],
                "chain_blocks": [hops[index].start, hops[index].end] if index in hops else None,
                "link_seconds": each.link_seconds,
            }
            for index, each in enumerate(found.machines)
        ],
        "uncovered": [[each.start, each.end] for each in found.uncovered],
        "tokens_per_second": {
            str(count): speed if math.isfinite(speed := found.tokens_per_second(count)) else None for count in STREAMS
        }
        if found.hops
        else None,
    }
