"""Hops that die at the worst moments: in a prompt, in a replay, two at once; and outputs that are no numbers."""

import asyncio
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from corolla.block_server.failures import Failures
from corolla.block_server.iteration import Admitted
from corolla.block_server.runner import BatchOutput
from corolla.block_server.service import BlockServer
from corolla.chassis.errors import HopUnavailable, NoChain, NonFiniteOutput, RequestKillsServers
from corolla.client.chain.session import ChainSession
from corolla.sdk.async_client import AsyncClient
from corolla.v1 import blocks_pb2 as pb
from corolla.wire.span import Span
from tests.checkpoints import make_tiny_checkpoint
from tests.integration.metrics import sample
from tests.integration.swarm import Swarm
from tests.integration.waiting import until

PROMPT = "the thin man in the inner tent " * 12
OPTIONS: dict[str, Any] = {"max_tokens": 40, "ignore_eos": True}
SPANS = ["0:2", "2:5"]

IsFatal = Callable[[list[Admitted]], bool]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_checkpoint(
        "llama", tmp_path_factory.mktemp("recovery") / "tiny", config_changes={"max_position_embeddings": 2048}
    )


def swarm_of(folder: Path, model: Path, spans: list[str], **client: Any) -> Swarm:
    """Without shared beginnings, which would spare the hops the work in which they are to die."""
    settings = {"prefill_chunk_tokens": 16, "recovery_patience_s": 30.0, **client}
    return Swarm(folder, model, spans, server={"prefix_cache": False}, client=settings)


def doom(server: BlockServer, is_fatal: IsFatal) -> list[float]:
    """The server dies, without a farewell, in the first iteration that is fatal. Gives the times of its deaths."""
    engine = server._engine
    assert engine is not None
    compute, loop, deaths = engine._compute, asyncio.get_running_loop(), list[float]()

    def compute_or_die(admitted: list[Admitted], blocks: Span) -> BatchOutput:
        if not deaths and is_fatal(admitted):
            deaths.append(time.monotonic())
            asyncio.run_coroutine_threadsafe(server._rpc.stop(0), loop).result()
        return compute(admitted, blocks)

    engine._compute = compute_or_die  # type: ignore[method-assign]
    return deaths


def beyond(position: int) -> IsFatal:
    """An iteration that computes the token at `position`."""
    return lambda admitted: any(
        row.position <= position < row.position + row.num_tokens for batch in admitted for row, _, _ in batch.rows
    )


async def undisturbed(swarm: Swarm, **options: Any) -> tuple[tuple[int, ...], int]:
    """The tokens of the answer, and how many the prompt has."""
    async with swarm.connect() as client:
        answer = await client.generate(PROMPT, **{**OPTIONS, **options})
        return answer.token_ids, answer.usage.prompt_tokens


async def end(swarm: Swarm, dead: list[BlockServer]) -> None:
    """The others are empty, and the dead ones can go."""
    swarm.servers[:] = [server for server in swarm.servers if server not in dead]
    await swarm.until_empty()
    for server in dead:
        await server.stop()


@pytest.mark.parametrize("hop", [0, 1])
@pytest.mark.parametrize(
    "share, options",
    [
        (0.0, {}),
        (0.6, {}),
        (1.0, {"speculation": "prompt_lookup"}),
        (1.1, {"temperature": 1.0, "seed": 3, "speculation": "prompt_lookup"}),
    ],
    ids=["first chunk", "mid prompt", "guesses", "sampled guesses"],
)
async def test_a_hop_that_dies_anywhere_is_replaced(
    tmp_path: Path, model: Path, hop: int, share: float, options: dict[str, Any]
) -> None:
    async with swarm_of(tmp_path, model, SPANS) as swarm, swarm.connect() as client:
        expected, num_prompt_tokens = await undisturbed(swarm, **options)
        victim = swarm.servers[hop]
        deaths = doom(victim, beyond(round(share * num_prompt_tokens)))
        answering = asyncio.create_task(client.generate(PROMPT, **{**OPTIONS, **options}))

        async def has_come() -> bool:
            return bool(deaths or (victim._sessions is not None and len(victim._sessions)))

        await until(has_come)
        await swarm.add_server(SPANS[hop])
        answer = await answering
        assert len(deaths) == 1
        assert (answer.token_ids, answer.usage.recoveries) == (expected, 1)
        await end(swarm, [victim])


