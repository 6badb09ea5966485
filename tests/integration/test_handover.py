"""The frames of a handover: what the receiver accepts, what it refuses, and what it holds afterwards."""

import asyncio
import math
import struct
import zlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from corolla.block_server import service
from corolla.block_server.handover.sender import HandoverLink
from corolla.block_server.hop_session import SessionState
from corolla.block_server.service import BlockServer
from corolla.cache.transfer import token_bytes
from corolla.chassis.channels import open_channel
from corolla.chassis.errors import HopUnavailable, MalformedMessage, OutOfPages
from corolla.v1 import blocks_pb2 as pb
from corolla.v1 import blocks_pb2_grpc, common_pb2
from corolla.wire.frames import Frame
from corolla.wire.stream import connect
from tests.integration.gates import held_up
from tests.integration.swarm import Swarm
from tests.integration.waiting import until
from tests.integration.wires import Cut
from tests.tiers import quick

SESSION, TRANSFER = b"s" * 16, b"x" * 16
BLOCKS = common_pb2.BlockSpan(start=2, end=5)


@asynccontextmanager
async def a_taker(folder: Path, model: Path) -> AsyncIterator[tuple[BlockServer, HandoverLink, int]]:
    """A server, a stream to it as another server has it, and the bytes of one token in its blocks."""
    async with Swarm(folder, model, ["0:2", "2:5"]) as swarm:
        server = swarm.servers[1]
        fingerprint = (await swarm.statuses())[1].fingerprint
        link = HandoverLink(server.address)
        async with link.connect(fingerprint):
            yield server, link, token_bytes(server.engine.runner.store, range(3))  # type: ignore[attr-defined]
            await swarm.until_empty()


def an_offer(**changes: Any) -> pb.Handover:
    offer = {
        "session_id": SESSION, "epoch": 3, "tenant": "t", "client_id": b"c" * 16, "max_tokens": 40, "blocks": BLOCKS,
        "lease_ms": 3_600_000, "transfer_id": TRANSFER, **changes,
    }  # fmt: skip
    return pb.Handover(**offer)


def a_part(payload: bytes, num_tokens: int, **changes: Any) -> pb.HandoverTokens:
    part = {
        "session_id": SESSION, "epoch": 3, "position": 0, "num_tokens": num_tokens, "first_tokens": [0, 0, 0],
        "checksum": zlib.crc32(payload), "transfer_id": TRANSFER, **changes,
    }  # fmt: skip
    return pb.HandoverTokens(**part)


async def test_the_receiver_takes_only_parts_that_fit_and_an_aborted_handover_leaves_no_page(
    tmp_path: Path, model: Path
) -> None:
    async with a_taker(tmp_path, model) as (_, link, bytes_per_token):
        payload = bytes(4 * bytes_per_token)
        answer = await link.request(a_part(payload, 4), payload)
        assert answer.reason == "HOP_SESSION_LOST"  # no server offered it
        answer = await link.request(an_offer())
        assert (answer.reason, answer.num_tokens) == ("", 0)
        bad: list[tuple[dict[str, Any], bytes, str]] = [
            ({"transfer_id": b"y" * 16}, payload, "HOP_SESSION_LOST"),
            ({"transfer_id": b""}, payload, "HOP_SESSION_LOST"),
            ({"epoch": 2}, payload, "HOP_SESSION_LOST"),
            ({"session_id": b"o" * 16}, payload, "HOP_SESSION_LOST"),
            ({"checksum": 1}, payload, "CHECKSUM_MISMATCH"),
            ({"position": 1}, payload, "POSITION_GAP"),
            ({}, payload[:-1], "MALFORMED_MESSAGE"),
            ({}, payload[:-4] + struct.pack("<f", math.nan), "MALFORMED_MESSAGE"),
            ({}, payload[:-4] + struct.pack("<f", -math.inf), "MALFORMED_MESSAGE"),
            ({"num_tokens": 5}, payload, "MALFORMED_MESSAGE"),
            ({"num_tokens": 41}, payload, "MALFORMED_MESSAGE"),
            ({"num_tokens": 1 << 31}, payload, "MALFORMED_MESSAGE"),
            ({"first_tokens": [0, 0]}, payload, "MALFORMED_MESSAGE"),
            ({"first_tokens": [0, 0, 1]}, payload, "MALFORMED_MESSAGE"),
            # One more layer may be that of a block that drafts, but none beyond.
            ({"first_tokens": [0, 0, 0, 0]}, payload[:-1], "MALFORMED_MESSAGE"),
            ({"first_tokens": [0, 0, 1, 0]}, payload, "MALFORMED_MESSAGE"),
            ({"first_tokens": [0, 0, 0, 0, 0]}, payload, "MALFORMED_MESSAGE"),
            ({"first_tokens": [32, 32, 32]}, b"", "MALFORMED_MESSAGE"),
        ]
        for changes, sent, reason in bad:
            changes = {"checksum": zlib.crc32(sent), **changes}
            answer = await link.request(a_part(sent, changes.pop("num_tokens", 4), **changes), sent)
            assert answer.reason == reason, (changes, answer)
        answer = await link.request(a_part(payload, 4), payload)
        assert (answer.reason, answer.num_tokens) == ("", 4)
        # What arrived counts for the same handover, and not for another one.
        assert (await link.request(an_offer())).num_tokens == 4
        assert (await link.request(an_offer(transfer_id=b"y" * 16))).num_tokens == 0
        link.send(pb.Close(session_id=SESSION, epoch=3))


