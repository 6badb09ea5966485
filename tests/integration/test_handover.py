"""The frames of a handover: what a server takes from another one, what it refuses, and what it has afterwards."""

import asyncio
import zlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from corolla.block_server.handover import sender as sending
from corolla.block_server.handover.link import HandoverLink
from corolla.block_server.handover.sender import HandoverSender
from corolla.block_server.kv.transfer import token_bytes
from corolla.block_server.service import BlockServer
from corolla.chassis.channels import open_channel
from corolla.chassis.errors import HopUnavailable, OutOfPages
from corolla.v1 import blocks_pb2 as pb
from corolla.v1 import common_pb2
from corolla.wire.frames import EXCHANGE, Buffer, encode, join
from tests.checkpoints import make_tiny_checkpoint
from tests.integration.swarm import Swarm
from tests.integration.waiting import until

SESSION, TRANSFER = b"s" * 16, b"x" * 16
BLOCKS = common_pb2.BlockSpan(start=2, end=5)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("handover") / "tiny"
    return make_tiny_checkpoint("llama", folder, config_changes={"max_position_embeddings": 8192})


@asynccontextmanager
async def a_taker(folder: Path, model: Path) -> AsyncIterator[tuple[BlockServer, HandoverLink, int]]:
    """A server, a stream to it as another server has it, and the bytes of one token in its blocks."""
    async with Swarm(folder, model, ["0:2", "2:5"]) as swarm:
        server = swarm.servers[1]
        fingerprint = (await swarm.statuses())[1].fingerprint
        link = HandoverLink(server.address, open_channel)
        async with link.open(fingerprint):
            assert server._engine is not None
            yield server, link, token_bytes(server._engine._runner.store, range(3))
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


async def test_only_parts_that_fit_are_taken_and_what_is_given_up_leaves_nothing(tmp_path: Path, model: Path) -> None:
    async with a_taker(tmp_path, model) as (_, link, bytes_per_token):
        payload = bytes(4 * bytes_per_token)
        answer = await link.ask(a_part(payload, 4), payload)
        assert answer.reason == "HOP_SESSION_LOST"  # nobody offered it
        answer = await link.ask(an_offer())
        assert (answer.reason, answer.num_tokens) == ("", 0)
        bad: list[tuple[dict[str, Any], bytes, str]] = [
            ({"transfer_id": b"y" * 16}, payload, "HOP_SESSION_LOST"),
            ({"transfer_id": b""}, payload, "HOP_SESSION_LOST"),
            ({"epoch": 2}, payload, "HOP_SESSION_LOST"),
            ({"session_id": b"o" * 16}, payload, "HOP_SESSION_LOST"),
            ({"checksum": 1}, payload, "CHECKSUM_MISMATCH"),
            ({"position": 1}, payload, "POSITION_GAP"),
            ({}, payload[:-1], "MALFORMED_MESSAGE"),
            ({"num_tokens": 5}, payload, "MALFORMED_MESSAGE"),
            ({"num_tokens": 41}, payload, "MALFORMED_MESSAGE"),
            ({"num_tokens": 1 << 31}, payload, "MALFORMED_MESSAGE"),
            ({"first_tokens": [0, 0]}, payload, "MALFORMED_MESSAGE"),
            ({"first_tokens": [0, 0, 1]}, payload, "MALFORMED_MESSAGE"),
            ({"first_tokens": [32, 32, 32]}, b"", "MALFORMED_MESSAGE"),
        ]
        for changes, sent, reason in bad:
            changes = {"checksum": zlib.crc32(sent), **changes}
            answer = await link.ask(a_part(sent, changes.pop("num_tokens", 4), **changes), sent)
            assert answer.reason == reason, (changes, answer)
        answer = await link.ask(a_part(payload, 4), payload)
        assert (answer.reason, answer.num_tokens) == ("", 4)
        # What arrived counts for the same handover, and not for another one.
        assert (await link.ask(an_offer())).num_tokens == 4
        assert (await link.ask(an_offer(transfer_id=b"y" * 16))).num_tokens == 0
        link.tell(pb.Close(session_id=SESSION, epoch=3))


