"""What is kept of servers from one placement to the next one is what is made of the last placement alone."""

import random
from collections.abc import Mapping

from hypothesis import given, settings
from hypothesis import strategies as st

from corolla.planning.bookings import Booked
from corolla.planning.ready_servers import ReadyServers
from corolla.planning.replicas import PlannedSession
from corolla.v1 import common_pb2
from corolla.v1 import router_pb2 as pb

SPANS = [(0, 2), (2, 4), (0, 4)]
NUMERICS = ["", "a", "a+1", "b"]


def joined(source: random.Random) -> pb.PlacedServer:
    """A server of any kind that says anything."""
    start, end = source.choice(SPANS)
    number = source.randrange(40)
    server = pb.ServerDescription(
        server_id=f"s{number}", address=f"host-{number}:1", fingerprint=source.choice("fffg"),
        zone=source.choice(["", "z"]), decode_tokens_per_second=source.choice([0.0, 90.0, 100.0, 5000.0]),
        prefill_tokens_per_second=source.choice([0.0, 800.0, 900.0]), cache_token_bytes=source.choice([0, 4096]),
    )  # fmt: skip
    placed = pb.PlacedServer(
        server=server, span=common_pb2.BlockSpan(start=start, end=end), state=pb.SERVER_STATE_READY
    )
    placed.load.numerics = source.choice(NUMERICS)
    return changed(placed, source)


def changed(before: pb.PlacedServer, source: random.Random) -> pb.PlacedServer:
    """The server with another heartbeat, and at times another load, state or mark."""
    placed = pb.PlacedServer()
    placed.CopyFrom(before)
    load = placed.load
    load.heartbeat_number += 1
    match source.randrange(8):
        case 0:
            load.num_sessions, load.num_queued_steps = source.randrange(3), source.randrange(3)
        case 1:
            load.decode_tokens_per_second = source.choice([0.0, 80.0, 110.0, 400.0, 9000.0])
        case 2:
            load.decode_step_seconds = source.choice([0.0, 0.01, 0.02, 0.5])
        case 3:
            placed.state = source.choice([pb.SERVER_STATE_JOINING, pb.SERVER_STATE_READY, pb.SERVER_STATE_DRAINING])
        case 4:
            placed.suspected, placed.doubted = source.random() < 0.5, source.random() < 0.5
        case 5:
            load.max_session_tokens = source.choice([10, 1000])
        case 6:
            del load.unreachable[:]
            load.unreachable.extend(f"host-{source.randrange(40)}:1" for _ in range(source.randrange(3)))
    return placed


def following(placed: Mapping[str, pb.PlacedServer], source: random.Random) -> dict[str, pb.PlacedServer]:
    """The next placement: a few servers have come, gone or changed."""
    after = dict(placed)
    for _ in range(source.randrange(4)):
        known = source.choice([*after, ""])
        if not known or source.random() < 0.2:
            each = joined(source)
            after[each.server.server_id] = each
        elif source.random() < 0.2:
            del after[known]
        else:
            after[known] = changed(after[known], source)
    return after


def sessions(ids: list[str]) -> list[PlannedSession]:
    held = {server_id: 64 * number for number, server_id in enumerate(ids[::3])}

    def booked(server_id: str) -> Booked:
        return Booked(len(server_id) + ord(server_id[-1]) % 3, 8)

    return [PlannedSession(), PlannedSession(40, held=held, new_tokens=16), PlannedSession(40, booked=booked)]


def facts(ready: ReadyServers) -> list[object]:
    """All that plans see of the servers, in its order."""
    ids, servers = list(ready.by_id), list(ready.by_id.values())
    # Sessions raise costs, which the next placement takes back.
    usable = [ready.replicas.usable(session, 3) for session in sessions(ids)]
    partners = [ready.replicas.partners(before, after) for before in servers[:4] for after in servers[-4:]]
    apart = [sorted(ready.apart.of([server_id])) for server_id in ready.placed]
    return [list(ready.by_id.items()), dict(ready.ids), usable, partners, apart]


@settings(max_examples=20)
@given(st.randoms(use_true_random=False), st.sampled_from(["", "f"]))
def test_an_index_that_follows_placements_is_as_one_of_the_last_placement(
    source: random.Random, fingerprint: str
) -> None:
    followed, turn = ReadyServers(fingerprint), 0.0
    servers = [joined(source) for _ in range(source.randrange(12))]
    placed = {each.server.server_id: each for each in servers}
    for _ in range(6):
        followed.take(placed, turn)
        anew = ReadyServers(fingerprint)
        anew.take(placed, turn)
        assert facts(followed) == facts(anew)
        if source.random() < 0.2:
            turn = source.random()
        placed = following(placed, source)


def test_only_servers_that_changed_are_made_anew() -> None:
    source = random.Random(1)
    servers = [joined(source) for _ in range(40)]
    placed = {each.server.server_id: each for each in servers}
    ready = ReadyServers()
    ready.take(placed, 0.5)
    before = dict(ready.by_id)
    beaten = pb.PlacedServer()
    beaten.CopyFrom(placed[next(iter(before))])
    beaten.load.heartbeat_number += 1
    ready.take({**placed, beaten.server.server_id: beaten}, 0.5)
    assert all(ready.by_id[server_id] is each for server_id, each in before.items())
    beaten.load.num_sessions += 5
    busy = pb.PlacedServer()
    busy.CopyFrom(beaten)
    ready.take({**placed, busy.server.server_id: busy}, 0.5)
    others = [server_id for server_id, each in before.items() if ready.by_id[server_id] is not each]
    assert others == [busy.server.server_id]