@pytest.mark.full
async def test_offers_are_checked_before_they_cost_a_page(tmp_path: Path, model: Path) -> None:
    async with a_taker(tmp_path, model) as (server, link, _):
        assert (await link.request(an_offer(max_tokens=(1 << 31) - 1))).reason == OutOfPages.reason
        assert not server.sessions
        assert (await link.request(an_offer())).reason == ""
        assert (await link.request(an_offer(tenant="u"))).reason == "HOP_SESSION_LOST"
        assert (await link.request(an_offer(epoch=2))).reason == "STALE_EPOCH"
        link.send(pb.Close(session_id=SESSION, epoch=3))
        for changes in ({"session_id": b"short"}, {"transfer_id": b""}, {"epoch": 0}, {"lease_ms": 0},
                        {"blocks": common_pb2.BlockSpan(start=1, end=5)}):  # fmt: skip
            # What no server of ours would send costs the stream.
            other = HandoverLink(server.address)
            async with other.connect(await fingerprint_of(server)):
                with pytest.raises(HopUnavailable):
                    await other.request(an_offer(**changes))


async def test_a_client_cannot_hand_sessions_over(tmp_path: Path, model: Path) -> None:
    async with a_taker(tmp_path, model) as (server, _, _):
        stream = connect(server.address, lambda _: lambda _: None)
        stream.send(pb.Hello(client_id=b"c" * 16, fingerprint=await fingerprint_of(server)))
        stream.send(an_offer())
        assert isinstance((await stream.ended).error, MalformedMessage)


@pytest.mark.parametrize("word", [pb.Truncate(idle=True), pb.Close()], ids=["turn over", "close"])
async def test_who_handed_a_session_over_has_no_say_once_its_client_has_opened_it(
    tmp_path: Path, model: Path, word: pb.Truncate | pb.Close
) -> None:
    """The client took the open of another hop back meanwhile, so the leaving server saw a turn end that goes on."""
    async with a_taker(tmp_path, model) as (server, link, bytes_per_token):
        payload = bytes(4 * bytes_per_token)
        await link.request(an_offer())
        await link.request(a_part(payload, 4, is_last=True), payload)
        is_opened = asyncio.Event()

        def receive(frame: Frame) -> None:
            if isinstance(frame.control, pb.Opened):
                is_opened.set()

        stream = connect(server.address, lambda _: receive)
        stream.send(pb.Hello(client_id=b"c" * 16, fingerprint=await fingerprint_of(server)))
        opening = pb.Open(
            request_id=1, session_id=SESSION, epoch=3, tenant="t", resume=True, max_tokens=40, blocks=BLOCKS,
            lease_ms=3_600_000, transient=True,
        )  # fmt: skip
        stream.send(opening)
        async with asyncio.timeout(30):
            await is_opened.wait()
        word.session_id, word.epoch = SESSION, 3
        link.send(word)
        answer = await link.request(an_offer())  # in order with it
        assert answer.reason == "STALE_EPOCH"
        assert [held.state for held in server.sessions] == [SessionState.RUNNING]
        stream.abort()


