"""Writes the Grafana dashboards of the chart.

python tools/dashboards.py FOLDER
"""

import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

HERE: Final = 'namespace=~"$namespace"'
PANELS_IN_A_ROW: Final = 2
WIDTH: Final = 24 // PANELS_IN_A_ROW
HEIGHT: Final = 8


@dataclass(frozen=True)
class Panel:
    """One diagram over time.

    Attributes:
        meaning: what a reader sees in it, and when to worry.
        unit: Grafana's name of the unit.
        queries: PromQL and the legend of its series.
    """

    title: str
    meaning: str
    unit: str
    queries: tuple[tuple[str, str], ...]


def rate(metric: str, by: str = "", where: str = "") -> str:
    labels = HERE + (f",{where}" if where else "")
    return (
        f"sum by ({by}) (rate({metric}{{{labels}}}[$__rate_interval]))"
        if by
        else (f"sum(rate({metric}{{{labels}}}[$__rate_interval]))")
    )


def quantiles(metric: str, *fractions: float, where: str = "") -> tuple[tuple[str, str], ...]:
    buckets = rate(f"{metric}_bucket", "le", where)
    return tuple((f"histogram_quantile({each}, {buckets})", f"p{round(each * 100)}") for each in fractions)


def gauge(metric: str, by: str, how: str = "sum") -> str:
    return f"{how} by ({by}) ({metric}{{{HERE}}})"


def share_within(metric: str, seconds: str) -> str:
    within = rate(f"{metric}_bucket", where=f'le="{seconds}"')
    return f"{within} / {rate(f'{metric}_count')}"


MEAN_STEP: Final = f"{rate('corolla_hop_step_seconds_sum', 'kind')} / {rate('corolla_hop_step_seconds_count', 'kind')}"

OVERVIEW: Final = (
    Panel("Requests", "Finished answers by why they ended.", "reqps", (
        (rate("corolla_request_success_total", "finished_reason"), "{{finished_reason}}"),
    )),
    Panel("Errors", "Calls that failed, by method and status.", "reqps", (
        (rate("corolla_rpcs_total", "method, code", 'code!="OK"'), "{{method}} {{code}}"),
    )),
    Panel("HTTP requests", "Requests over HTTP by route and status; 499: the caller left.", "reqps", (
        (rate("corolla_http_requests_total", "route, status"), "{{route}} {{status}}"),
    )),
    Panel("HTTP streams and connections", "Answers that are being streamed over HTTP, callers that watch the "
          "placement, and open connections.", "short", (
        (f"sum(corolla_http_open_streams{{{HERE}}})", "streams"),
        (f"sum(corolla_http_watchers{{{HERE}}})", "watchers"),
        (f"sum(corolla_http_connections{{{HERE}}})", "connections"),
    )),
    Panel("HTTP duration", "From the head of a request to the end of its reply, streams of answers included.", "s",
          quantiles("corolla_http_request_seconds", 0.5, 0.95, 0.99, where='route!="GET /v1/placement"')),
    Panel("Time to first token", "From the request to its first token.", "s",
          quantiles("corolla_time_to_first_token_seconds", 0.5, 0.95, 0.99)),
    Panel("Inter-token latency", "Between one token of an answer and the next.", "s",
          quantiles("corolla_inter_token_latency_seconds", 0.5, 0.95, 0.99)),
    Panel("Whole answers", "From the request to the end of its answer.", "s",
          quantiles("corolla_e2e_request_latency_seconds", 0.5, 0.95, 0.99)),
    Panel("Tokens per second", "Tokens of prompts and of answers.", "short", (
        (rate("corolla_prompt_tokens_total"), "prompts"),
        (rate("corolla_cached_prompt_tokens_total"), "prompts, already in caches"),
        (rate("corolla_generation_tokens_total"), "answers"),
    )),
    Panel("Queue", "Answers being generated, and those that wait for their turn.", "short", (
        (f"sum(corolla_num_requests_running{{{HERE}}})", "running"),
        (f"sum(corolla_num_requests_waiting{{{HERE}}})", "waiting"),
    )),
    Panel("Goodput", "Share of first tokens within 2.5 s, and of further tokens within 0.5 s.", "percentunit", (
        (share_within("corolla_time_to_first_token_seconds", "2.5"), "first tokens"),
        (share_within("corolla_inter_token_latency_seconds", "0.5"), "further tokens"),
    )),
    Panel("Grammars", "Grammars of response formats and of tool calls: newly compiled, known from before, or refused.",
          "reqps", (
        (rate("corolla_grammars_total", "outcome"), "{{outcome}}"),
    )),
    Panel("Time to compile a grammar", "99 in 100 take less time. An answer with a new grammar waits twice: in the "
          "client service and on the last hop.",
          "s", (
        (f"histogram_quantile(0.99, {rate('corolla_grammar_compile_seconds_bucket', 'le')})", "client services"),
        (f"histogram_quantile(0.99, {rate('corolla_hop_grammar_compile_seconds_bucket', 'le')})", "block servers"),
    )),
)  # fmt: skip

