"""Keys and values in eight bits through the whole stack: the tokens of a model whose cache rounds likewise."""

import asyncio
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

from tests.checkpoints import make_tiny_checkpoint
from tests.integration.deaths import answer_across_a_death
from tests.integration.gates import hand_over
from tests.integration.metrics import sample
from tests.integration.swarm import Swarm
from tests.reference import Unsplit
from tests.tiers import quick

CHAINS = (["0:5"], ["0:2", "2:3", "3:5"])
PROMPTS = ([5, 90, 17, 33], list(range(40, 110)))
NUM_NEW_TOKENS = 20
NEARLY_EQUAL = 0.1
CASES = [f"{kind} {family}" for kind in ("fp8", "int8") for family in ("llama", "gemma2", "bloom", "deepseek_v3")]


def rounded(numbers: Tensor, kind: str) -> Tensor:
    """Rounds by the definition of the types."""
    if kind == "fp8":
        return numbers.clamp(-448, 448).to(torch.float8_e4m3fn).float()
    unit = torch.exp2(torch.floor(torch.log2(numbers.abs().amax(-1, keepdim=True) / 127)) + 1)
    return (numbers / unit).round() * unit


class RoundingCache(DynamicCache):
    """transformers' own, which rounds what it is given."""

    kind = ""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        return super().update(rounded(key_states, self.kind), rounded(value_states, self.kind), *args, **kwargs)


@dataclass(frozen=True)
class Expected:
    """What a model answers whose cache rounds, and by how much each token won, in units of the logits."""

    token_ids: list[int]
    gaps: list[float]

    @classmethod
    def of(cls, unsplit: Unsplit, prompt: list[int], kind: str, num_tokens: int = NUM_NEW_TOKENS) -> "Expected":
        cache = RoundingCache(config=unsplit.model.config)
        cache.kind = kind
        ids = torch.tensor([prompt])
        output = unsplit.model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=num_tokens, do_sample=False, pad_token_id=0,
            past_key_values=cache, output_logits=True, return_dict_in_generate=True,
        )  # fmt: skip
        best = torch.cat(output.logits).topk(2).values
        return cls(output.sequences[0, len(prompt) :].tolist(), (best[:, 0] - best[:, 1]).tolist())

    def check(self, token_ids: Sequence[int]) -> None:
        """The same tokens, up to where two were about equally good.

        Two computations of a key differ in their last bits; where these decide how it is rounded, it differs by a step.
        """
        assert len(token_ids) == len(self.token_ids)
        different = [
            number for number, pair in enumerate(zip(token_ids, self.token_ids, strict=True)) if len({*pair}) > 1
        ]
        assert not different or self.gaps[different[0]] < NEARLY_EQUAL, (different[0], self.gaps[different[0]])


@pytest.mark.parametrize("case", quick(CASES, "fp8 llama", "int8 gemma2"))
async def test_chains_answer_as_a_model_whose_cache_rounds(tmp_path: Path, case: str) -> None:
    kind, family = case.split()
    folder = make_tiny_checkpoint(family, tmp_path / family)
    unsplit = Unsplit(folder)
    references = [Expected.of(unsplit, prompt, kind) for prompt in PROMPTS]
    plain = [unsplit.generate(prompt, NUM_NEW_TOKENS, ignore_eos=True).token_ids for prompt in PROMPTS]
    assert [each.token_ids for each in references] != plain, "rounding changes something"
    chosen = {"kv_cache_dtype": kind}
    async with AsyncExitStack() as stack:
        swarms = [
            Swarm(
                tmp_path,
                folder,
                chain,
                server={"kv_cache_mib": 16, **chosen},
                client={**chosen, "prefill_chunk_tokens": chunk},
            )
            for chain, chunk in zip(CHAINS, (64, 7), strict=True)
        ]
        await asyncio.gather(*(stack.enter_async_context(swarm) for swarm in swarms))
        for swarm in swarms:
            async with swarm.connect() as client:
                answers = await asyncio.gather(
                    *(client.generate(prompt, max_tokens=NUM_NEW_TOKENS, ignore_eos=True) for prompt in PROMPTS)
                )
            for answer, reference in zip(answers, references, strict=True):
                reference.check(answer.token_ids)


@pytest.mark.parametrize("kind", quick(["fp8", "int8"], "int8"))
async def test_an_answer_goes_on_when_its_server_dies(tmp_path: Path, kind: str) -> None:
    folder = make_tiny_checkpoint("llama", tmp_path / "llama")
    reference = Expected.of(Unsplit(folder), PROMPTS[1], kind)
    chosen = {"kv_cache_dtype": kind}
    middle = len(PROMPTS[1]) + NUM_NEW_TOKENS // 2
    async with (
        Swarm(tmp_path, folder, ["0:2", "2:5"], server={"kv_cache_mib": 16, **chosen}, client=chosen) as swarm,
        swarm.connect() as client,
    ):
        options = {"max_tokens": NUM_NEW_TOKENS, "ignore_eos": True}
        answer = await answer_across_a_death(swarm, client, 1, middle, PROMPTS[1], **options)
        reference.check(answer.token_ids)


@pytest.mark.parametrize("kind", quick(["fp8", "int8"], "fp8"))
async def test_a_session_is_handed_over_as_it_is_stored(tmp_path: Path, kind: str) -> None:
    folder = make_tiny_checkpoint("llama", tmp_path / "llama")
    reference = Expected.of(Unsplit(folder), PROMPTS[1], kind, num_tokens=400)
    chosen = {"kv_cache_dtype": kind}
    server = {"kv_cache_mib": 16, "grace_s": 60.0, **chosen}
    async with (
        Swarm(tmp_path, folder, ["0:2", "2:5"], server=server, client=chosen) as swarm,
        swarm.connect() as client,
    ):
        answering = asyncio.create_task(client.generate(PROMPTS[1], max_tokens=400, ignore_eos=True))
        _, other = await hand_over(swarm, 1, len(PROMPTS[1]))
        reference.check((await answering).token_ids)
        assert await sample(other.metrics_port, "corolla_handover_bytes_total", direction="in") > 0


async def test_the_same_memory_holds_more_tokens(tmp_path: Path) -> None:
    folder = make_tiny_checkpoint("llama", tmp_path / "llama")
    pages = {}
    for kind in ("auto", "fp8", "int8"):
        chosen = {"kv_cache_dtype": kind}
        async with Swarm(tmp_path, folder, ["0:5"], server={"kv_cache_mib": 16, **chosen}, client=chosen) as swarm:
            (status,) = await swarm.statuses()
            pages[kind] = status.num_pages
    assert pages["fp8"] == pytest.approx(4 * pages["auto"], rel=0.01)
    assert pages["int8"] == pytest.approx(4 * 16 / 17 * pages["auto"], rel=0.01)
