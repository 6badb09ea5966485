"""The placement as callers see it, and its stream: what is in it, how often, for how many, and until when."""

import asyncio
import json
from contextlib import aclosing
from itertools import count

import pytest

from corolla.chain.recovery_budget import RecoveryReport
from corolla.chassis.errors import QueueFull, ServiceStopping, Unauthenticated
from corolla.client.api.tenants import KeyHolder
from corolla.http.placement_facts import (
    MAX_ENTRIES,
    TOGETHER_S,
    PlacementFacts,
    RecoveryLog,
    name_of,
    placement_facts,
)
from corolla.http.placement_stream import INTERVAL_S, PlacementStream
from corolla.planning.numerics import MovedBlocks
from corolla.v1 import common_pb2
from corolla.v1 import router_pb2 as pb
from corolla.wire.span import Span
from tests.simulation.loop import VirtualLoop

ADDRESS = "10.1.2.3:50052"
SERVER_ID = "5e" * 16
MOVED = (MovedBlocks(Span(2, 5), "b" * 32, "c" * 32),)


def placed(server_id: str, start: int, end: int, *, suspected: bool = False, state: int = 2) -> pb.PlacedServer:
    return pb.PlacedServer(
        server=pb.ServerDescription(server_id=server_id, address=ADDRESS, zone="eu-1", pod_uid="pod-7"),
        span=common_pb2.BlockSpan(start=start, end=end),
        state=pb.SERVER_STATE_READY if state == 2 else pb.SERVER_STATE_JOINING,
        load=pb.ServerLoad(num_sessions=3, num_pages=8, num_free_pages=5, decode_batch_rows=2.5),
        suspected=suspected,
    )


def report(seconds: float = 0.1, moved: tuple[MovedBlocks, ...] = MOVED) -> RecoveryReport:
    return RecoveryReport("hop_unavailable", "tokens", seconds, 77_777, moved)


def test_callers_learn_how_servers_are_and_not_where_nor_which() -> None:
    log = RecoveryLog(lambda: 1000.0)
    log.add(report())
    facts = placement_facts("tiny", 5, [placed(SERVER_ID, 0, 2)], {SERVER_ID: 2}, log)
    (server,) = facts.servers
    assert (server.name, server.blocks, server.state, server.answers) == (name_of(SERVER_ID), (0, 2), "ready", 2)
    assert (server.sessions, server.pages, server.free_pages, server.batch_rows) == (3, 8, 5, 2.5)
    text = facts.model_dump_json()
    hidden = (ADDRESS, "10.1.2.3", SERVER_ID, "b" * 32, "c" * 32, "eu-1", "pod-7", "77777")
    assert [each for each in hidden if each in text] == []


def test_callers_see_servers_as_they_join_and_pairs_that_are_apart() -> None:
    joining, other = placed(SERVER_ID, 0, 2, state=1), placed("f" * 32, 2, 5)
    joining.load.start_share, joining.load.start_seconds_left = 0.5, 3.25
    other.server.address = "10.1.2.4:50052"
    other.load.spare_spans.add(start=0, end=2)
    joining.load.unreachable.extend([other.server.address, "10.9.9.9:1"])
    first, second = placement_facts("tiny", 5, [joining, other], {}, []).servers
    assert (first.spare_blocks, second.spare_blocks) == ([], [(0, 2)])
    assert (first.start_share, first.start_seconds_left) == (0.5, 3.2)
    assert first.unreachable == [name_of("f" * 32)]


def test_many_servers_have_names_of_their_own() -> None:
    names = {name_of(f"{number:032x}") for number in range(20_000)}
    assert len(names) == 20_000


def test_only_ready_servers_that_live_cover_blocks() -> None:
    servers = [placed("a", 0, 2), placed("b", 2, 4, suspected=True), placed("c", 4, 5, state=1)]
    facts = placement_facts("tiny", 6, servers, {}, ())
    assert [each.state for each in facts.servers] == ["ready", "lost", "joining"]
    assert facts.uncovered == [(2, 6)]