async def test_both_hops_may_die_at_once(tmp_path: Path, model: Path) -> None:
    async with swarm_of(tmp_path, model, SPANS) as swarm, swarm.connect() as client:
        expected, _ = await undisturbed(swarm)
        victims = list(swarm.servers)
        answering = asyncio.create_task(client.generate(PROMPT, **{**OPTIONS, "max_tokens": 400}))
        await until_half(swarm)
        for span in SPANS:
            await swarm.add_server(span)
        await asyncio.gather(*(victim._rpc.stop(0) for victim in victims))
        answer = await answering
        assert answer.token_ids[: len(expected)] == expected
        assert answer.usage.recoveries >= 1
        await end(swarm, victims)


async def until_half(swarm: Swarm) -> None:
    """Until the running answer is beyond its prompt."""
    port = swarm.servers[0].metrics_port
    before = await sample(port, "corolla_hop_tokens_total", kind="decode")

    async def has_begun() -> bool:
        return await sample(port, "corolla_hop_tokens_total", kind="decode") > before + 5

    await until(has_begun)


async def test_a_lost_span_may_be_cut_otherwise(tmp_path: Path, model: Path) -> None:
    async with swarm_of(tmp_path, model, SPANS) as swarm, swarm.connect() as client:
        expected, num_prompt_tokens = await undisturbed(swarm)
        victim = swarm.servers[1]
        doom(victim, beyond(num_prompt_tokens + 10))
        answering = asyncio.create_task(client.generate(PROMPT, **OPTIONS))
        for span in ("1:3", "3:5", "2:4"):
            await swarm.add_server(span)
        answer = await answering
        assert (answer.token_ids, answer.usage.recoveries) == (expected, 1)
        assert await sample(swarm.clients[0].metrics_port, "corolla_session_recoveries_total", method="outputs") == 1
        await end(swarm, [victim])


async def test_a_replacement_that_dies_in_the_replay_is_replaced(tmp_path: Path, model: Path) -> None:
    async with swarm_of(tmp_path, model, SPANS) as swarm, swarm.connect() as client:
        expected, num_prompt_tokens = await undisturbed(swarm)
        await swarm.add_server("2:5")
        await swarm.add_server("2:5")
        deaths: list[list[float]] = []

        def is_fatal(admitted: list[Admitted]) -> bool:
            """The first one dies at a token of the answer, the second one in the midst of what it gets again."""
            num_dead = sum(map(len, deaths))
            return num_dead < 2 and beyond((num_prompt_tokens + 10, 40)[num_dead])(admitted)

        deaths += [doom(server, is_fatal) for server in swarm.servers[1:]]
        answer = await client.generate(PROMPT, **OPTIONS)
        assert (answer.token_ids, answer.usage.recoveries) == (expected, 1)
        assert sorted(map(len, deaths)) == [0, 1, 1]
        await end(swarm, [server for server, death in zip(swarm.servers[1:], deaths, strict=True) if death])


async def test_a_request_that_kills_servers_is_stopped_after_the_second(tmp_path: Path, model: Path) -> None:
    async with swarm_of(tmp_path, model, ["0:2", *["2:5"] * 4]) as swarm, swarm.connect() as client:
        expected, num_prompt_tokens = await undisturbed(swarm)
        doomed = swarm.servers[1:]
        is_poison = beyond(num_prompt_tokens + 50)
        deaths = [doom(server, is_poison) for server in doomed]
        with pytest.raises(RequestKillsServers):
            await client.generate(PROMPT, **{**OPTIONS, "max_tokens": 300})
        assert sum(map(len, deaths)) == 2
        # The others serve whoever does no harm.
        assert (await undisturbed(swarm))[0] == expected
        await end(swarm, [server for server, death in zip(doomed, deaths, strict=True) if death])


async def test_other_weights_are_no_replacement(tmp_path: Path, model: Path) -> None:
    async with swarm_of(tmp_path, model, SPANS, recovery_patience_s=1.0) as swarm, swarm.connect() as client:
        _, num_prompt_tokens = await undisturbed(swarm)
        victim = swarm.servers[1]
        doom(victim, beyond(num_prompt_tokens + 10))
        await swarm.add_server("2:5", dtype="bfloat16")
        with pytest.raises(NoChain):
            await client.generate(PROMPT, **OPTIONS)
        assert await sample(swarm.servers[2].metrics_port, "corolla_hop_tokens_total") == 0
        await end(swarm, [victim])


