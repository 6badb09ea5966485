"""Whose a session is: known by the caller's key, and hidden from everybody else."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
import pytest_asyncio

from corolla.chassis.channels import open_channel
from corolla.chassis.errors import SessionNotFound, SettingsError, Unauthenticated
from corolla.chassis.settings import load
from corolla.client.service import ClientService
from corolla.client.settings import ClientSettings
from corolla.sdk.async_client import AsyncClient
from corolla.v1 import generation_pb2 as pb
from tests.checkpoints import make_tiny_checkpoint
from tests.integration.refusals import refusal
from tests.integration.swarm import Swarm

pytestmark = pytest.mark.asyncio(loop_scope="module")

ALICE, ALICES_SECOND, BOB = "key-a", "key-a2", "key-b"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def swarm(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Swarm]:
    folder = tmp_path_factory.mktemp("tenants")
    keys_file = folder / "keys"
    keys_file.write_text(f"# who calls\n\nalice:{ALICE}\nalice:{ALICES_SECOND}\n bob : {BOB} \n")
    model = make_tiny_checkpoint("llama", folder / "tiny")
    async with Swarm(
        folder, model, ["0:2", "2:5"], num_clients=2, client={"api_keys_file": keys_file}, api_key=ALICE
    ) as swarm:
        yield swarm


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


async def test_to_others_a_session_does_not_exist(swarm: Swarm) -> None:
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
    ["key-a", "Basic key-a", "Bearer", "Bearer key", "Bearer KEY-A", "Bearer alice:key-a", "Bearer key-a key-b", ""],
)
async def test_a_header_that_is_not_a_known_key_is_refused(swarm: Swarm, value: str) -> None:
    async with open_channel(swarm.address) as channel:
        call: Any = channel.unary_unary("/corolla.v1.GenerationService/ListModels")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call(b"", metadata=[("authorization", value)])
        assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
        assert "key-" not in (caught.value.details() or "")


@pytest.mark.parametrize("value", ["Bearer key-b", "bearer key-b", "BEARER   key-b  "])
async def test_the_scheme_is_written_as_one_likes(swarm: Swarm, value: str) -> None:
    async with open_channel(swarm.address) as channel:
        call: Any = channel.unary_unary("/corolla.v1.GenerationService/ListModels")
        answer = await call(b"", metadata=[("authorization", value)])
        assert pb.ListModelsResponse.FromString(answer).models


async def test_a_service_without_keys_takes_everybody(tmp_path: Path) -> None:
    model = make_tiny_checkpoint("llama", tmp_path / "tiny")
    async with Swarm(tmp_path, model, ["0:5"]) as swarm:
        async with AsyncClient(swarm.address, api_key="anything") as one, AsyncClient(swarm.address) as other:
            session_id = (await one.create_session()).session_id
            assert (await other.get_session(session_id)).session_id == session_id
        keys_file = tmp_path / "keys"
        keys_file.write_text("alice:key-a\n")
        service = await swarm.add_client(api_keys_file=keys_file)
        async with AsyncClient(f"127.0.0.1:{service.port}") as nobody:
            with pytest.raises(Unauthenticated):
                await nobody.models()


@pytest.mark.parametrize(
    "content", ["", "# nobody\n", "alice\n", "alice:\n", ":key\n", "alice:key\nbob key\n", b"\xff\xfe"], ids=repr
)
async def test_a_file_of_keys_that_is_none_ends_the_start(tmp_path: Path, content: str | bytes) -> None:
    keys_file = tmp_path / "keys"
    keys_file.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(SettingsError, match="COROLLA_API_KEYS_FILE") as caught:
        ClientService(load(ClientSettings, port=0, metrics_port=0, api_keys_file=keys_file))
    assert "key\n" not in caught.value.message


async def test_a_missing_file_of_keys_ends_the_start(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="cannot be read"):
        ClientService(load(ClientSettings, port=0, metrics_port=0, api_keys_file=tmp_path / "none"))


async def test_refusals_of_keys_say_how_and_no_more(swarm: Swarm) -> None:
    async with open_channel(swarm.address) as channel:
        refused = await refusal(channel, "ListModels", b"", api_key="key-of-nobody")
        assert (refused.reason, refused.domain) == ("UNAUTHENTICATED", "corolla.dev")
        assert "key-of-nobody" not in f"{refused.message}{refused.details}"
