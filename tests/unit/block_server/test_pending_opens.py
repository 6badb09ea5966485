"""Samplers that take a while are made in a thread, and only for those who still want them."""

import threading
from collections.abc import Callable

import pytest

from corolla.block_server.peers import Peer
from corolla.block_server.pending_opens import PendingOpens, takes_a_while
from corolla.block_server.row_sampling import SessionSampler
from corolla.chassis.errors import CorollaError, InternalError, MalformedMessage, QueueFull
from corolla.chassis.tasks import TaskGroup
from corolla.v1 import blocks_pb2 as pb
from corolla.v1.common_pb2 import SamplingParameters
from tests.integration.waiting import until
from tests.unread_stream import UnreadStream

GREEDY = pb.Sampler()
SAMPLED = pb.Sampler(parameters=SamplingParameters(temperature=1), token_ids=[7] * 5000)


def an_open(number: int = 1, epoch: int = 1, sampler: pb.Sampler = SAMPLED) -> pb.Open:
    return pb.Open(session_id=bytes([number % 256, number // 256]) * 8, epoch=epoch, max_tokens=6000, sampler=sampler)


def read(control: pb.Open) -> SessionSampler:
    return SessionSampler.read(control.sampler, None, vocab_size=30, max_tokens=control.max_tokens)


class Making:
    """Pending opens whose threads wait for `go_on`, and what came of them."""

    def __init__(self) -> None:
        self.tasks = TaskGroup()
        self.subject = PendingOpens(self.tasks)
        self.go_on = threading.Event()
        self.made: list[SessionSampler | None] = []
        self.refused: list[CorollaError] = []

    def start(self, control: pb.Open, peer: Peer, make: Callable[[pb.Open], SessionSampler] = read) -> None:
        def make_later(given: pb.Open) -> SessionSampler:
            assert threading.current_thread() is not threading.main_thread()
            self.go_on.wait(30)
            return make(given)

        self.subject.start(control, peer, make_later, self.made.append, self.refused.append)

    async def finish(self) -> None:
        """Until nothing is being prepared any more."""
        self.go_on.set()
        await until(lambda: not len(self.subject))


def test_long_texts_take_a_while() -> None:
    assert not takes_a_while(GREEDY)
    assert not takes_a_while(pb.Sampler(position=8000, token_ids=range(500)))
    assert takes_a_while(SAMPLED)
    assert takes_a_while(pb.Sampler(grammar=pb.Grammar(text="one that may be new")))


async def test_the_sampler_comes_once_it_is_made() -> None:
    making, peer = Making(), Peer(b"c", UnreadStream())
    making.start(an_open(), peer)
    await making.finish()
    assert [type(sampler) for sampler in making.made] == [SessionSampler]
    assert making.refused == []


@pytest.mark.parametrize(
    "failure, answered", [(MalformedMessage("sampler", "no"), MalformedMessage), (OSError(), InternalError)]
)
async def test_what_cannot_be_made_is_answered(failure: Exception, answered: type[CorollaError]) -> None:
    def fail(_control: pb.Open) -> SessionSampler:
        raise failure

    making = Making()
    making.start(an_open(), Peer(b"c", UnreadStream()), fail)
    await making.finish()
    assert [type(each) for each in making.refused] == [answered]


async def test_nobody_gets_what_nobody_wants_any_more() -> None:
    making, peer, other = Making(), Peer(b"c", UnreadStream()), Peer(b"d", UnreadStream())
    making.start(an_open(1, epoch=3), peer)
    making.start(an_open(2, epoch=3), peer)
    making.start(an_open(3, epoch=3), other)
    making.subject.cancel(an_open(1).session_id, 2)  # of an epoch before
    making.subject.cancel_of(other)
    making.subject.cancel(an_open(2).session_id, 3)
    await making.finish()
    assert len(making.made) == 1
    # A client that opens it once more gets one sampler, not two.
    making.go_on.clear()
    making.start(an_open(1, epoch=4), peer)
    making.subject.cancel(an_open(1).session_id, 5)
    making.start(an_open(1, epoch=5), peer)
    await making.finish()
    assert len(making.made) == 2
    assert making.refused == []


async def test_only_so_many_are_made_for_one_peer_at_a_time() -> None:
    making, peer, other = Making(), Peer(b"c", UnreadStream()), Peer(b"d", UnreadStream())
    for number in range(1024):
        making.start(an_open(number), peer)
    with pytest.raises(QueueFull):
        making.start(an_open(1024), peer)
    making.start(an_open(1025), other)
    making.subject.cancel_of(peer)
    making.start(an_open(1024), peer)
    making.subject.cancel_of(peer)
    making.subject.cancel_of(other)
    await making.finish()
    await making.tasks.close()
    assert making.made == []
    assert making.refused == []
