"""A client service of a simulated fleet: it opens sessions, and opens them again when servers die.

    python -m benchmarks.fleet_client ROUTER MODEL NUM_SESSIONS

It reads the ids of the servers that will die as JSON from one line, and prints a line once its sessions are open. It
prints as JSON when all sessions of these servers were open on others, by the wall clock, how many these were, and the
longest time that its event loop stood still, by the wall clock and in processor time.
"""

import asyncio
import json
import secrets
import sys
import time
from contextlib import AsyncExitStack
from typing import Final

import uvloop

from benchmarks.fleet_servers import NUM_BLOCKS, PATIENCE_S, Server
from corolla.chain.control import ControlPlane
from corolla.chain.identity import SessionIdentity
from corolla.chain.placement import PlacementWatch
from corolla.chain.recovery_budget import RecoveryReport
from corolla.chain.reservations import ChainLimits, OpenOptions
from corolla.chain.routes import Routes
from corolla.chain.session import ChainSession, ChainSessions
from corolla.chain.streams import DataPlane
from corolla.chassis import heap
from corolla.chassis.tasks import TaskGroup
from corolla.decoding.parameters import SampledToken, SamplingParams
from corolla.decoding.sampler_record import SamplerRecord
from corolla.wire import stream
from corolla.wire.page_hashes import TextDigests

_SESSION_TOKENS: Final = 256
_OPENS_AT_ONCE: Final = 32
_LIMITS: Final = ChainLimits(prefill_chunk_tokens=64, step_timeout_s=600.0, lease_ms=600_000)
_TICK_S: Final = 0.002


class _Unread:
    """The reader of an answer without tokens."""

    def read(self, token: SampledToken) -> bool:
        raise AssertionError(f"nobody chooses tokens, and {token} came")


class _Sessions:
    """The sessions of one client service, which wait for the first tokens of their answers."""

    def __init__(self, sessions: ChainSessions, dead: frozenset[str]) -> None:
        self._sessions = sessions
        self._dead = dead
        self._opening = asyncio.Semaphore(_OPENS_AT_ONCE)
        self._open: dict[bytes, ChainSession] = {}
        self._lost: set[bytes] = set()
        self.are_open_again = asyncio.Event()

    async def hold(self, is_open: asyncio.Event) -> None:
        """Opens a session, and waits for ever for its first token."""
        identity = SessionIdentity(secrets.token_bytes(16), 1, "")
        sampler = SamplerRecord(SamplingParams(), 0, [1], max_new_tokens=_SESSION_TOKENS - 1)
        options = OpenOptions(max_tokens=_SESSION_TOKENS, transient=True, standby="off", texts=[TextDigests([1])])

        def note(_report: RecoveryReport) -> None:
            if not self._uses_dead(self._open[identity.session_id]):
                self._lost.discard(identity.session_id)
                if not self._lost:
                    self.are_open_again.set()

        async with AsyncExitStack() as stack:
            async with self._opening:
                session = await stack.enter_async_context(self._sessions.open(identity, options, sampler, note))
            self._open[identity.session_id] = session
            is_open.set()
            await session.prefill([1], _Unread())

    def _uses_dead(self, session: ChainSession) -> bool:
        return any(hop.server_id in self._dead for hop in session.chain.hops)

    def expect_deaths(self) -> int:
        """Notes which sessions will have to be opened again, and returns how many."""
        self._lost = {session_id for session_id, each in self._open.items() if self._uses_dead(each)}
        if not self._lost:
            self.are_open_again.set()
        return len(self._lost)


async def main(router: str, model: str, num_sessions: int) -> None:
    control = ControlPlane(router, model)
    watch = PlacementWatch(control)
    watching = asyncio.create_task(watch.run())
    routes = Routes(control, watch, Server.fingerprint, NUM_BLOCKS)
    plane = DataPlane(Server.fingerprint, TaskGroup())
    while not watch.is_complete:
        await watch.wait_for_update(1.0)
    dead = frozenset(json.loads(await asyncio.to_thread(sys.stdin.readline)))
    heap.settle()
    sessions = _Sessions(ChainSessions(routes, plane, _LIMITS, TaskGroup()), dead)
    are_open = [asyncio.Event() for _ in range(num_sessions)]
    # A session that fails ends the group, and so the process, with its error.
    async with asyncio.TaskGroup() as group:
        holding = [group.create_task(sessions.hold(each)) for each in are_open]
        for each in are_open:
            await each.wait()
        num_lost = sessions.expect_deaths()
        pulse = _Pulse()
        feeling = group.create_task(pulse.run())
        print("open", flush=True)
        await sessions.are_open_again.wait()
        ended = time.time()
        # What the deaths cause goes on for a while: reports to the router, and its pushes.
        await asyncio.sleep(2.0)
        found = {"ended": ended, "num_opened": num_lost, "stall_s": pulse.longest_s, "work_s": pulse.most_work_s}
        print(json.dumps(found), flush=True)
        for task in (feeling, *holding):
            task.cancel()
    watching.cancel()


class _Pulse:
    """Feels how long the event loop stands still.

    Attributes:
        longest_s: the longest time, by the wall clock.
        most_work_s: the most processor time that this process took meanwhile; other processes do not count.
    """

    def __init__(self) -> None:
        self.longest_s = 0.0
        self.most_work_s = 0.0

    async def run(self) -> None:
        while True:
            before_s, worked_s = time.perf_counter(), time.process_time()
            await asyncio.sleep(_TICK_S)
            self.longest_s = max(self.longest_s, time.perf_counter() - before_s - _TICK_S)
            self.most_work_s = max(self.most_work_s, time.process_time() - worked_s)


if __name__ == "__main__":
    # One process plays hundreds of servers, and answers later than they would.
    stream.tolerate_silence(PATIENCE_S)
    # Like a client service, it has another loop than asyncio's, and no garbage of its start.
    uvloop.run(main(sys.argv[1], sys.argv[2], int(sys.argv[3])))
