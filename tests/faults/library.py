"""kill -9 of each hop while `generate` of transformers runs over the chain: beams that fork, batches, draft tokens."""

import asyncio
import random
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    LogitsProcessor,
    LogitsProcessorList,
    StoppingCriteria,
    StoppingCriteriaList,
)

from corolla.hf import AutoDistributedModelForCausalLM
from corolla.local.processes import ManagedProcess
from corolla.models.loading import LOADING
from tests.faults.figures import Figures, say
from tests.faults.running_stack import RunningStack

_PROMPTED = "trained prompts for each block"
_REMOTE_EDGES = "remote edges"
_WAYS: dict[str, tuple[int, dict[str, Any]]] = {
    "greedy": (1, {}),
    "sampled batch": (3, {"do_sample": True, "top_p": 0.95}),
    "beams": (2, {"num_beams": 3}),
    "sampled beams": (1, {"num_beams": 3, "do_sample": True, "num_return_sequences": 2}),
    "prompt lookup": (1, {"prompt_lookup_num_tokens": 4}),
    _PROMPTED: (2, {}),
    _REMOTE_EDGES: (3, {"do_sample": True, "top_p": 0.95, "repetition_penalty": 1.2}),
}
_MAX_NEW_TOKENS = 48


class _Countdown:
    """Does something at one step of `generate`, and nothing before or after it."""

    def __init__(self, step: int, act: Any) -> None:
        self._num_left = step
        self._act = act

    def count(self) -> None:
        if self._num_left == 0:
            self._act()
        self._num_left -= 1


class _InLogits(_Countdown, LogitsProcessor):
    """Counts steps that have logits here, and changes none."""

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        self.count()
        return scores


class _InTokens(_Countdown, StoppingCriteria):
    """Counts tokens that came from elsewhere, and ends nothing."""

    def __call__(self, input_ids: Any, scores: Any, **kwargs: Any) -> Any:
        self.count()
        return torch.zeros(len(input_ids), dtype=torch.bool)


async def library(stack: RunningStack, rng: random.Random, runs: range) -> int:
    """Each way of generating in turn, each hop in turn."""
    figures = Figures()
    folder = stack.local.options.model
    unsplit, with_local_edges, with_remote_edges = await asyncio.to_thread(_load, folder, stack.local.router_address)
    for number in runs:
        figures.num_runs += 1
        way = list(_WAYS)[number % len(_WAYS)]
        span = stack.spans[number // len(_WAYS) % len(stack.spans)]
        num_rows, options = _WAYS[way]
        prompt = torch.tensor([[rng.randrange(4, 256) for _ in range(12)] for _ in range(num_rows)])
        step = rng.randrange(_MAX_NEW_TOKENS // 4)
        loop = asyncio.get_running_loop()
        victims: list[ManagedProcess] = []

        def kill(
            span: str = span, loop: asyncio.AbstractEventLoop = loop, victims: list[ManagedProcess] = victims
        ) -> None:
            victims.append(asyncio.run_coroutine_threadsafe(stack.busiest(span), loop).result())
            stack.kill(victims[0])

        # No end token: each answer has all its tokens.
        options = {**options, "max_new_tokens": _MAX_NEW_TOKENS, "eos_token_id": None, "pad_token_id": 0}
        seed = rng.randrange(1 << 30)
        remote = with_remote_edges if way == _REMOTE_EDGES else with_local_edges
        trained = _train(remote) if way == _PROMPTED else None
        # The unsplit model takes no such prompts, and draws rows from one random stream: these ways are compared with
        # the undisturbed chain, which other tests compare with the unsplit model.
        undisturbed = remote if way in (_PROMPTED, _REMOTE_EDGES) else unsplit
        expected = await asyncio.to_thread(_generate, undisturbed, seed, prompt, options, trained)
        disturbance: dict[str, Any] = {"logits_processor": LogitsProcessorList([_InLogits(step, kill)])}
        if way == _REMOTE_EDGES:
            disturbance = {"stopping_criteria": StoppingCriteriaList([_InTokens(step, kill)])}
        try:
            given = await asyncio.to_thread(_generate, remote, seed, prompt, options | disturbance, trained)
            figures.check(given == expected, f"{way}: the tokens are not those of the undisturbed run")
        except Exception as failure:
            figures.check(False, f"{way}: the caller got {type(failure).__name__}: {failure}")
        say(f"run {figures.num_runs}: {way}, server of {span} killed at step {step}")
        for victim in victims:
            await stack.restart(victim)
    return figures.conclude(0.0)


def _load(folder: str, router: str) -> tuple[Any, Any, Any]:
    loading: Any = AutoModelForCausalLM
    with LOADING:
        unsplit = loading.from_pretrained(folder, dtype=torch.float32, local_files_only=True).eval()
    library = AutoDistributedModelForCausalLM
    return (
        unsplit,
        library.from_pretrained(folder, router=router),
        library.from_pretrained(folder, edges="remote", router=router),
    )


def _train(remote: Any) -> Tensor:
    """`[blocks, 6, H]`, as strong as what they are added to."""
    shape = (remote.config.num_hidden_layers, 6, remote.config.hidden_size)
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


def _generate(
    model: Any, seed: int, prompt: Tensor, options: dict[str, Any], block_prompts: Tensor | None
) -> list[list[int]]:
    torch.manual_seed(seed)
    session = model.inference_session(block_prompts=block_prompts) if block_prompts is not None else nullcontext()
    with session:
        tokens: list[list[int]] = model.generate(prompt, **options).tolist()
    return tokens
