"""Requests with adapters: a chain equals PEFT on the unsplit model, and no request gets another one's answer."""

import asyncio
import re
import shlex
import shutil
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from corolla.block_server.service import BlockServer
from corolla.chassis import errors
from corolla.cli.app import main
from corolla.client.api.keys import NewKey
from corolla.models.adapters.file import digest_of
from corolla.sdk.async_client import AsyncClient
from corolla.v1 import common_pb2, router_pb2, router_pb2_grpc
from corolla.wire.network import Network
from tests.adapters import make_adapter, unsplit_with
from tests.architecture.sources import ROOT
from tests.checkpoints import make_tiny_checkpoint
from tests.examples import addressed
from tests.faulty_runner import plant_fault
from tests.integration.gates import held_up
from tests.integration.swarm import Swarm
from tests.integration.waiting import until
from tests.reference import Sampling, Unsplit
from tests.tiers import quick

SPANS = ["0:2", "2:5"]
NAMES = ("one", "two", "three")
PROMPT = list(range(20, 60))
NUM_TOKENS = 24
SAMPLINGS: list[Sampling] = [{}, {"temperature": 0.9, "top_k": 20, "seed": 7}]


class Harness:
    """A checkpoint, its adapters, and the unsplit model with each of them."""

    def __init__(self, family: str, folder: Path) -> None:
        self.checkpoint = make_tiny_checkpoint(family, folder / "tiny")
        self.folders = {
            name: make_adapter(self.checkpoint, folder / name, seed=seed, r=2 + seed) for seed, name in enumerate(NAMES)
        }
        self._unsplit: dict[str, Unsplit] = {}

    def expected(self, name: str, sampling: Sampling | None = None, prompt: list[int] = PROMPT) -> list[int]:
        """What the unsplit model answers with an adapter; the empty name: without one."""
        if name not in self._unsplit:
            self._unsplit[name] = unsplit_with(self.checkpoint, self.folders.get(name))
        return self._unsplit[name].generate(prompt, NUM_TOKENS, sampling, ignore_eos=True).token_ids


async def register(swarm: Swarm, name: str, folder: Path, *tenants: str, digest: str = "") -> None:
    version = common_pb2.AdapterVersion(name=name, digest=digest or digest_of(folder))
    adapter = router_pb2.RegisteredAdapter(version=version, source=str(folder), tenants=tenants)
    async with Network.from_folder(None).open_channel(swarm.router_address) as channel:
        stub = router_pb2_grpc.RouterServiceStub(channel)
        await stub.AddAdapter(router_pb2.AddAdapterRequest(model="tiny", adapter=adapter))


async def remove(swarm: Swarm, name: str) -> None:
    async with Network.from_folder(None).open_channel(swarm.router_address) as channel:
        stub = router_pb2_grpc.RouterServiceStub(channel)
        await stub.RemoveAdapter(router_pb2.RemoveAdapterRequest(model="tiny", name=name))


async def answer(
    client: AsyncClient, name: str, sampling: Sampling | None = None, prompt: list[int] = PROMPT
) -> list[int]:
    generation = await client.generate(prompt, adapter=name, max_tokens=NUM_TOKENS, ignore_eos=True, **(sampling or {}))
    return list(generation.token_ids)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Harness:
    return Harness("llama", tmp_path_factory.mktemp("llama"))


@pytest_asyncio.fixture
async def swarm(llama: Harness, tmp_path: Path) -> AsyncIterator[Swarm]:
    async with Swarm(tmp_path, llama.checkpoint, SPANS) as swarm:
        for name, folder in llama.folders.items():
            await register(swarm, name, folder)
        yield swarm


@pytest.mark.parametrize("family", quick(["llama", "qwen3", "gemma3_text"], "llama"))
async def test_chains_with_adapters_equal_peft_alone_and_together(family: str, tmp_path: Path) -> None:
    harness = Harness(family, tmp_path)
    names = ("", *NAMES)
    expected = {(name, index): harness.expected(name, each) for name in names for index, each in enumerate(SAMPLINGS)}
    assert len({tuple(each) for each in expected.values()}) == len(expected)
    async with Swarm(tmp_path, harness.checkpoint, SPANS) as swarm, swarm.connect() as client:
        for name, folder in harness.folders.items():
            await register(swarm, name, folder)
        alone = {(name, i): await answer(client, name, each) for name in names for i, each in enumerate(SAMPLINGS)}
        assert alone == expected
        keys = [*expected] * 3
        together = await asyncio.gather(*(answer(client, name, SAMPLINGS[index]) for name, index in keys))
        assert together == [expected[key] for key in keys]
        await swarm.until_empty()


