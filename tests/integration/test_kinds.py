"""An answer outlives its client service, a server that leaves and one that dies, in a family of each kind."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoints import make_tiny_checkpoint
from tests.integration.deaths import answer_across_a_death
from tests.integration.gates import hand_over
from tests.integration.metrics import sample
from tests.integration.swarm import Swarm
from tests.quantized_checkpoints import make_packed_checkpoint, mxfp4
from tests.reference import Sampling, Unsplit
from tests.tiers import quick

FAMILIES = {
    "states": "qwen3_next",
    "latents": "deepseek_v3",
    "an index": "deepseek_v32",
    "chunks of attention": "llama4_text",
    "two attentions in a block": "longcat_flash",
    "packed floats of four bits": "gpt_oss",
}
SAMPLED: Sampling = {"temperature": 1.1, "top_p": 0.95, "seed": 7}
PROMPT = [20 + 3 * number for number in range(41)]
NUM_NEW_TOKENS = 75


def models_of(kind: str, folder: Path) -> tuple[Path, Path, dict[str, Any]]:
    """A checkpoint, the one with the same weights that transformers reads, and the settings of services."""
    if kind.startswith("packed"):
        return *make_packed_checkpoint(FAMILIES[kind], folder, mxfp4()), {"quantization": "packed"}
    model = make_tiny_checkpoint(FAMILIES[kind], folder / "tiny", num_blocks=4)
    return model, model, {}


@pytest.mark.parametrize("kind", quick(FAMILIES))
async def test_an_answer_outlives_its_service_and_both_servers(tmp_path: Path, kind: str) -> None:
    model, expanded, settings = models_of(kind, tmp_path)
    expected = Unsplit(expanded).generate(PROMPT, NUM_NEW_TOKENS, SAMPLED, ignore_eos=True).token_ids
    options: dict[str, Any] = {"max_tokens": NUM_NEW_TOKENS, "ignore_eos": True, **SAMPLED}
    server = {"grace_s": 120.0, "kv_cache_mib": 16, **settings}
    client = {"prefill_chunk_tokens": 24, "recovery_patience_s": 30.0, **settings}
    async with (
        Swarm(tmp_path, model, ["0:2", "2:4"], num_clients=2, server=server, client=client) as swarm,
        swarm.connect(0) as one,
        swarm.connect(1) as other,
    ):
        received: list[int] = []
        async with one.stream(PROMPT, request_id="resumed", **options) as stream:
            async for chunk in stream:
                received.extend(chunk.token_ids)
                if len(received) >= NUM_NEW_TOKENS // 3:
                    break
        rest = await other.generate(PROMPT, request_id="resumed", resume_from=received, **options)
        assert [*received, *rest.token_ids] == expected
        await swarm.until_empty()
        answering = asyncio.create_task(one.generate(PROMPT, **options))
        await hand_over(swarm, 0, len(PROMPT) + 5)
        answer = await answering
        assert (list(answer.token_ids), answer.usage.recoveries) == (expected, 1)
        assert await sample(swarm.clients[0].metrics_port, "corolla_recomputed_tokens_total") == 0
        answer = await answer_across_a_death(swarm, one, 0, len(PROMPT) + 30, PROMPT, **options)
        assert list(answer.token_ids) == expected