def test_sessions_that_lose_the_same_server_together_are_one_entry() -> None:
    now_s = 1000.0
    log = RecoveryLog(lambda: now_s)
    log.add(report(0.1))
    log.add(report(0.3, ()))
    log.add(report(0.2))
    assert [(each.number, each.answers, each.seconds) for each in log] == [(1, 2, 0.2), (2, 1, 0.3)]
    now_s += TOGETHER_S
    log.add(report(0.4))
    assert [(each.number, each.time) for each in log] == [(1, 1000.0), (2, 1000.0), (3, now_s)]


def test_old_recoveries_make_way_for_new_ones() -> None:
    times = count(0.0, 10.0)
    log = RecoveryLog(lambda: next(times))
    for _ in range(MAX_ENTRIES + 3):
        log.add(report())
    assert [each.number for each in log] == list(range(4, MAX_ENTRIES + 4))


class Described:
    """A placement that is another one whenever it is looked at."""

    def __init__(self) -> None:
        self.num_looks = 0

    def __call__(self) -> PlacementFacts:
        self.num_looks += 1
        return PlacementFacts(model="tiny", num_blocks=self.num_looks, uncovered=[], servers=[], recoveries=[])


async def test_all_who_watch_share_what_is_made_at_most_once_an_interval() -> None:
    described = Described()
    stream = PlacementStream(described, max_watchers=4, max_of_tenant=lambda: 4)

    async def watch() -> list[int]:
        numbers = []
        async with aclosing(stream.watch(KeyHolder("acme"))) as events:
            async for event in events:
                numbers.append(json.loads(event.removeprefix(b"data: "))["num_blocks"])
                if len(numbers) == 3:
                    return numbers
        return numbers

    began_s = asyncio.get_running_loop().time()
    found = await asyncio.gather(*(watch() for _ in range(4)))
    assert asyncio.get_running_loop().time() - began_s >= 2 * INTERVAL_S * 0.9
    assert found == [[1, 2, 3]] * 4
    assert stream.num_watchers == 0


async def test_a_tenant_does_not_take_all_places() -> None:
    stream = PlacementStream(Described(), max_watchers=3, max_of_tenant=lambda: 2)
    loud, quiet = KeyHolder("loud"), KeyHolder("quiet")
    watching = [stream.watch(each) for each in (loud, loud, quiet)]
    for number in (0, 1):
        await anext(watching[number])
    with pytest.raises(QueueFull):
        await anext(stream.watch(loud))
    await anext(watching[2])
    with pytest.raises(QueueFull):
        await anext(stream.watch(quiet))
    await watching[0].aclose()
    again = stream.watch(quiet)
    await anext(again)
    for each in (*watching, again):
        await each.aclose()
    assert stream.num_watchers == 0


async def test_streams_end_with_the_service_and_with_the_key() -> None:
    is_good = True
    stream = PlacementStream(Described(), max_watchers=3, max_of_tenant=lambda: 3)
    revoked = stream.watch(KeyHolder("acme", is_good=lambda: is_good))
    ended = stream.watch(KeyHolder("acme"))
    await anext(revoked)
    await anext(ended)
    is_good = False
    with pytest.raises(Unauthenticated):
        await anext(revoked)
    stream.close()
    assert [event async for event in ended] == []
    with pytest.raises(ServiceStopping):
        await anext(stream.watch(KeyHolder("acme")))


def test_where_nothing_changes_a_comment_says_that_the_service_is_there() -> None:
    still = PlacementFacts(model="tiny", num_blocks=1, uncovered=[], servers=[], recoveries=[])

    async def watch() -> tuple[list[bytes], float]:
        stream = PlacementStream(lambda: still, max_watchers=1, max_of_tenant=lambda: 1)
        clock = asyncio.get_running_loop().time
        began_s = clock()
        async with aclosing(stream.watch(KeyHolder("acme"))) as events:
            return [await anext(events) for _ in range(3)], clock() - began_s

    loop = VirtualLoop()
    try:
        (first, *others), seconds = loop.run_until_complete(watch())
    finally:
        loop.close()
    assert first.startswith(b"data: ")
    assert others == [b": \n\n"] * 2
    assert 30 <= seconds < 32
