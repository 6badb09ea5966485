"""An intruder who reaches a block server in the clear tries texts in the name of a victim."""

import asyncio
import secrets
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import SecretStr

from corolla.chain.beginnings import named_beginnings
from corolla.chain.reservations import OpenOptions
from corolla.chassis.errors import SettingsError
from corolla.hf import AutoDistributedModelForCausalLM
from corolla.v1 import blocks_pb2 as pb
from corolla.v1 import common_pb2
from corolla.wire.beginnings import unpack
from corolla.wire.frames import Frame
from corolla.wire.page_hashes import TextDigests, page_hashes
from corolla.wire.stream import connect
from tests.checkpoints import make_tiny_checkpoint
from tests.integration.swarm import Swarm

PAGE_TOKENS = 32
PROMPT = [*range(1, 2 * PAGE_TOKENS + 2)]
KEY = "key-of-the-victim"


async def num_found(swarm: Swarm) -> int:
    """Tokens of the tried text that a session of somebody else begins with."""
    opened: asyncio.Future[pb.Opened] = asyncio.get_running_loop().create_future()

    def receive(frame: Frame) -> None:
        if isinstance(frame.control, pb.Opened):
            opened.set_result(frame.control)

    stream = connect(swarm.servers[0].address, lambda _: receive)
    (status,) = await swarm.statuses()
    stream.send(pb.Hello(client_id=secrets.token_bytes(16), fingerprint=status.fingerprint))
    text = pb.ExpectedText(num_tokens=len(PROMPT), page_hashes=page_hashes(PROMPT, PAGE_TOKENS))
    stream.send(
        pb.Open(
            request_id=1, session_id=secrets.token_bytes(16), epoch=1, tenant="victim", max_tokens=100,
            blocks=common_pb2.BlockSpan(start=0, end=5), lease_ms=60_000, transient=True, text=text,
        )
    )  # fmt: skip
    answer = await asyncio.wait_for(opened, 10)
    stream.close()
    await swarm.until_empty()
    return answer.num_cached_tokens


@pytest.mark.parametrize("secret", ["", secrets.token_hex(16)], ids=["without a secret", "with a secret"])
async def test_only_who_knows_the_secret_finds_a_text_by_trying_it(tmp_path: Path, secret: str) -> None:
    model = make_tiny_checkpoint("llama", tmp_path / "tiny")
    keys = tmp_path / "keys.txt"
    keys.write_text(f"victim:{KEY}\n")
    async with Swarm(
        tmp_path, model, ["0:5"], num_clients=2, server={"page_tokens": PAGE_TOKENS, "kv_cache_mib": 16},
        client={"api_keys_file": keys, "cache_secret": SecretStr(secret)}, api_key=KEY,
    ) as swarm:  # fmt: skip
        for number, num_cached in ((0, 0), (1, 2 * PAGE_TOKENS)):
            async with swarm.connect(number) as client:
                answer = await client.generate(PROMPT, max_tokens=4, ignore_eos=True)
            assert answer.usage.cached_tokens == num_cached
        assert await num_found(swarm) == (0 if secret else 2 * PAGE_TOKENS)
        # An intruder who sees a heartbeat tries texts, too.
        announced = unpack(swarm.servers[0].engine.sessions.announced.newest_first())
        assert bool(announced) == bool(secret)
        salts = b"", OpenOptions(max_tokens=1, transient=True).beginning_salt
        tried = (named_beginnings(TextDigests(PROMPT), salt, range(len(PROMPT) + 1)) for salt in salts)
        assert not set(announced).intersection(each.digest for found in tried for each in found)


@pytest.mark.parametrize("edges", ["local", "remote"])
async def test_a_library_with_the_secret_meets_the_client_services_and_nobody_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, edges: str
) -> None:
    model, secret, keys = make_tiny_checkpoint("llama", tmp_path / "tiny"), secrets.token_hex(16), tmp_path / "keys.txt"
    keys.write_text(f"victim:{KEY}\n")
    monkeypatch.setenv("COROLLA_CACHE_SECRET", secret)
    async with Swarm(
        tmp_path, model, ["0:5"], server={"page_tokens": PAGE_TOKENS, "kv_cache_mib": 16},
        client={"api_keys_file": keys, "cache_secret": SecretStr(secret)}, api_key=KEY,
    ) as swarm:  # fmt: skip
        options: dict[str, Any] = {"edges": "remote"} if edges == "remote" else {}

        def generate() -> None:
            library = AutoDistributedModelForCausalLM.from_pretrained(
                str(model), router=swarm.router_address, tenant="victim", reuse_prefixes=True, **options
            )
            library.generate(torch.tensor([PROMPT]), max_new_tokens=4, do_sample=False)

        await asyncio.to_thread(generate)
        await swarm.until_empty()
        assert await num_found(swarm) == 0
        async with swarm.connect() as client:
            assert (await client.generate(PROMPT, max_tokens=4)).usage.cached_tokens == 2 * PAGE_TOKENS


async def test_a_library_refuses_a_short_secret(tmp_path: Path) -> None:
    with pytest.raises(SettingsError):
        AutoDistributedModelForCausalLM.from_pretrained(str(tmp_path), edges="remote", cache_secret="hunter2")
