"""The router's metrics."""

import collections
from functools import partial
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from corolla.planning.losses import loss_seconds
from corolla.router.roster import Roster
from corolla.v1 import router_pb2 as pb

SCRIPT_BUCKETS: Final = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0)
MOVE_REASONS: Final = ("covers", "faster")
_STATES: Final = {
    pb.SERVER_STATE_JOINING: "joining",
    pb.SERVER_STATE_READY: "ready",
    pb.SERVER_STATE_DRAINING: "draining",
}


class RouterMetrics:
    """The router's metrics. Gauges show the store's state as this router last read it, so all routers show the same."""

    def __init__(self, registry: CollectorRegistry) -> None:
        counter, gauge = partial(Counter, registry=registry), partial(Gauge, registry=registry)
        histogram = partial(Histogram, registry=registry)
        self._ready_replicas = gauge(
            "corolla_span_ready_replicas", "Ready block servers by the span that they hold.", ["model", "span"]
        )
        self._uncovered_blocks = gauge(
            "corolla_uncovered_blocks", "Blocks of the model without a ready block server.", ["model"]
        )
        self._single_copy_blocks = gauge(
            "corolla_single_copy_blocks", "Blocks of the model that one ready block server alone holds.", ["model"]
        )
        self._slowest_block = gauge(
            "corolla_slowest_block_tokens_per_second",
            "Tokens per second that the ready servers of the slowest block can decode, as they measured themselves.",
            ["model"],
        )
        self._span_loss = gauge(
            "corolla_span_loss_seconds",
            "Seconds for which other servers would compute if a block server of the span were lost now, at most; +Inf "
            "where blocks have no other server.",
            ["model", "span"],
        )
        self._moves = counter(
            "corolla_moves_ordered",
            "Moves of block servers to other spans that this router ordered: to cover blocks that had no server, or "
            "(`faster`) to make pairs of one kind and the slowest block faster.",
            ["model", "reason"],
        )
        self._servers = gauge("corolla_registered_servers", "Block servers with a lease, by state.", ["model", "state"])
        self._sessions = gauge("corolla_sessions", "Session records in the store.", ["model"])
        self.store_up = gauge("corolla_store_up", "1 while Redis answers and has room, else 0.")
        self.unreadable_records = counter(
            "corolla_unreadable_records",
            "Attempts to read a corrupt record in Redis, which is then skipped, by kind: server, order (to move), "
            "model (a name), key (a whole one), adapter.",
            ["model", "kind"],
        )
        self.script_seconds = histogram(
            "corolla_redis_script_seconds",
            "Duration of a Redis script in seconds, failed ones included.",
            ["script"],
            buckets=SCRIPT_BUCKETS,
        )
        self.pod_watch_up = gauge(
            "corolla_pod_watch_up",
            "1 while this router knows the states of its block servers' pods from Kubernetes, else 0.",
        )
        self.kubernetes_calls = counter(
            "corolla_kubernetes_calls",
            "Calls of the Kubernetes API, by call (list, watch, patch, event) and outcome (ok, forbidden, failed).",
            ["call", "outcome"],
        )
        self._spans: dict[str, set[str]] = {}

    def move_ordered(self, model: str, *, covers: bool) -> None:
        self._moves.labels(model, MOVE_REASONS[0] if covers else MOVE_REASONS[1]).inc()

    def observe(self, roster: Roster, num_sessions: int) -> None:
        """Shows one model's placement and number of sessions. A span without replicas stays, at zero."""
        model = roster.model
        ready = collections.Counter(
            f"{each.span.start}:{each.span.end}" for each in roster.servers if each.state == pb.SERVER_STATE_READY
        )
        seconds = loss_seconds(roster.servers)
        worst: dict[str, float] = {}
        for each in roster.servers:
            span = f"{each.span.start}:{each.span.end}"
            worst[span] = max(worst.get(span, 0.0), seconds.get(each.server.server_id, 0.0))
        spans = self._spans.setdefault(model, set())
        spans.update(ready)
        for span in spans:
            self._ready_replicas.labels(model, span).set(ready[span])
            self._span_loss.labels(model, span).set(worst.get(span, 0.0))
        states = collections.Counter(each.state for each in roster.servers)
        for state, name in _STATES.items():
            self._servers.labels(model, name).set(states[state])
        self._uncovered_blocks.labels(model).set(sum(map(len, roster.uncovered)))
        self._single_copy_blocks.labels(model).set(roster.num_single_copy_blocks())
        self._slowest_block.labels(model).set(roster.slowest_block_tokens_per_second())
        self._sessions.labels(model).set(num_sessions)
        for reason in MOVE_REASONS:
            self._moves.labels(model, reason)

    def forget(self, model: str) -> None:
        """Drops the gauges of a model that the store no longer knows."""
        for span in self._spans.pop(model, set()):
            self._ready_replicas.remove(model, span)
            self._span_loss.remove(model, span)
        for name in _STATES.values():
            self._servers.remove(model, name)
        for gauge in (self._uncovered_blocks, self._single_copy_blocks, self._slowest_block, self._sessions):
            gauge.remove(model)