async def test_a_hop_that_reaches_nobody_is_replaced_and_nobody_taken_for_dead(tmp_path: Path, model: Path) -> None:
    async with swarm_of(tmp_path, model, [*SPANS, SPANS[1]]) as swarm, swarm.connect() as client:
        expected, num_prompt_tokens = await undisturbed(swarm)
        cut_off = swarm.servers[0]
        cut(cut_off, num_prompt_tokens + 10)
        answering = asyncio.create_task(client.generate(PROMPT, **OPTIONS))

        async def has_come() -> bool:
            return cut_off._sessions is not None and len(cut_off._sessions) > 0

        await until(has_come)
        await swarm.add_server(SPANS[0])
        assert (await answering).token_ids == expected
        await swarm.until_empty()


async def test_two_hops_that_are_cut_off_from_each_other_for_a_while_are_no_dead_ones(
    tmp_path: Path, model: Path
) -> None:
    async with swarm_of(tmp_path, model, SPANS) as swarm, swarm.connect() as client:
        expected, num_prompt_tokens = await undisturbed(swarm)
        cut(swarm.servers[0], num_prompt_tokens + 10, num_losses=4)
        answer = await client.generate(PROMPT, **OPTIONS)
        assert answer.token_ids == expected
        await swarm.until_empty()


def cut(server: BlockServer, position: int, num_losses: int = 1000) -> None:
    """What the server sends on from that position is lost, so many times."""
    relay = server._relay
    assert relay is not None
    forward, num_left = relay.forward, [num_losses]

    def forward_or_lose(address: str, step: pb.Step, payload: Any) -> None:
        if num_left[0] and any(row.position >= position for row in step.rows):
            num_left[0] -= 1
            relay._fault(step, address)
            return
        forward(address, step, payload)

    relay.forward = forward_or_lose  # type: ignore[method-assign]


async def test_nobody_waits_longer_for_a_replacement_than_was_said(tmp_path: Path, model: Path) -> None:
    """Also where the lost server is asked again and again meanwhile."""
    async with swarm_of(tmp_path, model, SPANS, recovery_patience_s=5.0) as swarm, swarm.connect() as client:
        _, num_prompt_tokens = await undisturbed(swarm)
        victim = swarm.servers[1]
        deaths = doom(victim, beyond(num_prompt_tokens + 10))
        with pytest.raises((HopUnavailable, NoChain)):
            await client.generate(PROMPT, **OPTIONS)
        # With as much again after the last attempt it would be eight or nine.
        assert 5 <= time.monotonic() - deaths[0] < 7
        await end(swarm, [victim])