SPANS: Final = (
    Panel("Ready replicas", "Ready block servers of each span, as the routers see them.", "short", (
        (gauge("corolla_span_ready_replicas", "model, span", "max"), "{{model}} {{span}}"),
    )),
    Panel("Blocks at risk", "Blocks without a ready block server, and blocks with only one.", "short", (
        (gauge("corolla_uncovered_blocks", "model", "max"), "{{model}} uncovered"),
        (gauge("corolla_single_copy_blocks", "model", "max"), "{{model}} single"),
    )),
    Panel("Block servers", "Block servers with a lease, by state.", "short", (
        (gauge("corolla_registered_servers", "model, state", "max"), "{{model}} {{state}}"),
    )),
    Panel("Slowest block", "Tokens per second that its ready servers can decode; the limit of all answers.", "short", (
        (gauge("corolla_slowest_block_tokens_per_second", "model", "max"), "{{model}}"),
    )),
    Panel("Moves", "Block servers that were ordered to hold other blocks, in an hour.", "short", (
        (f"sum by (model, reason) (increase(corolla_moves_ordered_total{{{HERE}}}[1h]))", "{{model}} {{reason}}"),
    )),
    Panel("Page usage", "Share of the KV pages that sessions use or have reserved.", "percentunit", (
        (gauge("corolla_kv_cache_usage_ratio", "instance", "max"), "{{instance}}"),
    )),
    Panel("Pages", "KV pages of all block servers by state.", "short", (
        (gauge("corolla_kv_pages", "state"), "{{state}}"),
    )),
    Panel("Step time", "Duration of an iteration of a block server; 9 in 10 are shorter.", "s", (
        (f"histogram_quantile(0.9, {rate('corolla_hop_step_seconds_bucket', 'kind, le')})", "{{kind}}"),
    )),
    Panel("Step time and its bound", "Mean duration of an iteration on GPUs, beside what the bandwidth of the memory "
          "allows: each reads all weights, and the keys and values of its rows. Computing bounds prompts.", "s", (
        (f"{MEAN_STEP} and on (kind) {rate('corolla_hop_memory_bound_seconds_total', 'kind')}", "{{kind}}"),
        (f"{rate('corolla_hop_memory_bound_seconds_total', 'kind')} / {rate('corolla_hop_step_seconds_count', 'kind')}",
         "{{kind}}, bound"),
    )),
    Panel("GPU memory", "Memory of all GPUs by use. Where little is free, adapters and long steps may fail.", "bytes", (
        (gauge("corolla_device_memory_bytes", "use"), "{{use}}"),
    )),
    Panel("Batch size", "Rows computed together in one iteration, on average.", "short", (
        (f"{rate('corolla_hop_batch_rows_sum', 'instance')} / {rate('corolla_hop_batch_rows_count', 'instance')}",
         "{{instance}}"),
    )),
    Panel("Tokens computed", "By all block servers together; each token counts once for each hop.", "short", (
        (rate("corolla_hop_tokens_total", "kind"), "{{kind}}"),
    )),
    Panel("Waiting steps", "Steps queued for a block server's next iterations, and rows that wait for a microbatch.",
          "short", (
        (gauge("corolla_num_steps_waiting", "instance"), "{{instance}}"),
        (gauge("corolla_num_ring_rows_waiting", "instance"), "{{instance}}, microbatch"),
    )),
    Panel("Prefix hits", "Share of the tokens that block servers looked for in their prefix caches and found.",
          "percentunit", (
        (f"{rate('corolla_prefix_cache_hits_total')} / {rate('corolla_prefix_cache_queries_total')}", "found"),
        (f"{rate('corolla_host_cache_hits_total')} / {rate('corolla_prefix_cache_queries_total')}", "in host memory"),
    )),
    Panel("Refused rows", "Rows that block servers refused or failed, by reason.", "short", (
        (rate("corolla_hop_faults_total", "reason"), "{{reason}}"),
    )),
    Panel("Sessions", "Sessions that each block server holds.", "short", (
        (gauge("corolla_hop_sessions", "instance"), "{{instance}}"),
    )),
)  # fmt: skip

