"""Quotas of tenants, counted in the store: exactly, however many ask and however often a call is made again."""

import asyncio
from collections.abc import Sequence
from typing import Any

import grpc
import pytest

from corolla.router.validation import MOST_TAKES, MOST_USES
from corolla.v1 import router_pb2 as pb
from tests.integration.router.conftest import Clock, Router, StartRouter, refusal

LEASE_MS = 60_000
HOUR_MS = 3_600_000


def flow(amount: int, limit: int = 10, *, period_ms: int = HOUR_MS, must_fit: bool = True) -> pb.QuotaUse:
    return pb.QuotaUse(quota="flow", amount=amount, limit=limit, period_ms=period_ms, must_fit=must_fit)


def hold(amount: int, limit: int = 10, *, must_fit: bool = True) -> pb.QuotaUse:
    return pb.QuotaUse(quota="hold", amount=amount, limit=limit, must_fit=must_fit)


class Tenant:
    """One tenant's requests, by whichever router."""

    def __init__(self, router: Router, model: str, tenant: str = "t", taker_id: str = "c") -> None:
        self.router = router
        self.model = model
        self.tenant = tenant
        self.taker_id = taker_id

    async def take(self, request_id: str, *uses: pb.QuotaUse, lease_ms: int = LEASE_MS) -> int:
        take = pb.QuotaTake(tenant=self.tenant, request_id=request_id, lease_ms=lease_ms, uses=uses)
        request = pb.TakeQuotasRequest(model=self.model, taker_id=self.taker_id, takes=[take])
        return int((await self.router.stub.TakeQuotas(request, timeout=30)).num_takers)

    async def end(self, request_id: str) -> None:
        await self.take(request_id, lease_ms=0)

    async def refused(self, request_id: str, *uses: pb.QuotaUse) -> tuple[str, float]:
        """The quota that a take does not fit in, and after how long it is to be tried again."""
        error = await refusal(self.take(request_id, *uses))
        assert error.reason == "QUOTA_EXCEEDED"
        assert error.retry_after_s is not None
        return error.metadata["quota"], error.retry_after_s


@pytest.fixture
def tenant(router: Router, model: str) -> Tenant:
    return Tenant(router, model)


async def test_no_more_than_the_limit_however_many_ask_at_once(start_router: StartRouter, model: str) -> None:
    tenants = [Tenant(await start_router(), model, taker_id=str(number)) for number in range(3)]

    async def try_to_take(number: int) -> bool:
        try:
            await tenants[number % 3].take(f"r{number}", flow(1, 50), hold(1, 40))
        except grpc.aio.AioRpcError:
            return False
        return True

    assert sum(await asyncio.gather(*map(try_to_take, range(150)))) == 40
    assert await tenants[0].refused("more", flow(1, 50), hold(1, 40)) == ("hold", 1.0)
    assert (await tenants[1].refused("more", flow(11, 50)))[0] == "flow", "what was refused by one was counted by none"
    await tenants[2].take("more", flow(10, 50))


async def test_the_same_take_again_changes_nothing(tenant: Tenant) -> None:
    for _ in range(4):
        await tenant.take("a", flow(10), hold(10))
    await tenant.end("a")
    await tenant.end("a")
    await tenant.take("b", hold(10))
    await tenant.refused("b", flow(1))


async def test_amounts_are_sums(tenant: Tenant) -> None:
    await tenant.take("a", flow(4), hold(4))
    await tenant.take("a", flow(6), hold(6))
    await tenant.take("b", flow(4), hold(4))
    await tenant.refused("c", flow(1))
    await tenant.take("a", hold(3))
    await tenant.take("c", hold(3))


async def test_a_request_that_holds_nothing_of_a_quota_ends(tenant: Tenant) -> None:
    await tenant.take("a", hold(0))
    await tenant.end("a")
    await tenant.take("b", hold(10))


