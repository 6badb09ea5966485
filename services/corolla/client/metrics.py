"""What a client service exports. Base names and buckets are vLLM's, so that known dashboards carry over."""

from itertools import product
from typing import get_args

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from corolla.chassis.metrics import (
    INTER_TOKEN_BUCKETS,
    RECOVERY_BUCKETS,
    REQUEST_BUCKETS,
    TIME_TO_FIRST_TOKEN_BUCKETS,
    TOKEN_COUNT_BUCKETS,
)
from corolla.client.chain.account import CAUSES, METHODS, Recovered
from corolla.client.chain.quarantine import QuarantineCause


class ClientMetrics:
    """Requests and tokens. No label names a session, a request or a tenant."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.running = Gauge("corolla_num_requests_running", "Answers being generated.", registry=registry)
        self.waiting = Gauge("corolla_num_requests_waiting", "Answers that wait for their chain.", registry=registry)
        self.time_to_first_token = Histogram(
            "corolla_time_to_first_token_seconds",
            "From the request to its first token, in seconds.",
            buckets=TIME_TO_FIRST_TOKEN_BUCKETS,
            registry=registry,
        )
        self.inter_token = Histogram(
            "corolla_inter_token_latency_seconds",
            "Between one token of an answer and the next, in seconds.",
            buckets=INTER_TOKEN_BUCKETS,
            registry=registry,
        )
        self.e2e = Histogram(
            "corolla_e2e_request_latency_seconds",
            "From the request to the end of its answer, in seconds.",
            buckets=REQUEST_BUCKETS,
            registry=registry,
        )
        self.prompt_tokens = Counter("corolla_prompt_tokens", "Tokens of prompts.", registry=registry)
        self.generation_tokens = Counter("corolla_generation_tokens", "Tokens of answers.", registry=registry)
        self.prompt_length = Histogram(
            "corolla_request_prompt_tokens", "Tokens of a prompt.", buckets=TOKEN_COUNT_BUCKETS, registry=registry
        )
        self.cache_queries = Counter(
            "corolla_prefix_cache_queries", "Prompt tokens looked for in the hops' caches.", registry=registry
        )
        self.cache_hits = Counter(
            "corolla_prefix_cache_hits", "Prompt tokens that the hops' caches still had.", registry=registry
        )
        self.compute_seconds = Counter(
            "corolla_edge_compute_seconds", "Seconds spent on embedding, head and sampling.", registry=registry
        )
        self.recomputed = Counter(
            "corolla_recomputed_tokens",
            "Tokens of a session's log processed again since a cache was gone, for each hop that did.",
            registry=registry,
        )
        self.drafted_tokens = Counter(
            "corolla_drafted_tokens", "Tokens guessed and checked by speculation.", registry=registry
        )
        self.accepted_tokens = Counter(
            "corolla_accepted_draft_tokens", "Guessed tokens that were right: steps that were saved.", registry=registry
        )
        self.success = Counter(
            "corolla_request_success", "Finished answers by why they ended.", ["finished_reason"], registry=registry
        )
        self.recoveries = Counter(
            "corolla_session_recoveries",
            "Sessions that lost hops, or what hops held, and went on; by cause and by method: kept outputs, tokens.",
            ["cause", "method"],
            registry=registry,
        )
        for cause, method in product(CAUSES, METHODS):
            self.recoveries.labels(cause, method)
        self.recovery_seconds = Histogram(
            "corolla_session_recovery_seconds",
            "From a lost hop until its session could go on, in seconds.",
            buckets=RECOVERY_BUCKETS,
            registry=registry,
        )

        self.quarantines = Counter(
            "corolla_quarantines",
            "Times that this client service began to leave a block server out, by what that failed at: to open a "
            "session, or a step.",
            ["cause"],
            registry=registry,
        )
        for each in get_args(QuarantineCause):
            self.quarantines.labels(each)
        self.quarantined = Gauge(
            "corolla_quarantined_servers",
            "Block servers that this client service leaves out now since they failed lately.",
            registry=registry,
        )

    def quarantine(self, cause: QuarantineCause) -> None:
        self.quarantines.labels(cause).inc()

    def recovered(self, recovered: Recovered) -> None:
        self.recoveries.labels(recovered.cause, recovered.method).inc()
        self.recovery_seconds.observe(recovered.seconds)
        self.recomputed.inc(recovered.num_recomputed_tokens)