RECOVERY: Final = (
    Panel("Recoveries", "Answers that lost a hop and went on, by cause and method.", "short", (
        (f"{rate('corolla_session_recoveries_total', 'cause, method')} > 0", "{{cause}} {{method}}"),
    )),
    Panel("Stall", "From the loss of a hop until its answer went on.", "s",
          quantiles("corolla_session_recovery_seconds", 0.5, 0.9, 0.99)),
    Panel("Cost of a loss", "How long others would compute texts again if a block server were lost now: the most of "
          "any server of a span.", "s", (
        (gauge("corolla_span_loss_seconds", "model, span", "max"), "{{model}} {{span}}"),
    )),
    Panel("Sessions with a standby", "Share of the sessions in mid-answer whose text a standby holds. By default, "
          "short texts have none.", "percentunit", (
        (f'sum(corolla_hop_running_sessions{{{HERE},standby="yes"}}) / sum(corolla_hop_running_sessions{{{HERE}}})',
         "with a standby"),
    )),
    Panel("Lag of standbys", "The most tokens that a standby lacks of a session of each block server: a loss computes "
          "them again.", "short", (
        (gauge("corolla_standby_lag_tokens", "instance", "max"), "{{instance}}"),
    )),
    Panel("Copied to standbys", "Keys, values and states of sessions, in bytes per second.", "Bps", (
        (rate("corolla_standby_bytes_total", "direction"), "{{direction}}"),
        (rate("corolla_standby_state_bytes_total"), "states among out"),
    )),
    Panel("Where tokens came from", "Tokens per second that block servers found, or had to compute, recoveries "
          "included.", "short", (
        (f"{rate('corolla_prefix_cache_hits_total')} - {rate('corolla_host_cache_hits_total')}", "prefix cache"),
        (rate("corolla_host_cache_hits_total"), "host memory"),
        (rate("corolla_standby_hits_total"), "standby, or a server with the beginning"),
        (rate("corolla_hop_tokens_total", where='kind="prefill"'), "computed"),
    )),
    Panel("Recomputed tokens", "Tokens processed again, or sent again from boundary activations.", "short", (
        (rate("corolla_recomputed_tokens_total"), "recomputed"),
        (rate("corolla_hop_resent_tokens_total"), "sent again"),
    )),
    Panel("Handed over", "Keys and values that leaving block servers gave to others, in bytes per second.", "Bps", (
        (rate("corolla_handover_bytes_total", "direction"), "{{direction}}"),
    )),
    Panel("Sessions handed over", "Attempts of leaving block servers, by outcome.", "short", (
        (rate("corolla_sessions_handed_over_total", "outcome"), "{{outcome}}"),
    )),
    Panel("Quarantines", "Block servers that client services avoid for 5 to 60 s because they failed recently, "
          "and how often that begins. If it repeats, a server is faulty or some cannot reach it.", "short", (
        (gauge("corolla_quarantined_servers", "instance"), "{{instance}} avoids"),
        (rate("corolla_quarantines_total", "cause"), "new by {{cause}}, per second"),
    )),
    Panel("Numerics", "Block servers by the digest of how they compute, and requests whose tokens may differ, since "
          "only a server of another digest was left for a lost hop. If that repeats, add servers of each kind.",
          "short", (
        (gauge("corolla_numerics_info", "digest"), "{{digest}}"),
        (rate("corolla_numerics_changes_total"), "requests that may differ, per second"),
    )),
    Panel("Boundary activations", "Memory for outputs that rebuild a lost next hop.", "bytes", (
        (gauge("corolla_boundary_activation_bytes", "instance"), "{{instance}}"),
    )),
    Panel("Errors by reason", "Errors by their reason in the error tree.", "short", (
        (f"{rate('corolla_errors_total', 'reason')} > 0", "{{reason}}"),
    )),
    Panel("Sessions lost by hops", "Leases that ran out, idle sessions and boundary activations evicted.", "short", (
        (rate("corolla_hop_sessions_expired_total"), "expired"),
        (rate("corolla_hop_sessions_evicted_total"), "evicted"),
        (rate("corolla_boundary_activations_evicted_total"), "outputs evicted"),
    )),
    Panel("Redis", "1 while a router reaches Redis.", "short", (
        (gauge("corolla_store_up", "instance", "min"), "{{instance}}"),
    )),
    Panel("Redis scripts", "Duration of the routers' Redis scripts; 99 in 100 are shorter.", "s", (
        (f"histogram_quantile(0.99, {rate('corolla_redis_script_seconds_bucket', 'script, le')})", "{{script}}"),
    )),
    Panel("Issuer of tokens", "1 while a client service can fetch the key set. At 0 it uses the known keys.", "short", (
        (gauge("corolla_issuer_up", "instance", "min"), "{{instance}}"),
    )),
    Panel("Kubernetes", "1 while a router knows the states of its block servers' pods, and its calls of the Kubernetes "
          "API. At 0 it relies on heartbeats alone.", "short", (
        (gauge("corolla_pod_watch_up", "instance", "min"), "{{instance}} watches"),
        (rate("corolla_kubernetes_calls_total", "call, outcome"), "{{call}} {{outcome}}, per second"),
    )),
)  # fmt: skip

