"""How the state of pods affects the servers in them."""

from typing import Any

import pytest

from corolla.router.cluster.pods import Pod, PodTable, Withheld, read_pod, withheld_servers
from tests.unit.router.cluster.described import CREATED, STARTED, described_pod, placed


def read(described: Any) -> Pod:
    pod = read_pod(described)
    assert pod is not None
    return pod


def test_a_pod_is_read_with_its_labels_and_conditions() -> None:
    labels = {"corolla.dev/span": "0-15", "app": "x"}
    annotations = {"controller.kubernetes.io/pod-deletion-cost": "500"}
    assert read(described_pod("a", labels=labels, annotations=annotations)) == Pod(
        "a", "pod-a", span="0-15", cost="500"
    )
    assert read(described_pod("a")) == Pod("a", "pod-a")


@pytest.mark.parametrize(
    "described",
    [
        None, [], "pod", 7, {}, {"metadata": None}, {"metadata": {"uid": "a"}}, {"metadata": {"uid": 7, "name": "x"}},
        {"metadata": {"uid": "", "name": "x"}}, {"kind": "Status", "code": 410},
    ],
)  # fmt: skip
def test_an_object_that_is_no_pod_is_ignored(described: Any) -> None:
    assert read_pod(described) is None


@pytest.mark.parametrize(
    "status",
    [
        None, [], {"conditions": None}, {"conditions": [None, 7, {}]}, {"conditions": [{"type": "Ready"}]},
        {"conditions": {"Ready": "False"}}, {"containerStatuses": "x"}, {"containerStatuses": [{"state": None}]},
    ],
)  # fmt: skip
def test_a_malformed_pod_status_is_ignored(status: Any) -> None:
    assert not read({"metadata": {"uid": "a", "name": "n"}, "status": status}).is_leaving


@pytest.mark.parametrize(
    "facts, is_leaving, has_ended",
    [
        ({"deleted": True}, True, False),
        ({"phase": "Failed"}, False, True),
        ({"phase": "Succeeded"}, False, True),
        ({"phase": "Pending"}, False, False),
    ],
)
def test_a_deleted_pod_is_leaving_and_one_whose_containers_ended_has_ended(
    facts: dict[str, Any], is_leaving: bool, has_ended: bool
) -> None:
    pod = read(described_pod("a", **facts))
    assert (pod.is_leaving, pod.has_ended) == (is_leaving, has_ended)


@pytest.mark.parametrize(
    "facts, is_unready",
    [
        ({"ready": "True"}, False),
        ({"ready": None}, False),
        ({"ready": "False"}, True),
        ({"ready": "Unknown"}, True),
        # Not ready yet, as far as the kubelet has asked; the last two came in the same second.
        ({"ready": "False", "since": CREATED}, False),
        ({"ready": "False", "since": STARTED}, False),
        # It was restarted after it had been ready, and has not been asked since.
        ({"ready": "False", "since": CREATED, "started": STARTED}, False),
        # Nothing runs.
        ({"ready": "False", "since": CREATED, "started": None}, True),
        # A readiness gate, or a node that is not heard of.
        ({"ready": "False", "since": CREATED, "containers_ready": "True"}, True),
        ({"ready": "False", "since": CREATED, "containers_ready": "False"}, False),
    ],
)
def test_only_a_pod_that_lost_readiness_is_unready(facts: dict[str, Any], is_unready: bool) -> None:
    assert read(described_pod("a", **facts)).is_unready is is_unready


def test_a_table_follows_lists_and_changes() -> None:
    table = PodTable()
    assert not table.is_current
    table.listed([Pod("a", "pod-a"), Pod("b", "pod-b")])
    assert table.is_current
    table.changed(Pod("c", "pod-c"))
    table.changed(Pod("a", "pod-a", is_leaving=True))
    table.deleted(Pod("b", "pod-b"))
    assert sorted(each.uid for each in table) == ["a", "c"]
    assert [table.withheld(uid) for uid in "abcd"] == [Withheld.LEAVING, Withheld.LEAVING, None, None]


def test_a_pod_missing_from_a_later_list_is_leaving_and_may_return() -> None:
    table = PodTable()
    table.listed([Pod("a", "pod-a"), Pod("b", "pod-b")])
    table.listed([Pod("b", "pod-b")])
    assert [table.withheld(uid) for uid in "ab"] == [Withheld.LEAVING, None]
    # Somebody has taken the label off, and puts it on again.
    table.changed(Pod("a", "pod-a"))
    assert table.withheld("a") is None
    table.listed([])
    table.listed([Pod("a", "pod-a")])
    assert [table.withheld(uid) for uid in "ab"] == [None, Withheld.LEAVING]


def test_readiness_counts_only_while_it_is_known_and_leaving_for_ever() -> None:
    table = PodTable()
    table.listed([Pod("a", "pod-a", is_unready=True), Pod("b", "pod-b", is_leaving=True, is_unready=True)])
    assert [table.withheld(uid) for uid in "ab"] == [Withheld.UNREADY, Withheld.LEAVING]
    table.lost()
    assert [table.withheld(uid) for uid in "ab"] == [None, Withheld.LEAVING]


def test_the_memory_of_pods_that_are_gone_is_bounded() -> None:
    table = PodTable()
    for number in range(5000):
        table.deleted(Pod(f"u{number}", "n"))
    assert table.withheld("u0") is None
    assert table.withheld("u4999") is Withheld.LEAVING


def test_servers_are_found_by_their_pods_and_those_without_are_left_alone() -> None:
    table = PodTable()
    table.listed([Pod("uid-a", "x", is_leaving=True), Pod("uid-b", "y", is_unready=True), Pod("uid-c", "z")])
    table.deleted(Pod("", "no uid"))
    servers = [placed(name, "0:10") for name in "abcd"] + [placed("e", "0:10", pod_uid="")]
    assert withheld_servers(servers, table, ()) == {"a": Withheld.LEAVING, "b": Withheld.UNREADY}


@pytest.mark.parametrize("is_listed", [True, False])
def test_a_server_whose_pod_has_gone_is_lost_and_leaves_only_if_it_comes_back(is_listed: bool) -> None:
    table = PodTable()
    table.listed([Pod("uid-a", "x"), Pod("uid-b", "y")])
    if is_listed:
        table.changed(Pod("uid-a", "x", has_ended=True))
    else:
        table.deleted(Pod("uid-a", "x"))
    assert [table.has_gone(uid) for uid in ("uid-a", "uid-b")] == [True, False]
    servers = [placed(name, "0:10") for name in "ab"]
    assert withheld_servers(servers, table, ()) == {}, "it is to be removed"
    assert withheld_servers(servers, table, {"a"}) == {"a": Withheld.LEAVING}, "it was removed, and lives on"
