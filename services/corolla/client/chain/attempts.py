"""What earlier attempts to open a chain say of its servers. Pure."""

from collections.abc import Sequence
from typing import Final

from corolla.chassis.errors import HopUnavailable, OutOfPages
from corolla.v1 import common_pb2

_BREAKS_AT_ONCE_S: Final = 0.5


class Attempts:
    """The attempts of one request.

    Attributes:
        too_full: servers without room for it.
        failed: servers that are not asked again.
        broken: servers whose connection broke at once. The connection may be to blame, so each has a second attempt;
            one that is silent has none, since it would cost the caller as much time again.
    """

    def __init__(self) -> None:
        self.too_full: set[str] = set()
        self.failed: set[str] = set()
        self.broken: set[str] = set()

    def note(self, failures: Sequence[tuple[common_pb2.Hop, BaseException]], seconds: float) -> None:
        """What hops answered in one attempt.

        Args:
            seconds: that it took.
        """
        broke_before = frozenset(self.broken)
        for hop, failure in failures:
            if isinstance(failure, OutOfPages):
                self.too_full.add(hop.server_id)
            elif (
                isinstance(failure, HopUnavailable)
                and seconds < _BREAKS_AT_ONCE_S
                and hop.server_id not in broke_before
            ):
                self.broken.add(hop.server_id)
            else:
                self.failed.add(hop.server_id)
        self.broken -= self.failed

    def is_second(self, chain: common_pb2.Chain) -> bool:
        """Whether a hop of the chain has its second attempt."""
        return any(hop.server_id in self.broken for hop in chain.hops)
