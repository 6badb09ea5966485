"""Servers that leave while answers run hand their sessions to a peer, and no answer changes."""

import asyncio
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList

from corolla.block_server.registration import Registration
from corolla.block_server.service import BlockServer
from corolla.hf import AutoDistributedModelForCausalLM
from corolla.sdk.async_client import AsyncClient
from corolla.sdk.results import Generation
from tests.checkpoints import HIDDEN_SIZE, make_tiny_checkpoint
from tests.integration.gates import hand_over, held_up, until_held
from tests.integration.hf.models import draw_prompts
from tests.integration.metrics import sample
from tests.integration.swarm import Swarm
from tests.tiers import quick

PROMPTS = tuple(f"{words} in the inner tent " * repeats for words, repeats in (("the thin man", 1), ("anthem", 9)))
OPTIONS: dict[str, Any] = {"max_tokens": 400, "ignore_eos": True}
RECOMPUTED = "corolla_recomputed_tokens_total"


def num_sessions(server: BlockServer) -> int:
    return len(server.sessions)


async def metric(server: BlockServer, name: str, **labels: str) -> float:
    return await sample(server.metrics_port, name, **labels)


async def test_every_server_leaves_in_turn_and_nothing_is_computed_twice(tmp_path: Path) -> None:
    model = make_tiny_checkpoint("llama", tmp_path / "llama", config_changes={"max_position_embeddings": 8192})
    grace = {"grace_s": 120.0}
    async with (
        Swarm(tmp_path, model, ["0:2", "2:5"], server=grace, client={"prefill_chunk_tokens": 16}) as swarm,
        swarm.connect() as client,
    ):
        undisturbed = [await client.generate(text, **OPTIONS) for text in PROMPTS]
        answers = [asyncio.create_task(client.generate(text, **OPTIONS)) for text in PROMPTS for _ in "abc"]
        for _ in range(2):
            await hand_over(swarm, 0, undisturbed[1].usage.prompt_tokens, num_sessions=len(answers))
        given = await asyncio.gather(*answers)
        assert [each.token_ids for each in given] == [each.token_ids for each in undisturbed for _ in "abc"]
        assert all(each.usage.recoveries == 2 for each in given)
        port = swarm.clients[0].metrics_port
        assert await sample(port, RECOMPUTED) == 0
        assert await sample(port, "corolla_session_recoveries_total", cause="hop_leaving", method="reopen") == 12
        for server in swarm.servers:
            assert await metric(server, "corolla_handover_bytes_total", direction="in") > 0
        await swarm.until_empty()


async def test_idle_conversations_are_found_where_they_were_handed_to(tmp_path: Path, model: Path) -> None:
    async with (
        Swarm(tmp_path, model, ["0:2", "2:5", "2:5"], num_clients=2, server={"grace_s": 120.0}) as swarm,
        swarm.connect() as client,
        swarm.connect(1) as other,
    ):
        sessions = [(await client.create_session()).session_id for _ in range(2)]
        for session_id in sessions:
            await client.generate(PROMPTS[0], max_tokens=40, ignore_eos=True, session=session_id)
        expected = await client.generate(PROMPTS[1], max_tokens=40, ignore_eos=True, session=sessions[0])
        assert expected.usage.cached_tokens > 0
        for span in ("0:2", "2:5"):
            await swarm.add_server(span)
        for leaving in [swarm.servers.pop(0) for _ in range(3)]:
            await asyncio.wait_for(leaving.stop(), 60)
        # Also one that never heard of the session before goes on where it was.
        answer = await other.generate(PROMPTS[1], max_tokens=40, ignore_eos=True, session=sessions[1])
        assert answer.token_ids == expected.token_ids
        assert answer.usage.cached_tokens == expected.usage.cached_tokens
        for port in (each.metrics_port for each in swarm.clients):
            assert await sample(port, RECOMPUTED) == 0
        transcript = await other.get_session(sessions[1])
        assert transcript.num_turns == 2
        for session_id in sessions:
            await client.delete_session(session_id)
        await swarm.until_empty()


