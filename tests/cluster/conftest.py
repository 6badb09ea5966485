"""One release for all tests of this folder; its logs are kept if a test fails."""

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster import release


@pytest.fixture(scope="session")
def installed() -> Iterator[float]:
    """The seconds that the release took to become ready."""
    try:
        yield release.install()
    finally:
        _keep_logs()
        subprocess.run(["helm", "--namespace", release.NAMESPACE, "uninstall", release.RELEASE], capture_output=True)
        subprocess.run(["kubectl", "delete", "namespace", release.NAMESPACE, "--wait=false"], capture_output=True)


@pytest.fixture(scope="session")
def identities(installed: float, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for each role; the pods have theirs from the release's issuer."""
    folder = tmp_path_factory.mktemp("identities")
    release.give_identities(folder)
    return folder


@pytest.fixture(scope="session")
def address(installed: float) -> Iterator[str]:
    """Where the client service answers."""
    with release.forwarded(f"service/{release.RELEASE}-client") as forwarded:
        yield forwarded


@pytest.fixture
def whole(installed: float) -> None:
    """Every pod is there and ready."""
    release.wait_until_whole()


def _keep_logs() -> None:
    folder = os.environ.get("CLUSTER_TEST_LOGS")
    if not folder:
        return
    Path(folder).mkdir(parents=True, exist_ok=True)
    everything = ["kubectl", "--namespace", release.NAMESPACE]
    for name, command in {
        "pods.txt": ["get", "pods", "--output", "wide"],
        "events.txt": ["get", "events", "--sort-by", ".lastTimestamp"],
        "describe.txt": ["describe", "pods"],
        "logs.txt": ["logs", "--selector", f"app.kubernetes.io/instance={release.RELEASE}", "--tail=-1", "--prefix"],
    }.items():
        with (Path(folder) / name).open("w") as file:
            subprocess.run([*everything, *command], stdout=file, stderr=subprocess.STDOUT)
