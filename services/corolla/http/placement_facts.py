"""The placement in the form that callers may see. Pure.

Callers see the servers and their load, but no addresses, no ids and nothing about sessions. Clocks are passed in.
"""

import hashlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Final, Literal

from pydantic import BaseModel, Field

from corolla.chain.recovery_budget import RecoveryReport
from corolla.v1 import router_pb2 as pb
from corolla.wire.span import Span, gaps

State = Literal["joining", "ready", "draining", "lost"]
Blocks = tuple[int, int]

_STATES: Final[Mapping["pb.ServerState.ValueType", State]] = {
    pb.SERVER_STATE_JOINING: "joining",
    pb.SERVER_STATE_READY: "ready",
    pb.SERVER_STATE_DRAINING: "draining",
}
_NAME_CHARS: Final = 10
MAX_ENTRIES: Final = 16
TOGETHER_S: Final = 5.0
"""Recoveries of the same cause and the same moves within this time are one entry."""


class ServerFacts(BaseModel):
    """A block server."""

    name: str = Field(description="The server's public name: it changes at each start, and does not tell the address.")
    blocks: Blocks = Field(description="The first block of the server, and the one after its last.")
    state: State = Field(description="`lost`: the server failed, and has not reported since.")
    start_share: float = Field(description="The part of its weights that a joining server has read; 0: not known.")
    start_seconds_left: float = Field(description="The seconds for the rest at the speed so far; 0: not known.")
    unreachable: list[str] = Field(description="Names of the servers from which it is cut off.")
    spare_blocks: list[Blocks] = Field(
        description="Blocks of other servers whose weights it keeps, to take them over if they are lost."
    )
    answers: int = Field(description="Running answers of the asked client service that use the server.")
    sessions: int = Field(
        description="Sessions on the server, idle ones and sessions of other client services included."
    )
    pages: int = Field(description="Pages of the server's KV cache.")
    free_pages: int
    waiting_steps: int
    batch_rows: float = Field(description="Average number of rows of a decode step; 0: there was no step.")
    step_seconds: float = Field(description="Average seconds of a decode step through all blocks of the server.")


class Moved(BaseModel):
    """Blocks that moved from one server to another."""

    blocks: Blocks
    lost: str
    found: str


class RecoveryFacts(BaseModel):
    """A recovery of one answer, or of several that lost the same servers."""

    number: int
    time: float = Field(description="Unix time at which the answer continued.")
    cause: str
    answers: int
    seconds: float = Field(description="Seconds for which the answer stalled; of several answers, the longest stall.")
    moved: list[Moved] = Field(description="Empty: the same servers continued.")


class PlacementFacts(BaseModel):
    """The servers and the blocks that they hold."""

    model: str
    num_blocks: int
    uncovered: list[Blocks] = Field(description="Blocks that no ready server holds.")
    servers: list[ServerFacts] = Field(description="Block servers in the order of their blocks.")
    recoveries: list[RecoveryFacts] = Field(
        description="The newest recoveries of the asked client service, oldest first."
    )


def placement_facts(
    model: str,
    num_blocks: int,
    servers: Sequence[pb.PlacedServer],
    num_answers: Mapping[str, int],
    recoveries: Iterable[RecoveryFacts],
) -> PlacementFacts:
    """The placement in the form that watchers get.

    Args:
        servers: the servers that hold this model's weights.
        num_answers: the number of answers that use each server, by its id.
    """
    names = {each.server.address: name_of(each.server.server_id) for each in servers}
    found = [_server(each, num_answers.get(each.server.server_id, 0), names) for each in servers]
    ready = [Span(*each.blocks) for each in found if each.state == "ready"]
    return PlacementFacts(
        model=model,
        num_blocks=num_blocks,
        uncovered=[(each.start, each.end) for each in gaps(ready, Span(0, num_blocks))],
        servers=sorted(found, key=lambda each: (each.blocks, each.name)),
        recoveries=list(recoveries),
    )


def name_of(server_id: str) -> str:
    """The public name of a server, unique among thousands. It does not reveal the id, which has 128 random bits."""
    return hashlib.sha256(server_id.encode()).hexdigest()[:_NAME_CHARS]


def _server(placed: pb.PlacedServer, num_answers: int, names: Mapping[str, str]) -> ServerFacts:
    load = placed.load
    return ServerFacts(
        name=name_of(placed.server.server_id),
        blocks=(placed.span.start, placed.span.end),
        state="lost" if placed.suspected else _STATES.get(placed.state, "joining"),
        start_share=round(load.start_share, 3),
        start_seconds_left=round(load.start_seconds_left, 1),
        unreachable=sorted(names[each] for each in load.unreachable if each in names),
        spare_blocks=[(each.start, each.end) for each in load.spare_spans],
        answers=num_answers,
        sessions=load.num_sessions,
        pages=load.num_pages,
        free_pages=load.num_free_pages,
        waiting_steps=load.num_queued_steps,
        batch_rows=round(load.decode_batch_rows, 2),
        step_seconds=round(load.decode_step_seconds, 6),
    )


class RecoveryLog:
    """Holds the newest MAX_ENTRIES recoveries of a client service. It names no sessions and no tenants.

    Args:
        clock: returns the seconds since 1970.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._entries: deque[RecoveryFacts] = deque(maxlen=MAX_ENTRIES)
        self._num_entries = 0

    def __iter__(self) -> Iterator[RecoveryFacts]:
        """Iterates over the entries, oldest first."""
        return iter(self._entries)

    def add(self, report: RecoveryReport) -> None:
        """Adds a recovery that has just ended."""
        now_s, seconds = round(self._clock(), 3), round(report.seconds, 4)
        moved = [
            Moved(blocks=(each.blocks.start, each.blocks.end), lost=name_of(each.lost), found=name_of(each.found))
            for each in report.moved
        ]
        for index, entry in enumerate(self._entries):
            if (entry.cause, entry.moved) == (report.cause, moved) and now_s - entry.time < TOGETHER_S:
                together = {"answers": entry.answers + 1, "seconds": max(entry.seconds, seconds)}
                self._entries[index] = entry.model_copy(update=together)
                return
        self._num_entries += 1
        self._entries.append(
            RecoveryFacts(
                number=self._num_entries, time=now_s, cause=report.cause, answers=1, seconds=seconds, moved=moved
            )
        )
