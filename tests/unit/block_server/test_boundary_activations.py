"""Boundary activations against a list that keeps everything."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from corolla.block_server.boundary_activations import BoundaryActivations
from corolla.chassis.errors import OutputsNotKept

ROW_BYTES = 4
SESSIONS = (b"a", b"b", b"c")


def rows(session: int, position: int, num_tokens: int, version: int) -> bytes:
    """Rows that encode their session and the version of the step."""
    return b"".join(bytes((session, position + index, version, 7)) for index in range(num_tokens))


appends = st.tuples(st.just("append"), st.integers(0, 2), st.integers(0, 30), st.integers(1, 9))
forks = st.tuples(st.just("fork"), st.integers(0, 2), st.integers(0, 2), st.just(0))
forgets = st.tuples(st.just("forget"), st.integers(0, 2), st.just(0), st.just(0))


@given(st.lists(st.one_of(appends, forks, forgets), max_size=60), st.integers(0, 400))
def test_a_read_returns_the_last_sent_activations_within_the_budget(
    actions: list[tuple[str, int, int, int]], max_bytes: int
) -> None:
    store = BoundaryActivations(max_bytes)
    truth: dict[int, dict[int, bytes]] = {0: {}, 1: {}, 2: {}}
    for version, (what, session, other, num_tokens) in enumerate(actions):
        if what == "append":
            store.append(SESSIONS[session], other, num_tokens, rows(session, other, num_tokens, version))
            kept = {position: row for position, row in truth[session].items() if position < other}
            sent = rows(session, other, num_tokens, version)
            new = {other + index: sent[index * ROW_BYTES :][:ROW_BYTES] for index in range(num_tokens)}
            truth[session] = kept | new
        elif what == "fork":
            store.replace(SESSIONS[session], store.copy(SESSIONS[other]))
            truth[session] = dict(truth[other])
        else:
            store.forget(SESSIONS[session])
            truth[session] = {}
        assert 0 <= store.nbytes <= max_bytes
        for number, name in enumerate(SESSIONS):
            start, end = store.range(name)
            if start < end:
                assert store.read(name, start, end) == b"".join(truth[number][index] for index in range(start, end))
    assert store.nbytes == sum(ROW_BYTES * (end - start) for start, end in map(store.range, SESSIONS))


def test_within_the_budget_everything_stays() -> None:
    store = BoundaryActivations(1000)
    store.append(b"a", 0, 5, rows(0, 0, 5, 0))
    store.append(b"a", 5, 1, rows(0, 5, 1, 1))
    store.append(b"a", 3, 2, rows(0, 3, 2, 2))
    assert store.range(b"a") == (0, 5)
    assert store.read(b"a", 2, 4) == rows(0, 2, 1, 0) + rows(0, 3, 1, 2)
    store.append(b"a", 9, 1, rows(0, 9, 1, 3))
    assert store.range(b"a") == (9, 10), "there is no gap"
    with pytest.raises(OutputsNotKept):
        store.read(b"a", 8, 10)


def test_the_session_that_was_used_longest_ago_goes_first() -> None:
    store = BoundaryActivations(8 * ROW_BYTES)
    for name in SESSIONS[:2]:
        store.append(name, 0, 3, bytes(3 * ROW_BYTES))
    store.append(b"a", 3, 1, bytes(ROW_BYTES))
    store.append(b"c", 0, 3, bytes(3 * ROW_BYTES))
    assert [store.range(name) for name in SESSIONS] == [(0, 4), (0, 0), (0, 3)]
    assert store.num_evicted == 1
    with pytest.raises(OutputsNotKept):
        store.read(b"b", 0, 3)
