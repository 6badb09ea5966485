"""A client service of a simulated fleet: it plans sessions, and places them again when servers die.

    python -m benchmarks.fleet_client ROUTER MODEL FINGERPRINT NUM_BLOCKS NUM_SESSIONS

It prints a line once its sessions are placed. It reads the ids of dead servers as JSON from one line. It prints as JSON
when all of its sessions had other servers, by the wall clock, and the longest time that its event loop stood still.
"""

import asyncio
import json
import sys
import time
from typing import Final

from corolla.chain.control import ControlPlane
from corolla.chain.placement import PlacementWatch
from corolla.chain.routes import Routes
from corolla.v1 import common_pb2

_SESSION_TOKENS: Final = 256
_PATIENCE_S: Final = 60.0
_TICK_S: Final = 0.002


async def main(router: str, model: str, fingerprint: str, num_blocks: int, num_sessions: int) -> None:
    control = ControlPlane(router, model)
    watch = PlacementWatch(control)
    watching = asyncio.create_task(watch.run())
    routes = Routes(control, watch, fingerprint, num_blocks)
    while not watch.is_complete:
        await watch.wait_for_update(1.0)
    chains: list[common_pb2.Chain] = []
    for _ in range(num_sessions):
        chains.append(await routes.plan(num_tokens=_SESSION_TOKENS, record_id="", blocks=None))
        await asyncio.sleep(0)
    print("placed", flush=True)
    dead = frozenset(json.loads(await asyncio.to_thread(sys.stdin.readline)))
    pulse = _Pulse()
    feeling = asyncio.create_task(pulse.run())

    async def place_again(chain: common_pb2.Chain) -> common_pb2.Chain:
        known: set[str] = set()
        while lost := {hop.server_id for hop in chain.hops if hop.server_id in dead}:
            # A server that is planned may be dead, too: its open fails.
            known |= lost
            for server_id in lost:
                routes.avoid(server_id)
            chain = await routes.replace_lost(chain, known, num_tokens=_SESSION_TOKENS, patience_s=_PATIENCE_S)
        return chain

    affected = [chain for chain in chains if any(hop.server_id in dead for hop in chain.hops)]
    placed = await asyncio.gather(*map(place_again, affected))
    ended = time.time()
    # What the deaths cause goes on for a while: reports to the router, and its pushes.
    await asyncio.sleep(2.0)
    feeling.cancel()
    for chain in placed:
        if not _is_whole(chain, num_blocks):
            raise AssertionError("a session is not placed")
    print(json.dumps({"ended": ended, "num_placed": len(placed), "stall_s": pulse.longest_s}), flush=True)
    watching.cancel()
    await routes.close()
    await control.close()


class _Pulse:
    """Feels how long the event loop stands still."""

    def __init__(self) -> None:
        self.longest_s = 0.0

    async def run(self) -> None:
        clock = asyncio.get_running_loop().time
        while True:
            before = clock()
            await asyncio.sleep(_TICK_S)
            self.longest_s = max(self.longest_s, clock() - before - _TICK_S)


def _is_whole(chain: common_pb2.Chain, num_blocks: int) -> bool:
    ends = [0, *(hop.span.end for hop in chain.hops)]
    return ends[-1] == num_blocks and all(hop.span.start == end for hop, end in zip(chain.hops, ends, strict=False))


if __name__ == "__main__":
    router, model, fingerprint, num_blocks, num_sessions = sys.argv[1:]
    asyncio.run(main(router, model, fingerprint, int(num_blocks), int(num_sessions)))
