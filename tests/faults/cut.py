"""Each wire of the swarm cut, in one direction or both.

Streams over that wire continue on other servers, and late bytes change no token. Where two servers do not reach each
other, the placement says so and suspects neither, and new answers take no chain with both. While a wire to the router
or to Redis is cut, streams notice nothing, and new answers begin.
"""

import asyncio
import random
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from itertools import pairwise
from urllib.parse import urlsplit

from corolla.local.options import LOOPBACK
from corolla.local.processes import ManagedProcess
from tests.faults.figures import Figures, say
from tests.faults.long_answers import LongAnswers, LongRepertoire
from tests.faults.pauses import PAUSES
from tests.faults.running_stack import RunningStack
from tests.faults.streams import Answer, Question, listen
from tests.faults.wires import Wires
from tests.integration.waiting import until

MAX_STALL_S = 4.0
_CUT_S = 5.0
# A chain carries tens of steps in this time, and a wire that waits carries no more than a sign of life.
_LISTENED_S = 0.3
# So much silence may cost a hop its streams.
_SILENT_S = 0.5
# Another address of this machine: where the relays listen.
_RELAYED_HOST = "127.0.0.2"
_DIRECTIONS = ("in", "out", "both")
_NUM_NEWCOMERS = 4


@dataclass(frozen=True)
class _Edge:
    """A wire, from the process that connects to the one that listens, by their names."""

    source: str
    target: str
    is_of_chain: bool


async def cut(stack: RunningStack, rng: random.Random, runs: range) -> int:
    """Each run has two streams that outlast the cut of one wire, the first hop's, the next one's..."""
    figures = Figures()
    async with _relayed(stack) as wires:
        repertoire = LongRepertoire(stack, rng)
        for number in runs:
            figures.num_runs += 1
            edge_number, direction = divmod(number, len(_DIRECTIONS))
            await _run(repertoire, rng, figures, wires, edge_number, _DIRECTIONS[direction])
    return figures.conclude(MAX_STALL_S)


async def _run(
    repertoire: LongRepertoire,
    rng: random.Random,
    figures: Figures,
    wires: Mapping[str, Wires],
    edge_number: int,
    direction: str,
) -> None:
    stack = repertoire.stack
    answers = await LongAnswers.begin(repertoire, rng)
    edges = _edges(stack.service, await _hops(stack, wires))
    edge = edges[edge_number % len(edges)]
    wire = wires[edge.target]
    recoveries_before = await stack.metric("corolla_session_recoveries_total")
    source = stack.local.pid(edge.source) or 0
    # Tokens come to the client service before the last hop has sent the first one back.
    await until(lambda: wire.is_connected(source))
    cut_s = time.monotonic()
    wire.cut(source, direction)
    # A process that was paused has not yet waited for signs of life in vain.
    await PAUSES.sleep(_CUT_S)
    if not edge.is_of_chain:
        newcomer = Answer(Question.draw(rng, 4, 16))
        await listen(stack.client, newcomer)
        figures.check(newcomer.failure is None, f"a new answer did not begin: {newcomer.failure}")
    elif edge.source != stack.service.name and direction != "out":
        await _check_pair(stack, rng, figures, edge)
    figures.check(wire.num_held > 0, "the cut held nothing up")
    wire.restore()
    num_tokens = await answers.end(figures)
    num_recoveries = await stack.metric("corolla_session_recoveries_total") - recoveries_before
    if not edge.is_of_chain:
        # A process that got no processor time was silent, too.
        were_silent = PAUSES.num_seconds(cut_s) > _SILENT_S
        are_none = num_recoveries == 0 or were_silent
        figures.check(are_none, f"{num_recoveries:.0f} recoveries, though the chain was whole")
    # Between hops only signs of life come back.
    elif edge.source == stack.service.name or direction != "out":
        figures.check(num_recoveries > 0, "the cut was not noticed")
    await answers.compare(figures)
    stalls = answers.longest_waits_s(cut_s)
    figures.stalls_s += stalls
    say(f"run {figures.num_runs}: {direction} cut between {edge.source} and {edge.target}; {num_tokens} tokens, "
        f"longest stall {max(stalls):.2f} s")  # fmt: skip


