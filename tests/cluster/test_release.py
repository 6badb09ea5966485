"""A release on a real cluster, from `helm install` to `helm uninstall`, in this order."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Final

import pytest

from corolla import Client
from tests.charts.rendering import quantity
from tests.cluster import release
from tests.cluster.asking import GREEDY, NUM_LONG_TOKENS, answer_of, ask_with_openai, disturbed, load
from tests.cluster.bystanders import TESTER, standing
from tests.golden import GoldenAnswer
from tests.tiers import quick

STANDBY_HITS: Final = "corolla_standby_hits_total"
INSIDE: Final = Path(__file__).with_name("inside.py")
# The brackets keep it from finding itself; the files are those of both versions of control groups.
MEMORY: Final = """
grep -al 'client.text.[t]emplate' /proc/[0-9]*/cmdline | wc -l
cat /sys/fs/cgroup/memory/memory.usage_in_bytes /sys/fs/cgroup/memory.current 2>/dev/null; true
"""
WAITING: Final = ("--wait", "--timeout", "5m")

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900)]


def test_the_release_becomes_ready_in_time(installed: float) -> None:
    assert installed < release.READY_WITHIN_S


def test_helm_test_passes(installed: float) -> None:
    assert "Succeeded" in release.helm("test", release.RELEASE, "--timeout", "5m")


@pytest.mark.parametrize("component", ["block-server", "client"])
def test_a_container_holds_nothing_to_break_out_with(installed: float, component: str) -> None:
    (pod, *_) = release.names(release.pods(component))
    asked = "id -u; command -v cc gcc || echo no compiler; touch /x 2>/dev/null || echo read-only; ls /var/run/secrets"
    said = release.kubectl("exec", pod, "--", "sh", "-c", f"({asked}) 2>/dev/null; true").splitlines()
    assert said == ["10001", "no compiler", "read-only"]


@pytest.mark.parametrize("golden", quick(GREEDY[:3], GREEDY[0]), ids=lambda golden: golden.name)
def test_an_answer_is_that_of_the_unsplit_model(address: str, golden: GoldenAnswer) -> None:
    assert answer_of(address, golden) == (golden.token_ids, 0)


@pytest.mark.parametrize("what", quick(["known answer", "tools"], "known answer"))
def test_the_openai_package_asks_through_the_service(whole: None, what: str) -> None:
    with release.forwarded(f"service/{release.RELEASE}-client", release.HTTP_PORT) as http:
        ask_with_openai(http, what, GREEDY[0])


def test_pods_ask_by_the_services_name(whole: None, address: str) -> None:
    client_pods = [f"{each['status']['podIP']}:{release.CLIENT_PORT}" for each in release.pods("client")]
    with standing(TESTER):
        service = f"{release.RELEASE}-client:{release.CLIENT_PORT}"
        said = TESTER.run("python", "-", service, *client_pods, stdin=INSIDE.read_text(encoding="utf-8"))
    inside = json.loads(said)
    with Client(address, timeout=300) as client:
        outside = client.generate("The capital of France is", max_tokens=16, temperature=0, ignore_eos=True)
    assert inside["generated"] == list(outside.token_ids)
    assert inside["streamed"] == inside["first_turn"] != ""
    assert inside["cached_in_second_turn"] > 0


def test_client_services_use_no_more_memory_than_they_ask_for(whole: None) -> None:
    """Each has rendered a conversation in the test above, and keeps a process for it."""
    for pod in release.pods("client"):
        said = release.kubectl("exec", pod["metadata"]["name"], "--", "sh", "-c", MEMORY).split()
        num_renderers, num_bytes = map(int, said)
        assert num_renderers == 1
        asked = pod["spec"]["containers"][0]["resources"]["requests"]["memory"]
        assert num_bytes <= quantity(asked), f"{num_bytes >> 20} MiB"


def delete_gracefully(pod: str) -> None:
    release.kubectl("delete", "pod", pod, "--wait=false")


@pytest.mark.parametrize(
    "remove", quick([delete_gracefully, release.kill, release.evict], release.kill), ids=lambda remove: remove.__name__
)
@pytest.mark.parametrize("pool", quick(["front", "back"], "back"))
def test_a_block_server_goes_in_the_middle_of_an_answer(
    whole: None, address: str, pool: str, remove: Callable[[str], None], capsys: pytest.CaptureFixture[str]
) -> None:
    before: dict[str, float] = {}

    def disturb() -> None:
        gone = release.serving_pod(pool)
        others = set(release.names(release.pods("block-server", pool=pool))) - {gone}
        before.update((name, release.metric(name, STANDBY_HITS)) for name in others)
        remove(gone)

    streamed = disturbed(address, disturb)
    with capsys.disabled():
        sys.stdout.write(
            f"\n{remove.__name__} of a pod of {pool} at {NUM_LONG_TOKENS} tokens: "
            f"{streamed.num_recoveries} recoveries, longest wait for a token {max(streamed.waits_s):.2f} s\n"
        )
    # One that leaves with notice may still finish the answer, or hand it over.
    if remove is release.kill:
        assert streamed.num_recoveries
        release.wait_for(
            lambda: any(release.metric(name, STANDBY_HITS) > num_found for name, num_found in before.items()),
            30,
            "no standby went on with the answer",
        )


def test_a_span_is_never_evicted_whole(whole: None) -> None:
    one, other = release.names(release.pods("block-server", pool="back"))
    release.evict(one)
    with pytest.raises(release.CommandFailed, match="disruption budget"):
        release.evict(other)


@pytest.mark.parametrize("component", quick(["router", "redis"], "redis"))
def test_the_control_plane_goes_in_the_middle_of_an_answer(whole: None, address: str, component: str) -> None:
    def kill_all() -> None:
        for name in release.names(release.pods(component)):
            release.kill(name)

    assert disturbed(address, kill_all).num_recoveries == 0


UPGRADES: Final = {
    "router": "router.settings.leaseMs=7000",
    "block-server": "blockServer.defaults.settings.kvCacheMib=160",
}


@pytest.mark.parametrize("component", quick(UPGRADES, "router"))
def test_an_upgrade_and_its_rollback_fail_no_request(whole: None, address: str, component: str) -> None:
    before = release.names(release.pods(component))
    with load(address) as problems:
        release.helm(
            "upgrade", release.RELEASE, str(release.CHART), "--reuse-values", "--set", UPGRADES[component], *WAITING
        )
        assert not set(before) & set(release.names(release.pods(component)))
        release.helm("rollback", release.RELEASE, *WAITING)
    assert problems == []


@pytest.mark.full
def test_a_pool_grows_and_shrinks_without_an_error(whole: None, address: str) -> None:
    deployment = f"deployment/{release.RELEASE}-block-server-back"
    with load(address) as problems:
        release.kubectl("scale", deployment, "--replicas=3")
        release.kubectl("rollout", "status", deployment, "--timeout=5m")
        release.kubectl("scale", deployment, "--replicas=2")
        release.wait_until_whole()
    assert problems == []


def test_uninstalling_leaves_nothing(whole: None) -> None:
    release.helm("uninstall", release.RELEASE, *WAITING)
    release.wait_for(lambda: not release.leftovers(), 120, f"the release left {release.leftovers()}")
