"""A Prometheus outside of the cluster, which scrapes every pod of the release."""

import json
import subprocess
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import yaml

from tests.cluster import release


class Prometheus:
    """One that runs. `address` is its host:port."""

    def __init__(self, address: str) -> None:
        self._address = address

    def series(self, query: str) -> list[dict[str, Any]]:
        """The present result of a query."""
        return list(self._get("query", query=query)["result"])

    def num_targets_up(self) -> int:
        return len(self.series("up == 1"))

    def is_firing(self, alert: str) -> bool:
        return any(
            each["labels"]["alertname"] == alert and each["state"] == "firing" for each in self._get("alerts")["alerts"]
        )

    def _get(self, what: str, **parameters: str) -> dict[str, Any]:
        address = f"http://{self._address}/api/v1/{what}?{urllib.parse.urlencode(parameters)}"
        with urllib.request.urlopen(address, timeout=30) as answer:
            return dict(json.load(answer)["data"])


@contextmanager
def running(folder: Path, port: int) -> Iterator[Prometheus]:
    """Scrapes each pod every two seconds, by forwarded ports, and judges the chart's alerts as often."""
    with ExitStack() as stack:
        targets = []
        for component in ("block-server", "client", "router"):
            for name in release.names(release.pods(component)):
                address = stack.enter_context(release.forwarded(f"pod/{name}", release.METRICS_PORT))
                labels = {"namespace": release.NAMESPACE, "job": component, "instance": name}
                targets.append({"targets": [address], "labels": labels})
        settings = {
            "global": {"scrape_interval": "2s", "evaluation_interval": "2s"},
            "rule_files": [str(release.CHART / "alerts.yaml")],
            "scrape_configs": [{"job_name": "pods", "static_configs": targets}],
        }
        (folder / "prometheus.yaml").write_text(yaml.safe_dump(settings))
        process = subprocess.Popen(
            [
                "prometheus", f"--config.file={folder}/prometheus.yaml", f"--storage.tsdb.path={folder}/data",
                f"--web.listen-address=127.0.0.1:{port}", "--log.level=error",
            ]
        )  # fmt: skip
        try:
            prometheus = Prometheus(f"127.0.0.1:{port}")
            _wait_until_it_answers(prometheus, len(targets))
            yield prometheus
        finally:
            process.terminate()
            process.wait()


def _wait_until_it_answers(prometheus: Prometheus, num_targets: int) -> None:
    deadline = time.monotonic() + 120
    while True:
        try:
            if prometheus.num_targets_up() == num_targets:
                return
        except OSError:
            pass
        assert time.monotonic() < deadline, "Prometheus does not read all pods"
        time.sleep(1)