async def test_what_is_held_comes_back_when_nothing_more_is_heard(clock: Clock, tenant: Tenant) -> None:
    await tenant.take("a", hold(10), flow(10), lease_ms=4000)
    await clock.move(3999)
    await tenant.refused("b", hold(1))
    await clock.move(1)
    await tenant.take("b", hold(10))
    assert (await tenant.refused("b", flow(1)))[0] == "flow", "what flowed is gone"


async def test_a_lease_that_is_renewed_does_not_lapse(clock: Clock, tenant: Tenant) -> None:
    await tenant.take("a", hold(10), lease_ms=4000)
    await tenant.take("a", hold(10), lease_ms=LEASE_MS)
    await clock.move(LEASE_MS - 1)
    await tenant.refused("b", hold(1))


async def test_a_refusal_says_when_there_is_enough_again(clock: Clock, tenant: Tenant) -> None:
    await tenant.take("a", flow(10, period_ms=8000))
    assert await tenant.refused("b", flow(5, period_ms=8000)) == ("flow", 4.0)
    await clock.move(3999)
    assert await tenant.refused("b", flow(5, period_ms=8000)) == ("flow", 0.001)
    await clock.move(1)
    await tenant.take("b", flow(5, period_ms=8000))


async def test_what_was_used_already_is_charged_and_made_up_for(clock: Clock, tenant: Tenant) -> None:
    await tenant.take("a", flow(30, period_ms=10_000, must_fit=False))
    assert await tenant.refused("b", flow(1, period_ms=10_000)) == ("flow", 21.0)


async def test_tenants_and_models_do_not_take_from_each_other(router: Router, model: str) -> None:
    for each in (Tenant(router, model), Tenant(router, model, "u"), Tenant(router, model + "-2")):
        await each.take("a", flow(10), hold(10))


async def test_the_router_says_how_many_client_services_take(router: Router, model: str) -> None:
    assert await Tenant(router, model, "t", "one").take("a", hold(1)) == 1
    assert await Tenant(router, model, "u", "two").take("a", hold(1)) == 2
    assert await Tenant(router, model, "t", "one").take("b", hold(1)) == 2


async def test_a_batch_counts_up_to_the_take_that_does_not_fit(router: Router, model: str) -> None:
    takes = [
        pb.QuotaTake(tenant="t", request_id=name, lease_ms=LEASE_MS, uses=[hold(amount)])
        for name, amount in (("a", 4), ("b", 7), ("c", 1))
    ]
    request = pb.TakeQuotasRequest(model=model, taker_id="c", takes=takes)
    assert (await refusal(router.stub.TakeQuotas(request, timeout=30))).reason == "QUOTA_EXCEEDED"
    await Tenant(router, model).take("d", hold(6))
    await Tenant(router, model).refused("e", hold(1))


GOOD: dict[str, Any] = {"tenant": "t", "request_id": "r", "lease_ms": 1000}


@pytest.mark.parametrize(
    "takes, field",
    [
        ([{**GOOD, "tenant": ""}], "takes.tenant"),
        ([{**GOOD, "tenant": "t" * 257}], "takes.tenant"),
        ([{**GOOD, "request_id": "no spaces"}], "takes.request_id"),
        ([{**GOOD, "lease_ms": 600_001}], "takes.lease_ms"),
        ([{**GOOD, "uses": [flow(1, 0)]}], "takes.uses.limit"),
        ([{**GOOD, "uses": [flow(10**12 + 1)]}], "takes.uses.amount"),
        ([{**GOOD, "uses": [pb.QuotaUse(quota="", limit=1)]}], "takes.uses.quota"),
        ([{**GOOD, "uses": [hold(1)] * (MOST_USES + 1)}], "takes.uses"),
        ([GOOD] * (MOST_TAKES + 1), "takes"),
    ],
)
async def test_what_makes_no_sense_is_refused(
    router: Router, model: str, takes: Sequence[dict[str, Any]], field: str
) -> None:
    request = pb.TakeQuotasRequest(model=model, taker_id="c", takes=[pb.QuotaTake(**each) for each in takes])
    error = await refusal(router.stub.TakeQuotas(request, timeout=30))
    assert error.reason == "INVALID_REQUEST"
    assert error.message.startswith(f"{field}:")
