"""The metrics of a block server."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from corolla.chassis.errors import NonFiniteOutput, OutOfMemory, StepFailed
from corolla.chassis.metrics import BATCH_ROWS_BUCKETS, STEP_BUCKETS, GrammarMetrics
from corolla.compute.device_memory import DEVICE_MEMORY_USES
from corolla.compute.memory_bound import MemoryBound

DIRECTIONS: Final = ("in", "out")
STEP_KINDS: Final = ("decode", "prefill")
OUTCOMES: Final = ("moved", "refused", "failed", "no_peer")


class StandbyMetrics:
    """Metrics of sessions that are copied to standbys, and of those that this server holds as a standby."""

    def __init__(self, registry: CollectorRegistry) -> None:
        counter, gauge = partial(Counter, registry=registry), partial(Gauge, registry=registry)
        self.bytes = counter(
            "corolla_standby_bytes",
            "Bytes of keys and values that were copied to standbys, by direction (in, out).",
            ["direction"],
        )
        for direction in DIRECTIONS:
            self.bytes.labels(direction)
        self.state_bytes = counter(
            "corolla_standby_state_bytes", "Bytes of recurrent states among those that this server copied to standbys."
        )
        self.running = gauge(
            "corolla_hop_running_sessions",
            "Sessions of this server in mid-answer, by whether a standby holds their texts (yes, no).",
            ["standby"],
        )
        self.lag = gauge(
            "corolla_standby_lag_tokens", "The most tokens that a standby lacks of a session of this server."
        )
        self.hits = counter(
            "corolla_standby_hits",
            "Tokens that sessions found on this server because another one had copied them here, as to its standby or "
            "because it held the beginning of the text.",
        )

    def observe(self, num_running: int, lags: Sequence[int]) -> None:
        """Sets the gauges.

        Args:
            lags: how many tokens its standby lacks of each session that has one.
        """
        self.running.labels("yes").set(len(lags))
        self.running.labels("no").set(max(0, num_running - len(lags)))
        self.lag.set(max(lags, default=0))


class BlockServerMetrics:
    """Metrics of pages, sessions and steps. No label names a session or a request.

    Attributes:
        bound: the least time of iterations by what they read; None: it is not known.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        self._exported: dict[Counter, int] = {}
        counter, gauge = partial(Counter, registry=registry), partial(Gauge, registry=registry)
        histogram = partial(Histogram, registry=registry)
        self.bound: MemoryBound | None = None
        self.sessions = gauge("corolla_hop_sessions", "Sessions held by this server.")
        self.pages = gauge(
            "corolla_kv_pages",
            "KV pages by state: used by sessions, reserved for them, cached (no session uses them now; they hold "
            "beginnings of texts, and sessions may get them), free.",
            ["state"],
        )
        self.guaranteed_pages = gauge(
            "corolla_kv_guaranteed_pages",
            "KV pages that are guaranteed to tenants, by state: kept (reserved for tenants that use less than their "
            "guarantee), missing (guaranteed beyond what this server has).",
            ["state"],
        )
        self.usage = gauge(
            "corolla_kv_cache_usage_ratio", "Share of the KV pages that sessions use or have reserved, 0 to 1."
        )
        self.prefix_queries = counter(
            "corolla_prefix_cache_queries", "Tokens that sessions looked for in this server's prefix cache."
        )
        self.prefix_hits = counter(
            "corolla_prefix_cache_hits", "Tokens that sessions looked for in this server's prefix cache and found."
        )
        self.host_hits = counter(
            "corolla_host_cache_hits",
            "Tokens of evicted texts that came back from the memory of the machine for a session; they are among "
            "corolla_prefix_cache_hits_total.",
        )
        self.device_memory = gauge(
            "corolla_device_memory_bytes",
            "Bytes of the GPU's memory by use: weights, pages (keys and values), recordings (of decode steps), "
            "workspace (tensors of steps, adapters), other (driver, libraries, other processes), free. Only servers on "
            "a GPU have this; process_resident_memory_bytes has the machine's memory.",
            ["use"],
        )
        self.numerics = gauge(
            "corolla_numerics_info",
            "1, with the digest of how this server computes: device kind, dtype, versions and kernels.",
            ["digest"],
        )
        self.waiting = gauge("corolla_num_steps_waiting", "Steps queued for the next iterations.")
        self.ring_waiting = gauge(
            "corolla_num_ring_rows_waiting",
            "Rows that came back from the last hop and wait at this first hop for a microbatch; normal on busy chains.",
        )
        step_seconds = histogram(
            "corolla_hop_step_seconds",
            "Duration of one iteration on this server in seconds, by kind (decode, prefill).",
            ["kind"],
            buckets=STEP_BUCKETS,
        )
        # The labelled metrics are looked up once, since each iteration uses them.
        self.step_seconds = {kind: step_seconds.labels(kind) for kind in STEP_KINDS}
        self.memory_bound_seconds = counter(
            "corolla_hop_memory_bound_seconds",
            "Seconds that the iterations would have taken if they only read all weights once and the keys and values "
            "of their rows, at the bandwidth that was measured at start, by kind (decode, prefill). Only servers on a "
            "GPU have this.",
            ["kind"],
        )
        self.edge_seconds = counter(
            "corolla_edge_compute_seconds", "Seconds of iterations spent on embedding, head and choice of tokens."
        )
        self.grammars = GrammarMetrics(registry, "corolla_hop_grammar")
        self.batch_rows = histogram(
            "corolla_hop_batch_rows", "Rows computed together in one iteration.", buckets=BATCH_ROWS_BUCKETS
        )
        tokens = counter("corolla_hop_tokens", "Tokens computed, by kind (decode, prefill).", ["kind"])
        self.tokens = {kind: tokens.labels(kind) for kind in STEP_KINDS}
        self.faults = counter("corolla_hop_faults", "Rows refused or failed, by reason.", ["reason"])
        # An alert sees that a series grows, but not that it appears. So the series of these errors exist at once.
        for error in (NonFiniteOutput, StepFailed, OutOfMemory):
            self.faults.labels(error.reason)
        self.split_iterations = counter(
            "corolla_hop_split_iterations",
            "Iterations that failed and were computed again row by row, so that only bad rows fail.",
        )
        self.invariant_violations = counter(
            "corolla_hop_invariant_violations",
            "How often this server's tables contradicted each other while it was idle, by invariant: each is a bug.",
            ["invariant"],
        )
        self.expired = counter("corolla_hop_sessions_expired", "Sessions freed because their lease ran out.")
        self.boundary_activation_bytes = gauge(
            "corolla_boundary_activation_bytes", "Bytes of outputs kept to rebuild a lost next hop."
        )
        self.spare_bytes = gauge(
            "corolla_spare_weights_bytes", "Bytes of weights of other servers' spans that this server keeps."
        )
        self.resent_tokens = counter("corolla_hop_resent_tokens", "Tokens whose boundary activations were sent again.")
        self.outputs_evicted = counter(
            "corolla_boundary_activations_evicted",
            "Sessions whose boundary activations were dropped to make room for other sessions.",
        )
        self.handover_bytes = counter(
            "corolla_handover_bytes",
            "Bytes of keys and values that were handed over, by direction (in, out).",
            ["direction"],
        )
        for direction in DIRECTIONS:
            self.handover_bytes.labels(direction)
        self.standbys = StandbyMetrics(registry)
        self.handed_over = counter(
            "corolla_sessions_handed_over",
            "Attempts to hand a session over, by outcome: moved, refused (by every peer), failed, no_peer.",
            ["outcome"],
        )
        for outcome in OUTCOMES:
            self.handed_over.labels(outcome)
        self.evicted = counter("corolla_hop_sessions_evicted", "Idle sessions freed to make room for others.")

    def follow_device(self, by_use: Callable[[], Mapping[str, int]], bound: MemoryBound) -> None:
        """Begins the metrics of a device with memory of its own; on CPUs they are absent.

        Args:
            by_use: the bytes of each of `DEVICE_MEMORY_USES`; each look at the metrics calls it.
            bound: the least time of iterations.
        """
        self.bound = bound
        for kind in STEP_KINDS:
            self.memory_bound_seconds.labels(kind)
        for use in DEVICE_MEMORY_USES:
            self.device_memory.labels(use).set_function(lambda use=use: by_use()[use])  # type: ignore[misc]

    def count_to(self, counter: Counter, total: int) -> None:
        """Raises a counter to a total that another object counts."""
        counter.inc(total - self._exported.get(counter, 0))
        self._exported[counter] = total
