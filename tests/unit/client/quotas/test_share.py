"""What a client service enforces by itself while no router counts."""

import asyncio
import json
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from corolla.chassis.errors import QuotaExceeded
from corolla.chassis.tenant_limits import Use
from corolla.client.generation.admission import Usage
from corolla.client.metrics import ClientMetrics
from corolla.client.quotas.keeper import QuotaKeeper
from corolla.client.quotas.share import Shortage, StaticShare


def flow(amount: int, limit: int = 10, *, must_fit: bool = True) -> Use:
    """A use of a limit that comes anew each second."""
    return Use("flow", amount, limit, must_fit, 1000)


def hold(amount: int, limit: int = 10) -> Use:
    return Use("hold", amount, limit, True, 0)


def test_what_flows_is_counted_until_its_window_ends() -> None:
    share = StaticShare()
    assert [share.take("t", [flow(4)], {}, 5.25, 1) for _ in range(3)] == [None, None, Shortage("flow", 0.75)]
    assert share.take("t", [flow(2)], {}, 5.75, 1) is None
    assert share.take("t", [flow(10)], {}, 6.0, 1) is None


def test_more_than_a_share_is_taken_from_an_unused_window() -> None:
    share = StaticShare()
    assert share.take("t", [flow(25)], {}, 0.0, 1) is None
    assert share.take("t", [flow(1)], {}, 0.5, 1) == Shortage("flow", 0.5)


def test_what_was_used_already_is_charged_in_any_case() -> None:
    share = StaticShare()
    assert [share.take("t", [flow(30, must_fit=False)], {}, 0.0, 1) for _ in range(2)] == [None, None]
    assert share.take("t", [flow(1)], {}, 0.5, 1) == Shortage("flow", 0.5)
    assert share.take("t", [flow(1)], {}, 1.0, 1) is None


def test_what_is_held_here_counts() -> None:
    share = StaticShare()
    assert share.take("t", [hold(4)], {"hold": 6}, 0.0, 1) is None
    assert share.take("t", [hold(5)], {"hold": 6}, 0.0, 1) == Shortage("hold", 0.0)
    assert share.take("t", [hold(11)], {}, 0.0, 1) == Shortage("hold", 0.0)
    assert share.take("t", [hold(0)], {"hold": 12}, 0.0, 1) is None


def test_nothing_of_a_take_that_does_not_fit_is_counted() -> None:
    share = StaticShare()
    assert share.take("t", [flow(10), hold(11)], {}, 0.0, 1) == Shortage("hold", 0.0)
    assert share.take("t", [flow(10)], {}, 0.0, 1) is None


def test_tenants_and_quotas_do_not_take_from_each_other() -> None:
    share = StaticShare()
    for tenant in "tu":
        assert share.take(tenant, [flow(10), Use("other", 10, 10, True, 1000)], {}, 0.0, 1) is None


def test_a_share_is_a_part_of_the_limit_and_never_nothing() -> None:
    share = StaticShare()
    assert share.take("t", [hold(5), flow(5)], {}, 0.0, 2) is None
    assert share.take("t", [hold(1)], {"hold": 5}, 0.0, 2) == Shortage("hold", 0.0)
    assert share.take("t", [flow(1)], {}, 0.5, 2) == Shortage("flow", 0.5)
    assert share.take("u", [hold(1, 2), flow(1, 2)], {}, 0.0, 30) is None


async def test_without_a_router_running_requests_hold_their_part_until_they_end(tmp_path: Path) -> None:
    limits = {"running_requests": 3, "reserved_tokens": 100}
    (tmp_path / "quotas").write_text(json.dumps({"default": limits}))
    keeper = QuotaKeeper(tmp_path / "quotas", ClientMetrics(CollectorRegistry()))

    async def ask(num_tokens: int, has_begun: asyncio.Event, may_end: asyncio.Event) -> None:
        async with keeper.running("t", 1, Usage()) as allowance:
            await allowance.take_prompt(1, num_tokens)
            has_begun.set()
            await may_end.wait()

    first_begun, first_ends, later = asyncio.Event(), asyncio.Event(), asyncio.Event()
    later.set()
    first = asyncio.create_task(ask(60, first_begun, first_ends))
    await first_begun.wait()
    await ask(40, asyncio.Event(), later)
    with pytest.raises(QuotaExceeded, match="reserved_tokens"):
        await ask(41, asyncio.Event(), later)
    first_ends.set()
    await first
    await ask(100, asyncio.Event(), later)
