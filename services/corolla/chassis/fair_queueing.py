"""Start-time fair queueing (Goyal, Vin, Cheng: "Start-time Fair Queuing", 1996) between tenants. Pure."""


class FairQueueing:
    """Says when tenants are due. The caller keeps the line, and serves the lowest stamp first.

    A stamp is the service, in whatever unit, after which a tenant is due: where what it asked for before ends, but not
    before what is served at present. So over any time in which two tenants both wait, what they get differs by no more
    than the longest piece of each together; and a tenant that was away comes back without debts or savings.
    """

    def __init__(self) -> None:
        self._present = 0
        self._ends: dict[str, int] = {}

    def start(self, tenant: str) -> int:
        """The stamp that the tenant's next piece will have."""
        return max(self._present, self._ends.get(tenant, 0))

    def stamp(self, tenant: str, amount: int) -> int:
        """When a piece of service of this amount is due; what the tenant asks for later is due after it."""
        start = self.start(tenant)
        self._ends[tenant] = start + amount
        return start

    def serve(self, stamp: int) -> None:
        """A piece of this stamp is served now. Tenants with nothing due any more are forgotten."""
        if stamp > self._present:
            self._present = stamp
            self._ends = {tenant: end for tenant, end in self._ends.items() if end > stamp}
