"""Counts in the store what tenants use of their quotas, for all client services together."""

from typing import Final

from corolla.chassis.errors import InvalidRequest, QuotaExceeded
from corolla.router import validation
from corolla.router.store import Store
from corolla.v1 import router_pb2 as pb

MOST_TAKES: Final = 1024
MOST_USES: Final = 16
MOST_AMOUNT: Final = 10**12
MOST_LEASE_MS: Final = 600_000
MOST_PERIOD_MS: Final = 24 * 3600 * 1000


class Quotas:
    """The tenants' quotas, counted in the store. Methods raise StoreUnavailable when Redis does not answer."""

    def __init__(self, store: Store) -> None:
        self._store = store

    async def take(self, request: pb.TakeQuotasRequest) -> int:
        """Counts all takes, in order, and returns the number of client services with a take in the last minute.

        Raises:
            QuotaExceeded: A take does not fit. That take and those after it are not counted.
        """
        num_takers = 1
        for each in request.takes:
            uses = [
                value
                for use in each.uses
                for value in (use.quota, use.amount, use.limit, use.period_ms, int(use.must_fit))
            ]
            kind, *facts = await self._store.call(
                "take_quotas", request.model, each.tenant, each.request_id, request.taker_id, each.lease_ms, *uses
            )
            if kind == b"quota":
                raise QuotaExceeded.of(facts[0].decode(), int(facts[1]) / 1000)
            num_takers = int(facts[0])
        return num_takers


def checked(request: pb.TakeQuotasRequest) -> pb.TakeQuotasRequest:
    """Returns the request if it is valid, else raises InvalidRequest."""
    validation.check_text("model", request.model)
    validation.check_name("taker_id", request.taker_id)
    if len(request.takes) > MOST_TAKES:
        raise InvalidRequest("takes", f"has {len(request.takes)}; at most {MOST_TAKES} are accepted")
    for take in request.takes:
        validation.check_text("takes.tenant", take.tenant)
        validation.check_name("takes.request_id", take.request_id)
        validation.check_duration("takes.lease_ms", take.lease_ms, MOST_LEASE_MS, 0)
        if len(take.uses) > MOST_USES:
            raise InvalidRequest("takes.uses", f"has {len(take.uses)}; at most {MOST_USES} are accepted")
        for use in take.uses:
            validation.check_name("takes.uses.quota", use.quota)
            validation.check_duration("takes.uses.period_ms", use.period_ms, MOST_PERIOD_MS, 0)
            if not (use.amount <= MOST_AMOUNT and 1 <= use.limit <= MOST_AMOUNT):
                raise InvalidRequest(
                    "takes.uses", f"must have amounts and limits of at most {MOST_AMOUNT}, and no limit of 0"
                )
    return request
