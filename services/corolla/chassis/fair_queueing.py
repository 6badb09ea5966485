"""Start-time fair queueing (Goyal, Vin, Cheng: "Start-time Fair Queuing", 1996) between tenants. Pure."""


class FairQueueing:
    """Gives each piece of work a stamp. The caller keeps the queue, and serves the lowest stamp first.

    A stamp is a virtual time, in units of service (the start tag of the paper). A tenant's next piece starts where its
    previous piece ends, but not before the stamp that is served at present. So while two tenants both wait, the service
    that they get differs by at most the longest piece of one plus the longest piece of the other. A tenant that was
    idle comes back with neither debts nor credit.
    """

    def __init__(self) -> None:
        self._present = 0
        self._ends: dict[str, int] = {}

    def start(self, tenant: str) -> int:
        """Returns the stamp that the tenant's next piece will have."""
        return max(self._present, self._ends.get(tenant, 0))

    def stamp(self, tenant: str, amount: int) -> int:
        """Returns the stamp of a piece with this amount of service; the tenant's later pieces come after it."""
        start = self.start(tenant)
        self._ends[tenant] = start + amount
        return start

    def serve(self, stamp: int) -> None:
        """Records that the piece with this stamp is served now, and forgets tenants whose pieces have all ended."""
        if stamp > self._present:
            self._present = stamp
            self._ends = {tenant: end for tenant, end in self._ends.items() if end > stamp}
