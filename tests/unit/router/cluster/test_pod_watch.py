"""The pod watch's thread reports unexpected failures."""

import queue
from typing import Any

from corolla.router.cluster.connection import PodWatch
from corolla.router.cluster.pods import PodTable


class SurprisingApi:
    """Raises an exception that no code expects."""

    def pods(self) -> Any:
        raise KeyError("metadata")

    def stop(self) -> None:
        """Nothing is under way."""


def test_a_pod_watch_that_fails_reports_it_and_drops_its_table() -> None:
    tables: queue.SimpleQueue[Any] = queue.SimpleQueue()
    failures: queue.SimpleQueue[Exception] = queue.SimpleQueue()
    api: Any = SurprisingApi()
    PodWatch(api, 60.0, tell=tables.put, complain=tables.put, fail=failures.put, after_forbidden_s=60.0).start()
    assert isinstance(failures.get(timeout=30), KeyError)
    assert tables.get_nowait() is PodTable.lost