DASHBOARDS: Final[dict[str, tuple[str, Sequence[Panel]]]] = {
    "overview": ("Corolla / Overview", OVERVIEW),
    "spans": ("Corolla / Spans", SPANS),
    "recovery": ("Corolla / Recovery", RECOVERY),
}


def dashboard(name: str) -> dict[str, Any]:
    """The dashboard as Grafana imports it."""
    title, panels = DASHBOARDS[name]
    source = {"type": "prometheus", "uid": "${datasource}"}
    return {
        "uid": f"corolla-{name}",
        "title": title,
        "tags": ["corolla"],
        "schemaVersion": 39,
        "timezone": "browser",
        "refresh": "30s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {
            "list": [
                {"name": "datasource", "label": "Data source", "type": "datasource", "query": "prometheus"},
                {
                    "name": "namespace", "label": "Namespace", "type": "query", "datasource": source, "refresh": 2,
                    "query": "label_values(corolla_store_up, namespace)", "includeAll": True, "allValue": ".*",
                    "current": {"text": "All", "value": "$__all"},
                },
            ]
        },
        "panels": list(_panels(panels, source)),
    }  # fmt: skip


def _panels(panels: Sequence[Panel], source: dict[str, str]) -> Iterator[dict[str, Any]]:
    for number, panel in enumerate(panels):
        row, column = divmod(number, PANELS_IN_A_ROW)
        yield {
            "id": number + 1,
            "type": "timeseries",
            "title": panel.title,
            "description": panel.meaning,
            "datasource": source,
            "gridPos": {"x": column * WIDTH, "y": row * HEIGHT, "w": WIDTH, "h": HEIGHT},
            "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0}, "overrides": []},
            "options": {"tooltip": {"mode": "multi"}, "legend": {"displayMode": "list", "placement": "bottom"}},
            "targets": [
                {"refId": chr(ord("A") + index), "datasource": source, "expr": query, "legendFormat": legend}
                for index, (query, legend) in enumerate(panel.queries)
            ],
        }


def main(folder: Path) -> None:
    for name in DASHBOARDS:
        (folder / f"{name}.json").write_text(json.dumps(dashboard(name), indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
