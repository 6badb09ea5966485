"""Answers that resume at another client service: exactly the missing tokens and text, and each turn runs once."""

import asyncio
import threading
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import grpc
import pytest
import pytest_asyncio

from corolla.chassis.channels import open_channel
from corolla.chassis.errors import InvalidRequest, SessionBusy
from corolla.client.generation.resumption import Resumption
from corolla.client.service import ClientBounds
from corolla.sdk.async_client import AsyncClient
from corolla.sdk.requests import ChatOptions
from corolla.sdk.results import FinishReason
from corolla.v1 import generation_pb2 as pb
from corolla.v1.generation_pb2_grpc import GenerationServiceStub
from tests.checkpoints import make_tiny_checkpoint, make_tokenizer
from tests.integration.metrics import sample
from tests.integration.refusals import refusal, refusal_of
from tests.integration.swarm import Swarm, tiny_swarm
from tests.tiers import covering, quick

pytestmark = pytest.mark.asyncio(loop_scope="module")

PROMPT = "the thin man in the inner tent"
MAX_TOKENS = 48
WAYS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "seeded": {"temperature": 1.2, "top_p": 0.95, "seed": 7},
    # The caller chose no seed, and yet the random numbers are the same everywhere.
    "without a seed": {"temperature": 1.2},
    "penalties": {"temperature": 1.2, "top_k": 40, "repetition_penalty": 1.3, "presence_penalty": 0.5},
    "draft tokens": {"speculation": "prompt_lookup", "temperature": 0.7},
    # Text may be held back for a stop sequence that does not come.
    "stop sequences": {"stop": ["\x00\x01\x02\x03"], "temperature": 1.5},
}


swarm = tiny_swarm(["0:2", "2:5"], context_length=8192, num_clients=2)


INTERRUPTIONS = covering(WAYS, [17, 0, 1, MAX_TOKENS - 1], [True, False])


@pytest.mark.parametrize(
    "interruption", quick(INTERRUPTIONS, *(each for each in INTERRUPTIONS if each[1] == 17)), ids=str
)
async def test_another_client_service_sends_only_the_missing_tokens(
    clients: Sequence[AsyncClient], interruption: tuple[str, int, bool]
) -> None:
    one, other = clients
    way, num_received, has_received = interruption
    options: dict[str, Any] = {"max_tokens": MAX_TOKENS, "ignore_eos": True, **WAYS[way]}
    options["request_id"] = f"{way.replace(' ', '-')}-{num_received}-{has_received}"
    whole = await one.generate(PROMPT, **options)
    texts, received = await begin(one, options, num_received)
    rest = await other.generate(PROMPT, **options, resume_from=received if has_received else len(received))
    assert [*received, *rest.token_ids] == list(whole.token_ids)
    assert texts + rest.text == whole.text
    assert rest.finish_reason == whole.finish_reason
    assert rest.usage.completion_tokens == MAX_TOKENS - (len(received) if has_received else 0)
    assert rest.usage.prompt_tokens == whole.usage.prompt_tokens


