"""The metrics of a client service. Many names after `corolla_`, and the buckets, are vLLM's, to fit its dashboards."""

from enum import StrEnum
from functools import partial
from itertools import product
from typing import get_args

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from corolla.chain.quarantine import QuarantineCause
from corolla.chain.recovery_budget import CAUSES, METHODS, RecoveryReport
from corolla.chassis.errors import CorollaError
from corolla.chassis.metrics import (
    INTER_TOKEN_BUCKETS,
    RECOVERY_BUCKETS,
    REQUEST_BUCKETS,
    TIME_TO_FIRST_TOKEN_BUCKETS,
    TOKEN_COUNT_BUCKETS,
    GrammarMetrics,
)
from corolla.chassis.tenant_limits import QUOTAS


class RequestEnd(StrEnum):
    """How a request ends that has no finish reason."""

    DONE = "done"
    ABORT = "abort"
    REFUSED = "refused"
    ERROR = "error"

    @classmethod
    def from_failure(cls, failure: BaseException | None) -> "RequestEnd":
        """The end of a request that failed with an exception, or did not."""
        match failure:
            case None:
                return cls.DONE
            case CorollaError(is_callers_fault=True):
                return cls.REFUSED
            case Exception():
                return cls.ERROR
        # The caller left: its task was cancelled, or the generator of its answer was closed.
        return cls.ABORT


class ClientMetrics:
    """Metrics of requests and tokens. No label names a session, a request or a tenant."""

    def __init__(self, registry: CollectorRegistry) -> None:
        counter, gauge = partial(Counter, registry=registry), partial(Gauge, registry=registry)
        histogram = partial(Histogram, registry=registry)
        self.running = gauge("corolla_num_requests_running", "Answers being generated.")
        self.waiting = gauge("corolla_num_requests_waiting", "Answers that wait for their chain.")
        self.time_to_first_token = histogram(
            "corolla_time_to_first_token_seconds",
            "Time from the request to its first token, in seconds.",
            buckets=TIME_TO_FIRST_TOKEN_BUCKETS,
        )
        self.inter_token = histogram(
            "corolla_inter_token_latency_seconds",
            "Time between one token of an answer and the next, in seconds.",
            buckets=INTER_TOKEN_BUCKETS,
        )
        self.e2e = histogram(
            "corolla_e2e_request_latency_seconds",
            "Time from the request to the end of its answer, however it ends, in seconds.",
            buckets=REQUEST_BUCKETS,
        )
        self.prompt_tokens = counter("corolla_prompt_tokens", "Tokens of prompts.")
        self.generation_tokens = counter("corolla_generation_tokens", "Tokens of answers.")
        self.prompt_length = histogram(
            "corolla_request_prompt_tokens", "Tokens of a prompt.", buckets=TOKEN_COUNT_BUCKETS
        )
        self.cached_prompt_tokens = counter(
            "corolla_cached_prompt_tokens",
            "Tokens of prompts that all hops still held, from the session's earlier turns or from other texts with the "
            "same beginning, and did not compute.",
        )
        self.recomputed = counter(
            "corolla_recomputed_tokens",
            "Tokens of sessions that were processed again because a cache was lost, counted for each hop.",
        )
        self.drafted_tokens = counter("corolla_drafted_tokens", "Tokens drafted and checked by speculation.")
        self.accepted_tokens = counter(
            "corolla_accepted_draft_tokens", "Draft tokens that were right; each saved a step."
        )
        self.discarded_tokens = counter(
            "corolla_discarded_tokens",
            "Tokens that hops chose after their answer had ended by a stop sequence, a time limit or its caller, or "
            "chose again after a recovery.",
        )
        self.grammars = GrammarMetrics(registry, "corolla_grammar")
        self.success = counter(
            "corolla_request_success",
            "Answers by why they ended. abort: the caller left; refused, error: caller or service were at fault.",
            ["finished_reason"],
        )
        self.readings = counter(
            "corolla_readings",
            "Requests without an answer (embeddings, scores, prompts that are only echoed) by how they ended: done, "
            "abort, refused or error.",
            ["outcome"],
        )
        for end in RequestEnd:
            self.readings.labels(end)
            if end is not RequestEnd.DONE:
                self.success.labels(end)
        self.reading_seconds = histogram(
            "corolla_reading_seconds",
            "Time from a request without an answer to its end, in seconds.",
            buckets=REQUEST_BUCKETS,
        )
        self.quota_refusals = counter(
            "corolla_quota_refusals", "Requests refused because their tenant had used up a quota.", ["quota"]
        )
        for quota in QUOTAS:
            self.quota_refusals.labels(quota)
        self.local_quota_takes = counter(
            "corolla_local_quota_takes",
            "Times that this client service used its own share of a quota, because no router answered.",
        )
        self.recoveries = counter(
            "corolla_session_recoveries",
            "Sessions that lost hops, or the caches of hops, and continued; by cause and method.",
            ["cause", "method"],
        )
        for cause, method in product(CAUSES, METHODS):
            self.recoveries.labels(cause, method)
        self.recovery_seconds = histogram(
            "corolla_session_recovery_seconds",
            "Time from a lost hop until its session could continue, in seconds.",
            buckets=RECOVERY_BUCKETS,
        )
        self.numerics_changes = counter(
            "corolla_numerics_changes",
            "Requests whose tokens may differ from an undisturbed answer, since a hop was replaced by a block "
            "server of other numerics; always 0 in float32.",
        )
        self.quarantines = counter(
            "corolla_quarantines",
            "Times that this client service began to avoid a block server, by what had failed: opening a session, or "
            "a step.",
            ["cause"],
        )
        for each in get_args(QuarantineCause):
            self.quarantines.labels(each)
        self.quarantined = gauge(
            "corolla_quarantined_servers",
            "Block servers that this client service avoids now because they failed recently.",
        )

        self.issuer_up = gauge(
            "corolla_issuer_up",
            "Whether the last fetch of the tokens' issuer's key set succeeded; 0: it failed, and the "
            "known keys stay. Also 1 if none is fetched.",
        )
        self.issuer_up.set(1)

    def count_recovery(self, report: RecoveryReport) -> None:
        self.recoveries.labels(report.cause, report.method).inc()
        self.recovery_seconds.observe(report.seconds)
        self.recomputed.inc(report.num_recomputed_tokens)
