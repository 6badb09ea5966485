"""Sessions that are copied to standbys while they go on, and hops that die then."""

import asyncio
import random
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList

from corolla.block_server import span_loader
from corolla.block_server.handover.sender import HandoverSender
from corolla.block_server.hop_session import SessionState
from corolla.block_server.service import BlockServer
from corolla.block_server.sessions import SessionTable
from corolla.cache.states import LayerStates, SessionStates, StateTable
from corolla.cache.store import SessionCache
from corolla.cache.transfer import token_bytes
from corolla.chain import recovery, reservations, standbys
from corolla.chain.recovery_budget import METHODS, RecoveryReport
from corolla.compute.speed import Speed, measure_speed
from corolla.hf import AutoDistributedModelForCausalLM
from corolla.sdk.async_client import AsyncClient
from corolla.sdk.results import Generation
from corolla.trust.capabilities import Capabilities
from corolla.v1 import blocks_pb2 as pb
from corolla.wire import network
from tests.adapters import make_adapter
from tests.checkpoints import CONTEXT_LENGTH, make_tiny_checkpoint
from tests.faulty_runner import plant_fault
from tests.integration.hf.models import draw_prompts
from tests.integration.metrics import sample
from tests.integration.swarm import Swarm
from tests.integration.test_adapters import register
from tests.integration.waiting import until
from tests.reference import Unsplit
from tests.tiers import quick

PROMPT = "the thin man in the inner tent " * 12
NUM_PROMPT_TOKENS = 240
OPTIONS: dict[str, Any] = {"max_tokens": 200, "ignore_eos": True}
SPANS = ["0:2", "0:2", "2:5", "2:5"]


LIBRARY_OPTIONS: dict[str, dict[str, Any]] = {
    "beams": {"num_beams": 3, "do_sample": False},
    "rows": {"do_sample": False},
    "sampled beams": {"num_beams": 3, "do_sample": True},
    "drafts": {"prompt_lookup_num_tokens": 4, "do_sample": False},
    "prompts": {"do_sample": False},
}
NUM_LIBRARY_TOKENS = 120


async def stand_still(*_copy: Any) -> int:
    await asyncio.Event().wait()
    return 0


class At(LogitsProcessor):
    """Does something at one step of `generate`, and changes nothing."""

    def __init__(self, step: int, act: Callable[[], None]) -> None:
        self._left = step
        self._act = act

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self._left -= 1
        if not self._left:
            self._act()
        return scores


def swarm_of(
    folder: Path, model: Path, spans: Sequence[str] = SPANS, client: Mapping[str, Any] | None = None, **options: Any
) -> Swarm:
    settings = {"standby": "all", "prefill_chunk_tokens": 16, **(client or {})}
    return Swarm(folder, model, spans, client=settings, **options)


def num_held(server: BlockServer, state: SessionState = SessionState.STANDBY) -> int:
    """How many tokens a server holds of sessions in a state."""
    return sum(each.cache.num_tokens for each in server.sessions if each.state is state)


async def begin(swarm: Swarm, hop: int, **options: Any) -> tuple[asyncio.Task[Generation], BlockServer, BlockServer]:
    """Begins an answer. Returns it with the servers that hold and stand by for a hop, once some tokens are copied."""
    for server in swarm.servers:
        plant_fault(server.engine.runner, before=lambda rows: time.sleep(0.005))

    async def ask() -> Generation:
        async with swarm.connect() as client:
            return await client.generate(PROMPT, **{**OPTIONS, **options})

    answering = asyncio.create_task(ask())
    alike = [server for server in swarm.servers if server.settings.blocks == SPANS[2 * hop]]
    await until(lambda: answering.done() or max(map(num_held, alike)) > NUM_PROMPT_TOKENS + 16)
    (running,) = [server for server in alike if num_held(server, SessionState.RUNNING)]
    return answering, running, max(alike, key=num_held)


async def undisturbed(swarm: Swarm, **options: Any) -> tuple[int, ...]:
    async with swarm.connect() as client:
        answer = await client.generate(PROMPT, **{**OPTIONS, **options})
    assert answer.usage.prompt_tokens == NUM_PROMPT_TOKENS
    return answer.token_ids