async def test_offers_are_checked_before_they_cost_a_page(tmp_path: Path, model: Path) -> None:
    async with a_taker(tmp_path, model) as (server, link, _):
        status = server._load()
        assert (await link.ask(an_offer(max_tokens=(1 << 31) - 1))).reason == OutOfPages.reason
        assert server._load().num_free_pages == status.num_free_pages
        assert (await link.ask(an_offer())).reason == ""
        assert (await link.ask(an_offer(tenant="u"))).reason == "HOP_SESSION_LOST"
        assert (await link.ask(an_offer(epoch=2))).reason == "STALE_EPOCH"
        link.tell(pb.Close(session_id=SESSION, epoch=3))
        for changes in ({"session_id": b"short"}, {"transfer_id": b""}, {"epoch": 0}, {"lease_ms": 0},
                        {"blocks": common_pb2.BlockSpan(start=1, end=5)}):  # fmt: skip
            # What no server of ours would send costs the stream.
            other = HandoverLink(server.address, open_channel)
            async with other.open(await fingerprint_of(server)):
                with pytest.raises(HopUnavailable):
                    await other.ask(an_offer(**changes))


async def test_a_client_cannot_hand_sessions_over(tmp_path: Path, model: Path) -> None:
    async with a_taker(tmp_path, model) as (server, _, _), open_channel(server.address) as channel:
        fingerprint = await fingerprint_of(server)
        call: grpc.aio.StreamStreamCall[bytes, bytes] = channel.stream_stream(EXCHANGE)()
        await call.write(join([encode(pb.Hello(client_id=b"c" * 16, fingerprint=fingerprint))]))
        await call.read()
        await call.write(join([encode(an_offer())]))
        assert (await call.code()).name == "INVALID_ARGUMENT"


@pytest.mark.parametrize("num_asks", [1, 2, 4])
async def test_after_a_broken_stream_only_the_rest_is_sent(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch, num_asks: int
) -> None:
    """And of what is damaged on the way, or grew meanwhile, nothing is wrong in the end."""
    monkeypatch.setattr(sending, "PART_BYTES", 20_000)
    options: dict[str, Any] = {"max_tokens": 400, "ignore_eos": True}
    prompt = "the thin man in the inner tent " * 8
    async with Swarm(tmp_path, model, ["0:2", "2:5"]) as swarm, swarm.connect() as client:
        undisturbed = (await client.generate(prompt, **options)).token_ids
        await swarm.until_empty()
        answer = asyncio.create_task(client.generate(prompt, **options))
        leaving = swarm.servers[1]
        await until_tokens(leaving, 100)
        taker = await swarm.add_server("2:5")
        assert leaving._sessions is not None
        assert leaving._drain is not None
        (held,) = leaving._sessions
        sender: HandoverSender = leaving._drain._sender
        fingerprint = await fingerprint_of(taker)
        breaking = _Breaking(taker.address, num_asks)
        async with breaking.open(fingerprint):
            with pytest.raises(HopUnavailable):
                await sender.send(held, breaking)
        assert not held.is_leaving
        assert taker._sessions is not None
        num_arrived = next(iter(taker._sessions)).cache.num_tokens
        assert bool(num_arrived) == (num_asks > 1)
        swarm.servers.remove(leaving)
        await leaving._drain.run(20)
        num_bytes = leaving._registry.get_sample_value("corolla_handover_bytes_total", {"direction": "out"}) or 0
        bytes_per_token = token_bytes(leaving._engine._runner.store, range(3))  # type: ignore[union-attr]
        assert num_bytes <= (800 - num_arrived) * bytes_per_token
        await leaving.stop()
        assert (await answer).token_ids == undisturbed
        assert (await answer).usage.recoveries == 1
        await swarm.until_empty()


class _Breaking(HandoverLink):
    """Damages its first part, and breaks after some answers."""

    def __init__(self, address: str, num_asks: int) -> None:
        super().__init__(address, open_channel)
        self._num_left = num_asks
        self._has_damaged = False

    async def ask(self, control: pb.Handover | pb.HandoverTokens, payload: Buffer = b"") -> pb.HandoverAnswer:
        if self._num_left == 0:
            raise HopUnavailable("broken", self.address)
        if isinstance(control, pb.HandoverTokens) and not self._has_damaged:
            self._has_damaged = True
            return await super().ask(control, bytes(payload)[:-1] + bytes([bytes(payload)[-1] ^ 1]))
        self._num_left -= 1
        return await super().ask(control, payload)


async def fingerprint_of(server: BlockServer) -> str:
    assert server._drain is not None
    return server._drain._server.fingerprint


async def until_tokens(server: BlockServer, num_tokens: int) -> None:
    async def has_them() -> bool:
        return any(held.cache.num_tokens >= num_tokens for held in server._sessions or ())

    await until(has_them)