async def _check_pair(stack: RunningStack, rng: random.Random, figures: Figures, edge: _Edge) -> None:
    """Two servers are apart, and serve nevertheless."""
    placement = await asyncio.to_thread(stack.local.placement)
    placed = {each.server.address: each for each in (placement.servers if placement else ())}
    source, target = (stack.process(name).address for name in (edge.source, edge.target))
    figures.check(target in placed[source].load.unreachable, f"the placement does not say that {edge} is cut")
    suspected = [each.server.address for each in placed.values() if each.suspected]
    figures.check(not suspected, f"one report had others avoid {suspected}")
    newcomers = [Answer(Question.draw(rng, 4, 16)) for _ in range(_NUM_NEWCOMERS)]
    await asyncio.gather(*(listen(stack.client, newcomer) for newcomer in newcomers))
    for newcomer in newcomers:
        figures.check(newcomer.failure is None, f"a new answer failed: {newcomer.failure}")
        figures.check(not newcomer.was_hit, "a new answer began on both")


async def _hops(stack: RunningStack, wires: Mapping[str, Wires]) -> list[ManagedProcess]:
    """The servers of a chain that an answer takes: each sends most to the next one."""
    hops = [await stack.busiest(stack.spans[0])]
    for span in stack.spans[1:]:
        source = stack.local.pid(hops[-1].name) or 0
        replicas = [server for server in stack.servers if server.blocks == span]
        before = {each.name: wires[each.name].num_carried(source) for each in replicas}
        await asyncio.sleep(_LISTENED_S)
        hops.append(max(replicas, key=lambda each: wires[each.name].num_carried(source) - before[each.name]))
    return hops


def _edges(service: ManagedProcess, hops: Sequence[ManagedProcess]) -> list[_Edge]:
    return [
        *(_Edge(service.name, hop.name, is_of_chain=True) for hop in hops),
        # Round the ring, and back from the last hop to the first one.
        *(_Edge(hop.name, following.name, is_of_chain=True) for hop, following in pairwise([*hops, hops[0]])),
        *(_Edge(name, "router", is_of_chain=False) for name in (service.name, hops[0].name)),
        _Edge("router", "redis", is_of_chain=False),
    ]


@asynccontextmanager
async def _relayed(stack: RunningStack) -> AsyncIterator[dict[str, Wires]]:
    """All but Redis started again, each with the addresses of relays. Returns the relays by their servers."""
    wires: dict[str, Wires] = {}
    local = stack.local
    router = stack.process("router")
    relayed_router = _relayed_address(router.address)
    try:
        for process in (stack.service, *stack.servers, router):
            stack.kill(process)
            await stack.until_gone(process)
        for process in (router, *stack.servers):
            wires[process.name] = Wires(_RELAYED_HOST, LOOPBACK, int(process.address.rpartition(":")[2]))
        wires["redis"] = Wires(_RELAYED_HOST, LOOPBACK, urlsplit(local.redis_url).port or 0)
        for each in wires.values():
            await each.start()
        local.launch(router, {"COROLLA_REDIS_URL": local.redis_url.replace(LOOPBACK, _RELAYED_HOST)})
        for server in stack.servers:
            relayed = replace(server, address=_relayed_address(server.address))
            local.launch(relayed, {"COROLLA_ROUTER": relayed_router, "COROLLA_ADVERTISED_HOST": _RELAYED_HOST})
        local.launch(stack.service, {"COROLLA_ROUTER": relayed_router})
        await stack.until_serving(stack.service)
        await stack.until_whole()
        yield wires
    finally:
        for each in wires.values():
            each.restore()
            await each.close()


def _relayed_address(address: str) -> str:
    return address.replace(LOOPBACK, _RELAYED_HOST)
