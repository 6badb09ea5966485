"""A router uses a Kubernetes API: what it learns, what it writes, and that it serves without it."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import pytest
from redis.asyncio import Redis

from corolla.v1 import router_pb2 as pb
from tests.integration.metrics import sample, until_sample
from tests.integration.router.conftest import FAST_INTERVALS, BlockServer, Router, StartRouter, spans
from tests.integration.router.kubernetes_server import KubernetesServer, kubeconfig, kubernetes_server
from tests.integration.router.test_registration import placement, plan
from tests.integration.waiting import until
from tests.tiers import quick
from tests.unit.router.cluster.described import described_pod

SELECTOR: Final = "app.kubernetes.io/component=block-server"
# Hanging calls hang for a minute, so a component that waits for one is noticed.
PATIENT: Final = {"kubernetes_answer_s": 60.0}
OWN_POD: Final = {"pod_name": "router-0", "pod_uid": "router-uid"}


@pytest.fixture(autouse=True)
async def empty_store(redis_url: str) -> None:
    """Pods have the same uids in each test, and servers of the last one may still have their leases."""
    async with Redis.from_url(redis_url) as store:
        await store.flushdb()


@pytest.fixture
def kubernetes() -> Iterator[KubernetesServer]:
    with kubernetes_server() as server:
        yield server


def at_pace(inside: dict[str, Any], **seconds: float) -> dict[str, Any]:
    """The settings, with a router that looks or waits otherwise."""
    return {**inside, "intervals": replace(inside["intervals"], **seconds)}


@pytest.fixture
def inside(tmp_path: Path, kubernetes: KubernetesServer) -> dict[str, Any]:
    """The settings of a router that knows where the API is."""
    intervals = replace(FAST_INTERVALS, list_pods_s=1.0)
    return {"kubernetes": kubeconfig(tmp_path, kubernetes), "intervals": intervals, **OWN_POD}


def server_in(router: Router, model: str, pod: str, **facts: Any) -> BlockServer:
    return BlockServer(router, model, **{"num_model_blocks": 10, "pod_uid": pod, **facts})


@asynccontextmanager
async def serving(*servers: BlockServer) -> AsyncIterator[None]:
    """The servers are ready, each with all blocks that it can hold, and send heartbeats."""
    async with AsyncExitStack() as stack:
        for each in servers:
            await each.join()
            await stack.enter_async_context(each.beating())
        yield


async def watched(router: Router) -> None:
    """Returns when the router knows the pods."""
    await until_sample(router.process.metrics_port, "corolla_pod_watch_up", lambda value: value == 1)


async def tagged(kubernetes: KubernetesServer) -> None:
    """Returns when a router has tagged a pod."""
    await until(lambda: kubernetes.patches)


async def num_patches(router: Router) -> float:
    return await sample(router.process.metrics_port, "corolla_kubernetes_calls_total", call="patch")


async def states(router: Router, model: str) -> dict[str, tuple[int, bool]]:
    """State and suspicion of each server, by pod."""
    seen = await placement(router, model)
    return {each.server.pod_uid: (each.state, each.suspected) for each in seen.servers}


async def becomes(router: Router, model: str, pod: str, state: int, *, suspected: bool = False) -> None:
    async def is_so() -> bool:
        return (await states(router, model)).get(pod) == (state, suspected)

    await until(is_so)


async def chosen(router: Router, model: str) -> set[str]:
    """Which servers twenty new sessions get."""
    return {(await plan(router, model)).chain.hops[0].server_id for _ in range(20)}


READY, DRAINING = int(pb.SERVER_STATE_READY), int(pb.SERVER_STATE_DRAINING)


async def test_a_deleted_pod_gets_no_more_sessions_and_watchers_are_notified(
    start_router: StartRouter, inside: dict[str, Any], kubernetes: KubernetesServer, model: str
) -> None:
    for name in "ab":
        kubernetes.put(described_pod(name))
    # No timer helps here: neither the list of pods nor the placement is read again by itself.
    router = await start_router(**at_pace(inside, list_pods_s=600.0, relist_s=60.0))
    await watched(router)
    going, staying = server_in(router, model, "a"), server_in(router, model, "b")
    async with serving(going, staying):
        assert await chosen(router, model) == {going.server_id, staying.server_id}
        watch = router.stub.WatchPlacement(pb.WatchPlacementRequest(model=model))
        await watch.read()
        kubernetes.put(described_pod("a", deleted=True))
        pushed = await asyncio.wait_for(watch.read(), 30)
        assert {each.server.pod_uid: each.state for each in pushed.servers} == {"a": DRAINING, "b": READY}
        assert await chosen(router, model) == {staying.server_id}
        # Its own word does not change that: it has not heard of it yet.
        await going.beat()
        await asyncio.sleep(0.3)
        assert await chosen(router, model) == {staying.server_id}
        watch.cancel()


async def test_a_pod_that_vanishes_gets_no_sessions_though_its_lease_runs(
    start_router: StartRouter, inside: dict[str, Any], kubernetes: KubernetesServer, model: str
) -> None:
    for name in "abc":
        kubernetes.put(described_pod(name))
    router = await start_router(**inside)
    await watched(router)
    servers = [server_in(router, model, name) for name in "abc"]
    async with serving(*servers):
        kubernetes.remove("pod-a")
        await becomes(router, model, "a", DRAINING)
        # This one goes while no router watches.
        kubernetes.faults["watch"] = 503
        kubernetes.cut_watches()
        await asyncio.sleep(0.2)
        kubernetes.remove("pod-b")
        kubernetes.faults.clear()
        await becomes(router, model, "b", DRAINING)
        assert await chosen(router, model) == {servers[2].server_id}


@pytest.mark.parametrize("end", quick(["failed", "vanished"], "failed"))
async def test_a_server_whose_pod_has_gone_is_lost_before_its_lease_ends(
    start_router: StartRouter,
    inside: dict[str, Any],
    kubernetes: KubernetesServer,
    model: str,
    caplog: pytest.LogCaptureFixture,
    end: str,
) -> None:
    caplog.set_level(logging.INFO)
    for name in "ab":
        kubernetes.put(described_pod(name))
    router, other = await start_router(**inside), await start_router(**inside)
    await watched(router)
    await watched(other)
    gone, staying = server_in(router, model, "a"), server_in(router, model, "b")
    async with serving(staying):
        await gone.join()
        watch = other.stub.WatchPlacement(pb.WatchPlacementRequest(model=model))
        if end == "failed":
            kubernetes.put(described_pod("a", phase="Failed"))
        else:
            kubernetes.remove("pod-a")
        # Client services count a server that they saw draining as one that left in order.
        seen: list[pb.PlacedServer] = []
        while len(seen) != 1:
            seen = [*(await asyncio.wait_for(watch.read(), 30)).servers]
            assert all(each.state == READY for each in seen)
        assert seen[0].server.pod_uid == "b"
        watch.cancel()
        # It lives on: no router removes it again.
        await gone.join()
        await becomes(other, model, "a", DRAINING)
        await asyncio.sleep(1)
    assert sum("has gone" in each.message for each in caplog.records) == 1


async def test_a_pod_that_is_not_ready_comes_last_until_it_is_ready_again(
    start_router: StartRouter, inside: dict[str, Any], kubernetes: KubernetesServer, model: str
) -> None:
    for name in "ab":
        kubernetes.put(described_pod(name))
    router = await start_router(**inside)
    await watched(router)
    one, other = server_in(router, model, "a"), server_in(router, model, "b")
    async with serving(one, other):
        kubernetes.put(described_pod("a", ready="False"))
        await becomes(router, model, "a", READY, suspected=True)
        assert await chosen(router, model) == {other.server_id}
        # Its own word counts where no other block server is left: a cluster that errs must not stop the model.
        kubernetes.put(described_pod("b", deleted=True))
        await becomes(router, model, "b", DRAINING)
        assert await chosen(router, model) == {one.server_id}
        kubernetes.put(described_pod("a"))
        await becomes(router, model, "a", READY)


async def test_readiness_marks_lapse_when_the_api_is_gone(
    start_router: StartRouter, inside: dict[str, Any], kubernetes: KubernetesServer, model: str
) -> None:
    kubernetes.put(described_pod("a", ready="False"))
    kubernetes.put(described_pod("b", deleted=True))
    router = await start_router(**inside)
    await watched(router)
    async with serving(server_in(router, model, "a"), server_in(router, model, "b")):
        await becomes(router, model, "a", READY, suspected=True)
        kubernetes.faults.update(list=503, watch=503)
        kubernetes.cut_watches()
        await becomes(router, model, "a", READY)
        # A deletion is never taken back.
        assert (await states(router, model))["b"] == (DRAINING, False)


async def test_pods_are_patched_once_with_their_span_and_deletion_cost(
    start_router: StartRouter, inside: dict[str, Any], kubernetes: KubernetesServer, model: str
) -> None:
    router = await start_router(**inside)
    await watched(router)
    servers = [server_in(router, model, name, capacity_blocks=5) for name in "abc"]
    async with serving(*servers):
        for name in "abc":
            await becomes(router, model, name, READY)
        # Pods whose servers come one after the other are tagged again for each that comes.
        for name in "abc":
            kubernetes.put(described_pod(name, labels={"app": "x"}))
        await until(lambda: len(kubernetes.patches) >= 3)
        await asyncio.sleep(1)
        metadata = {name: pod["metadata"] for name, pod in kubernetes.pods.items()}
        assert {name: each["labels"] for name, each in metadata.items()} == {
            "pod-a": {"app": "x", "corolla.dev/span": "0-5"},
            "pod-b": {"app": "x", "corolla.dev/span": "5-10"},
            "pod-c": {"app": "x", "corolla.dev/span": "0-5"},
        }
        costs = {
            name: int(each["annotations"]["controller.kubernetes.io/pod-deletion-cost"])
            for name, each in metadata.items()
        }
        assert costs["pod-a"] == costs["pod-c"] < costs["pod-b"]
        assert sorted(name for name, _, _ in kubernetes.patches) == ["pod-a", "pod-b", "pod-c"]
        assert {kind for _, kind, _ in kubernetes.patches} == {"application/merge-patch+json"}
        assert all(
            query["labelSelector"] == [SELECTOR] for call, query in kubernetes.calls if call in ("list", "watch")
        )


async def test_of_several_routers_one_writes_and_another_takes_over(
    start_router: StartRouter, inside: dict[str, Any], kubernetes: KubernetesServer, model: str
) -> None:
    kubernetes.put(described_pod("a"))
    routers = [await start_router(**inside, lease_ms=3000) for _ in range(3)]
    for each in routers:
        await watched(each)

    async with serving(server_in(routers[0], model, "a")):
        await tagged(kubernetes)
        await asyncio.sleep(1)
        made = [await num_patches(each) for each in routers]
        assert sorted(made) == [0, 0, 1]
        leader = routers[made.index(1)]
        others = [each for each in routers if each is not leader]
    await leader.process.stop()
    kubernetes.put(described_pod("b"))
    async with serving(server_in(others[0], model, "b")):
        await until(lambda: "corolla.dev/span" in kubernetes.pods["pod-b"]["metadata"]["labels"])

        async def one_has_counted_it() -> bool:
            return sorted([await num_patches(each) for each in others]) == [0, 1]

        await until(one_has_counted_it)


@pytest.mark.full
async def test_releases_that_share_a_namespace_and_a_store_each_have_a_leader(
    start_router: StartRouter, inside: dict[str, Any], kubernetes: KubernetesServer, model: str
) -> None:
    routers = [await start_router(**inside, lease_ms=3000, pod_selector=f"release={name}") for name in ("one", "other")]
    for each in routers:
        await watched(each)

    # This API shows each of them the same pods, so both have something to tag and to tell.
    async def both_have_tagged() -> bool:
        return all([await num_patches(each) for each in routers])

    async with serving(server_in(routers[0], model, "a")):
        await becomes(routers[0], model, "a", READY)
        # A router that tags the pod from now on has seen that all blocks have a server.
        kubernetes.put(described_pod("a"))
        await until(both_have_tagged)
    await until(lambda: kubernetes.reasons().count("SpanUncovered") >= 2)


# What is recorded, and when, is decided by `router.cluster.events`; the next test writes an Event as this one does.
@pytest.mark.full
async def test_the_router_records_uncovered_and_restored_spans_on_its_pod(
    start_router: StartRouter, inside: dict[str, Any], kubernetes: KubernetesServer, model: str
) -> None:
    one, other = f"a-{model}", f"b-{model}"
    # Longer than a busy machine stops: a lease that ends while the server lives is an uncovered span, too.
    routers = [await start_router(**inside, lease_ms=10_000) for _ in range(2)]
    for each in routers:
        await watched(each)

    async def is_recorded(reason: str) -> bool:
        return reason in kubernetes.reasons()

    async with serving(server_in(routers[0], model, one)):
        await becomes(routers[0], model, one, READY)
        # A store may have the models of several releases; Events are about the pods here. So a router looks at this
        # model from now on, when all its blocks have a server: a release that loads has them restored.
        for uid in (one, other):
            kubernetes.put(described_pod(uid))
        await tagged(kubernetes)
        await asyncio.sleep(1)
        assert kubernetes.events == []
    await until(lambda: is_recorded("SpanUncovered"))
    messages = [each["message"] for each in kubernetes.events]
    assert messages == [f"blocks 0:10 of {model} have no ready block server"]
    event = kubernetes.events[0]
    assert event["type"] == "Warning"
    assert event["involvedObject"] == {
        "apiVersion": "v1", "kind": "Pod", "namespace": kubernetes.namespace, "name": "router-0", "uid": "router-uid",
    }  # fmt: skip
    async with serving(server_in(routers[1], model, other)):
        await until(lambda: is_recorded("SpanRestored"))
    assert kubernetes.reasons() == ["SpanUncovered", "SpanRestored"]
    assert kubernetes.events[1]["type"] == "Normal"


async def test_the_router_records_a_handover_on_the_servers_pod(
    start_router: StartRouter, inside: dict[str, Any], kubernetes: KubernetesServer, model: str
) -> None:
    kubernetes.put(described_pod("a"))
    routers = [await start_router(**inside) for _ in range(2)]
    for each in routers:
        await watched(each)
    server = server_in(routers[1], model, "a")
    # However soon it leaves again, the router knows its pod.
    await server.join()
    request = pb.DeregisterServerRequest(
        model=model, server_id=server.server_id, num_moved_sessions=3, num_left_sessions=1
    )
    await routers[1].stub.DeregisterServer(request, timeout=30)
    await until(lambda: kubernetes.events)
    await asyncio.sleep(0.5)
    (event,) = kubernetes.events
    assert (event["reason"], event["type"]) == ("SessionsHandedOver", "Warning")
    assert event["message"] == "sessions that other block servers have taken over: 3; left, and to be recomputed: 1"
    assert (event["involvedObject"]["name"], event["involvedObject"]["uid"]) == ("pod-a", "a")
    assert event["source"]["component"] == "corolla-router"


async def test_the_router_works_without_permission_and_logs_it_once(
    start_router: StartRouter,
    inside: dict[str, Any],
    kubernetes: KubernetesServer,
    model: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    kubernetes.faults.update(list=403, watch=403, patch=403, event=403)
    kubernetes.put(described_pod("a", deleted=True))
    with caplog.at_level(logging.INFO):
        router = await start_router(**at_pace(inside, after_forbidden_s=0.1))
        server = server_in(router, model, "a")
        async with serving(server):
            await until(lambda: kubernetes.num_calls("list") > 5)
            assert await chosen(router, model) == {server.server_id}
        said = [each for each in caplog.records if each.getMessage().startswith("kubernetes")]
        assert [(each.levelname, vars(each)["reason"]) for each in said] == [("WARNING", "ApiForbidden")]
        assert await sample(router.process.metrics_port, "corolla_pod_watch_up") == 0
        # Somebody has given it the role.
        kubernetes.faults.clear()
        await watched(router)


@pytest.mark.parametrize("call", quick(["patch", "event"], "patch"))
async def test_the_router_skips_forbidden_writes_and_logs_it_once(
    start_router: StartRouter,
    inside: dict[str, Any],
    kubernetes: KubernetesServer,
    model: str,
    call: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    kubernetes.faults[call] = 403
    kubernetes.put(described_pod("a"))
    router = await start_router(**at_pace(inside, after_failures_s=0.3))
    await watched(router)
    with caplog.at_level(logging.INFO):
        server = server_in(router, model, "a")
        await server.join()
        async with server.beating():
            await until(lambda: kubernetes.num_calls("patch") > 0)
            assert await chosen(router, model) == {server.server_id}
        request = pb.DeregisterServerRequest(model=model, server_id=server.server_id, num_moved_sessions=1)
        await router.stub.DeregisterServer(request, timeout=30)
        await asyncio.sleep(1)
    said = [vars(each)["reason"] for each in caplog.records if each.getMessage().startswith("kubernetes")]
    assert said == ["ApiForbidden"]
    assert bool(kubernetes.events) == (call == "patch")
    assert bool(kubernetes.patches) == (call == "event")


@pytest.mark.parametrize("fault", quick(["hang", "garbage", "nonsense", "expired", 410, 500], "hang"))
@pytest.mark.parametrize("call", ["list", "watch"])
async def test_routing_survives_every_fault_of_the_api(
    start_router: StartRouter, inside: dict[str, Any], kubernetes: KubernetesServer, model: str, call: str, fault: Any
) -> None:
    if fault == "expired" and call == "list":
        fault = 429
    kubernetes.put(described_pod("a"))
    kubernetes.faults[call] = fault
    router = await start_router(**at_pace(inside, **PATIENT))
    server = server_in(router, model, "a")
    async with serving(server):
        longest_s = 0.0
        for _ in range(15):
            began_s = time.monotonic()
            assert spans((await plan(router, model)).chain) == ["0:10"]
            longest_s = max(longest_s, time.monotonic() - began_s)
            await asyncio.sleep(0.1)
        assert longest_s < 20
        kubernetes.faults.clear()
        kubernetes.put(described_pod("a", deleted=True))
        await becomes(router, model, "a", DRAINING)


@pytest.mark.parametrize("call", quick(["list", "watch", "patch", "event"], "list", "patch"))
async def test_a_hanging_api_delays_no_request(
    start_router: StartRouter, inside: dict[str, Any], kubernetes: KubernetesServer, model: str, call: str
) -> None:
    kubernetes.put(described_pod("a"))
    kubernetes.faults[call] = "hang"
    router = await start_router(**at_pace(inside, **PATIENT))
    server = server_in(router, model, "a")
    await server.join()
    async with server.beating():
        await until(lambda: kubernetes.num_calls("patch" if call == "event" else call) > 0)
    request = pb.DeregisterServerRequest(model=model, server_id=server.server_id, num_moved_sessions=1)
    await router.stub.DeregisterServer(request, timeout=30)
    await asyncio.sleep(0.3)
    began_s = time.monotonic()
    await router.process.stop()
    assert time.monotonic() - began_s < 20
    kubernetes.faults.clear()


@pytest.mark.parametrize("kubeconfig", [None, "missing"])
async def test_the_router_serves_without_a_cluster_and_logs_it(
    start_router: StartRouter, model: str, tmp_path: Path, kubeconfig: str | None,
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    sentence = "cannot watch pods" if kubeconfig else "not using the Kubernetes API"
    with caplog.at_level(logging.INFO):
        router = await start_router(**({"kubernetes": str(tmp_path / kubeconfig)} if kubeconfig else {}))
        server = server_in(router, model, "a")
        async with serving(server):
            await until(
                lambda: any(
                    sentence in each.getMessage() for each in caplog.records if kubeconfig or each.levelname == "INFO"
                )
            )
            assert await chosen(router, model) == {server.server_id}
            if kubeconfig is None:
                assert await states(router, model) == {"a": (READY, False)}


async def test_kubernetes_off_makes_no_call(
    start_router: StartRouter, inside: dict[str, Any], kubernetes: KubernetesServer, model: str
) -> None:
    router = await start_router(**{**inside, "kubernetes": "off"})
    server = server_in(router, model, "a")
    async with serving(server):
        await asyncio.sleep(0.5)
        assert await chosen(router, model) == {server.server_id}
    assert kubernetes.calls == []


async def test_the_router_ignores_servers_of_other_releases_in_its_store(
    start_router: StartRouter, inside: dict[str, Any], kubernetes: KubernetesServer, model: str
) -> None:
    kubernetes.put(described_pod("mine"))
    router = await start_router(**inside)
    await watched(router)
    mine, foreign = server_in(router, model, "mine"), server_in(router, model, "of-another-namespace")
    outside = server_in(router, model, "")
    async with serving(mine, foreign, outside):
        await asyncio.sleep(1)
        assert await chosen(router, model) == {mine.server_id, foreign.server_id, outside.server_id}


async def test_a_pod_that_cannot_be_tagged_does_not_stop_the_others(
    start_router: StartRouter, inside: dict[str, Any], kubernetes: KubernetesServer, model: str
) -> None:
    """An admission webhook may refuse a change like this."""
    for name in "abc":
        kubernetes.put(described_pod(name))
    kubernetes.untouchable.add("pod-a")
    router = await start_router(**inside)
    await watched(router)
    async with serving(*(server_in(router, model, name) for name in "abc")):
        await until(lambda: {name for name, _, _ in kubernetes.patches} == {"pod-b", "pod-c"})
