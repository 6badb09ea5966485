"""Counts in the store what tenants use of their quotas, for all client services together."""

from corolla.chassis.errors import QuotaExceeded
from corolla.router.store import Store
from corolla.v1 import router_pb2 as pb


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
                raise QuotaExceeded.used_up(facts[0].decode(), int(facts[1]) / 1000)
            num_takers = int(facts[0])
        return num_takers
