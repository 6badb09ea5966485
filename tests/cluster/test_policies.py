"""Pods reach what the chart's policies let them, and each policy is what opens its own ways."""

import json
from collections.abc import Iterator
from typing import Final

import pytest

from tests.cluster import policies, release
from tests.cluster.asking import GREEDY, answer_of
from tests.cluster.bystanders import MARK, standing
from tests.cluster.policies import CALLER, CALLERS, COMPONENTS, PATHS, POLICIES, PUBLIC, Way

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900)]

PATIENCE_S: Final = (2, 2, 4, 8, 16, 32)
# What the API server adds to an object.
_ADDED: Final = ("uid", "resourceVersion", "creationTimestamp", "generation", "managedFields")
_ASK: Final = """
import sys, urllib.request
from corolla import Client
for address in sys.argv[1:]:
    if address.endswith(":9464"):
        assert b"corolla_" in urllib.request.urlopen(f"http://{address}/metrics", timeout=30).read()
    else:
        with Client(address, timeout=60) as client:
            assert client.models()[0].ready
    print(address)
"""


@pytest.fixture(scope="module", autouse=True)
def bystanders(installed: float) -> Iterator[None]:
    release.wait_until_whole()
    with standing(*policies.BYSTANDERS.values()):
        yield


def wait_for_ways(expected: set[Way]) -> None:
    """Until just these are open. A changed policy counts within a second; a busy machine answers later than that."""
    found: set[Way] = set()
    for patience_s in PATIENCE_S:
        found = policies.open_ways(patience_s)
        if found == expected:
            return
    pytest.fail(f"open, though closed: {found - expected}; closed, though open: {expected - found}")


def test_just_the_ways_of_the_table_are_open() -> None:
    wait_for_ways(policies.expected())


def test_every_open_way_carries_traffic(address: str) -> None:
    answer_of(address, GREEDY[0])
    carried = policies.standing_ways()
    ips = {component: [each["status"]["podIP"] for each in release.pods(component)] for component in COMPONENTS}
    for name, bystander in policies.BYSTANDERS.items():
        open_to = {f"{ip}:{each.port}": each.way for each in PATHS if each.source == name for ip in ips[each.target]}
        said = bystander.run("python", "-", *open_to, stdin=_ASK)
        carried |= {open_to[each] for each in said.split()}
    assert carried == policies.expected()


@pytest.mark.parametrize("name", POLICIES)
def test_without_one_policy_just_its_ways_are_closed(name: str) -> None:
    described = json.loads(release.kubectl("get", "networkpolicy", name, "--output", "json"))
    described["metadata"] = {key: value for key, value in described["metadata"].items() if key not in _ADDED}
    release.kubectl("delete", "networkpolicy", name)
    try:
        wait_for_ways(policies.expected(without=name))
    finally:
        release.kubectl("create", "--filename", "-", stdin=json.dumps(described))


def test_where_callers_are_named_nobody_else_reaches_the_public_port() -> None:
    named = json.dumps([{"podSelector": {"matchLabels": {MARK: CALLER.name}}}])
    upgrade = ("upgrade", release.RELEASE, str(release.CHART), "--reuse-values")
    release.helm(*upgrade, "--set-json", f"networkPolicy.callers={named}")
    try:
        wait_for_ways({way for way in policies.expected() if way[2] != PUBLIC or way[0] in CALLERS})
    finally:
        release.helm("rollback", release.RELEASE)
    wait_for_ways(policies.expected())


def test_the_release_has_no_other_policy() -> None:
    labels = ",".join(f"{name}={value}" for name, value in release.SELECTOR.items())
    found = release.kubectl("get", "networkpolicies", "--selector", labels, "--output", "name").split()
    assert {each.rpartition("/")[2] for each in found} == set(POLICIES)
