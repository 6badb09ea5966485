"""What a hop tells a client of a standby. The test replaces streams, sessions and copies."""

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from prometheus_client import CollectorRegistry

from corolla.block_server.handover.plan import HandoverProgress
from corolla.block_server.handover.sender import HandoverLink, HandoverLinks, HandoverSender
from corolla.block_server.handover.standbys import Standbys
from corolla.block_server.hop_session import SessionState, nothing
from corolla.block_server.metrics import BlockServerMetrics
from corolla.cache.store import KVStore
from corolla.chassis.tasks import TaskGroup
from corolla.v1 import blocks_pb2 as pb
from corolla.v1 import common_pb2
from corolla.wire.frames import Frame
from corolla.wire.span import Span
from corolla.wire.stream import Connect
from tests.integration.waiting import until


async def test_a_standby_without_any_token_of_a_short_text_is_not_lost() -> None:
    sent, num_looks = list[int](), 0
    session: Any = SimpleNamespace(
        request=SimpleNamespace(session_id=b"s" * 16, epoch=1, client_id=b"c" * 16, only_cached=False),
        cache=SimpleNamespace(num_tokens=7, num_unchanged_tokens=0),
        version=1, state=SessionState.RUNNING, num_settled_tokens=7, rewound_step_id=0, on_change=nothing,
    )  # fmt: skip

    def in_version(_session_id: bytes, _version: int) -> Any:
        nonlocal num_looks
        num_looks += 1
        return session

    async def copy_settled(_session: Any, _transfer_id: bytes, progress: Any, _link: Any) -> tuple[int, int]:
        assert sent == []
        progress.begin(16)
        session.cache.num_unchanged_tokens = 16
        return 3, 1

    async def finds(_address: str) -> bool:
        return True

    def hold(num_tokens: int) -> None:
        """A step has settled these tokens."""
        session.cache.num_tokens = session.num_settled_tokens = num_tokens
        session.on_change()

    peer = SimpleNamespace(send=lambda standby: sent.append(standby.num_tokens))
    ended = asyncio.get_running_loop().create_future()
    stream = SimpleNamespace(ended=ended, send=lambda *_frame: None, close=lambda: ended.set_result(None))
    sessions: Any = SimpleNamespace(get=lambda _session_id: session, in_version=in_version, is_draining=False)
    sender: Any = SimpleNamespace(copy_settled=copy_settled)
    neighbours: Any = SimpleNamespace(finds=finds)
    peers: Any = {session.request.client_id: peer}
    metrics = BlockServerMetrics(CollectorRegistry())
    tasks, links = TaskGroup(), HandoverLinks(cast(Connect, lambda *_to: stream), "weights")
    covering = Standbys(sessions, sender, links, peers, neighbours, tasks, metrics)
    hop = common_pb2.Hop(address="x:1")
    covering.name(pb.Standby(session_id=b"s" * 16, epoch=1, hop=hop, transfer_id=b"t" * 16))
    await until(lambda: num_looks == 1)
    hold(15)
    await asyncio.sleep(0.1)
    assert num_looks == 1, "fewer tokens than one part"
    hold(16)
    await until(lambda: sent == [16])
    session.state = SessionState.PARKED
    await asyncio.to_thread(session.on_change)  # as the compute thread does with the last part of a handover
    await until(ended.done)
    await tasks.close()
    assert sent == [16]
    assert session.on_change is nothing
    assert (covering.num_bytes, covering.num_state_bytes) == (3, 1)


async def test_a_server_that_the_placement_does_not_name_stands_by_for_no_session() -> None:
    lost = asyncio.Event()
    session: Any = SimpleNamespace(
        request=SimpleNamespace(session_id=b"s" * 16, epoch=1, client_id=b"c" * 16),
        cache=SimpleNamespace(num_tokens=7, num_unchanged_tokens=0),
        version=1, state=SessionState.RUNNING, rewound_step_id=0,
    )  # fmt: skip

    async def finds(_address: str) -> bool:
        return False

    def tell(standby: pb.Standby) -> None:
        assert not standby.num_tokens
        lost.set()

    tasks, links = TaskGroup(), cast(HandoverLinks, None)
    covering = Standbys(
        cast(Any, SimpleNamespace(get=lambda _session_id: session, is_draining=False)), cast(Any, None), links,
        cast(Any, {b"c" * 16: SimpleNamespace(send=tell)}), cast(Any, SimpleNamespace(finds=finds)), tasks,
        BlockServerMetrics(CollectorRegistry()),
    )  # fmt: skip
    covering.name(pb.Standby(session_id=b"s" * 16, epoch=1, hop=common_pb2.Hop(address="x:1"), transfer_id=b"t" * 16))
    await asyncio.wait_for(lost.wait(), 30)
    assert covering.lags == []
    await tasks.close()


@pytest.mark.parametrize("max_part_tokens", [16, 3])
async def test_settled_tokens_are_read_at_once_with_the_layer_of_the_prediction_block(max_part_tokens: int) -> None:
    store = KVStore(4, 4, [None, None], mtp_layer=1)
    numbers = torch.ones(1, 1, 4)
    cache = store.new_cache()
    cache.allocate(4)
    cache.prepare(0, 4)
    for layer in range(2):
        for tensor in store.layer_like(layer, numbers, numbers):
            tensor.fill_(1.0)
    cache.commit(4)
    session: Any = SimpleNamespace(
        request=SimpleNamespace(session_id=b"s" * 16, epoch=1, blocks=Span(0, 1)),
        cache=cache, version=1, num_settled_tokens=4, is_idle=False, applied_step_id=1,
    )  # fmt: skip
    sent: list[pb.HandoverTokens] = []
    ended = asyncio.get_running_loop().create_future()

    def connect(_address: str, accept: Any) -> Any:
        receive = accept(None)

        def send(control: Any, _payload: bytes = b"") -> None:
            if isinstance(control, pb.Hello):
                return
            sent.append(control)
            answer = pb.HandoverAnswer(
                session_id=control.session_id, transfer_id=control.transfer_id,
                num_tokens=control.position + control.num_tokens,
            )  # fmt: skip
            receive(Frame(answer, b""))

        return SimpleNamespace(ended=ended, send=send, close=lambda: ended.set_result(None))

    num_reads = 0

    async def copy(read: Any) -> Any:
        nonlocal num_reads
        num_reads += 1
        return read()

    sender = HandoverSender(
        Span(0, 1), cast(Any, SimpleNamespace(in_version=lambda *_: session)), cast(Any, SimpleNamespace(copy=copy)),
        max_part_tokens=max_part_tokens,
    )  # fmt: skip
    link = HandoverLink("x:1", cast(Connect, connect))
    async with link.connect("weights"):
        copied = await sender.copy_settled(session, b"t" * 16, HandoverProgress(), link)
    assert (num_reads, copied) == (1, (2 * 2 * 4 * numbers.nbytes, 0))
    assert {len(part.first_tokens) for part in sent} == {2}
    ends = [part.position + part.num_tokens for part in sent]
    assert ends == [*range(max_part_tokens, 4, max_part_tokens), 4]
