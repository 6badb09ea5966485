"""The asyncio client against a real gRPC server. What is made of it, the blocking client, has further tests."""

import asyncio

import pytest

from corolla import AsyncClient, errors
from corolla.sdk.async_client import AsyncStream
from corolla.sdk.results import Chunk
from tests.generation_server import API_KEY, GenerationServer


async def test_completions_and_streams(server: GenerationServer) -> None:
    async with AsyncClient(server.address) as client:
        assert (await client.generate([5, 6])).text == "5 6"
        async with client.stream("one two") as stream:
            assert [chunk.text async for chunk in stream] == ["one", " two"]
        assert stream.usage is not None
        assert (await client.models())[0].name == (await client.model("echo")).name == "echo"
        assert (await client.tokenize("a b")).token_ids == (0, 1)


async def test_streams_run_side_by_side(server: GenerationServer) -> None:
    async def answer(client: AsyncClient, number: int) -> str:
        return "".join([chunk.text async for chunk in client.stream(f"number {number}")])

    async with AsyncClient(server.address) as client:
        answers = await asyncio.gather(*(answer(client, number) for number in range(8)))
    assert answers == [f"number {number}" for number in range(8)]


async def test_a_stream_closed_from_another_task_ends_for_its_reader(server: GenerationServer) -> None:
    async with AsyncClient(server.address) as client:
        stream = client.stream("endless")
        await anext(stream)
        asyncio.get_running_loop().call_later(0.02, stream.close)
        await asyncio.wait_for(read_all(stream), 30)


async def test_a_stream_is_closed_when_its_reader_stops_waiting(server: GenerationServer) -> None:
    async with AsyncClient(server.address) as client:
        stream = client.stream("endless")
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(read_all(stream), 0.05)
        assert await read_all(stream) == []


async def test_a_key_may_have_to_be_waited_for(server: GenerationServer) -> None:
    keys = [API_KEY, API_KEY, API_KEY, "expired"]

    async def key() -> str:
        await asyncio.sleep(0)
        return keys.pop()

    async with AsyncClient(server.address, api_key=key) as client:
        with pytest.raises(errors.Unauthenticated):
            await client.models()
        await client.models()
        assert [chunk.text for chunk in await read_all(client.stream("one two"))] == ["one", " two"]
        async with client.stream("endless") as stream:
            assert (await anext(stream)).text
    assert not keys


async def test_a_key_that_nobody_has_to_wait_for_begins_the_call_at_once(server: GenerationServer) -> None:
    async with AsyncClient(server.address, api_key=lambda: API_KEY) as client:
        await client.models()
        stream = client.stream("endless")
        stream.close()
        assert await read_all(stream) == []


async def read_all(stream: AsyncStream) -> list[Chunk]:
    return [chunk async for chunk in stream]


async def test_a_session_that_is_used_twice_at_first_is_one(server: GenerationServer) -> None:
    async with AsyncClient(server.address) as client, client.session() as session:
        first, second = await asyncio.gather(session.open(), session.open())
        assert first == second
    assert server.servicer.sessions == {}


async def test_a_chat_of_three_turns(server: GenerationServer) -> None:
    async with AsyncClient(server.address) as client:
        async with client.chat(system="be brief") as chat:
            async for _ in await chat.stream("endless"):
                break
            assert (await chat.send("hello")).text == "hello"
            stream = await chat.stream("again")
            assert "".join([chunk.text async for chunk in stream]) == "again"
            assert chat.usage is not None
            assert chat.usage.cached_tokens == 10
            assert (await chat.info()).num_turns == 2
        assert server.servicer.sessions == {}
        async with client.session() as session:
            await session.generate("one")
            assert "".join([chunk.text async for chunk in await session.stream("two")]) == "two"
        assert server.servicer.sessions == {}
    roles = [
        [message.role for message in each.messages] for each in server.servicer.requests if hasattr(each, "messages")
    ]
    assert roles == [["system", "user"], ["system", "user"], ["user"]]


async def test_a_turn_that_the_service_kept_counts_though_its_answer_was_lost(server: GenerationServer) -> None:
    async with AsyncClient(server.address) as client, client.chat(system="be brief") as chat:
        server.servicer.loses_answers = True
        with pytest.raises(errors.RouterUnavailable):
            await chat.send("hello")
        server.servicer.loses_answers = False
        await chat.send("again")
    turns = [each for each in server.servicer.requests if hasattr(each, "messages")]
    assert [[message.role for message in each.messages] for each in turns] == [["system", "user"], ["user"]]
