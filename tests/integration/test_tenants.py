"""The caller's key identifies the owner of a session, which other tenants do not see."""

import asyncio
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import pytest

from corolla.chassis.channels import open_channel
from corolla.chassis.errors import ScopeDenied, SessionNotFound, SettingsError, Unauthenticated
from corolla.chassis.settings import load
from corolla.client.api.keys import NewKey, Scope
from corolla.client.api.tenants import Tenants
from corolla.client.service import ClientService
from corolla.client.settings import ClientSettings
from corolla.sdk.async_client import AsyncClient
from corolla.v1 import generation_pb2 as pb
from tests.checkpoints import make_tiny_checkpoint
from tests.integration.refusals import is_taken
from tests.integration.swarm import Swarm, tiny_swarm
from tests.integration.waiting import until

pytestmark = pytest.mark.asyncio(loop_scope="module")

ALICE, ALICES_SECOND, BOB = "key-of-alice-0001", "key-of-alice-0002", "key-of-bob-00001"
EVES = "key-of-eve-00001"
LONG = 12_000
HALF_A_KEY = "15-characters.."


swarm = tiny_swarm(
    ["0:2", "2:5"],
    context_length=16384,
    keys=f"# who calls\n\nalice:{ALICE}\nalice :{ALICES_SECOND}\n bob : {BOB} \n  # eve:{EVES}\n\t#eve:{EVES}\n",
    num_clients=2,
    api_key=ALICE,
)


async def test_all_keys_of_a_tenant_reach_its_sessions_through_any_client(swarm: Swarm) -> None:
    async with (
        AsyncClient(swarm.address_of(0), api_key=ALICE) as one,
        AsyncClient(swarm.address_of(1), api_key=ALICES_SECOND) as other,
    ):
        session_id = (await one.create_session()).session_id
        await one.generate("the thin man", session=session_id, max_tokens=4, ignore_eos=True)
        more = await other.generate(" and then", session=session_id, max_tokens=4, ignore_eos=True)
        assert more.usage.cached_tokens > 0
        await other.delete_session(session_id)
    await swarm.until_empty()


async def test_other_tenants_do_not_see_a_session(swarm: Swarm) -> None:
    async with (
        AsyncClient(swarm.address_of(0), api_key=ALICE) as alice,
        AsyncClient(swarm.address_of(1), api_key=BOB) as bob,
    ):
        session_id = (await alice.create_session()).session_id
        await alice.generate("the thin man", session=session_id, max_tokens=4)
        before = await alice.get_session(session_id)
        with pytest.raises(SessionNotFound) as foreign:
            await bob.get_session(session_id)
        with pytest.raises(SessionNotFound) as unknown:
            await bob.get_session("0" * 32)
        assert foreign.value.message == unknown.value.message, "existence is not disclosed"
        for attempt in (
            bob.generate("the thin man", session=session_id, max_tokens=4),
            bob.chat(session=session_id).send("hi"),
            bob.delete_session(session_id),
        ):
            with pytest.raises(SessionNotFound):
                await attempt
        after = await alice.get_session(session_id)
        assert (after.num_tokens, after.num_turns, after.busy) == (before.num_tokens, before.num_turns, False)
        await alice.delete_session(session_id)
    await swarm.until_empty()


@pytest.mark.parametrize(
    "value",
    [
        ALICE, f"Basic {ALICE}", "Bearer", "Bearer key", f"Bearer {ALICE.upper()}", f"Bearer alice:{ALICE}",
        f"Bearer {ALICE} {BOB}", "",
        # These lines are comments, though indented.
        f"Bearer {EVES}",
    ],
)  # fmt: skip
async def test_a_header_that_is_not_a_known_key_is_refused(swarm: Swarm, value: str) -> None:
    async with open_channel(swarm.address) as channel:
        call: Any = channel.unary_unary("/corolla.v1.GenerationService/ListModels")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call(b"", metadata=[("authorization", value)])
        assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
        assert "key-" not in (caught.value.details() or "")


@pytest.mark.parametrize("value", [f"Bearer {BOB}", f"bearer {BOB}", f"BEARER   {BOB}  "])
async def test_the_scheme_of_a_key_is_case_insensitive(swarm: Swarm, value: str) -> None:
    async with open_channel(swarm.address) as channel:
        call: Any = channel.unary_unary("/corolla.v1.GenerationService/ListModels")
        answer = await call(b"", metadata=[("authorization", value)])
        assert pb.ListModelsResponse.FromString(answer).models