@pytest.mark.kind
async def test_who_takes_a_session_over_verifies_who_opened_it_and_may_hand_it_on(tmp_path: Path, model: Path) -> None:
    grace = {"grace_s": 120.0}
    async with (
        Swarm(tmp_path, model, ["0:2", "2:5"], server=grace, is_encrypted=True) as swarm,
        swarm.connect() as client,
    ):
        session = (await client.create_session()).session_id
        undisturbed = await client.generate(PROMPTS[1], **OPTIONS)
        await client.generate(PROMPTS[0], max_tokens=40, ignore_eos=True, session=session)
        answer = asyncio.create_task(client.generate(PROMPTS[1], **OPTIONS))
        for _ in range(2):
            leaving, _ = await hand_over(swarm, 1, undisturbed.usage.prompt_tokens, num_sessions=2)
            # What it counted can be read also when it has stopped.
            moved = leaving.registry.get_sample_value("corolla_sessions_handed_over_total", {"outcome": "moved"})
            assert moved == 2
        assert (await answer).token_ids == undisturbed.token_ids
        again = await client.generate(PROMPTS[1], max_tokens=8, session=session)
        assert again.usage.cached_tokens > 0
        assert await sample(swarm.clients[0].metrics_port, RECOMPUTED) == 0
        await client.delete_session(session)
        await swarm.until_empty()


