"""Lists and watches the pods repeatedly, in a thread that no task waits for."""

import random
import threading
from collections.abc import Callable
from typing import Final

from corolla.router.cluster.api import ApiForbidden, ApiUnavailable, KubernetesApi
from corolla.router.cluster.pods import Pod, PodTable

Update = Callable[[PodTable], None]
"""A change of the table of pods, which the table's owner applies."""

_SHORTEST_PAUSE_S: Final = 1.0
_LONGEST_PAUSE_S: Final = 30.0


class PodWatch:
    """Reports every list and every change of the pods, by functions that its thread calls.

    Args:
        relist_interval_s: The time after which a watch ends and the pods are listed anew, in case it missed a change.
        tell: A function that is called with each change of the table.
        complain: A function that is called with each failure, and with None after a success.
        fail: A function that is called when an unexpected exception ends the thread.
        after_forbidden_s: The pause after the API server has forbidden to list pods.
    """

    def __init__(
        self,
        api: KubernetesApi,
        relist_interval_s: float,
        tell: Callable[[Update], None],
        complain: Callable[[ApiUnavailable | None], None],
        fail: Callable[[Exception], None],
        *,
        after_forbidden_s: float,
    ) -> None:
        self._api = api
        self._relist_interval_s = relist_interval_s
        self._tell = tell
        self._complain = complain
        self._fail = fail
        self._after_forbidden_s = after_forbidden_s
        self._stopping = threading.Event()
        self._num_failures = 0

    def start(self) -> None:
        threading.Thread(target=self._run, name="pod watch", daemon=True).start()

    def stop(self) -> None:
        self._stopping.set()
        self._api.stop()

    def _run(self) -> None:
        while not self._stopping.is_set():
            try:
                self._look()
                pause_s = _SHORTEST_PAUSE_S
            except ApiUnavailable as failure:
                if self._stopping.is_set():
                    return
                self._num_failures += 1
                self._tell(PodTable.lost)
                self._complain(failure)
                pause_s = self._rest_s(failure)
            except Exception as failure:
                # The table must not count as current for ever.
                self._tell(PodTable.lost)
                self._fail(failure)
                return
            self._stopping.wait(pause_s)

    def _look(self) -> None:
        """Reads one list, and the changes after it."""
        pods, version = self._api.pods()
        self._tell(lambda table: table.listed(pods))
        for kind, pod in self._api.changes(version, max(1, round(self._relist_interval_s))):
            if self._stopping.is_set():
                return
            self._all_is_well()
            self._tell(_update(kind, pod))
        self._all_is_well()

    def _all_is_well(self) -> None:
        self._num_failures = 0
        self._complain(None)

    def _rest_s(self, failure: ApiUnavailable) -> float:
        if isinstance(failure, ApiForbidden):
            return self._after_forbidden_s
        pause_s = min(_SHORTEST_PAUSE_S * 2.0 ** min(self._num_failures - 1, 10), _LONGEST_PAUSE_S)
        return pause_s * random.uniform(0.5, 1.0)


def _update(kind: str, pod: Pod) -> Update:
    return lambda table: table.deleted(pod) if kind == "DELETED" else table.changed(pod)
