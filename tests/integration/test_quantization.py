"""Quantised chains give the tokens of the unsplit model with blocks that the same library quantised."""

import asyncio
import re
from pathlib import Path

import pytest
import torchao.quantization
from torchao.prototype.quantization.int4 import PrototypeInt4WeightOnlyConfig

from corolla.block_server.settings import BlockServerSettings
from corolla.chassis.errors import NoChain, SettingsError
from corolla.chassis.settings import load
from corolla.client.settings import ClientSettings
from tests.checkpoints import make_tiny_checkpoint
from tests.integration.swarm import Swarm
from tests.reference import Unsplit
from tests.tiers import quick

PROMPTS = ([5, 90, 17, 33], list(range(40, 75)), [200, 8])
NUM_NEW_TOKENS = 24
CONFIGS = {
    "int8": lambda: torchao.quantization.Int8WeightOnlyConfig(),
    "int4": lambda: PrototypeInt4WeightOnlyConfig(group_size=32),
}


def quantized_reference(folder: Path, quantization: str) -> Unsplit:
    """Blocks quantised, embedding and head not."""
    unsplit = Unsplit(folder)
    torchao.quantization.quantize_(unsplit.model.model.layers, CONFIGS[quantization]())
    return unsplit


@pytest.mark.parametrize("quantization", ["int8", "int4"])
@pytest.mark.parametrize("family", quick(["llama", "gemma2"], "llama"))
async def test_a_quantised_chain_answers_as_the_quantised_model(tmp_path: Path, family: str, quantization: str) -> None:
    folder = make_tiny_checkpoint(family, tmp_path / family)
    plain = Unsplit(folder).generate(PROMPTS[0], NUM_NEW_TOKENS, ignore_eos=True)
    unsplit = quantized_reference(folder, quantization)
    expected = [unsplit.generate(prompt, NUM_NEW_TOKENS, ignore_eos=True) for prompt in PROMPTS]
    assert not expected[0].logits.equal(plain.logits), "the reference is not quantised"
    chosen = {"quantization": quantization}
    async with (
        Swarm(tmp_path, folder, ["0:2", "2:5"], server={"kv_cache_mib": 16, **chosen}, client=chosen) as swarm,
        swarm.connect() as client,
    ):
        answers = await asyncio.gather(
            *(client.generate(prompt, max_tokens=NUM_NEW_TOKENS, ignore_eos=True) for prompt in PROMPTS)
        )
        assert [list(answer.token_ids) for answer in answers] == [each.token_ids for each in expected]


@pytest.mark.parametrize("server", [{"quantization": "int8"}, {"kv_cache_dtype": "fp8"}], ids=str)
async def test_a_client_of_another_format_is_given_no_chain(tmp_path: Path, server: dict[str, str]) -> None:
    folder = make_tiny_checkpoint("llama", tmp_path / "llama")
    async with Swarm(tmp_path, folder, ["0:5"], server=server, num_clients=0) as swarm:
        await swarm.add_client()
        async with swarm.connect() as client:
            with pytest.raises(NoChain):
                await client.generate("hi", max_tokens=1)


@pytest.mark.parametrize("settings", [BlockServerSettings, ClientSettings])
@pytest.mark.parametrize(
    "variable, value", [("COROLLA_QUANTIZATION", "int3"), ("COROLLA_QUANTIZATION", "8"), ("COROLLA_DTYPE", "fp8")]
)
def test_unknown_formats_are_refused_by_key_and_value(
    settings: type[BlockServerSettings | ClientSettings], variable: str, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, value)
    with pytest.raises(SettingsError, match=re.escape(f"{variable}={value!r}")):
        load(settings)


@pytest.mark.parametrize("given, meant", [("fp32", "float32"), ("bf16", "bfloat16"), ("fp16", "float16")])
def test_dtypes_have_abbreviations(given: str, meant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COROLLA_DTYPE", given)
    assert load(BlockServerSettings).dtype == load(ClientSettings).dtype == meant
