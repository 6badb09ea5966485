"""Somebody registers as a block server that is ready and fast, and is not: every answer comes, and few ask it."""

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from corolla.chassis.channels import open_channel
from corolla.client.service import ClientBounds
from corolla.v1 import blocks_pb2 as pb
from corolla.v1 import common_pb2
from corolla.wire import stream
from tests.checkpoints import make_tiny_checkpoint
from tests.integration.metrics import sample
from tests.integration.router.conftest import BlockServer, Router
from tests.integration.swarm import Swarm
from tests.tiers import quick

LONG_S = 10.0
MOST_TIMES_ASKED = 2
"""A client service leaves it out for 5 seconds, then for 10, and so on up to a minute."""


@pytest.fixture(autouse=True)
def _impatient() -> Iterator[None]:
    """Connections end after seconds of silence, as those of services do; those of tests otherwise bear a minute."""
    patient_s = stream.between_servers().silence_s
    stream.tolerate_silence(3)
    yield
    stream.tolerate_silence(patient_s)


def welcome(caller: stream.Stream) -> stream.Receiver:
    caller.send(pb.Welcome(server_id="forged", span=common_pb2.BlockSpan(start=0, end=5), max_tokens_per_frame=512))
    return lambda _: None


async def _say_nothing(reader: asyncio.StreamReader, _: asyncio.StreamWriter) -> None:
    await reader.read()


@asynccontextmanager
async def forger(kind: str) -> AsyncIterator[str]:
    """The address of one that is not there, takes connections in silence, or welcomes everybody and opens nothing."""
    listener = stream.StreamListener("127.0.0.1", 0)
    address = f"127.0.0.1:{listener.port}"
    if kind == "welcomes":
        await listener.start(welcome)
    if kind != "silent":
        yield address
        await listener.close()
        return
    listener.release()
    server = await asyncio.start_server(_say_nothing, "127.0.0.1", listener.port)
    yield address
    server.close()


def connections(swarm: Swarm) -> Counter[str]:
    """How often the client service begins a stream to each address, from now on."""
    wires, begun = swarm.wires_of(swarm.clients[0]), Counter[str]()
    connect = wires.beneath.connect

    def connect_counted(
        address: str, accept: stream.Accept, limits: stream.StreamLimits | None = None
    ) -> stream.Stream:
        begun[address] += 1
        return connect(address, accept, limits)

    wires.beneath = replace(wires.beneath, connect=connect_counted)
    return begun


@pytest.mark.parametrize("kind", quick(["absent", "silent", "welcomes"], "absent"))
async def test_a_forged_ready_costs_each_client_service_little(tmp_path: Path, kind: str) -> None:
    model = make_tiny_checkpoint("llama", tmp_path / "tiny")
    async with (
        Swarm(tmp_path, model, ["0:5"], bounds=ClientBounds(open_timeout_s=1.0)) as swarm,
        swarm.connect() as client,
        forger(kind) as address,
        open_channel(swarm.router_address) as channel,
    ):
        options: dict[str, Any] = {"max_tokens": 8, "ignore_eos": True}
        expected = (await client.generate([1, 2, 3], **options)).token_ids
        (status,) = await swarm.statuses()
        forged = BlockServer(
            Router(swarm.router, channel), "tiny", address=address, fingerprint=status.fingerprint,
            num_model_blocks=5, capacity_blocks=5, decode_tokens_per_second=1e9,
        )  # fmt: skip
        await forged.join("0:5")
        forged.load.decode_step_seconds = 1e-9
        begun, opened = connections(swarm), swarm.wires_of(swarm.clients[0]).openings
        async with forged.beating():
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LONG_S):
                    while True:
                        assert (await client.generate([1, 2, 3], **options)).token_ids == expected
        # Not quarantines, of which the honest server has one where the machine pauses while it opens a session.
        assert 1 <= max(begun[address], opened[address]) <= MOST_TIMES_ASKED
        assert await sample(swarm.clients[0].metrics_port, "corolla_quarantines_total") >= 1