@pytest.mark.parametrize("num_asks", quick([1, 2, 4], 2))
async def test_after_a_broken_stream_only_the_rest_is_sent(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch, num_asks: int
) -> None:
    """Parts that were damaged on the way or changed meanwhile are correct in the end."""
    monkeypatch.setattr(service, "PART_BYTES", 10_000)
    options: dict[str, Any] = {"max_tokens": 800, "ignore_eos": True}
    prompt = "the thin man in the inner tent " * 8
    async with (
        Swarm(tmp_path, model, ["0:2", "2:5"], server={"grace_s": 20.0}) as swarm,
        swarm.connect() as client,
    ):
        undisturbed = (await client.generate(prompt, **options)).token_ids
        await swarm.until_empty()
        answer = asyncio.create_task(client.generate(prompt, **options))
        leaving = swarm.servers[1]
        await until_tokens(leaving, 100)
        with held_up(swarm.servers[0]):
            taker = await swarm.add_server("2:5")
            bytes_per_token = token_bytes(leaving.engine.runner.store, range(3))  # type: ignore[attr-defined]
            breaking = _Breaking(leaving, taker, num_asks)
            swarm.wires_of(leaving).on_sent = breaking
            swarm.servers.remove(leaving)
        await leaving.stop()
        assert breaking.has_damaged == (num_asks > 1)
        assert breaking.states == (SessionState.RUNNING, SessionState.ARRIVING)
        assert bool(breaking.num_arrived) == (num_asks > 1)
        num_bytes = leaving.registry.get_sample_value("corolla_handover_bytes_total", {"direction": "out"})
        assert num_bytes is not None
        assert 0 < num_bytes <= (2000 - breaking.num_arrived) * bytes_per_token
        assert (await answer).token_ids == undisturbed
        assert (await answer).usage.recoveries == 1
        await swarm.until_empty()


class _Breaking:
    """Damages the first part that goes from one server to another, and breaks the stream after some frames, once.

    Attributes:
        has_damaged: whether there was a part to damage.
        states: of the session, here and there, when it is offered again.
        num_arrived: tokens that the taker has by then.
    """

    def __init__(self, leaving: BlockServer, taker: BlockServer, num_asks: int) -> None:
        self.has_damaged = False
        self.states: tuple[SessionState, SessionState] | None = None
        self.num_arrived = 0
        self._leaving = leaving
        self._taker = taker
        self._num_left = num_asks

    def __call__(self, address: str, frame: Frame) -> Frame:
        if address != self._taker.address or not isinstance(frame.control, pb.Handover | pb.HandoverTokens):
            return frame
        if self._num_left == 0:
            self._num_left -= 1
            raise Cut
        if self._num_left < 0:
            self._note()
        elif isinstance(frame.control, pb.HandoverTokens) and not self.has_damaged:
            self.has_damaged = True
            payload = bytes(frame.payload)
            return Frame(frame.control, payload[:-1] + bytes([payload[-1] ^ 1]))
        else:
            self._num_left -= 1
        return frame

    def _note(self) -> None:
        if self.states is None:
            (here,), (there,) = self._leaving.sessions, self._taker.sessions
            self.states, self.num_arrived = (here.state, there.state), there.cache.num_tokens


async def fingerprint_of(server: BlockServer) -> str:
    async with open_channel(f"127.0.0.1:{server.control_port}") as channel:
        stub = blocks_pb2_grpc.BlockServiceStub(channel)
        return str((await stub.GetStatus(pb.GetBlockServerStatusRequest())).fingerprint)


async def until_tokens(server: BlockServer, num_tokens: int) -> None:
    await until(lambda: any(held.cache.num_tokens >= num_tokens for held in server.sessions))
