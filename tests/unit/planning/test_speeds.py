"""How fast a server may count that says how fast it is."""

import math

import pytest

from corolla.planning.candidates import MOST_TIMES_TYPICAL, candidates, is_slow, speed_bounds
from corolla.v1 import common_pb2
from corolla.v1 import router_pb2 as pb


def placed(server_id: str, speed: float, *, doubted: bool = False, fingerprint: str = "f") -> pb.PlacedServer:
    """A ready server of ten blocks."""
    server = pb.ServerDescription(server_id=server_id, fingerprint=fingerprint, decode_tokens_per_second=speed)
    span = common_pb2.BlockSpan(start=0, end=10)
    return pb.PlacedServer(server=server, span=span, state=pb.SERVER_STATE_READY, doubted=doubted)


@pytest.mark.parametrize(
    "others, median", [([], math.inf), ([0.0], math.inf), ([5.0], 5.0), ([5.0, 100.0], 5.0), ([5.0, 100.0, 1e9], 100.0)]
)
def test_a_server_is_bounded_by_the_median_of_the_others_that_measured(others: list[float], median: float) -> None:
    servers = [placed(str(number), speed) for number, speed in enumerate(others)]
    for own in (0.0, 1.0, 5.0, 100.0, 1e9):
        trusted = speed_bounds([*servers, placed("own", own)])["own"]
        doubted = speed_bounds([*servers, placed("own", own, doubted=True)])["own"]
        assert (trusted, doubted) == (median * MOST_TIMES_TYPICAL, median)


def test_servers_of_other_weights_say_nothing_of_a_server() -> None:
    assert speed_bounds([placed("a", 1.0), placed("b", 1e9, fingerprint="g")])["b"] == math.inf


def test_the_duration_of_a_step_is_bounded_as_the_speed_is() -> None:
    servers = [placed("a", 100.0), placed("b", 100.0, doubted=True)]
    servers[1].load.decode_step_seconds = 1e-9
    first, second = (each.seconds_per_block for each in candidates(servers))
    assert first == second == pytest.approx(0.01, rel=0.025)


def counted(*times: tuple[float, float, str]) -> list[float]:
    """The times of a decode step and of a token of a prompt that count, by the measured ones and numerics."""
    servers = [placed(str(number), 1.0) for number in range(len(times))]
    for server, (step_s, prompt_s, numerics) in zip(servers, times, strict=True):
        server.load.decode_step_seconds, server.load.numerics = 10 * step_s, numerics
        server.server.prefill_tokens_per_second = 1 / prompt_s
    return [each for server in candidates(servers) for each in (server.seconds_per_block, server.prompt_seconds)]


def test_equal_machines_count_alike_unless_one_is_far_slower_or_faster() -> None:
    near = [(0.1, 0.01, "same"), (0.17, 0.019, "same+head"), (0.06, 0.006, "same")]
    far = [(0.3, 0.06, "same"), (0.03, 0.002, "same")]
    times = counted(*near, *far)
    assert times[:6] == 3 * times[:2]
    assert times[::2] == pytest.approx([0.1, 0.1, 0.1, 0.3, 0.03], rel=0.05)
    assert times[1::2] == [0.01, 0.01, 0.01, 0.06, 0.002]


@pytest.mark.parametrize("numerics", [("one", "other"), ("", "")])
def test_machines_that_may_differ_count_as_they_measured(numerics: tuple[str, str]) -> None:
    times = counted((0.1, 0.01, numerics[0]), (0.15, 0.015, numerics[1]))
    assert times == pytest.approx([0.1, 0.01, 0.15, 0.015], rel=0.05)


def test_a_chain_is_slow_where_tokens_take_many_times_as_long_as_its_servers_say() -> None:
    ready = {each.server_id: each for each in candidates([placed("a", 100.0)])}
    hop = common_pb2.Hop(server_id="a", span=common_pb2.BlockSpan(start=0, end=10))
    chain = common_pb2.Chain(fingerprint="f", hops=[hop])
    assert not is_slow(ready, chain, token_seconds=0.8)
    assert is_slow(ready, chain, token_seconds=0.9)
    gone = common_pb2.Chain(fingerprint="f", hops=[hop, common_pb2.Hop(server_id="gone")])
    assert not is_slow(ready, gone, token_seconds=100.0)