async def test_a_conversation_whose_stream_broke_between_two_steps_goes_on(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As while its caller does not read. When the next step is taken, the stream is there again."""
    decode, reached, go_on = ChainSession.decode, asyncio.Event(), asyncio.Event()

    async def decode_later(self: ChainSession, *step: Any) -> list[int]:
        reached.set()
        await go_on.wait()
        return await decode(self, *step)

    async with swarm_of(tmp_path, model, SPANS) as swarm, swarm.connect() as client:
        expected, _ = await undisturbed(swarm)
        session = (await client.create_session()).session_id
        monkeypatch.setattr(ChainSession, "decode", decode_later)
        answering = asyncio.create_task(client.generate(PROMPT, session=session, **OPTIONS))
        await reached.wait()
        plane, server = swarm.clients[0]._plane, swarm.servers[1]
        assert plane is not None
        broken = plane._streams[server.address].task
        assert broken is not None
        broken.cancel()
        await asyncio.wait([broken])

        async def is_forsaken() -> bool:
            return all(held.is_idle for held in server._sessions or ())

        await until(is_forsaken)
        await plane.connect(server.address)
        go_on.set()
        assert (await answering).token_ids == expected
        await client.delete_session(session)
        await swarm.until_empty()


async def test_a_turn_that_cannot_go_on_reserves_nothing_any_more(tmp_path: Path, model: Path) -> None:
    """The hops that are left keep its conversation's tokens, and no place for an answer that nobody makes."""
    async with swarm_of(tmp_path, model, SPANS, recovery_patience_s=0.5) as swarm, swarm.connect() as client:
        session = await first_turn(client)
        victim = swarm.servers[1]
        doom(victim, lambda admitted: True)
        with pytest.raises((HopUnavailable, NoChain)):
            await client.generate(PROMPT, session=session, **OPTIONS)
        sessions = swarm.servers[0]._sessions
        assert sessions is not None

        async def are_idle() -> bool:
            return all(held.is_idle for held in sessions)

        await until(are_idle)
        await client.delete_session(session)
        await end(swarm, [victim])


async def test_a_conversation_goes_on_though_a_hop_has_no_second_place_for_it(tmp_path: Path, model: Path) -> None:
    """One that lost its cache gets the past through one that has kept no outputs, and computes in its only place."""
    settings = {"prefix_cache": False, "kept_outputs_mib": 0}
    async with Swarm(tmp_path, model, SPANS, server=settings) as swarm, swarm.connect() as client:
        expected = await last_turn(client, await first_turn(client))
        session = await first_turn(client)
        first, last = (server._sessions for server in swarm.servers)
        assert first is not None
        assert last is not None
        assert last.expire(time.monotonic() + 1e6) == 1
        num_taken = first.pool.num_available - 2
        first.pool.promise(num_taken)
        assert await last_turn(client, session) == expected
        first.pool.promise(-num_taken)
        await swarm.until_empty()


async def test_a_conversation_goes_on_though_kept_outputs_are_gone_at_the_last_moment(
    tmp_path: Path, model: Path
) -> None:
    async with swarm_of(tmp_path, model, SPANS) as swarm, swarm.connect() as client:
        expected = await last_turn(client, await first_turn(client))
        session = await first_turn(client)
        first, last = swarm.servers
        assert first._engine is not None
        assert last._sessions is not None
        assert last._sessions.expire(time.monotonic() + 1e6) == 1
        outputs = first._engine._outputs
        read = outputs.read

        def read_nothing(session_id: bytes, start: int, end: int) -> bytes:
            outputs.forget(session_id)
            return read(session_id, start, end)

        outputs.read = read_nothing  # type: ignore[method-assign]
        assert await last_turn(client, session) == expected
        await swarm.until_empty()


async def first_turn(client: AsyncClient) -> str:
    """A conversation's id."""
    session = (await client.create_session()).session_id
    await client.generate(PROMPT, session=session, **OPTIONS)
    return session


async def last_turn(client: AsyncClient, session: str) -> tuple[int, ...]:
    """A short one; the conversation is over."""
    answer = await client.generate("then", session=session, max_tokens=8, ignore_eos=True)
    await client.delete_session(session)
    return answer.token_ids


@pytest.mark.parametrize("num_sick", [1, 2])
async def test_numbers_that_are_none_are_tried_on_one_other_server(tmp_path: Path, model: Path, num_sick: int) -> None:
    async with swarm_of(tmp_path, model, SPANS) as swarm, swarm.connect() as client:
        expected, _ = await undisturbed(swarm)
        await swarm.add_server("2:5")
        # The first ones to compute something.
        sick: set[str] = set()
        for server in swarm.servers[1:]:
            sicken(server, sick, num_sick)
        num_recovered = 0
        for _ in range(6):
            if num_sick == 2:
                with pytest.raises(NonFiniteOutput):
                    await client.generate(PROMPT, **OPTIONS)
                continue
            answer = await client.generate(PROMPT, **OPTIONS)
            assert answer.token_ids == expected
            num_recovered += answer.usage.recoveries
        if num_sick == 1:
            assert num_recovered >= 1
            # Its numbers are no reason to leave a server out: it answers, and may be right about other requests.
            name = "corolla_session_recoveries_total"
            assert await sample(swarm.clients[0].metrics_port, name, cause="non_finite") == num_recovered
        await swarm.until_empty()


async def test_a_server_that_fails_to_compute_is_replaced_and_ends_itself(tmp_path: Path, model: Path) -> None:
    async with swarm_of(tmp_path, model, SPANS) as swarm, swarm.connect() as client:
        expected, _ = await undisturbed(swarm)
        broken = swarm.servers[1]
        await swarm.add_server("2:5")
        engine, ends = broken._engine, list[bool]()
        assert engine is not None

        def fail(admitted: list[Admitted], blocks: Span) -> BatchOutput:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

        engine._compute = fail  # type: ignore[method-assign]
        engine.failures = Failures(lambda: ends.append(True))
        num_recovered = 0
        for _ in range(100):
            answer = await client.generate(PROMPT, **OPTIONS)
            assert answer.token_ids == expected
            num_recovered += answer.usage.recoveries
            if ends:
                break
        assert ends == [True]
        assert num_recovered == 3
        await swarm.until_empty()


def sicken(server: BlockServer, sick: set[str], num_sick: int) -> None:
    """Its outputs are no numbers any more, if it is among the first `num_sick` servers to compute."""
    engine = server._engine
    assert engine is not None
    compute = engine._compute

    def compute_nothing(admitted: list[Admitted], blocks: Span) -> BatchOutput:
        output = compute(admitted, blocks)
        if len(sick) < num_sick:
            sick.add(server.server_id)
        if server.server_id not in sick:
            return output
        return BatchOutput(torch.full_like(output.hidden, torch.nan), (False,) * len(output.finite))

    engine._compute = compute_nothing  # type: ignore[method-assign]
