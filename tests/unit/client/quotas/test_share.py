"""What a client service enforces by itself while no router counts."""

import asyncio
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from corolla.chassis.errors import QuotaExceeded
from corolla.client.generation.admission import RequestCounts
from corolla.client.metrics import ClientMetrics
from corolla.client.quotas.enforcer import QuotaEnforcer
from corolla.client.quotas.share import StaticShare
from corolla.v1 import router_pb2 as pb


def flow(amount: int, limit: int = 10, *, must_fit: bool = True) -> pb.QuotaUse:
    """A use of a limit that comes anew each second."""
    return pb.QuotaUse(quota="flow", amount=amount, limit=limit, must_fit=must_fit, period_ms=1000)


def hold(amount: int, limit: int = 10) -> pb.QuotaUse:
    return pb.QuotaUse(quota="hold", amount=amount, limit=limit, must_fit=True)


class Share(StaticShare):
    def short_of(
        self, tenant: str, uses: Sequence[pb.QuotaUse], held: Mapping[str, int], now_s: float, num_services: int
    ) -> tuple[str, float | None] | None:
        """The quota of which there is too little, and when there may be enough."""
        try:
            self.take(tenant, uses, held, now_s, num_services)
        except QuotaExceeded as refusal:
            return refusal.metadata["quota"], refusal.retry_after_s
        return None


def test_what_flows_is_counted_until_its_window_ends() -> None:
    share = Share()
    assert [share.short_of("t", [flow(4)], {}, 5.25, 1) for _ in range(3)] == [None, None, ("flow", 0.75)]
    assert share.short_of("t", [flow(2)], {}, 5.75, 1) is None
    assert share.short_of("t", [flow(10)], {}, 6.0, 1) is None


def test_more_than_a_share_is_taken_from_an_unused_window() -> None:
    share = Share()
    assert share.short_of("t", [flow(25)], {}, 0.0, 1) is None
    assert share.short_of("t", [flow(1)], {}, 0.5, 1) == ("flow", 0.5)


def test_what_was_used_already_is_charged_in_any_case() -> None:
    share = Share()
    assert [share.short_of("t", [flow(30, must_fit=False)], {}, 0.0, 1) for _ in range(2)] == [None, None]
    assert share.short_of("t", [flow(1)], {}, 0.5, 1) == ("flow", 0.5)
    assert share.short_of("t", [flow(1)], {}, 1.0, 1) is None


def test_what_is_held_here_counts() -> None:
    share = Share()
    assert share.short_of("t", [hold(4)], {"hold": 6}, 0.0, 1) is None
    assert share.short_of("t", [hold(5)], {"hold": 6}, 0.0, 1) == ("hold", 1.0)
    assert share.short_of("t", [hold(11)], {}, 0.0, 1) == ("hold", 1.0)
    assert share.short_of("t", [hold(0)], {"hold": 12}, 0.0, 1) is None


def test_nothing_of_a_take_that_does_not_fit_is_counted() -> None:
    share = Share()
    assert share.short_of("t", [flow(10), hold(11)], {}, 0.0, 1) == ("hold", 1.0)
    assert share.short_of("t", [flow(10)], {}, 0.0, 1) is None


def test_tenants_and_quotas_do_not_take_from_each_other() -> None:
    share = Share()
    for tenant in "tu":
        assert (
            share.short_of(
                tenant,
                [flow(10), pb.QuotaUse(quota="other", amount=10, limit=10, must_fit=True, period_ms=1000)],
                {},
                0.0,
                1,
            )
            is None
        )


def test_a_share_is_a_part_of_the_limit_and_never_nothing() -> None:
    share = Share()
    assert share.short_of("t", [hold(5), flow(5)], {}, 0.0, 2) is None
    assert share.short_of("t", [hold(1)], {"hold": 5}, 0.0, 2) == ("hold", 1.0)
    assert share.short_of("t", [flow(1)], {}, 0.5, 2) == ("flow", 0.5)
    assert share.short_of("u", [hold(1, 2), flow(1, 2)], {}, 0.0, 30) is None


async def test_without_a_router_running_requests_hold_their_part_until_they_end(tmp_path: Path) -> None:
    limits = {"running_requests": 3, "reserved_tokens": 100}
    (tmp_path / "quotas").write_text(json.dumps({"default": limits}))
    enforcer = QuotaEnforcer(tmp_path / "quotas", ClientMetrics(CollectorRegistry()))

    async def ask(num_tokens: int, has_begun: asyncio.Event, may_end: asyncio.Event) -> None:
        async with enforcer.running("t", 1, RequestCounts()) as allowance:
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