async def num_recomputed(swarm: Swarm) -> float:
    return await sample(swarm.clients[0].metrics_port, "corolla_recomputed_tokens_total")


@pytest.mark.parametrize("hop", quick([0, 1], 1))
async def test_a_standby_takes_the_place_of_a_lost_hop(tmp_path: Path, model: Path, hop: int) -> None:
    async with swarm_of(tmp_path, model) as swarm:
        expected = await undisturbed(swarm, standby="off")
        copied = [
            await sample(each.metrics_port, "corolla_standby_bytes_total", direction="in") for each in swarm.servers
        ]
        assert not any(copied)
        answering, running, _ = await begin(swarm, hop)
        await swarm.crash(running)
        answer = await answering
        assert (answer.token_ids, answer.usage.recoveries) == (expected, 1)
        assert await num_recomputed(swarm) < NUM_PROMPT_TOKENS
        await swarm.until_empty()


@pytest.mark.parametrize("kind", quick(LIBRARY_OPTIONS, "beams"))
async def test_sequences_of_the_library_go_on_at_standbys(
    tmp_path: Path, model: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    hop = int(kind in ("beams", "drafts"))
    reports = list[RecoveryReport]()

    def noted(*facts: Any) -> RecoveryReport:
        reports.append(RecoveryReport(*facts))
        return reports[-1]

    monkeypatch.setattr(recovery, "RecoveryReport", noted)
    monkeypatch.setattr(standbys, "LONGEST_REPLAY_S", 0.0)
    loop = asyncio.get_running_loop()
    async with swarm_of(tmp_path, model) as swarm:
        remote: Any = await asyncio.to_thread(
            AutoDistributedModelForCausalLM.from_pretrained, str(model), router=swarm.router_address
        )
        ids = draw_prompts(1 if kind == "drafts" else 3, NUM_LIBRARY_TOKENS)
        options: dict[str, Any] = {"max_new_tokens": 60, "min_new_tokens": 60, **LIBRARY_OPTIONS[kind]}
        prompts = torch.randn(remote.config.num_hidden_layers, 4, remote.config.hidden_size) * 0.1

        def answer(*processors: LogitsProcessor) -> list[list[int]]:
            torch.manual_seed(0)
            session = remote.inference_session(block_prompts=prompts if kind == "prompts" else None)
            with session:
                tokens: Tensor = remote.generate(ids, logits_processor=LogitsProcessorList(processors), **options)
            return tokens.tolist()

        def of_hop() -> list[BlockServer]:
            return [each for each in swarm.servers if each.settings.blocks == SPANS[2 * hop]]

        async def stop_copying() -> None:
            """Lets the standby fall behind: it keeps what the sequences take back in the next steps."""
            await until(lambda: max(map(num_held, of_hop())) > ids.numel() // 2)
            monkeypatch.setattr(HandoverSender, "copy_settled", stand_still)

        async def lose_the_hop() -> None:
            (running,) = [each for each in of_hop() if num_held(each, SessionState.RUNNING)]
            await swarm.crash(running)

        expected = await asyncio.to_thread(answer)

        def of_loop(act: Callable[[], Coroutine[Any, Any, None]]) -> Callable[[], None]:
            return lambda: asyncio.run_coroutine_threadsafe(act(), loop).result()

        acts = At(26, of_loop(stop_copying)), At(37, of_loop(lose_the_hop))
        assert await asyncio.to_thread(answer, *acts) == expected
        (report,) = reports
        assert report.num_recomputed_tokens < ids.numel() * options.get("num_beams", 1)
        await swarm.until_empty()


@pytest.mark.full
async def test_a_standby_takes_the_place_of_a_frozen_hop(tmp_path: Path, model: Path) -> None:
    """Streams of tests bear silence for a minute, so without its standby the answer would not go on meanwhile."""
    async with swarm_of(tmp_path, model) as swarm:
        expected = await undisturbed(swarm)
        answering, running, standby = await begin(swarm, 1)
        wires = swarm.wires_of(swarm.clients[0])
        wires.freeze(running.address)
        await until(lambda: answering.done() or num_held(standby, SessionState.RUNNING))
        assert num_held(running, SessionState.RUNNING), "it does not know of the new epoch"
        wires.thaw(running.address)
        answer = await answering
        assert (answer.token_ids, answer.usage.recoveries) == (expected, 1)
        assert await num_recomputed(swarm) < 64
        port, name = swarm.clients[0].metrics_port, "corolla_session_recoveries_total"
        assert sum([await sample(port, name, cause="hop_late", method=method) for method in METHODS]) == 1
        assert await sample(port, "corolla_quarantined_servers") == 0
        await swarm.until_empty()


@pytest.mark.full
@pytest.mark.parametrize(
    "options",
    [
        {"speculation": "prompt_lookup"},
        {"speculation": "prompt_lookup", "temperature": 1.0, "seed": 3},
        {"n": 3, "temperature": 1.0, "seed": 3},
    ],
    ids=["drafts", "sampled drafts", "forks"],
)
@pytest.mark.parametrize("hop", [0, 1])
async def test_tokens_that_the_answer_may_drop_do_not_count(
    tmp_path: Path, model: Path, options: dict[str, Any], hop: int
) -> None:
    async with swarm_of(tmp_path, model) as swarm, swarm.connect() as client:
        expected = await client.generate(PROMPT, **{**OPTIONS, **options})
        answering, running, _ = await begin(swarm, hop, **options)
        await swarm.crash(running)
        answer = await answering
        assert [each.token_ids for each in answer.completions] == [each.token_ids for each in expected.completions]
        await swarm.until_empty()


@pytest.mark.full
@pytest.mark.parametrize(
    "family, hop",
    [("gemma3_text", 0), ("gpt_neo", 1), ("deepseek_v3", 0), ("qwen3_next", 0), ("lfm2", 1), ("falcon_mamba", 1)],
)
async def test_windows_latents_and_states_are_copied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str, hop: int
) -> None:
    model = make_tiny_checkpoint(family, tmp_path / family, config_changes={"max_position_embeddings": CONTEXT_LENGTH})
    arrived, arrive = [0], SessionStates.arrive

    def note(states: SessionStates, position: int, layers: LayerStates, table: StateTable | None = None) -> None:
        arrived.append(position)
        arrive(states, position, layers, table)

    monkeypatch.setattr(SessionStates, "arrive", note)
    async with swarm_of(tmp_path, model) as swarm:
        expected = await undisturbed(swarm)
        answering, running, _ = await begin(swarm, hop)
        if family in ("qwen3_next", "lfm2", "falcon_mamba"):
            # States come more seldom than tokens, and may belong to a token that the client service has not read yet.
            await until(
                lambda: (
                    answering.done()
                    or (arrived[-1] > NUM_PROMPT_TOKENS and num_held(running, SessionState.RUNNING) > arrived[-1] + 32)
                )
            )
        await swarm.crash(running)
        assert (await answering).token_ids == expected
        assert await num_recomputed(swarm) < NUM_PROMPT_TOKENS


@pytest.mark.full
async def test_codes_are_copied_between_services_that_prove_who_they_are(tmp_path: Path, model: Path) -> None:
    client = {"kv_cache_dtype": "int8"}
    async with swarm_of(tmp_path, model, server={"kv_cache_dtype": "int8"}, client=client, is_encrypted=True) as swarm:
        expected = await undisturbed(swarm)
        answering, running, _ = await begin(swarm, 1)
        await swarm.crash(running)
        assert (await answering).token_ids == expected
        assert await num_recomputed(swarm) < NUM_PROMPT_TOKENS


@pytest.mark.full
@pytest.mark.parametrize("hop", [0, 1])
async def test_a_standby_goes_on_with_an_adapter(tmp_path: Path, model: Path, hop: int) -> None:
    adapter = make_adapter(model, tmp_path / "one")
    async with swarm_of(tmp_path, model) as swarm:
        await register(swarm, "one", adapter)
        expected = await undisturbed(swarm, adapter="one")
        assert expected != await undisturbed(swarm)
        answering, running, _ = await begin(swarm, hop, adapter="one")
        await swarm.crash(running)
        answer = await answering
        assert (answer.token_ids, answer.usage.recoveries) == (expected, 1)
        assert await num_recomputed(swarm) < NUM_PROMPT_TOKENS
        await swarm.until_empty()


@pytest.mark.full
async def test_a_session_is_handed_over_after_its_first_capabilities_have_expired(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_ms = [round(time.time() * 1000)]
    monkeypatch.setattr(network, "Capabilities", partial(Capabilities, clock=lambda: now_ms[0] / 1000))
    monkeypatch.setattr(reservations, "RENEWAL_S", 0.0)
    async with swarm_of(tmp_path, model, server={"grace_s": 30.0}, is_encrypted=True) as swarm:
        expected = await undisturbed(swarm)
        answering, running, _ = await begin(swarm, 1)

        def end_ms() -> int:
            (session,) = [each for each in running.engine.sessions if each.state is SessionState.RUNNING]
            assert session.request.capability is not None
            return pb.Capability.FromString(session.request.capability.capability).expires_at_ms

        first_ms = end_ms()
        now_ms[0] = first_ms - 1
        await until(lambda: answering.done() or end_ms() > first_ms)
        now_ms[0] = first_ms + 1
        await running.stop()
        swarm.servers.remove(running)
        answer = await answering
        assert (answer.token_ids, answer.usage.recoveries) == (expected, 1)
        assert await num_recomputed(swarm) == 0


@pytest.mark.full
async def test_servers_that_share_no_pages_have_no_standbys(tmp_path: Path, model: Path) -> None:
    async with swarm_of(tmp_path, model, server={"prefix_cache": False}) as swarm:
        await undisturbed(swarm)
        name = "corolla_standby_bytes_total"
        copied = [await sample(each.metrics_port, name, direction="out") for each in swarm.servers]
        assert copied == [0] * len(SPANS)


@pytest.mark.full
async def test_a_second_loss_finds_the_next_standby(tmp_path: Path, model: Path) -> None:
    async with swarm_of(tmp_path, model, [*SPANS, "0:2"]) as swarm:
        expected = await undisturbed(swarm)
        answering, running, standby = await begin(swarm, 0)
        (other,) = [swarm.servers[number] for number in (0, 1, 4) if swarm.servers[number] not in (running, standby)]
        await swarm.crash(running)
        await until(lambda: num_held(other) > NUM_PROMPT_TOKENS)
        assert num_held(standby, SessionState.RUNNING)
        await swarm.crash(standby)
        answer = await answering
        assert (answer.token_ids, answer.usage.recoveries) == (expected, 2)
        assert await num_recomputed(swarm) < NUM_PROMPT_TOKENS


@pytest.mark.full
async def test_a_standby_that_dies_is_replaced(tmp_path: Path, model: Path) -> None:
    async with swarm_of(tmp_path, model, [*SPANS, "0:2"]) as swarm:
        expected = await undisturbed(swarm)
        answering, running, standby = await begin(swarm, 0)
        (other,) = [swarm.servers[number] for number in (0, 1, 4) if swarm.servers[number] not in (running, standby)]
        await swarm.die(standby)
        await until(lambda: num_held(other) > NUM_PROMPT_TOKENS)
        await swarm.crash(running)
        assert (await answering).token_ids == expected
        assert await num_recomputed(swarm) < NUM_PROMPT_TOKENS


@pytest.mark.full
async def test_a_session_that_grows_keeps_its_standby(tmp_path: Path) -> None:
    """Its hops are opened again for each growth: what a standby has got before still counts."""
    options: dict[str, Any] = {"max_tokens": None}
    model = make_tiny_checkpoint("llama", tmp_path / "tiny")
    async with swarm_of(tmp_path, model) as swarm:
        expected = await undisturbed(swarm, **options)
        answering, running, standby = await begin(swarm, 0, **options)
        await until(lambda: num_held(standby) > 480)
        await swarm.crash(running)
        assert (await answering).token_ids == expected
        assert await num_recomputed(swarm) < NUM_PROMPT_TOKENS


async def test_a_server_that_leaves_hands_only_the_rest_to_a_standby(tmp_path: Path, model: Path) -> None:
    async with swarm_of(tmp_path, model, server={"grace_s": 30.0}) as swarm:
        expected = await undisturbed(swarm)
        answering, running, standby = await begin(swarm, 1)
        await running.stop()
        assert num_held(standby, SessionState.RUNNING) > NUM_PROMPT_TOKENS
        swarm.servers.remove(running)
        answer = await answering
        assert (answer.token_ids, answer.usage.recoveries) == (expected, 1)
        assert await num_recomputed(swarm) == 0
        moved = await sample(standby.metrics_port, "corolla_handover_bytes_total", direction="in")
        assert moved < await sample(standby.metrics_port, "corolla_standby_bytes_total", direction="in") / 4
        await swarm.until_empty()


@pytest.mark.full
async def test_a_standby_gives_its_pages_to_sessions_that_need_them(tmp_path: Path, model: Path) -> None:
    """Its client names no other one, since there is none, and a loss is computed again."""
    async with swarm_of(tmp_path, model, server={"kv_cache_mib": 1}) as swarm:
        expected = await undisturbed(swarm)
        answering, running, standby = await begin(swarm, 0)
        sessions = standby.engine.sessions
        # They fit only if the standby goes.
        standby.engine.between_iterations(lambda: sessions.make_room(sessions.max_session_tokens))
        await until(lambda: not num_held(standby))
        await swarm.crash(running)
        answer = await answering
        assert (answer.token_ids, answer.usage.recoveries) == (expected, 1)
        await swarm.until_empty()


@pytest.mark.full
async def test_the_next_text_may_begin_on_a_standby(tmp_path: Path, model: Path) -> None:
    """Once the answer has ended, hops and standbys keep its pages under the same names."""
    async with swarm_of(tmp_path, model) as swarm:
        answering, _, _ = await begin(swarm, 0)
        await answering
        await swarm.until_empty()
        pools = [server.engine.sessions.pool for server in swarm.servers]
        assert all(pool.num_cached * pool.page_tokens >= NUM_PROMPT_TOKENS for pool in pools)


PAGE_TOKENS = 32
BEGINNING = random.Random(1).choices(range(4, 256), k=8 * PAGE_TOKENS)
NEXT_TURN = [*BEGINNING, *random.Random(2).choices(range(4, 256), k=40)]
NUM_NEW = 2 * PAGE_TOKENS


def room_next_to(sessions: SessionTable[SessionCache], num_tokens: int) -> int:
    """How many tokens a session may have that leaves room for another one."""
    cache = sessions.new_cache()
    return cache.max_tokens_within(sessions.pool.num_pages - cache.worst_case(num_tokens))


@asynccontextmanager
async def full_holders(
    swarm: Swarm, prompt_speed: float, num_common: int, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[AsyncClient]:
    """Servers that hold the beginning of a text, and have no room for the text. Gives a client of the swarm.

    Args:
        prompt_speed: how many tokens of a prompt a second servers say that a block computes.
        num_common: how many tokens the text has in common with that of the session that takes the room.
    """

    def measure(*block: Any) -> Speed:
        return replace(measure_speed(*block), prefill_tokens_per_second=prompt_speed)

    monkeypatch.setattr(span_loader, "measure_speed", measure)
    async with swarm, swarm.connect() as client:
        await client.generate(BEGINNING, max_tokens=1)
        await swarm.until_empty()
        holders = [each for each in swarm.servers if each.engine.sessions.pool.num_cached]
        for each in holders:
            plant_fault(each.engine.runner, before=lambda rows: time.sleep(0.005))
        # The pages that both texts have in common lead it there, too. It leaves no room for another whole text, but
        # for the first one again, whose room the client service may still take for used.
        other = [*BEGINNING[:num_common], 5]
        num_left = len(BEGINNING) + 1
        num_tokens = min(room_next_to(each.engine.sessions, num_left) for each in holders)
        async with client.stream(other, max_tokens=num_tokens - len(other), ignore_eos=True) as stream:
            await anext(aiter(stream))
            assert all(num_held(each, SessionState.RUNNING) for each in holders)
            yield client


@pytest.mark.parametrize(
    "family, spans, num_common, options",
    [
        ("llama", ["0:5", "0:5"], len(BEGINNING), {}),
        pytest.param("gemma3_text", SPANS, 2 * PAGE_TOKENS, {"is_encrypted": True}, marks=pytest.mark.full),
    ],
    ids=["one hop", "two hops with windows, encrypted"],
)
async def test_a_beginning_comes_from_a_server_that_has_no_room(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    family: str,
    spans: list[str],
    num_common: int,
    options: dict[str, Any],
) -> None:
    model = make_tiny_checkpoint(family, tmp_path / family, config_changes={"max_position_embeddings": 2048})
    server = {"page_tokens": PAGE_TOKENS, "kv_cache_mib": 1}
    swarm = Swarm(tmp_path, model, spans, server=server, client={"standby": "off"}, **options)
    async with full_holders(swarm, 50.0, num_common, monkeypatch) as client:
        answer = await client.generate(NEXT_TURN, max_tokens=NUM_NEW, ignore_eos=True)
        assert answer.usage.cached_tokens == len(BEGINNING)
        assert len(BEGINNING) in [each.engine.sessions.num_standby_tokens for each in swarm.servers]
        again = await client.generate(NEXT_TURN, max_tokens=NUM_NEW, ignore_eos=True)
        assert again.usage.cached_tokens > len(BEGINNING), "the pages have no names there"
    truth = Unsplit(model).generate(NEXT_TURN, NUM_NEW, ignore_eos=True).token_ids
    assert answer.token_ids == again.token_ids == tuple(truth)


@pytest.mark.full
@pytest.mark.parametrize("prompt_speed, num_parts", [(4000.0, 0), (400.0, 1)], ids=["at once", "midway"])
async def test_a_beginning_is_computed_where_its_holder_does_not_answer(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch, prompt_speed: float, num_parts: int
) -> None:
    """What has arrived before it freezes counts."""
    server = {"page_tokens": PAGE_TOKENS, "kv_cache_mib": 1}
    swarm = Swarm(tmp_path, model, ["0:5", "0:5"], server=server, client={"standby": "off"})
    copied, copy = list[tuple[int, int]](), HandoverSender.copy_settled
    async with full_holders(swarm, prompt_speed, len(BEGINNING), monkeypatch) as client:
        holder, hop = sorted(swarm.servers, key=lambda each: -num_held(each, SessionState.RUNNING))
        frozen = [(swarm.wires_of(swarm.clients[0]), holder.address), (swarm.wires_of(holder), hop.address)]

        async def copy_until_it_freezes(sender: HandoverSender, *given: Any) -> tuple[int, int]:
            sender.max_part_bytes = 2 * PAGE_TOKENS * token_bytes(given[0].cache.store, range(5))
            copied.append(await copy(sender, *given))
            freeze()
            return copied[-1]

        def freeze() -> None:
            for wires, address in frozen:
                wires.freeze(address)

        monkeypatch.setattr(HandoverSender, "copy_settled", copy_until_it_freezes)
        # One part is read at a time.
        monkeypatch.setattr("corolla.block_server.handover.sender.MOST_BYTES_AT_ONCE", 1)
        if not num_parts:
            freeze()
        answer = await client.generate(NEXT_TURN, max_tokens=NUM_NEW, ignore_eos=True)
        for wires, address in frozen:
            wires.thaw(address)
        assert len(copied) == num_parts
        assert answer.usage.cached_tokens <= num_parts * 2 * PAGE_TOKENS
    truth = Unsplit(model).generate(NEXT_TURN, NUM_NEW, ignore_eos=True).token_ids
    assert answer.token_ids == tuple(truth)
