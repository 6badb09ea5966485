"""The budget for the bytes of requests and replies, and how tenants share it."""

from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import pytest

from corolla.chassis.audit import ANONYMOUS_CALLER
from corolla.chassis.errors import QueueFull, ShareExceeded
from corolla.client.held_bytes import HeldBytes, Holding


def held_by(budget: HeldBytes, tenant: str | None) -> Holding:
    call: Any = SimpleNamespace(caller=ANONYMOUS_CALLER if tenant is None else SimpleNamespace(tenant=tenant))
    return budget.hold(call)


def test_requests_and_replies_are_counted_together_and_replies_are_never_refused() -> None:
    budget = HeldBytes(100)
    with held_by(budget, "ada") as first:
        first.take(60)
        with held_by(budget, None) as second:
            with pytest.raises(QueueFull):
                second.take(41)
            second.take(40)
            second.add_reply(500)
        for tenant in ("ada", "bob"):
            with pytest.raises(QueueFull):
                held_by(budget, tenant).take(41)
        first.let_go()
        first.take(100)
    held_by(budget, "bob").take(100)


def test_a_reply_that_was_expected_counts_once() -> None:
    budget = HeldBytes(100)
    reply = held_by(budget, "ada")
    reply.expect_reply(50)
    with pytest.raises(QueueFull):
        held_by(budget, "ada").expect_reply(51)
    for _ in range(2):
        reply.add_reply(30)
    request = held_by(budget, "ada")
    request.take(40)
    reply.let_go()
    request.take(60)


def test_no_tenant_holds_more_than_stays_free_where_there_may_be_several() -> None:
    budget, holdings = HeldBytes(1200, lambda: 2), dict[str, Holding]()
    for tenant in ("ada", "bob", "cyd"):
        holding = holdings[tenant] = held_by(budget, tenant)
        with suppress(QueueFull):
            while True:
                holding.take(1)
    found = {tenant: each.num_bytes for tenant, each in holdings.items()}
    assert found == {"ada": 600, "bob": 300, "cyd": 150}
    # The one that has more than its share is to blame; the others met a full service.
    for tenant, kind in (("ada", ShareExceeded), ("bob", QueueFull), ("cyd", QueueFull)):
        with pytest.raises(QueueFull) as refused:
            holdings[tenant].take(1)
        assert type(refused.value) is kind
    holdings["ada"].let_go()
    holdings["cyd"].take(150)
