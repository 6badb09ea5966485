"""What a client service enforces by itself while no router counts."""

import asyncio
import contextlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry

from corolla.chain.control import ControlPlane
from corolla.chassis.errors import (
    CorollaError,
    InvalidRequest,
    QuotaExceeded,
    RoleDenied,
    RouterUnavailable,
    StoreUnavailable,
)
from corolla.client.metrics import ClientMetrics
from corolla.client.quotas.enforcer import QuotaEnforcer
from corolla.client.quotas.share import StaticShare
from corolla.router.validation import check
from corolla.v1 import router_pb2 as pb
from corolla.v1.generation_pb2 import Usage
from corolla.wire.frames import is_tenant_name


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
    share, other = Share(), flow(10)
    other.quota = "other"
    assert [share.short_of(tenant, [flow(10), other], {}, 0.0, 1) for tenant in "tu"] == [None, None]


def test_a_share_is_a_part_of_the_limit_and_never_nothing() -> None:
    share = Share()
    assert share.short_of("t", [hold(5), flow(5)], {}, 0.0, 2) is None
    assert share.short_of("t", [hold(1)], {"hold": 5}, 0.0, 2) == ("hold", 1.0)
    assert share.short_of("t", [flow(1)], {}, 0.5, 2) == ("flow", 0.5)
    assert share.short_of("u", [hold(1, 2), flow(1, 2)], {}, 0.0, 30) is None


async def test_without_a_router_running_requests_hold_their_part_until_they_end(tmp_path: Path) -> None:
    """Before a router has ever said how many share a limit, this one takes an eighth."""
    limits = {"running_requests": 8 * 3, "reserved_tokens": 8 * 100}
    (tmp_path / "quotas").write_text(json.dumps({"default": limits}))
    enforcer = QuotaEnforcer(tmp_path / "quotas", ClientMetrics(CollectorRegistry()))

    async def ask(num_tokens: int, has_begun: asyncio.Event, may_end: asyncio.Event) -> None:
        async with enforcer.running("t", 1, Usage()) as allowance:
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


class _Router(ControlPlane):
    """Refuses takes of one tenant, and counts those of the others."""

    def __init__(self, refusal: CorollaError) -> None:
        self.model = "m"
        self.refusal = refusal
        self.counted: list[str] = []
        self.num_calls = 0

    async def take_quotas(self, request: pb.TakeQuotasRequest, timeout_s: float) -> pb.TakeQuotasResponse:
        self.num_calls += 1
        names = [each.tenant for each in request.takes]
        if "refused" in names:
            raise self.refusal
        self.counted += names
        return pb.TakeQuotasResponse(num_takers=1)


@pytest.mark.parametrize(
    "refusal, is_outage",
    [
        (InvalidRequest("takes.tenant", "has characters that cannot be printed"), False),
        (QuotaExceeded.used_up("requests_per_second", 1.0), False),
        (RouterUnavailable("no router answers"), True),
        (StoreUnavailable("the store does not answer"), True),
        (RoleDenied("not this role"), True),
    ],
)
async def test_what_a_router_refuses_of_one_tenant_is_no_outage_for_others(
    tmp_path: Path, refusal: CorollaError, is_outage: bool
) -> None:
    (tmp_path / "quotas").write_text(json.dumps({"default": {"requests_per_second": 80, "running_requests": 80}}))
    enforcer, router = QuotaEnforcer(tmp_path / "quotas", ClientMetrics(CollectorRegistry())), _Router(refusal)
    enforcer.start(router)
    if is_outage:
        await enforcer.check_request("refused")
    else:
        with pytest.raises(type(refusal)):
            await enforcer.check_request("refused")
    await enforcer.check_request("other")
    assert router.counted == [] if is_outage else ["other"]
    if not is_outage:
        # Ended requests are reported together; the refused one does not take the others with it.
        async with enforcer.running("other", 1, Usage()):
            with contextlib.suppress(CorollaError):
                async with enforcer.running("refused", 1, Usage()):
                    pass
        await enforcer.settle()
        num_calls = router.num_calls
        await enforcer.settle()
        assert router.num_calls == num_calls


@given(st.text(max_size=300))
def test_routers_and_block_servers_accept_the_tenants_that_may_call(name: str) -> None:
    take = pb.QuotaTake(tenant=name, request_id="r", lease_ms=1)
    try:
        check(pb.TakeQuotasRequest(model="m", taker_id="t", takes=[take]))
    except InvalidRequest:
        assert not is_tenant_name(name)
    else:
        assert is_tenant_name(name)