async def test_a_cached_beginning_serves_no_other_adapter(swarm: Swarm, llama: Harness) -> None:
    prompt = list(range(20, 120))
    async with swarm.connect() as client:
        for name in ("", "one", "two", "", "one", "two"):
            assert await answer(client, name, prompt=prompt) == llama.expected(name, prompt=prompt)
        again = await client.generate(prompt, adapter="one", max_tokens=2)
        assert again.usage.cached_tokens >= 64
        other = await client.generate(prompt, adapter="three", max_tokens=2)
        assert other.usage.cached_tokens == 0


async def test_models_are_listed_and_named_with_their_adapters(swarm: Swarm, llama: Harness) -> None:
    async with swarm.connect() as client:

        async def are_listed() -> bool:
            listed = [each.name for each in await client.models()]
            return listed == ["tiny", "tiny:one", "tiny:three", "tiny:two"]

        # The client service learns of an adapter with the next placement.
        await until(are_listed)
        assert (await client.model("tiny:two")).adapter == "two"
        generation = await client.generate(PROMPT, model="tiny:two", max_tokens=NUM_TOKENS, ignore_eos=True)
        assert list(generation.token_ids) == llama.expected("two")
        assert generation.model == "tiny:two"


async def test_what_cannot_be_used_is_refused(swarm: Swarm, llama: Harness) -> None:
    await register(swarm, "secret", llama.folders["one"], "acme")
    async with swarm.connect() as client:
        with pytest.raises(errors.AdapterNotFound):
            await answer(client, "four")
        with pytest.raises(errors.AdapterDenied):
            await answer(client, "secret")
        with pytest.raises(errors.AdapterDenied):
            await client.create_session(adapter="secret")
        with pytest.raises(errors.ModelNotFound):
            await client.generate(PROMPT, model="tiny:", max_tokens=2)
        with pytest.raises(errors.InvalidRequest, match="contradicts the adapter"):
            await client.generate(PROMPT, model="tiny:one", adapter="two", max_tokens=2)
        assert "tiny:secret" not in [each.name for each in await client.models()]
        assert await answer(client, "one") == llama.expected("one")


async def test_a_session_keeps_its_adapter(swarm: Swarm, llama: Harness) -> None:
    async with swarm.connect() as client, client.session(adapter="two") as session:
        first = await session.generate(PROMPT, max_tokens=NUM_TOKENS, ignore_eos=True)
        assert list(first.token_ids) == llama.expected("two")
        assert (await client.get_session(await session.open())).adapter == "two"
        more = [30, 31, 32]
        second = await session.generate(more, max_tokens=NUM_TOKENS, ignore_eos=True)
        assert list(second.token_ids) == llama.expected("two", prompt=[*PROMPT, *first.token_ids, *more])
        assert second.usage.cached_tokens > 0
        with pytest.raises(errors.InvalidRequest, match="must be the adapter"):
            await session.generate(more, adapter="one", max_tokens=2)
        await register(swarm, "two", llama.folders["three"])
        with pytest.raises(errors.AdapterNotFound, match="anew"):
            await session.generate(more, max_tokens=2)
    async with swarm.connect() as client, client.session() as session:
        with pytest.raises(errors.InvalidRequest, match="without an adapter"):
            await session.generate(PROMPT, adapter="one", max_tokens=2)


