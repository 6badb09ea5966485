"""Every panel and every alert has data on a real cluster, and an alert fires when a span is gone."""

import re
import shutil
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from tests.charts.test_monitoring import ALERTS, queries
from tests.cluster import release
from tests.cluster.asking import GREEDY, answer_of, answer_over_http, disturbed
from tests.cluster.prometheus import Prometheus, running

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900)]

MAY_BE_SILENT: Final = {
    "ErrorBudgetBurn": "no answer failed",
    "HttpErrorBudgetBurn": "no answer failed",
    "MetricsAbsent": "nothing is absent",
    "overview: Errors": "no call failed",
    "spans: Refused rows": "no row was refused",
    "spans: GPU memory": "no server computes on a GPU",
    "spans: Step time and its bound": "no server computes on a GPU",
}
"""Queries that are right to give nothing on this release; `promtool test rules` proves the alerts among them."""


@pytest.fixture(scope="module")
def prometheus(address: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    if shutil.which("prometheus") is None:
        pytest.fail("prometheus is not on PATH: apt-get install prometheus, or take it from prometheus.io")
    # One recovery, so that its panels have something to show.
    disturbed(address, lambda: release.kill(release.serving_pod("back")))
    release.wait_until_whole()
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    folder: Path = tmp_path_factory.mktemp("prometheus")
    with running(folder, port) as prometheus:
        # Enough scrapes for a rate, while answers are given.
        with release.forwarded(f"service/{release.RELEASE}-client", release.HTTP_PORT) as http:
            for golden in GREEDY[1:3]:
                assert answer_over_http(http, golden) == golden.token_ids
                answer_of(address, golden)
        yield prometheus


def measured(query: str) -> str:
    """The query of an alert without its threshold."""
    filled = query.replace("$__rate_interval", "1m").replace("$namespace", ".*")
    return re.split(r"\s(?:>|==|!=)\s", filled)[0]


def test_every_query_gives_a_series(prometheus: Prometheus) -> None:
    silent = {where for where, query in queries() if not prometheus.series(measured(query))}
    assert silent <= set(MAY_BE_SILENT)


def test_nothing_is_wrong_with_a_healthy_release(prometheus: Prometheus) -> None:
    firing = [rule["alert"] for rule in ALERTS if prometheus.is_firing(rule["alert"])]
    assert firing == []


@pytest.mark.full
def test_an_alert_fires_for_an_uncovered_span_and_resolves(prometheus: Prometheus) -> None:
    deployment = f"deployment/{release.RELEASE}-block-server-back"
    release.kubectl("scale", deployment, "--replicas=0")
    release.wait_for(lambda: prometheus.is_firing("SpanUncovered"), 180, "SpanUncovered does not fire")
    release.kubectl("scale", deployment, "--replicas=2")
    release.wait_until_whole()
    release.wait_for(lambda: not prometheus.is_firing("SpanUncovered"), 60, "SpanUncovered does not end")