async def test_a_service_without_keys_accepts_every_caller(tmp_path: Path) -> None:
    model = make_tiny_checkpoint("llama", tmp_path / "tiny")
    async with Swarm(tmp_path, model, ["0:5"]) as swarm:
        async with AsyncClient(swarm.address, api_key="anything") as one, AsyncClient(swarm.address) as other:
            session_id = (await one.create_session()).session_id
            assert (await other.get_session(session_id)).session_id == session_id
        keys_file = tmp_path / "keys"
        keys_file.write_text(f"alice:{ALICE}\n")
        service = await swarm.add_client(api_keys_file=keys_file)
        async with AsyncClient(f"127.0.0.1:{service.port}") as nobody:
            with pytest.raises(Unauthenticated):
                await nobody.models()


@pytest.mark.parametrize(
    "content, says",
    [
        ("", "holds no keys"),
        ("# nobody\n", "holds no keys"),
        (f"  # alice:{ALICE}\n", "holds no keys"),
        ("alice\n", "line 1 is not of the form"),
        ("alice:\n", "line 1 is not of the form"),
        (f":{ALICE}\n", "line 1 is not of the form"),
        (f" :{ALICE}\n", "line 1 is not of the form"),
        (f"alice:{ALICE}\nbob key\n", "line 2 is not of the form"),
        (f"alice:{ALICE}\nbob:x\n", "line 2: a key has at least 16 characters"),
        (f"alice:{HALF_A_KEY}\n", "line 1: a key has at least 16 characters"),
        ("t" * 257 + f":{ALICE}\n", "line 1: a tenant's name has at most 256 characters"),
        (f"alice:{ALICE}\n\nbob: {ALICE}\n", "line 3: the key of line 1 belongs to another tenant"),
        (b"\xff\xfe", "cannot be read"),
    ],
    ids=repr,
)
async def test_an_invalid_key_file_ends_the_start(tmp_path: Path, content: str | bytes, says: str) -> None:
    keys_file = tmp_path / "keys"
    keys_file.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(SettingsError, match="COROLLA_API_KEYS_FILE") as caught:
        ClientService(load(ClientSettings, port=0, metrics_port=0, api_keys_file=keys_file))
    assert says in caught.value.message
    assert not any(key in caught.value.message for key in (ALICE, HALF_A_KEY)), "keys are secret"


async def test_a_key_may_stand_twice_for_the_same_tenant(tmp_path: Path) -> None:
    keys_file = tmp_path / "keys"
    keys_file.write_text(f"alice:{ALICE}\nbob:{BOB}\nalice:{ALICE}\n")
    Tenants(keys_file)


async def test_changed_keys_count_within_seconds_and_broken_files_change_nothing(swarm: Swarm, tmp_path: Path) -> None:
    keys_file = tmp_path / "keys"
    first, second = NewKey("acme", scopes=[Scope.CHAT]), NewKey("acme")
    keys_file.write_text(f"{first.record.line}\n")
    address = f"127.0.0.1:{(await swarm.add_client(api_keys_file=keys_file)).port}"
    assert await is_taken(address, first.key)
    async with AsyncClient(address, api_key=first.key) as client:
        with pytest.raises(ScopeDenied):
            await client.generate([1, 2, 3], max_tokens=1)
    keys_file.write_text("nonsense")
    await asyncio.sleep(3)
    assert await is_taken(address, first.key)
    keys_file.write_text(f"{second.record.line}\n")
    await until(partial(is_taken, address, second.key), 10)
    assert not await is_taken(address, first.key)


async def test_an_answer_ends_with_the_key_that_it_runs_under(swarm: Swarm, tmp_path: Path) -> None:
    keys_file = tmp_path / "keys"
    revoked, kept = NewKey("acme"), NewKey("acme")
    keys_file.write_text(f"{revoked.record.line}\n{kept.record.line}\n")
    service = await swarm.add_client(api_keys_file=keys_file)
    address = f"127.0.0.1:{service.port}"

    async def is_refused() -> bool:
        return not await is_taken(address, revoked.key)

    async with AsyncClient(address, api_key=revoked.key) as one, AsyncClient(address, api_key=kept.key) as other:
        # No caller takes their tokens meanwhile, so neither comes to its end.
        ending, going = (each.stream([1, 2, 3], max_tokens=LONG, ignore_eos=True) for each in (one, other))
        for stream in (ending, going):
            await anext(stream)
        keys_file.write_text(f"{kept.record.line}\n")
        await until(is_refused, 10)
        with pytest.raises(Unauthenticated):
            async for _ in ending:
                pass
        for _ in range(50):
            await anext(going)
        going.close()
