"""Hops that die at the worst moments: in a prompt, in a replay, two at once; and outputs of NaN and infinity."""

import asyncio
import itertools
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from corolla.block_server.boundary_activations import BoundaryActivations
from corolla.block_server.engine import Failures
from corolla.block_server.hop_session import SessionState
from corolla.block_server.service import BlockServer
from corolla.chain.session import ChainSession, TokenReader
from corolla.chassis.errors import (
    CorollaError,
    HopUnavailable,
    InternalError,
    NoChain,
    NonFiniteOutput,
    NotComputed,
    OutOfMemory,
    RequestKillsServers,
    StepFailed,
)
from corolla.compute.base import LaunchedBatch, RowWork
from corolla.sdk.async_client import AsyncClient
from corolla.v1 import blocks_pb2 as pb
from corolla.wire.frames import Frame
from tests.faulty_runner import plant_fault
from tests.integration.deaths import answer_across_a_death, beyond, doom
from tests.integration.metrics import sample, until_sample
from tests.integration.swarm import Swarm
from tests.integration.waiting import until
from tests.integration.wires import Cut
from tests.reference import Unsplit
from tests.tiers import quick

PROMPT = "the thin man in the inner tent " * 12
OPTIONS: dict[str, Any] = {"max_tokens": 40, "ignore_eos": True}
SPANS = ["0:2", "2:5"]


def swarm_of(folder: Path, model: Path, spans: list[str], **client: Any) -> Swarm:
    """A swarm whose texts share no beginnings, which would spare the hops the work in which they are to die."""
    settings = {"prefill_chunk_tokens": 16, "recovery_patience_s": 30.0, **client}
    return Swarm(folder, model, spans, server={"prefix_cache": False}, client=settings)


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
        pytest.param(0.0, {}, marks=pytest.mark.full),
        (0.6, {}),
        pytest.param(1.0, {"speculation": "prompt_lookup"}, marks=pytest.mark.full),
        (1.1, {"temperature": 1.0, "seed": 3, "speculation": "prompt_lookup"}),
    ],
    ids=["first chunk", "mid prompt", "draft tokens", "sampled draft tokens"],
)
async def test_a_hop_that_dies_anywhere_is_replaced(
    tmp_path: Path, model: Path, hop: int, share: float, options: dict[str, Any]
) -> None:
    async with swarm_of(tmp_path, model, SPANS) as swarm, swarm.connect() as client:
        expected, num_prompt_tokens = await undisturbed(swarm, **options)
        asked = {**OPTIONS, **options}
        answer = await answer_across_a_death(swarm, client, hop, round(share * num_prompt_tokens), PROMPT, **asked)
        assert answer.token_ids == expected


