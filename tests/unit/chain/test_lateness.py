"""When a token is late, and what silence proves."""

import math
from collections.abc import Sequence

import pytest

from corolla.chain.lateness import TICK_S, Silences, TokenWaits, silent_one


def test_a_token_is_late_after_three_times_the_longest_of_the_newest_waits() -> None:
    waits = TokenWaits()
    for _ in range(7):
        waits.add(0.04)
    assert waits.late_after_s == math.inf, "too few tokens tell nothing"
    waits.add(0.1)
    assert waits.late_after_s == pytest.approx(0.3)
    for _ in range(64):
        waits.add(0.001)
    assert waits.late_after_s == 0.05, "an old wait no longer counts, and quick tokens are not late at once"


def be_silent(server: Silences, seconds: float, *, ends: bool = True) -> bool:
    """Returns whether the silence costs the server sessions. A pause of this process is less than one tick more."""
    for _ in range(round(seconds / TICK_S)):
        server.tick()
    is_too_long = server.is_too_long
    if ends:
        server.end()
    return is_too_long


@pytest.mark.parametrize(
    "silences_s, costs",
    [
        ([0.0, 0.02, 0.08] * 9, 0),  # a server that lives
        ([0.1] * 300, 1),  # throttled: it works for 100 ms of each 200 ms, and one ping came when a pause began
        ([0.04, 0.06, 0.1] * 100, 0),  # the same, and pings come at any moment of a pause
        ([0.1, 0.2, 0.4, 0.8], 4),
        ([0.48] * 40, 1),  # a machine that others use, too
        ([0.6, 10.0, 1.0], 3),  # frozen again and again
        ([0.3, *[0.0] * 16, 0.1], 2),  # answers in time renew what is allowed
        ([0.3, *[0.0] * 15, 0.1], 1),
    ],
)  # fmt: skip
def test_a_silence_costs_sessions_if_it_is_twice_as_long_as_others(silences_s: Sequence[float], costs: int) -> None:
    server = Silences()
    assert sum(be_silent(server, each) for each in silences_s) == costs


def test_patience_follows_the_link() -> None:
    server = Silences(link_s=0.25)
    assert [be_silent(server, each) for each in (0.1, 0.12, 0.26)] == [False, False, True]


def test_a_server_that_was_silent_before_is_known() -> None:
    server = Silences()
    for seconds, was_long in ((0.08, False), (0.12, True), *[(0.0, True)] * 15, (0.0, False)):
        be_silent(server, seconds)
        assert server.was_long is was_long


@pytest.mark.parametrize(
    "silent_s, blamed",
    [
        ({"a": 0.1, "b": 0.0}, "a"),
        ({"a": 0.0, "b": 0.1}, None),  # it has no standby
        ({"a": 0.08, "b": 0.0}, None),
        ({"a": 0.1, "b": 0.06}, None),  # two of two: this machine is slow, or theirs
        ({"a": 10.0, "b": 10.0, "c": 0.0, "d": 0.0}, None),
        ({"a": 0.1, "b": 0.1, **dict.fromkeys("cdefgh", 0.0)}, "a"),
        ({"a": 0.1, "b": 0.1, "c": 0.1, **dict.fromkeys("defgh", 0.0)}, None),
    ],
)
def test_many_silent_servers_tell_of_a_slow_machine(silent_s: dict[str, float], blamed: str | None) -> None:
    servers = {name: Silences() for name in silent_s}
    for name, seconds in silent_s.items():
        be_silent(servers[name], seconds, ends=False)
    assert silent_one({"a": servers["a"]}, servers.values()) == blamed