async def test_a_key_for_a_model_with_one_adapter_uses_its_sessions(swarm: Swarm, tmp_path: Path) -> None:
    keys_file = tmp_path / "keys"
    one, two = NewKey("acme", models=["tiny:one"]), NewKey("acme", models=["tiny:two"])
    keys_file.write_text(f"{one.record.line}\n{two.record.line}\n")
    address = f"127.0.0.1:{(await swarm.add_client(api_keys_file=keys_file)).port}"
    async with AsyncClient(address, api_key=one.key) as client, AsyncClient(address, api_key=two.key) as other:
        session = client.session(adapter="one")
        await session.generate(PROMPT, max_tokens=2)
        assert (await session.info()).adapter == "one"
        for refused in (other.get_session, other.delete_session):
            with pytest.raises(errors.ScopeDenied):
                await refused(await session.open())
        assert (await client.tokenize("the thin man", model="tiny:one")).token_ids
        with pytest.raises(errors.ScopeDenied):
            await client.tokenize("the thin man")
        await session.delete()
        with pytest.raises(errors.ScopeDenied):
            await client.get_session("0" * 32)
    await swarm.until_empty()


def slow(server: BlockServer) -> None:
    """Each of its steps takes a while."""
    plant_fault(server.engine.runner, before=lambda _rows: time.sleep(0.02))


async def until_begun(server: BlockServer, num_answers: int) -> None:
    await until(lambda: len(server.sessions) == num_answers and all(each.cache.num_tokens for each in server.sessions))


async def test_a_removed_adapter_ends_answers_with_a_clear_status(swarm: Swarm, llama: Harness) -> None:
    slow(swarm.servers[0])
    async with swarm.connect() as client:
        ending = asyncio.ensure_future(client.generate(PROMPT, adapter="one", max_tokens=400, ignore_eos=True))
        await until_begun(swarm.servers[1], 1)
        base = asyncio.ensure_future(client.generate(PROMPT, max_tokens=NUM_TOKENS, ignore_eos=True))
        await until_begun(swarm.servers[1], 2)
        await remove(swarm, "one")
        with pytest.raises(errors.AdapterNotFound, match="was removed"):
            await ending
        assert list((await base).token_ids) == llama.expected("")
        with pytest.raises(errors.AdapterNotFound):
            await answer(client, "one")
        await register(swarm, "one", llama.folders["one"])
        assert await answer(client, "one") == llama.expected("one")
        await swarm.until_empty()


async def test_files_that_are_not_those_registered_are_not_used(swarm: Swarm, llama: Harness) -> None:
    await register(swarm, "one", llama.folders["two"], digest=digest_of(llama.folders["one"]))
    async with swarm.connect() as client:
        with pytest.raises(errors.AdapterNotLoaded, match="registered"):
            await answer(client, "one")
        await register(swarm, "gone", llama.checkpoint.parent / "gone", digest="0" * 64)
        with pytest.raises(errors.AdapterNotLoaded, match="not there"):
            await answer(client, "gone")
        assert await answer(client, "two") == llama.expected("two")


@pytest.mark.kind
async def test_adapters_give_way_to_others_within_the_budget(llama: Harness, tmp_path: Path) -> None:
    """One at a time fits."""
    async with Swarm(tmp_path, llama.checkpoint, SPANS, server={"adapters_mib": 1}) as swarm, swarm.connect() as client:
        folders: dict[str, Path] = {}
        for seed in range(3):
            name = f"large{seed}"
            folders[name] = make_adapter(llama.checkpoint, tmp_path / name, seed=seed, r=64)
        for name, folder in folders.items():
            await register(swarm, name, folder)
            llama.folders[name] = folder
        for name in (*folders, *folders):
            assert await answer(client, name) == llama.expected(name)
        for status in await swarm.statuses():
            assert 0 < status.adapter_bytes <= 1 << 20
            assert len(status.adapters) < len(folders)


async def test_answers_survive_the_death_of_a_server(swarm: Swarm, llama: Harness) -> None:
    await swarm.add_server(SPANS[1])
    expected = [llama.expected(name) for name in ("", *NAMES)]
    async with swarm.connect() as client:
        slow(swarm.servers[0])
        answers = [asyncio.ensure_future(answer(client, name)) for name in ("", *NAMES)]
        await asyncio.sleep(0.3)
        await swarm.die(max(swarm.servers[1:], key=lambda server: len(server.sessions)))
        assert await asyncio.gather(*answers) == expected
        await swarm.until_empty()


