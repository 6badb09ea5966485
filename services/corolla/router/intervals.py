"""The intervals and time-outs of a router, which are the same in every deployment."""

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class RouterIntervals:
    """Intervals and time-outs in seconds.

    Attributes:
        relist_s: The time between two readings of an unchanged placement. The router hears of changes at once; this
            interval bounds how late it notices an expired lease, and is far shorter than a lease.
        read_whole_s: The time between two readings of a whole placement. In between, a router reads what changed.
        settle_s: How long all servers must be ready, and a move must be the best one, before the router orders the
            move. Servers that start together are ready within this time.
        between_moves_s: The time between a move and another one that only makes blocks faster. It is longer than most
            servers need to load their blocks, and doubles while the servers stay the same.
        return_s: The time within which a lost server is expected to have registered again. So long, no other one leaves
            blocks that it alone holds.
        takeover_s: The time between two looks for lost spans, while servers keep some of them in addition to their own.
        list_pods_s: The time after which the watched pods are listed anew, in case the watch missed a change.
        kubernetes_answer_s: How long an answer of the Kubernetes API may take.
        after_forbidden_s: The pause of a router that may not list pods before it tries again.
        after_failures_s: The pause after several failed writes to Kubernetes.
    """

    relist_s: float = 0.5
    read_whole_s: float = 5.0
    settle_s: float = 2.0
    between_moves_s: float = 60.0
    return_s: float = 60.0
    takeover_s: float = 0.1
    list_pods_s: float = 30.0
    kubernetes_answer_s: float = 5.0
    after_forbidden_s: float = 60.0
    after_failures_s: float = 30.0


USUAL_INTERVALS: Final = RouterIntervals()
