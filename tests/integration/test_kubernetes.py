"""Real block servers in pods that a Kubernetes API lists."""

import asyncio
from pathlib import Path

from corolla.block_server.service import BlockServer
from tests.integration.router.kubernetes_server import KubernetesServer, kubeconfig, kubernetes_server
from tests.integration.router.test_kubernetes import OWN_POD
from tests.integration.swarm import Swarm
from tests.integration.waiting import until
from tests.unit.router.cluster.described import described_pod


async def test_a_server_whose_pod_is_deleted_hands_over_and_the_router_records_an_event(
    tmp_path: Path, model: Path
) -> None:
    with kubernetes_server() as kubernetes:
        for name in "ab":
            kubernetes.put(described_pod(name))
        inside = {"kubernetes": str(kubeconfig(tmp_path, kubernetes)), **OWN_POD}
        async with Swarm(tmp_path, model, [], num_clients=0, router=inside, server={"grace_s": 20.0}) as swarm:
            await swarm.add_server("0:2")
            going = await swarm.add_server("2:5", pod_uid="a")
            await swarm.add_client()
            await swarm.until_ready()
            await _leave_in_mid_answer(swarm, going, kubernetes)
            (event,) = [each for each in kubernetes.events if each["reason"] == "SessionsHandedOver"]
            assert event["involvedObject"]["name"] == "pod-a"
            assert event["message"] == "sessions that other block servers have taken over: 1"


async def _leave_in_mid_answer(swarm: Swarm, going: BlockServer, kubernetes: KubernetesServer) -> None:
    """Returns when the Event is there."""
    async with swarm.connect() as client:
        undisturbed = await client.generate("the thin man", max_tokens=300, ignore_eos=True)
        answer = asyncio.create_task(client.generate("the thin man", max_tokens=300, ignore_eos=True))
        await until(lambda: len(going.sessions) > 0)
        await swarm.add_server("2:5", pod_uid="b")
        kubernetes.put(described_pod("a", deleted=True))
        swarm.servers.remove(going)
        await going.stop()
        assert (await answer).token_ids == undisturbed.token_ids
    await until(lambda: "SessionsHandedOver" in kubernetes.reasons())