async def test_a_conversation_deleted_during_its_handover_is_freed_on_both_servers(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A deletion frees the session on the server that its record names."""
    move = Registration.move_session
    async with Swarm(tmp_path, model, ["0:2", "2:5"]) as swarm, swarm.connect() as client:
        session_id = (await client.create_session()).session_id
        await client.generate(PROMPTS[0], max_tokens=8, session=session_id)
        await swarm.add_server("2:5")

        async def delete_and_move(*args: Any) -> None:
            if num_sessions(swarm.servers[0]):
                await client.delete_session(session_id)
            await move(*args)

        monkeypatch.setattr(Registration, "move_session", delete_and_move)
        await asyncio.wait_for(swarm.servers.pop(1).stop(), 60)
        await swarm.until_empty()


@pytest.mark.full
async def test_an_answer_whose_server_finds_no_peer_in_time_is_replayed(tmp_path: Path, model: Path) -> None:
    options: dict[str, Any] = {"max_tokens": 1500, "ignore_eos": True}
    async with Swarm(tmp_path, model, ["0:2", "2:5"], server={"grace_s": 1.0}) as swarm, swarm.connect() as client:
        answer, undisturbed = await begin(swarm, client, PROMPTS[0], options)
        leaving = swarm.servers.pop()
        with held_up(leaving):
            # Each holds a part of the span only.
            await swarm.add_server("2:3")
            await swarm.add_server("3:5")
        await leaving.stop()
        given = await answer
        assert given.token_ids == undisturbed
        assert given.usage.recoveries >= 1
        await swarm.until_empty()


@pytest.mark.full
async def test_an_answer_is_replayed_on_a_server_with_room_if_the_peer_has_none(tmp_path: Path, model: Path) -> None:
    options: dict[str, Any] = {"max_tokens": 1500, "ignore_eos": True}
    settings: dict[str, Any] = {"server": {"grace_s": 1.0}, "client": {"recovery_patience_s": 60.0}}
    async with Swarm(tmp_path, model, ["0:2", "2:5"], **settings) as swarm, swarm.connect() as client:
        answer, undisturbed = await begin(swarm, client, PROMPTS[0], options)
        leaving = swarm.servers.pop()
        with held_up(leaving):
            small = await swarm.add_server("2:5", kv_cache_mib=1)
        await leaving.stop()
        assert leaving.registry.get_sample_value("corolla_sessions_handed_over_total", {"outcome": "moved"}) == 0
        assert num_sessions(small) == 0
        await swarm.add_server("2:5")
        given = await answer
        assert given.token_ids == undisturbed
        assert given.usage.recoveries >= 1
        assert await sample(swarm.clients[0].metrics_port, RECOMPUTED) > 0
        await swarm.until_empty()


@pytest.mark.full
async def test_sessions_whose_pages_cannot_be_read_are_replayed_and_the_server_leaves(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options: dict[str, Any] = {"max_tokens": 1500, "ignore_eos": True}
    async with Swarm(tmp_path, model, ["0:2", "2:5"], server={"grace_s": 1.0}) as swarm, swarm.connect() as client:
        answer, undisturbed = await begin(swarm, client, PROMPTS[0], options)
        leaving = swarm.servers.pop()
        with held_up(leaving):
            await swarm.add_server("2:5")

        def fail(*_: object) -> None:
            raise RuntimeError("the device failed")

        monkeypatch.setattr("corolla.block_server.handover.sender.read_tokens", fail)
        await asyncio.wait_for(leaving.stop(), 60)
        placed = (await swarm.placement()).servers
        assert leaving.server_id not in {each.server.server_id for each in placed}
        given = await answer
        assert given.token_ids == undisturbed
        assert given.usage.recoveries == 1
        assert leaving.registry.get_sample_value("corolla_sessions_handed_over_total", {"outcome": "failed"})
        await swarm.until_empty()


@pytest.mark.full
async def test_a_later_hop_of_the_same_chain_is_no_peer_and_keeps_its_own_blocks(tmp_path: Path, model: Path) -> None:
    """A server has one run of blocks of a session."""
    options: dict[str, Any] = {"max_tokens": 1500, "ignore_eos": True}
    async with Swarm(tmp_path, model, ["0:2", "2:5"], server={"grace_s": 120.0}) as swarm, swarm.connect() as client:
        answer, undisturbed = await begin(swarm, client, PROMPTS[0], options)
        leaving, victim = swarm.servers
        with held_up(leaving):
            whole = await swarm.add_server("0:5")
        swarm.servers.remove(victim)
        await swarm.die(victim)
        await until_held(whole, 1)
        swarm.servers.remove(leaving)
        # No other server could take it: this one serves it to its end.
        await asyncio.wait_for(leaving.stop(), 60)
        given = await answer
        assert given.token_ids == undisturbed
        assert given.usage.recoveries == 1
        refused = {"outcome": "refused"}
        assert leaving.registry.get_sample_value("corolla_sessions_handed_over_total", refused)
        await swarm.until_empty()
        await victim.stop()


async def test_draining_all_hops_of_a_conversation_does_not_end_on_one_server(tmp_path: Path, model: Path) -> None:
    options: dict[str, Any] = {"max_tokens": 40, "ignore_eos": True}
    async with Swarm(tmp_path, model, ["0:2", "2:5"], server={"grace_s": 120.0}) as swarm, swarm.connect() as client:
        sessions = [(await client.create_session()).session_id for _ in range(2)]
        for session_id in sessions:
            await client.generate(PROMPTS[0], session=session_id, **options)
        expected = await client.generate(PROMPTS[1], session=sessions[0], **options)
        await swarm.add_server("0:5")
        for leaving in [swarm.servers.pop(1), swarm.servers.pop(0)]:
            await asyncio.wait_for(leaving.stop(), 60)
        answer = await client.generate(PROMPTS[1], session=sessions[1], **options)
        assert answer.token_ids == expected.token_ids
        for session_id in sessions:
            await client.delete_session(session_id)
        await swarm.until_empty()


@pytest.mark.full
async def test_a_hop_that_leaves_helps_to_replace_another_one(tmp_path: Path, model: Path) -> None:
    """It opens no scratch sessions any more, so it computes its own sessions' tokens again."""
    options: dict[str, Any] = {"max_tokens": 1500, "ignore_eos": True}
    server = {"grace_s": 120.0, "boundary_activations_mib": 0}
    async with Swarm(tmp_path, model, ["0:2", "2:5"], server=server) as swarm, swarm.connect() as client:
        answer, undisturbed = await begin(swarm, client, PROMPTS[0], options)
        leaving, victim = swarm.servers
        with held_up(leaving):
            await swarm.add_server("2:5")
        swarm.servers[:2] = []
        ending = asyncio.create_task(leaving.stop())
        await asyncio.sleep(0.2)
        await swarm.die(victim)
        given = await asyncio.wait_for(answer, 60)
        assert given.token_ids == undisturbed
        assert given.usage.recoveries == 1
        await ending
        await swarm.until_empty()
        await victim.stop()


@pytest.mark.parametrize("dies_next", ["0:2", "2:5"])
@pytest.mark.full
async def test_a_server_that_took_sessions_over_can_die(tmp_path: Path, model: Path, dies_next: str) -> None:
    """Either its own span is rebuilt, or the next one, whose input it kept only where it computed that itself."""
    options: dict[str, Any] = {"max_tokens": 600, "ignore_eos": True}
    async with Swarm(tmp_path, model, ["0:2", "2:5"], server={"grace_s": 120.0}) as swarm, swarm.connect() as client:
        answer, undisturbed = await begin(swarm, client, PROMPTS[1], options)
        leaving = swarm.servers[0]
        with held_up(leaving):
            taker = await swarm.add_server("0:2")
            # The one with most free pages is asked first: a spare one of the same span does not take it over.
            await swarm.add_server(dies_next, kv_cache_mib=8)
        swarm.servers.remove(leaving)
        await leaving.stop()
        assert num_sessions(taker) == 1
        victim = taker if dies_next == "0:2" else swarm.servers[0]
        swarm.servers.remove(victim)
        await swarm.die(victim)
        given = await answer
        assert given.token_ids == undisturbed
        assert given.usage.recoveries >= 2
        assert await sample(swarm.clients[0].metrics_port, RECOMPUTED) > 0
        await swarm.until_empty()
        await victim.stop()


@pytest.mark.parametrize("family", quick(["mistral", "mimo_v2_flash"], "mistral"))
async def test_a_handover_sends_only_the_tokens_that_a_sliding_window_still_sees(tmp_path: Path, family: str) -> None:
    folder = make_tiny_checkpoint(family, tmp_path / family, config_changes={"max_position_embeddings": 4096})
    options: dict[str, Any] = {**OPTIONS, "temperature": 1.0, "seed": 5}
    server = {"grace_s": 120.0, "page_tokens": 4}
    async with Swarm(tmp_path, folder, ["0:2", "2:5"], server=server) as swarm, swarm.connect() as client:
        answer, undisturbed = await begin(swarm, client, PROMPTS[1], options)
        for _ in range(2):
            await hand_over(swarm, 0)
        assert (await answer).token_ids == undisturbed
        assert (await answer).usage.recoveries == 2
        assert await sample(swarm.clients[0].metrics_port, RECOMPUTED) == 0
        await swarm.until_empty()


@pytest.mark.parametrize(
    "num_rows, options",
    [
        pytest.param(3, {"do_sample": True}, marks=pytest.mark.full, id="batch"),
        pytest.param(2, {"num_beams": 3}, id="beams"),
        pytest.param(1, {"prompt_lookup_num_tokens": 4}, marks=pytest.mark.full, id="draft tokens"),
    ],
)
@pytest.mark.parametrize("waits", quick([True, False], True), ids=["between steps", "under way"])
async def test_batches_and_beams_of_the_library_move(
    tmp_path: Path, model: Path, num_rows: int, options: dict[str, Any], waits: bool
) -> None:
    prompt = draw_prompts(num_rows, 12)
    loop = asyncio.get_running_loop()

    def generate(remote: Any, *processors: LogitsProcessor) -> list[list[int]]:
        torch.manual_seed(0)
        tokens: list[list[int]] = remote.generate(
            prompt, max_new_tokens=40, min_new_tokens=40, logits_processor=LogitsProcessorList(processors), **options
        ).tolist()
        return tokens

    async with Swarm(tmp_path, model, ["0:2", "2:5"], server={"grace_s": 120.0}) as swarm:
        remote = await asyncio.to_thread(load_remote, model, swarm)
        undisturbed = await asyncio.to_thread(generate, remote)
        takers: list[BlockServer] = []
        changes: list[Future[None]] = []

        async def change() -> None:
            leaving = swarm.servers.pop(0)
            takers.append(await swarm.add_server(leaving.settings.blocks))
            await leaving.stop()

        def begin() -> None:
            changes.append(asyncio.run_coroutine_threadsafe(change(), loop))
            if waits:
                changes[-1].result()

        given = await asyncio.to_thread(generate, remote, At({4, 9}, begin))
        for each in changes:
            await asyncio.wrap_future(each)
        assert given == undisturbed
        for taker in takers:
            assert not waits or await metric(taker, "corolla_handover_bytes_total", direction="in") > 0
        await swarm.until_empty()


@pytest.mark.full
async def test_trained_prompts_travel_with_their_session(tmp_path: Path, model: Path) -> None:
    generator = torch.Generator().manual_seed(3)
    block_prompts = torch.randn(5, 40, HIDDEN_SIZE, generator=generator)
    prompt = draw_prompts(1, 12)

    def first(remote: Any, session: Any) -> list[list[int]]:
        tokens: list[list[int]] = remote.generate(prompt, max_new_tokens=8, session=session).tolist()
        return tokens

    def further(remote: Any, session: Any) -> list[list[int]]:
        # Most of the prompts belong to positions that come only now.
        tokens: list[list[int]] = remote.generate(max_new_tokens=24, session=session).tolist()
        return tokens

    async with Swarm(tmp_path, model, ["0:2", "2:5"], server={"grace_s": 120.0}) as swarm:
        remote = await asyncio.to_thread(load_remote, model, swarm)
        answers = []
        for moves in (False, True):
            session = remote.inference_session(block_prompts=block_prompts)
            parts = [await asyncio.to_thread(first, remote, session)]
            if moves:
                for _ in range(2):
                    leaving = swarm.servers.pop(0)
                    taker = await swarm.add_server(leaving.settings.blocks)
                    await leaving.stop()
                    assert await metric(taker, "corolla_handover_bytes_total", direction="in") > 0
            parts.append(await asyncio.to_thread(further, remote, session))
            answers.append(parts)
            await asyncio.to_thread(session.close)
        assert answers[0] == answers[1]
        await swarm.until_empty()


class At(LogitsProcessor):
    """Does something at some steps of `generate`, and changes nothing."""

    def __init__(self, steps: set[int], act: Callable[[], None]) -> None:
        self._steps = steps
        self._act = act
        self._step = 0

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        if self._step in self._steps:
            self._act()
        self._step += 1
        return scores


def load_remote(model: Path, swarm: Swarm) -> Any:
    return AutoDistributedModelForCausalLM.from_pretrained(str(model), router=swarm.router_address)


async def begin(
    swarm: Swarm, client: AsyncClient, prompt: str, options: dict[str, Any]
) -> tuple[asyncio.Task[Generation], tuple[int, ...]]:
    """An answer of which every server of the swarm has computed some tokens, and those that it has undisturbed."""
    undisturbed = await client.generate(prompt, **options)
    await swarm.until_empty()
    answer = asyncio.create_task(client.generate(prompt, **options))
    for server in swarm.servers:
        await until_held(server, 1, undisturbed.usage.prompt_tokens)
    return answer, undisturbed.token_ids