async def test_received_tokens_are_processed_in_no_thread_that_all_answers_share(
    clients: Sequence[AsyncClient], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Thousands of them would stop the event loop for all other answers."""
    threads: set[str] = set()
    replay_into = Resumption.replay_into

    def watched_replay(self: Resumption, answer: Any) -> None:
        threads.add(threading.current_thread().name)
        replay_into(self, answer)

    monkeypatch.setattr(Resumption, "replay_into", watched_replay)
    one, other = clients
    options: dict[str, Any] = {"max_tokens": 120, "ignore_eos": True, "temperature": 1.2, "request_id": "long"}
    whole = await one.generate(PROMPT, **options)
    rest = await other.generate(PROMPT, **options, resume_from=list(whole.token_ids[:100]))
    assert [*whole.token_ids[:100], *rest.token_ids] == list(whole.token_ids)
    assert threads
    assert all(name.startswith("prompts") for name in threads), threads


async def begin(client: AsyncClient, options: dict[str, Any], num_tokens: int) -> tuple[str, list[int]]:
    """The first tokens of an answer, and their text."""
    if not num_tokens:
        return "", []
    async with client.stream(PROMPT, **options) as stream:
        async for _ in stream:
            if len(stream.token_ids) >= num_tokens:
                break
        return stream.text, list(stream.token_ids)


async def test_names_of_tenants_and_requests_give_other_random_numbers(clients: Sequence[AsyncClient]) -> None:
    options: dict[str, Any] = {"max_tokens": 16, "ignore_eos": True, "temperature": 1.5}
    answers = {
        (await clients[number % 2].generate(PROMPT, **options, request_id=f"name-{number // 2}")).token_ids
        for number in range(6)
    }
    assert len(answers) == 3


@pytest.mark.parametrize("way", ["greedy", "without a seed"])
@pytest.mark.full
async def test_a_turn_is_taken_over_while_the_first_service_still_holds_it(
    clients: Sequence[AsyncClient], way: str
) -> None:
    one, other = clients
    options: dict[str, Any] = {"ignore_eos": True, **WAYS[way]}
    ids = [(await one.create_session()).session_id for _ in range(2)]
    for session_id in ids:
        await one.generate("the others", max_tokens=8, session=session_id, ignore_eos=True, temperature=1.0, seed=5)
    turn = {**options, "max_tokens": 800, "request_id": f"turn-{way[:6]}"}
    # The twin's turn is the same one, from the same past.
    twin = asyncio.create_task(other.generate(PROMPT, session=ids[1], **turn))
    abandoned = one.stream(PROMPT, session=ids[0], **turn)
    received: list[int] = []
    async for chunk in abandoned:
        received.extend(chunk.token_ids)
        if len(received) >= 20:
            break
    with pytest.raises(SessionBusy):
        await other.generate(PROMPT, session=ids[0], max_tokens=4)
    rest = await other.generate(PROMPT, session=ids[0], **turn, resume_from=received)
    expected = await twin
    assert (*received, *rest.token_ids) == expected.token_ids
    # What the first service still does counts no longer, neither on the hops nor in the store.
    with pytest.raises(SessionBusy):
        async for _ in abandoned:
            pass
    infos = [await one.get_session(session_id) for session_id in ids]
    assert (infos[0].num_tokens, infos[0].num_turns) == (infos[1].num_tokens, 2)
    # The conversations are the same, and go on alike.
    again = [await one.generate(PROMPT, max_tokens=16, session=session_id, **options, seed=6) for session_id in ids]
    assert again[0].token_ids == again[1].token_ids
    for session_id in ids:
        await one.delete_session(session_id)


@pytest.mark.parametrize("num_received", [0, 5])
@pytest.mark.parametrize("num_logprobs", [None, 0, 3])
async def test_a_finished_turn_is_repeated_from_its_record(
    clients: Sequence[AsyncClient], num_received: int, num_logprobs: int | None
) -> None:
    one, other = clients
    name = f"made-{num_received}-{num_logprobs}"
    options: ChatOptions = {"max_tokens": 12, "request_id": name, "temperature": 1.3, "logprobs": num_logprobs}
    async with one.chat() as chat:
        session_id = await chat.open()
        first = await chat.send("who are the others?", **options)
        received = list(first.token_ids[:num_received])
        elsewhere = other.chat(session=session_id, **options)
        again = await elsewhere.send("who are the others?", resume_from=received)
        assert [*received, *again.token_ids] == list(first.token_ids)
        assert first.text.endswith(again.text)
        assert again.finish_reason == first.finish_reason
        assert len(first.logprobs) == (0 if num_logprobs is None else len(first.token_ids))
        assert again.logprobs == first.logprobs[num_received:]
        info = await other.get_session(session_id)
        assert info.num_turns == 1
        assert (await chat.send("and then?", max_tokens=4)).finish_reason is not None
        assert (await other.get_session(session_id)).num_turns == 2


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def endings(swarm: Swarm) -> dict[FinishReason, dict[str, Any]]:
    """Options of answers that end in each way, of at least two tokens."""
    async with swarm.connect() as client:
        return await find_endings(client)


async def find_endings(client: AsyncClient) -> dict[FinishReason, dict[str, Any]]:
    options: dict[str, Any] = {"temperature": 1.5, "seed": 3}
    text = (await client.generate(PROMPT, **options, max_tokens=12, ignore_eos=True)).text
    ways: dict[FinishReason, dict[str, Any]] = {
        FinishReason.LENGTH: {**options, "max_tokens": 4, "ignore_eos": True},
        FinishReason.STOP_SEQUENCE: {**options, "max_tokens": 12, "ignore_eos": True, "stop": [text[4:6]]},
    }
    # Few answers end soon by themselves.
    options["logit_bias"] = {make_tokenizer().eos_token_id: 6.0}
    for seed in range(200):
        options["seed"] = seed
        answer = await client.generate(PROMPT, **options, max_tokens=64)
        if answer.finish_reason is FinishReason.EOS and len(answer.token_ids) > 1:
            return {**ways, FinishReason.EOS: {**options, "max_tokens": 64}}
    raise AssertionError("no answer ended by itself")


@pytest.mark.parametrize("has_received", quick([True, False], True))
async def test_an_answer_of_which_all_tokens_have_come_still_gives_its_end(
    clients: Sequence[AsyncClient], endings: dict[FinishReason, dict[str, Any]], has_received: bool
) -> None:
    one, other = clients
    for reason, options in endings.items():
        named = {**options, "request_id": f"whole-{reason}-{has_received}"}
        whole = await one.generate(PROMPT, **named)
        assert whole.finish_reason is reason
        received = list(whole.token_ids)
        given: Any = received if has_received else len(received)
        async with other.stream(PROMPT, **named, resume_from=given) as stream:
            (chunk,) = [each async for each in stream]
        assert (chunk.token_ids, chunk.text, chunk.finish_reason) == ((), "", reason)
        assert chunk.usage is not None
        assert chunk.usage.prompt_tokens == whole.usage.prompt_tokens
        assert chunk.usage.completion_tokens == (0 if has_received else len(received))
        unary = await other.generate(PROMPT, **named, resume_from=given)
        assert (unary.token_ids, unary.text, unary.finish_reason) == ((), "", reason)


@pytest.mark.parametrize("is_written_down", quick([True, False]))
@pytest.mark.parametrize("has_received", quick([True, False], False))
async def test_a_turn_of_which_all_tokens_have_come_still_ends(
    clients: Sequence[AsyncClient],
    endings: dict[FinishReason, dict[str, Any]],
    has_received: bool,
    is_written_down: bool,
) -> None:
    """And the session continues after it, also when the first service died before it saved the turn."""
    one, other = clients
    for reason, options in endings.items():
        named = {**options, "request_id": f"turn-{reason}-{has_received}-{is_written_down}"}
        ids = [(await one.create_session()).session_id for _ in range(2)]
        whole = await one.generate(PROMPT, session=ids[0], **named)
        assert whole.finish_reason is reason
        session_id = ids[0] if is_written_down else ids[1]
        given: Any = list(whole.token_ids) if has_received else len(whole.token_ids)
        rest = await other.generate(PROMPT, session=session_id, **named, resume_from=given)
        assert (rest.token_ids, rest.text, rest.finish_reason) == ((), "", reason)
        infos = [await one.get_session(each) for each in (ids[0], session_id)]
        assert (infos[0].num_tokens, infos[0].num_turns) == (infos[1].num_tokens, 1)
        if not is_written_down:
            more = [await one.generate(PROMPT, session=each, max_tokens=8, temperature=1.5, seed=4) for each in ids]
            assert more[0].token_ids == more[1].token_ids
        for each in ids:
            await one.delete_session(each)


async def test_client_service_refuses_an_answer_that_cannot_be_resumed(
    swarm: Swarm, clients: Sequence[AsyncClient]
) -> None:
    named: dict[str, Any] = {"max_tokens": 4, "ignore_eos": True, "request_id": "some-name"}
    whole = await clients[0].generate(PROMPT, **named)
    for client in clients:
        for received in ([*whole.token_ids, 40], 5, 9):
            with pytest.raises(InvalidRequest) as caught:
                await client.generate(PROMPT, **named, resume_from=received)
            assert caught.value.violations[0][0] == "resume_from_index"
    bad = [
        ("request_id", pb.GenerateRequest(text="a", resume_from_index=3)),
        ("request_id", pb.GenerateRequest(text="a", request_id="no/slash")),
        ("request_id", pb.GenerateRequest(text="a", request_id="x" * 65)),
        ("num_completions", pb.GenerateRequest(text="a", request_id="x", num_completions=2)),
        (
            "received.ids",
            pb.GenerateRequest(text="a", request_id="x", resume_from_index=2, received=pb.TokenIds(ids=[1])),
        ),
        (
            "received.ids[0]",
            pb.GenerateRequest(text="a", request_id="x", resume_from_index=1, received=pb.TokenIds(ids=[1 << 30])),
        ),
    ]
    async with open_channel(swarm.address) as channel:
        for field, request in bad:
            assert (await refusal(channel, "Generate", request)).fields == (field,)


@pytest.mark.full
async def test_client_service_ends_a_stalled_stream_and_its_caller_may_resume(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    folder = tmp_path_factory.mktemp("stalled")
    model = make_tiny_checkpoint("llama", folder / "tiny", config_changes={"max_position_embeddings": 8192})
    async with Swarm(folder, model, ["0:2", "2:5"], bounds=ClientBounds(reader_timeout_s=4.0)) as swarm:
        options: dict[str, Any] = {"max_tokens": 800, "ignore_eos": True, "request_id": "long", "temperature": 1.0}
        async with swarm.connect() as client:
            whole = (await client.generate(PROMPT, **options)).token_ids
        # Large chunks and small buffers, which are full soon.
        request = pb.GenerateRequest(text=PROMPT, request_id="long", logprobs=20)
        request.sampling.temperature = 1.0
        request.stopping.max_tokens, request.stopping.ignore_eos = 800, True
        async with grpc.aio.insecure_channel(swarm.address, options=[("grpc.http2.bdp_probe", 0)]) as channel:
            call = GenerationServiceStub(channel).GenerateStream(request)
            received: list[int] = []
            async for chunk in call:
                received += chunk.token_ids
                if len(received) == 10:
                    break
            running = await sample(swarm.clients[0].metrics_port, "corolla_num_requests_running")
            assert running == 1
            # It stays, and all that it was given comes back.
            await swarm.until_empty()
            assert await sample(swarm.clients[0].metrics_port, "corolla_num_requests_running") == 0
            # What is on the way still comes, and then why there is no more.
            with suppress(grpc.aio.AioRpcError):
                async for chunk in call:
                    received += chunk.token_ids
            ending = await call.code(), await call.initial_metadata(), await call.trailing_metadata()
            assert refusal_of(grpc.aio.AioRpcError(*ending)).reason == "CALLER_STALLED"
        assert 10 < len(received) < 800
        async with swarm.connect() as client:
            rest = (await client.generate(PROMPT, **options, resume_from=received)).token_ids
        assert (*received, *rest) == whole
