"""Pages that are guaranteed to a tenant are there for it, whatever other tenants hold."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from corolla.block_server.hop_session import OpenRequest
from corolla.block_server.page_guarantees import PageGuarantees
from corolla.block_server.sessions import SessionTable
from corolla.cache.pages import PagePool
from corolla.cache.prefixes import ExpectedText
from corolla.cache.session_pages import SessionPages
from corolla.cache.tables import GroupRule
from corolla.chassis.errors import OutOfPages
from corolla.wire.span import Span

NUM_PAGES, PAGE_TOKENS = 12, 4


def a_table(**guaranteed: int) -> SessionTable[SessionPages]:
    pool = PagePool(NUM_PAGES, PAGE_TOKENS)
    table = SessionTable(pool, lambda: SessionPages(pool, [GroupRule()]))
    table.guarantees = PageGuarantees(guaranteed, NUM_PAGES)
    return table


def a_request(tenant: str, name: str, num_pages: int, epoch: int = 1) -> OpenRequest:
    return OpenRequest(
        session_id=name.encode(), epoch=epoch, tenant=tenant, client_id=b"c" * 16, resume=True,
        max_tokens=num_pages * PAGE_TOKENS, blocks=Span(0, 2), lease_s=10.0, transient=False,
    )  # fmt: skip


def test_others_fill_what_is_not_guaranteed_and_no_more() -> None:
    table = a_table(quiet=4)
    table.open(a_request("noisy", "n0", 6), 0.0)
    assert table.max_session_tokens == 2 * PAGE_TOKENS
    with pytest.raises(OutOfPages) as refused:
        table.open(a_request("noisy", "n1", 3), 0.0)
    assert refused.value.metadata == {"pages_needed": "3", "pages_free": "2"}
    table.open(a_request("noisy", "n1", 2), 0.0)
    assert (table.num_kept_pages, table.max_session_tokens) == (4, 0)
    for name in ("q0", "q1"):
        table.open(a_request("quiet", name, 2), 0.0)
    assert table.num_kept_pages == 0
    with pytest.raises(OutOfPages):
        table.open(a_request("quiet", "q2", 1), 0.0)


def test_a_tenant_may_hold_more_than_it_is_guaranteed_where_there_is_room() -> None:
    table = a_table(quiet=4, calm=3)
    table.open(a_request("quiet", "q0", 9), 0.0)
    with pytest.raises(OutOfPages):
        table.open(a_request("quiet", "q1", 1), 0.0)
    table.open(a_request("calm", "c0", 3), 0.0)


def test_what_a_tenant_holds_of_its_own_it_opens_again() -> None:
    table = a_table(quiet=4)
    table.open(a_request("noisy", "n0", 8), 0.0)
    table.open(a_request("noisy", "n0", 8, epoch=2), 0.0)
    table.guarantees = PageGuarantees({"quiet": 10}, NUM_PAGES)
    table.open(a_request("noisy", "n0", 8, epoch=3), 0.0)
    with pytest.raises(OutOfPages):
        table.open(a_request("noisy", "n0", 9, epoch=4), 0.0)


def test_a_tenant_is_charged_once_for_what_its_sessions_share() -> None:
    """Until the last one has left that is not idle."""
    table = a_table(quiet=6)
    text = ExpectedText(b"quiet", tuple(bytes([number]) * 16 for number in range(4)), 4 * PAGE_TOKENS + 1)

    def opened(name: str, epoch: int = 1) -> None:
        request = replace(a_request("quiet", name, 5, epoch), text=text, write_start=text.num_tokens)
        cache = table.open(request, 0.0).cache
        position, num_more = cache.num_tokens, 4 * PAGE_TOKENS - cache.num_tokens
        if num_more:
            cache.make_writable(position, num_more)
            cache.commit(4 * PAGE_TOKENS)

    opened("q0")
    assert table.num_kept_pages == 1
    opened("q1")
    assert (table.num_kept_pages, table.pool.num_available) == (0, 6)
    table.open(a_request("noisy", "n0", 6), 0.0)
    with pytest.raises(OutOfPages):
        opened("q2")
    table.truncate(b"q0", 1, 4 * PAGE_TOKENS, idle=True)
    assert (table.num_kept_pages, table.num_available_pages) == (1, 1)
    table.end(b"q1", 1)
    assert (table.num_kept_pages, table.num_available_pages) == (6, 6)
    opened("q0", 2)
    assert (table.num_kept_pages, table.num_available_pages) == (1, 1)


def test_an_idle_session_is_no_part_of_what_its_tenant_holds() -> None:
    table = a_table(quiet=4)
    table.open(a_request("quiet", "q0", 4), 0.0)
    table.truncate(b"q0", 1, 0, idle=True)
    table.open(a_request("noisy", "n0", 8), 0.0)
    with pytest.raises(OutOfPages):
        table.open(a_request("noisy", "n1", 1), 0.0)
    table.open(a_request("quiet", "q1", 4), 0.0)


def test_where_there_are_too_few_pages_each_has_its_part() -> None:
    guarantees = PageGuarantees({"a": 12, "b": 6}, NUM_PAGES)
    assert guarantees.num_missing == 6
    assert guarantees.num_kept({}) == 12
    assert guarantees.num_kept({"a": 8}) == 4


TENANTS = ("quiet", "calm", "noisy", "loud")
GUARANTEED = {"quiet": 4, "calm": 3}
ACTS = st.lists(
    st.tuples(st.sampled_from(TENANTS), st.integers(0, 5), st.integers(1, 9), st.sampled_from(["open", "park", "end"])),
    max_size=40,
)


@given(ACTS)
def test_within_its_guarantee_no_tenant_is_ever_refused(acts: list[tuple[str, int, int, str]]) -> None:
    table = a_table(**GUARANTEED)
    epochs: dict[bytes, int] = {}
    for tenant, number, num_pages, act in acts:
        name = f"{tenant}{number}".encode()
        epoch = epochs[name] = epochs.get(name, 0) + 1
        if act == "end":
            table.end(name, epoch)
        elif act == "park":
            table.truncate(name, epoch, 0, idle=True)
        else:
            held = sum(
                each.num_pages
                for each in table
                if each.request.tenant == tenant and each.request.session_id != name and not each.is_idle
            )
            try:
                table.open(a_request(tenant, name.decode(), num_pages, epoch), 0.0)
            except OutOfPages:
                assert held + num_pages > GUARANTEED.get(tenant, 0)
        assert table.num_available_pages >= table.num_kept_pages
