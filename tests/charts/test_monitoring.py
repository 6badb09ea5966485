"""Dashboards and alerts ask for metrics that the services export, and each alert for a chapter of the runbook."""

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, Final

import pytest
import yaml
from prometheus_client import CollectorRegistry

from corolla.block_server.metrics import BlockServerMetrics
from corolla.chassis.metrics import RpcMetrics, TaskMetrics
from corolla.client.metrics import ClientMetrics
from corolla.compute.device_memory import DEVICE_MEMORY_USES
from corolla.compute.memory_bound import MemoryBound
from corolla.http.metrics import HttpMetrics
from corolla.router.metrics import RouterMetrics
from corolla.router.roster import Roster
from tests.architecture.sources import ROOT
from tests.charts.rendering import CHART, named, of_kind, render

ALERTS: Final[list[dict[str, Any]]] = [
    rule
    for group in yaml.safe_load((CHART / "alerts.yaml").read_text(encoding="utf-8"))["groups"]
    for rule in group["rules"]
]
DASHBOARDS: Final = sorted((CHART / "dashboards").glob("*.json"))
TEST_RULES: Final = Path(__file__).parent / "alerts.test.yaml"


def queries() -> Iterator[tuple[str, str]]:
    """(where, PromQL) of every alert and every panel."""
    for rule in ALERTS:
        yield rule["alert"], rule["expr"]
    for file in DASHBOARDS:
        for panel in json.loads(file.read_text(encoding="utf-8"))["panels"]:
            for target in panel["targets"]:
                yield f"{file.stem}: {panel['title']}", target["expr"]


def exported() -> dict[str, set[str]]:
    """The labels of every series that the services export, by its name."""
    found: dict[str, set[str]] = {}
    http = partial(HttpMetrics, rpc=RpcMetrics(CollectorRegistry()))
    for collectors in (BlockServerMetrics, ClientMetrics, http, RouterMetrics, RpcMetrics, TaskMetrics):
        registry = CollectorRegistry()
        collectors(registry)
        for names, collector in ((registry._collector_to_names[each], each) for each in registry._collector_to_names):
            labels = set(getattr(collector, "_labelnames", ()))
            for name in names:
                found.setdefault(name, set()).update(labels)
    return found


EXPORTED: Final = exported()
# What Prometheus adds when it scrapes, and what the kinds of metrics have by themselves.
ADDED_LABELS: Final = {"namespace", "instance", "job", "le"}


@pytest.mark.parametrize("where, query", list(queries()))
def test_queries_ask_for_exported_metrics(where: str, query: str) -> None:
    metrics = set(re.findall(r"corolla_\w+", query))
    assert metrics
    assert metrics <= set(EXPORTED), where
    grouped = {label.strip() for labels in re.findall(r"by \(([^)]*)\)", query) for label in labels.split(",")}
    chosen = set(re.findall(r"[{,](\w+)[!=]~?=?\"", query))
    of_metrics = set[str]().union(*(EXPORTED[metric] for metric in metrics))
    assert grouped | chosen <= of_metrics | ADDED_LABELS, where


@pytest.mark.parametrize("where, query", list(queries()))
def test_a_query_shows_the_present_and_not_all_time_totals(where: str, query: str) -> None:
    """A counter or histogram since its start says nothing about now."""
    without_labels = re.sub(r"\{[^}]*\}", "", query)
    bare = re.sub(r"(rate|increase)\([^()]*\)", "", without_labels)
    assert re.findall(r"corolla_\w+(?:_total|_bucket|_count|_sum)\b", bare) == [], where


def test_a_query_asks_for_buckets_that_exist() -> None:
    asked = {
        (metric, bound)
        for _, query in queries()
        for metric, bound in re.findall(r"(corolla_\w+)_bucket\{[^}]*le=\"([^\"]+)\"", query)
    }
    assert asked
    registry = CollectorRegistry()
    ClientMetrics(registry)
    HttpMetrics(registry, RpcMetrics(registry))
    there = {
        (each.name.removesuffix("_bucket"), each.labels["le"])
        for family in registry.collect()
        for each in family.samples
        if "le" in each.labels
    }
    assert asked <= there


def test_every_alert_has_a_severity_and_a_chapter_of_the_runbook() -> None:
    runbook = (ROOT / "docs" / "runbook.md").read_text(encoding="utf-8")
    chapters = re.findall(r"^## (.*)$", runbook, flags=re.MULTILINE)
    for rule in ALERTS:
        assert rule["alert"] in chapters
        assert rule["annotations"]["runbook_url"] == f"docs/runbook.md#{rule['alert'].lower()}"
        assert rule["labels"]["severity"] in ("page", "warning")