async def test_a_server_that_leaves_hands_sessions_over_to_one_that_loads_their_adapters(
    swarm: Swarm, llama: Harness
) -> None:
    expected = [llama.expected(name) for name in ("", *NAMES)]
    async with swarm.connect() as client:
        first, leaving = swarm.servers
        slow(first)
        answers = [asyncio.ensure_future(answer(client, name)) for name in ("", *NAMES)]
        await until_begun(leaving, len(expected))
        with held_up(first):
            await swarm.add_server(SPANS[1])
            assert not (await swarm.statuses())[-1].adapters
        swarm.servers.remove(leaving)
        await leaving.stop()
        assert await asyncio.gather(*answers) == expected
        moved = leaving.registry.get_sample_value("corolla_sessions_handed_over_total", {"outcome": "moved"})
        assert moved == len(expected)
        assert len((await swarm.statuses())[-1].adapters) == len(NAMES)


@pytest.mark.full
async def test_the_examples_of_the_page_run(llama: Harness, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The examples of docs/models.md run as they stand there, with a tiny model."""
    section = (ROOT / "docs" / "models.md").read_text("utf-8").partition("\n## Adapters\n")[2].partition("\n## ")[0]
    commands, program = re.findall(r"^```\w+\n(.*?)^```", section, re.DOTALL | re.M)
    adds, removal = commands.rstrip().rsplit("\n", 1)
    for name in ("legal", "tone"):
        shutil.copytree(llama.folders["one"], tmp_path / name)
    monkeypatch.chdir(tmp_path)
    async with Swarm(tmp_path, llama.checkpoint, SPANS) as swarm:
        monkeypatch.setenv("COROLLA_ROUTER", swarm.router_address)

        def run() -> dict[str, Any]:
            names: dict[str, Any] = {}
            assert [main(shlex.split(line, comments=True)[1:]) for line in adds.splitlines()] == [0, 0, 0]
            exec(compile(addressed(program, {"client": swarm.address}), "docs/models.md", "exec"), names)  # noqa: S102
            assert main(shlex.split(removal)[1:]) == 0
            return names

        names = await asyncio.to_thread(run)
        assert names["ruling"].model == "tiny:legal"
        assert names["ruling"].token_ids == names["same"].token_ids
        assert [each.version.name for each in (await swarm.placement()).adapters] == ["legal"]


async def test_a_folder_outside_of_the_root_is_refused(llama: Harness, tmp_path: Path) -> None:
    root = {"adapters_dir": llama.folders["one"].parent}
    async with Swarm(tmp_path, llama.checkpoint, ["0:5"], server=root) as swarm, swarm.connect() as client:
        await register(swarm, "one", Path("one"), digest=digest_of(llama.folders["one"]))
        assert await answer(client, "one") == llama.expected("one")
        outside = make_adapter(llama.checkpoint, tmp_path / "outside")
        for name, folder in {"two": Path("../outside"), "three": outside}.items():
            await register(swarm, name, folder, digest=digest_of(outside))
            with pytest.raises(errors.AdapterNotLoaded, match="outside of"):
                await answer(client, name)


async def test_a_folder_that_servers_see_elsewhere_is_registered_as_they_see_it(
    llama: Harness, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = shutil.copytree(llama.folders["one"], tmp_path / "here")
    root = {"adapters_dir": llama.folders["one"].parent}
    async with Swarm(tmp_path, llama.checkpoint, ["0:5"], server=root) as swarm, swarm.connect() as client:
        monkeypatch.setenv("COROLLA_ROUTER", swarm.router_address)
        assert await asyncio.to_thread(main, ["adapters", "add", "one", str(here), "--source-as", "one"]) == 0
        assert await answer(client, "one") == llama.expected("one")
        both = ["adapters", "add", "two", "org/two", "--revision", "main", "--source-as", "two"]
        assert await asyncio.to_thread(main, both) == 2


async def test_servers_without_memory_for_adapters_answer_none(llama: Harness, tmp_path: Path) -> None:
    async with (
        Swarm(tmp_path, llama.checkpoint, ["0:5"], server={"adapters_mib": 0}) as swarm,
        swarm.connect() as client,
    ):
        await register(swarm, "one", llama.folders["one"])
        with pytest.raises(errors.AdapterNotLoaded):
            await answer(client, "one")
        await swarm.add_server("0:5", adapters_mib=8)
        assert await answer(client, "one") == llama.expected("one")
        assert await answer(client, "") == llama.expected("")
