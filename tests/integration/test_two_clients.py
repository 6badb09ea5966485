"""A conversation depends on no process's memory: any client service continues it."""

from typing import Any

import grpc
import pytest

from corolla.chassis.channels import open_channel
from corolla.sdk.async_client import AsyncClient
from corolla.sdk.results import Reply
from corolla.v1 import generation_pb2 as pb
from tests.integration.gates import held_up
from tests.integration.refusals import refusal
from tests.integration.swarm import Swarm, tiny_swarm

pytestmark = pytest.mark.asyncio(loop_scope="module")

TURNS = ("the thin man", "and then in the inner tent?", "who are the others?", "an in_daemon_thread")
OPTIONS: dict[str, Any] = {"max_tokens": 16, "ignore_eos": True}


swarm = tiny_swarm(["0:2", "2:5"], num_clients=2)


async def converse(clients: list[AsyncClient], order: list[int], **options: Any) -> list[Reply]:
    """Turn after turn of one session, each through the client service that `order` names."""
    session_id = (await clients[order[0]].create_session()).session_id
    replies = []
    for client, text in zip(order, TURNS, strict=True):
        replies.append(await clients[client].chat(session=session_id).send(text, **OPTIONS, **options))
    # A client service that deletes it frees what others have opened.
    await clients[1 - order[-1]].delete_session(session_id)
    return replies


@pytest.mark.parametrize(
    "order, options",
    [
        ([0, 1, 0, 1], {}),
        ([0, 0, 1, 1], {"temperature": 1.0, "seed": 4}),
        ([0, 1, 1, 0], {"temperature": 1.0, "repetition_penalty": 1.3, "seed": 8}),
        ([1, 0, 0, 0], {}),
    ],
    ids=["by turns", "seeded", "penalised", "away and not back"],
)
async def test_turns_through_either_are_the_same_conversation(
    clients: list[AsyncClient], order: list[int], options: dict[str, Any]
) -> None:
    expected = await converse(clients, [0, 0, 0, 0], **options)
    got = await converse(clients, order, **options)
    for one, other in zip(expected, got, strict=True):
        assert one.token_ids == other.token_ids
        assert one.usage.cached_tokens == other.usage.cached_tokens
    assert all(reply.usage.cached_tokens > 0 for reply in got[1:])


async def test_one_turn_at_a_time_whichever_client_it_runs_on(swarm: Swarm, clients: list[AsyncClient]) -> None:
    async with clients[0].chat() as chat, open_channel(swarm.address_of(1)) as channel:
        running = await chat.stream(TURNS[0], max_tokens=300, ignore_eos=True)
        await anext(running)
        session_id = await chat.open()
        turn = pb.ChatRequest(session_id=session_id, messages=[pb.ChatMessage(role="user", content="hi")])
        deletion = pb.DeleteSessionRequest(session_id=session_id)
        with held_up(swarm.servers[0]):
            for method, request in (("Chat", turn), ("ChatStream", turn), ("DeleteSession", deletion)):
                refused = await refusal(channel, method, request)
                assert (refused.code, refused.reason) == (grpc.StatusCode.ABORTED, "SESSION_BUSY")
                assert refused.retry_after_s > 0
        assert [chunk async for chunk in running]


async def test_conversations_survive_their_client_service(swarm: Swarm, clients: list[AsyncClient]) -> None:
    leaving = await swarm.add_client()
    expected = await converse(clients, [0, 0, 0, 0])
    async with AsyncClient(f"127.0.0.1:{leaving.port}") as client:
        session_id = (await client.create_session()).session_id
        chat = client.chat(session=session_id)
        got = [await chat.send(text, **OPTIONS) for text in TURNS[:2]]
    await swarm.clients.pop().stop()
    chat = clients[1].chat(session=session_id)
    got += [await chat.send(text, **OPTIONS) for text in TURNS[2:]]
    assert [reply.token_ids for reply in got] == [reply.token_ids for reply in expected]
    assert got[2].usage.cached_tokens == expected[2].usage.cached_tokens > 0
    await clients[1].delete_session(session_id)
