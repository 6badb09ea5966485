"""How often a router looks, and how long it waits: what every deployment has alike."""

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class RouterPace:
    """All in seconds.

    Attributes:
        relist_s: between two readings of a placement of which nothing is heard. Changes are heard at once; this bounds
            how late a lease that ran out is noticed, and is far shorter than a lease.
        settle_s: for which all servers must be ready, and a move the best one, before it is ordered: as long as servers
            that start together differ.
        between_moves_s: after a move until another one that only makes blocks faster, longer than most servers load
            their blocks; it doubles while the servers stay.
        list_pods_s: until the watched pods are listed anew, should the watch have missed something.
        kubernetes_answer_s: for an answer of the Kubernetes API.
        after_forbidden_s: before pods are listed again by a router that may not list them.
        after_failures_s: before something is written to Kubernetes again after several failures.
    """

    relist_s: float = 0.5
    settle_s: float = 2.0
    between_moves_s: float = 60.0
    list_pods_s: float = 30.0
    kubernetes_answer_s: float = 5.0
    after_forbidden_s: float = 60.0
    after_failures_s: float = 30.0


USUAL_PACE: Final = RouterPace()