async def test_an_answer_without_a_seed_keeps_its_key(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = itertools.chain([7, 7], itertools.count(8))
    monkeypatch.setattr(secrets, "randbits", lambda _: next(keys))
    options = {**OPTIONS, "temperature": 1.5}
    async with swarm_of(tmp_path, model, SPANS) as swarm, swarm.connect() as client:
        expected, num_prompt_tokens = await undisturbed(swarm, **options)
        answer = await answer_across_a_death(swarm, client, 1, num_prompt_tokens + 9, PROMPT, **options)
        assert answer.token_ids == expected
        assert (await undisturbed(swarm, **options))[0] != expected, "the next answer has another key"


@pytest.mark.full
async def test_both_hops_may_die_at_once(tmp_path: Path, model: Path) -> None:
    async with swarm_of(tmp_path, model, SPANS) as swarm, swarm.connect() as client:
        expected, _ = await undisturbed(swarm)
        victims = list(swarm.servers)
        answering = asyncio.create_task(client.generate(PROMPT, **{**OPTIONS, "max_tokens": 400}))
        await until_half(swarm)
        for span in SPANS:
            await swarm.add_server(span)
        await asyncio.gather(*(swarm.crash(victim) for victim in victims))
        answer = await answering
        assert answer.token_ids[: len(expected)] == expected
        assert answer.usage.recoveries >= 1
        await end(swarm, victims)


async def until_half(swarm: Swarm) -> None:
    """Until the running answer is beyond its prompt."""
    port = swarm.servers[0].metrics_port
    before = await sample(port, "corolla_hop_tokens_total", kind="decode")
    await until_sample(port, "corolla_hop_tokens_total", lambda value: value > before + 5, kind="decode")


async def test_a_lost_span_may_be_cut_otherwise(tmp_path: Path, model: Path) -> None:
    async with swarm_of(tmp_path, model, SPANS) as swarm, swarm.connect() as client:
        expected, num_prompt_tokens = await undisturbed(swarm)
        victim = swarm.servers[1]
        doom(swarm, victim, beyond(num_prompt_tokens + 10))
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

        def is_fatal(rows: Sequence[RowWork]) -> bool:
            """The first server dies at a token of the answer, its replacement in the middle of the replay."""
            num_dead = sum(map(len, deaths))
            return num_dead < 2 and beyond((num_prompt_tokens + 10, 40)[num_dead])(rows)

        deaths += [doom(swarm, server, is_fatal) for server in swarm.servers[1:]]
        answer = await client.generate(PROMPT, **OPTIONS)
        assert (answer.token_ids, answer.usage.recoveries) == (expected, 1)
        assert sorted(map(len, deaths)) == [0, 1, 1]
        await end(swarm, [server for server, death in zip(swarm.servers[1:], deaths, strict=True) if death])


async def test_a_request_that_kills_servers_is_stopped_after_the_second(tmp_path: Path, model: Path) -> None:
    async with swarm_of(tmp_path, model, ["0:2", *["2:5"] * 4]) as swarm, swarm.connect() as client:
        expected, num_prompt_tokens = await undisturbed(swarm)
        doomed = swarm.servers[1:]
        is_poison = beyond(num_prompt_tokens + 50)
        deaths = [doom(swarm, server, is_poison) for server in doomed]
        with pytest.raises(RequestKillsServers):
            await client.generate(PROMPT, **{**OPTIONS, "max_tokens": 300})
        assert sum(map(len, deaths)) == 2
        # The other servers serve requests that do no harm.
        assert (await undisturbed(swarm))[0] == expected
        await end(swarm, [server for server, death in zip(doomed, deaths, strict=True) if death])


async def test_other_weights_are_no_replacement(tmp_path: Path, model: Path) -> None:
    async with swarm_of(tmp_path, model, SPANS, recovery_patience_s=1.0) as swarm, swarm.connect() as client:
        _, num_prompt_tokens = await undisturbed(swarm)
        victim = swarm.servers[1]
        doom(swarm, victim, beyond(num_prompt_tokens + 10))
        await swarm.add_server("2:5", dtype="bfloat16")
        with pytest.raises(NoChain):
            await client.generate(PROMPT, **OPTIONS)
        assert await sample(swarm.servers[2].metrics_port, "corolla_hop_tokens_total") == 0
        await end(swarm, [victim])


async def test_a_hop_that_reaches_no_peer_is_replaced_and_no_other_server_is_blamed(
    tmp_path: Path, model: Path
) -> None:
    async with swarm_of(tmp_path, model, [*SPANS, SPANS[1]]) as swarm, swarm.connect() as client:
        expected, num_prompt_tokens = await undisturbed(swarm)
        cut_off = swarm.servers[0]
        num_left = cut(swarm, cut_off, num_prompt_tokens + 10)
        answering = asyncio.create_task(client.generate(PROMPT, **OPTIONS))
        await until(lambda: len(cut_off.sessions) > 0)
        await swarm.add_server(SPANS[0])
        assert (await answering).token_ids == expected
        assert num_left[0] < 1000
        await swarm.until_empty()


async def test_two_hops_with_a_broken_link_are_not_counted_as_dead(tmp_path: Path, model: Path) -> None:
    async with swarm_of(tmp_path, model, SPANS) as swarm, swarm.connect() as client:
        expected, num_prompt_tokens = await undisturbed(swarm)
        num_left = cut(swarm, swarm.servers[0], num_prompt_tokens + 10, num_losses=4)
        answer = await client.generate(PROMPT, **OPTIONS)
        assert answer.token_ids == expected
        assert num_left == [0]
        await swarm.until_empty()


def cut(swarm: Swarm, server: BlockServer, position: int, num_losses: int = 1000) -> list[int]:
    """The server's connection breaks at what it sends on from that position, so many times. Gives how many are left."""
    num_left = [num_losses]

    def lose(address: str, frame: Frame) -> Frame:
        step = frame.control
        if num_left[0] and isinstance(step, pb.Step) and any(row.position >= position for row in step.rows):
            num_left[0] -= 1
            raise Cut
        return frame

    swarm.wires_of(server).on_sent = lose
    return num_left


async def test_a_request_waits_for_a_replacement_no_longer_than_configured(tmp_path: Path, model: Path) -> None:
    """Also where the lost server is asked again and again meanwhile."""
    waits_s: list[float] = []
    # If as long a wait again followed the last attempt, it would be eight or nine seconds, each time.
    while not waits_s or (waits_s[-1] >= 7 and len(waits_s) < 3):
        async with swarm_of(tmp_path, model, SPANS, recovery_patience_s=5.0) as swarm, swarm.connect() as client:
            _, num_prompt_tokens = await undisturbed(swarm)
            victim = swarm.servers[1]
            deaths = doom(swarm, victim, beyond(num_prompt_tokens + 10))
            with pytest.raises((HopUnavailable, NoChain)):
                await client.generate(PROMPT, **OPTIONS)
            waits_s.append(time.monotonic() - deaths[0])
            await end(swarm, [victim])
    assert min(waits_s) >= 5
    assert waits_s[-1] < 7, waits_s


async def test_a_conversation_whose_stream_broke_between_two_steps_goes_on(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The stream breaks while its caller does not read. When the next step is taken, the stream is there again."""
    decode, reached, go_on = ChainSession.decode, asyncio.Event(), asyncio.Event()

    async def decode_later(self: ChainSession, reader: TokenReader) -> tuple[int, int]:
        reached.set()
        await go_on.wait()
        return await decode(self, reader)

    async with swarm_of(tmp_path, model, SPANS) as swarm, swarm.connect() as client:
        expected, _ = await undisturbed(swarm)
        session = (await client.create_session()).session_id
        monkeypatch.setattr(ChainSession, "decode", decode_later)
        answering = asyncio.create_task(client.generate(PROMPT, session=session, **OPTIONS))
        await reached.wait()
        server = swarm.servers[1]
        swarm.wires_of(swarm.clients[0]).cut(server.address)
        await until(lambda: all(held.state is SessionState.ORPHANED for held in server.sessions))
        # Another answer has the stream opened again, and needs no second step.
        await client.generate(PROMPT, max_tokens=1)
        go_on.set()
        assert (await answering).token_ids == expected
        await client.delete_session(session)
        await swarm.until_empty()


async def test_a_failed_turn_releases_its_reservation(tmp_path: Path, model: Path) -> None:
    """The remaining hops keep the conversation's tokens, and no reservation for an answer that has ended."""
    async with swarm_of(tmp_path, model, SPANS, recovery_patience_s=0.5) as swarm, swarm.connect() as client:
        session = await first_turn(client)
        victim = swarm.servers[1]
        doom(swarm, victim, lambda admitted: True)
        with pytest.raises((HopUnavailable, NoChain)):
            await client.generate(PROMPT, session=session, **OPTIONS)

        async def are_idle() -> bool:
            idle = (SessionState.PARKED, SessionState.ORPHANED)
            return all(held.state in idle for held in swarm.servers[0].sessions)

        await until(are_idle)
        await client.delete_session(session)
        await end(swarm, [victim])


@pytest.mark.full
async def test_hops_before_a_lost_one_compute_only_what_they_took_from_a_prefix_cache(
    tmp_path: Path, model: Path
) -> None:
    """They have kept their outputs for the rest of the text."""
    unsplit = Unsplit(model)
    prompt_ids = unsplit.encode(PROMPT)
    expected = unsplit.generate(prompt_ids, OPTIONS["max_tokens"], ignore_eos=True).token_ids
    settings = {"prefill_chunk_tokens": 16, "standby": "off"}
    async with Swarm(tmp_path, model, SPANS, client=settings) as swarm, swarm.connect() as client:
        await client.generate(prompt_ids[: len(prompt_ids) // 2], max_tokens=1)
        position = len(prompt_ids) + 10
        answer = await answer_across_a_death(swarm, client, 1, position, prompt_ids, **OPTIONS)
        assert list(answer.token_ids) == expected
        num_found, port = answer.usage.cached_tokens, swarm.clients[0].metrics_port
        assert 0 < num_found < len(prompt_ids) // 2
        assert await sample(port, "corolla_session_recoveries_total", method="outputs+tokens") == 1
        # Both hops compute the beginning, and the lost one the rest.
        num_recomputed = await sample(port, "corolla_recomputed_tokens_total")
        assert len(prompt_ids) <= num_recomputed - num_found <= position + 1


async def test_a_conversation_continues_although_a_hop_has_no_room_for_a_scratch_session(
    tmp_path: Path, model: Path
) -> None:
    """One that lost its cache gets the past through one that has kept no outputs, and computes in its only place."""
    settings = {"prefix_cache": False, "boundary_activations_mib": 0}
    async with Swarm(tmp_path, model, SPANS, server=settings) as swarm, swarm.connect() as client:
        expected = await last_turn(client, await first_turn(client))
        session = await first_turn(client)
        pool = swarm.servers[0].engine.runner.store.pool  # type: ignore[attr-defined]
        await swarm.forget(1)
        num_taken = pool.num_available - 2
        pool.promise(num_taken)
        assert await last_turn(client, session) == expected
        pool.promise(-num_taken)
        await swarm.until_empty()


async def test_a_conversation_continues_although_boundary_activations_vanish_at_the_last_moment(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read, num_readings = BoundaryActivations.read, 0

    def read_nothing(outputs: BoundaryActivations, session_id: bytes, start: int, end: int) -> bytes:
        nonlocal num_readings
        num_readings += 1
        outputs.forget(session_id)
        return read(outputs, session_id, start, end)

    async with swarm_of(tmp_path, model, SPANS) as swarm, swarm.connect() as client:
        expected = await last_turn(client, await first_turn(client))
        session = await first_turn(client)
        await swarm.forget(1)
        monkeypatch.setattr(BoundaryActivations, "read", read_nothing)
        assert await last_turn(client, session) == expected
        assert num_readings > 0
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


def to_nan(launched: LaunchedBatch) -> LaunchedBatch:
    hidden = torch.full_like(launched.hidden, torch.nan)
    return replace(launched, hidden=hidden, read_sum=hidden.sum)


def failing(failure: Exception) -> Callable[[LaunchedBatch], LaunchedBatch]:
    def fail(output: LaunchedBatch) -> LaunchedBatch:
        raise failure

    return fail


SICKNESSES: dict[type[NotComputed], Callable[[LaunchedBatch], LaunchedBatch]] = {
    NonFiniteOutput: to_nan,
    StepFailed: failing(IndexError("list index out of range")),
    OutOfMemory: failing(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")),
}


@pytest.mark.parametrize("sickness", quick(SICKNESSES, NonFiniteOutput))
@pytest.mark.parametrize("num_sick", [1, 2])
async def test_a_step_that_a_server_cannot_compute_is_tried_on_one_other_server(
    tmp_path: Path, model: Path, num_sick: int, sickness: type[NotComputed]
) -> None:
    async with swarm_of(tmp_path, model, SPANS) as swarm, swarm.connect() as client:
        expected, _ = await undisturbed(swarm)
        await swarm.add_server("2:5")
        # The first ones to compute something.
        sick: set[str] = set()
        for server in swarm.servers[1:]:
            sicken(server, sick, num_sick, SICKNESSES[sickness])
        num_recovered = 0
        for _ in range(6):
            if num_sick == 2:
                with pytest.raises(sickness) as refused:
                    await client.generate(PROMPT, **OPTIONS)
                assert refused.value.code is sickness.code
                continue
            answer = await client.generate(PROMPT, **OPTIONS)
            assert answer.token_ids == expected
            num_recovered += answer.usage.recoveries
        if num_sick == 1:
            assert num_recovered >= 1
            # The failure must not leave a server out: it answers, and may be right about other requests.
            name, cause = "corolla_session_recoveries_total", sickness.reason.lower()
            assert await sample(swarm.clients[0].metrics_port, name, cause=cause) == num_recovered
            assert await faults(swarm, sickness.reason) >= num_recovered
        await swarm.until_empty()


async def faults(swarm: Swarm, reason: str) -> float:
    """Rows that all servers refused or failed for that reason."""
    servers = [server.metrics_port for server in swarm.servers]
    return sum([await sample(port, "corolla_hop_faults_total", reason=reason) for port in servers])


class FromTomorrow(CorollaError):
    """What servers of a later version may say."""


async def test_an_unknown_reason_ends_only_its_own_answer(tmp_path: Path, model: Path) -> None:
    """Block servers send such a reason when they are upgraded before client services."""
    async with swarm_of(tmp_path, model, SPANS) as swarm, swarm.connect() as client:
        expected, _ = await undisturbed(swarm)
        engine = swarm.servers[1].engine
        restore = plant_fault(engine.runner, after=failing(FromTomorrow("a new reason")))
        with pytest.raises(CorollaError) as refused:
            await client.generate(PROMPT, **OPTIONS)
        assert (refused.value.code, refused.value.reason) == (InternalError.code, InternalError.reason)
        restore()
        assert (await client.generate(PROMPT, **OPTIONS)).token_ids == expected
        await swarm.until_empty()


async def test_requests_that_fail_one_after_the_other_do_not_end_a_server_that_computes_others(
    tmp_path: Path, model: Path
) -> None:
    async with swarm_of(tmp_path, model, SPANS) as swarm, swarm.connect() as client:
        engine, ends = swarm.servers[1].engine, list[bool]()
        plant_fault(engine.runner, after=SICKNESSES[StepFailed])
        engine.failures = Failures(lambda: ends.append(True))
        for _ in range(5):
            with pytest.raises(StepFailed):
                await client.generate(PROMPT, **OPTIONS)
        assert ends == []
        await swarm.until_empty()


async def test_a_server_that_fails_to_compute_is_replaced_and_ends_itself(tmp_path: Path, model: Path) -> None:
    async with swarm_of(tmp_path, model, SPANS) as swarm, swarm.connect() as client:
        expected, _ = await undisturbed(swarm)
        broken = swarm.servers[1]
        await swarm.add_server("2:5")
        ends: list[bool] = []
        plant_fault(broken.engine.runner, is_broken=True)
        broken.engine.failures = Failures(lambda: ends.append(True))
        # Whatever the machine did while they were measured, callers prefer this one.
        broken.engine.decode_speed.observe(1e-6, 1)
        num_recovered = 0
        # Callers avoid it for seconds after each failure, and a fast machine gives many answers meanwhile.
        async with asyncio.timeout(120):
            while not ends:
                answer = await client.generate(PROMPT, **OPTIONS)
                assert answer.token_ids == expected
                num_recovered += answer.usage.recoveries
        assert ends == [True]
        assert num_recovered == 3
        await swarm.until_empty()


def sicken(server: BlockServer, sick: set[str], num_sick: int, spoil: Callable[[LaunchedBatch], LaunchedBatch]) -> None:
    """Its outputs are spoilt from now on, if it is among the first `num_sick` servers to compute."""

    def spoil_if_sick(output: LaunchedBatch) -> LaunchedBatch:
        if len(sick) < num_sick:
            sick.add(server.server_id)
        return spoil(output) if server.server_id in sick else output

    plant_fault(server.engine.runner, after=spoil_if_sick)