def test_every_alert_is_seen_to_fire() -> None:
    tests = yaml.safe_load(TEST_RULES.read_text(encoding="utf-8"))["tests"]
    fired = {each["alertname"] for test in tests for each in test["alert_rule_test"] if each.get("exp_alerts")}
    quiet = {each["alertname"] for test in tests for each in test["alert_rule_test"] if not each.get("exp_alerts")}
    names = {rule["alert"] for rule in ALERTS}
    assert fired == names
    assert names - quiet <= {"RecoverySlow"}  # which keeps quiet about the namespace `quick`


@pytest.mark.promtool
@pytest.mark.parametrize("arguments", [("check", "rules", CHART / "alerts.yaml"), ("test", "rules", TEST_RULES)])
def test_promtool_agrees(arguments: tuple[str, ...]) -> None:
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.fail("promtool is not on PATH: apt-get install prometheus, or take it from prometheus.io")
    done = subprocess.run([promtool, *arguments], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_objectives_and_runbook_are_put_into_the_rules() -> None:
    given = {"timeToFirstTokenSeconds": "1.0", "interTokenSeconds": "0.1", "runbookUrl": "https://wiki/runbook"}
    (rule,) = of_kind(render({"monitoring": {"prometheusRule": given}}), "PrometheusRule")
    rules = {each["alert"]: each for group in rule["spec"]["groups"] for each in group["rules"]}
    assert rules["HighTTFT"]["expr"].count('le="1.0"') == 2
    assert rules["HighInterToken"]["expr"].count('le="0.1"') == 2
    assert rules["HighTTFT"]["annotations"]["runbook_url"] == "https://wiki/runbook#highttft"
    assert "{{ $value | humanizePercentage }}" in rules["HighTTFT"]["annotations"]["summary"]


def test_a_release_judges_its_own_namespace(tmp_path: Path) -> None:
    given = {"timeToFirstTokenSeconds": "0.5", "interTokenSeconds": "0.1", "runbookUrl": "https://wiki/corolla_runbook"}
    (rule,) = of_kind(render({"monitoring": {"prometheusRule": given}}), "PrometheusRule")
    for each in (each for group in rule["spec"]["groups"] for each in group["rules"]):
        metrics = re.findall(r"corolla_\w+.{0,15}", each["expr"])
        assert metrics
        assert all(re.fullmatch(r'corolla_\w+\{namespace="ns".*', metric) for metric in metrics), each["alert"]
        assert each["annotations"]["runbook_url"].startswith("https://wiki/corolla_runbook#")
    (tmp_path / "rules.yaml").write_text(yaml.safe_dump(rule["spec"]))
    if promtool := shutil.which("promtool"):
        subprocess.run([promtool, "check", "rules", tmp_path / "rules.yaml"], check=True)


# Every answer, or a router's ordinary day, raises these counters: an operator has seen each of them before.
NEVER_RARE: Final = {
    "corolla_hop_batch_rows", "corolla_hop_faults_total", "corolla_hop_step_seconds_bucket", "corolla_hop_tokens_total",
    "corolla_http_request_seconds_bucket", "corolla_http_requests_total",
    "corolla_kubernetes_calls_total", "corolla_redis_script_seconds_bucket", "corolla_request_success_total",
    "corolla_rpcs_total",
}  # fmt: skip


def test_rare_counters_begin_at_zero() -> None:
    """`rate` and `increase` see a series grow, not begin: the first recovery would not count."""
    servers, clients, routers = (CollectorRegistry() for _ in range(3))
    metrics = BlockServerMetrics(servers)
    metrics.follow_device(lambda: dict.fromkeys(DEVICE_MEMORY_USES, 0), MemoryBound(1e12, 1, 0, 0, ()))
    metrics.invariant_violations.labels("pages")  # created with the PeriodicTasks
    RpcMetrics(servers)
    TaskMetrics(servers).restarts.labels("turn_lock")  # by each task as it starts
    ClientMetrics(clients)
    HttpMetrics(clients, RpcMetrics(clients))
    RouterMetrics(routers).observe(Roster("m", 1, 2), num_sessions=0)
    present = {
        sample.name for each in (servers, clients, routers) for family in each.collect() for sample in family.samples
    }
    grown = {metric for _, query in queries() for metric in re.findall(r"(?:rate|increase)\((corolla_\w+)", query)}
    assert grown - present <= NEVER_RARE


def test_every_reason_that_an_alert_looks_for_is_an_errors() -> None:
    asked = {
        reason
        for rule in ALERTS
        for reasons in re.findall(r'reason=~"([^"]+)"', rule["expr"])
        for reason in reasons.split("|")
    }
    registry = CollectorRegistry()
    RpcMetrics(registry)
    there = {
        each.labels["reason"] for family in registry.collect() for each in family.samples if each.labels.get("reason")
    }
    assert asked
    assert asked <= there


def test_the_dashboards_reach_the_cluster_as_they_are() -> None:
    objects = render()
    for file in DASHBOARDS:
        data = named(objects, "ConfigMap", f"rel-corolla-dashboard-{file.stem}")["data"]
        (content,) = data.values()
        assert json.loads(content) == json.loads(file.read_text(encoding="utf-8"))
