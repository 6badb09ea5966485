"""Computes how many pages a server keeps free for tenants with guaranteed pages. Pure."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

_NOBODY: Final[Mapping[str, int]] = MappingProxyType({})


class PageGuarantees:
    """The guaranteed pages of each tenant. Other tenants may only use the pages that exceed all guarantees.

    If the server has fewer pages than are guaranteed in all, each tenant gets a proportional part of them.

    Attributes:
        num_missing: how many guaranteed pages this server does not have.
    """

    def __init__(self, wanted: Mapping[str, int] = _NOBODY, num_pages: int = 0) -> None:
        num_wanted = sum(wanted.values())
        self.num_missing = max(0, num_wanted - num_pages)
        self._pages = (
            {tenant: each * num_pages // num_wanted for tenant, each in wanted.items()}
            if self.num_missing
            else dict(wanted)
        )

    def __bool__(self) -> bool:
        return bool(self._pages)

    def __contains__(self, tenant: str) -> bool:
        return tenant in self._pages

    def num_kept(self, held: Mapping[str, int]) -> int:
        """How many pages are kept free when tenants hold the pages in `held`."""
        return sum(max(0, each - held.get(tenant, 0)) for tenant, each in self._pages.items())

    def num_kept_from(self, tenant: str, held: Mapping[str, int]) -> int:
        """How many pages a tenant has to leave free for others; `held` includes the pages of its next session."""
        if held.get(tenant, 0) <= self._pages.get(tenant, 0):
            return 0
        return self.num_kept(held)
