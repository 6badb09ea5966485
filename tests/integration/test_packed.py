"""Chains whose servers keep the weights as the files pack them give the tokens of the expanded model."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from corolla.models.checkpoint import Checkpoint
from tests.gguf_files import make_tiny_gguf
from tests.integration.deaths import answer_across_a_death
from tests.integration.swarm import Swarm
from tests.quantized_checkpoints import FORMATS, make_packed_checkpoint
from tests.reference import Unsplit
from tests.tiers import quick

CHAINS = (["0:4"], ["0:2", "2:4"], ["0:1", "1:3", "3:4"])
PROMPTS = ([5, 90, 17, 33], list(range(40, 75)), [200, 8])
NUM_NEW_TOKENS = 24
PACKED: dict[str, Any] = {"quantization": "packed"}


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COROLLA_CACHE", str(tmp_path / "cache"))


def packed_model(folder: Path, kind: str) -> tuple[Path, Unsplit]:
    """A GGUF file, or a checkpoint of the format, and the unsplit model with its weights, in float32."""
    if kind in FORMATS:
        packed, expanded = make_packed_checkpoint("llama", folder, FORMATS[kind](), with_head=True)
        return packed, Unsplit(expanded)
    source, path = make_tiny_gguf("llama", folder, kind=kind)
    unsplit = Unsplit(source)
    gguf = Checkpoint.from_pretrained(str(path)).gguf
    assert gguf is not None
    state = unsplit.model.state_dict()
    for name, tensor in gguf.tensors.items():
        state[name].copy_(tensor[...])
    return path, unsplit


@pytest.mark.parametrize(
    "kind, named, spans",
    [
        *(pytest.param("Q4_1", "Q4_1", chain, marks=pytest.mark.full) for chain in CHAINS[:-1]),
        *(pytest.param("Q8_0", "Q8_0", chain, marks=pytest.mark.full) for chain in CHAINS[1:]),
        ("Q4_1", "Q4_1", CHAINS[-1]),
        pytest.param("Q8_0", "Q8_0", CHAINS[0], marks=pytest.mark.kind),
        pytest.param("nvfp4", "nvfp4", CHAINS[2], marks=pytest.mark.kind),
        ("gptq-act-order", "gptq", CHAINS[1]),
        pytest.param("w4a16-asymmetric", "compressed-tensors", CHAINS[0], marks=pytest.mark.kind),
    ],
)
async def test_a_packed_chain_answers_as_the_expanded_model(
    tmp_path: Path, kind: str, named: str, spans: list[str]
) -> None:
    path, unsplit = packed_model(tmp_path, kind)
    expected = [unsplit.generate(prompt, NUM_NEW_TOKENS, ignore_eos=True) for prompt in PROMPTS]
    async with (
        Swarm(tmp_path, path, spans, server={"kv_cache_mib": 16, **PACKED}, client=PACKED) as swarm,
        swarm.connect() as client,
    ):
        answers = await asyncio.gather(
            *(client.generate(prompt, max_tokens=NUM_NEW_TOKENS, ignore_eos=True) for prompt in PROMPTS)
        )
        assert [list(answer.token_ids) for answer in answers] == [each.token_ids for each in expected]
        (described, *_) = (await swarm.placement(path.stem)).servers
        assert described.server.dtype == f"packed/fp32: {named}"
        sampled = await client.generate(PROMPTS[0], max_tokens=NUM_NEW_TOKENS, temperature=0.8, seed=3, ignore_eos=True)
        reference = unsplit.generate(PROMPTS[0], NUM_NEW_TOKENS, {"temperature": 0.8, "seed": 3}, ignore_eos=True)
        assert list(sampled.token_ids) == reference.token_ids


@pytest.mark.parametrize("kind", quick(["Q4_1", "gptq-act-order"], "gptq-act-order"))
@pytest.mark.parametrize("hop", quick([0, 1], 1))
async def test_a_packed_hop_that_dies_is_replaced_and_no_token_changes(tmp_path: Path, kind: str, hop: int) -> None:
    path, unsplit = packed_model(tmp_path, kind)
    prompt, spans = PROMPTS[0], CHAINS[1]
    expected = unsplit.generate(prompt, NUM_NEW_TOKENS, ignore_eos=True)
    options = {"max_tokens": NUM_NEW_TOKENS, "ignore_eos": True}
    settings = {"kv_cache_mib": 16, "prefix_cache": False, **PACKED}
    patience = {"recovery_patience_s": 30.0, **PACKED}
    async with Swarm(tmp_path, path, spans, server=settings, client=patience) as swarm, swarm.connect() as client:
        answer = await answer_across_a_death(swarm, client, hop, len(prompt) + 9, prompt, **options)
        assert list(answer.token_ids) == expected.token_ids
