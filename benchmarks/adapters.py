"""What adapters cost: 8 streams with as many of them, with one, and with none.

    python -m benchmarks.adapters --rounds 5

Each adapter changes every linear layer of the blocks. Speed is all tokens over the time from the first request to the
last answer.
"""

import argparse
import json
import tempfile
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import torch
from safetensors.torch import save_file

from benchmarks.chain import Chain
from benchmarks.command import interleaved, random_ids, run
from benchmarks.figures import Figure, at_least, figure, ratio
from corolla.models.adapters.config import CONFIG_FILE
from corolla.models.adapters.file import WEIGHTS_FILE
from corolla.models.checkpoint import Checkpoint
from corolla.models.fused import PLACES
from corolla.models.span_model import make_span
from corolla.wire.span import Span

_PROMPT_TOKENS = 16
_STRENGTH = 0.01


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default="demo", help="checkpoint folder, hub id or demo")
    parser.add_argument("--servers", type=int, default=2, help="hops")
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=48, help="tokens of one answer")


def measure(options: argparse.Namespace) -> Iterator[Figure]:
    checkpoint = Checkpoint.from_pretrained(options.model)
    checkpoint.fetch()
    names = [f"a{number}" for number in range(options.streams)]
    prompts = [random_ids(_PROMPT_TOKENS, checkpoint.vocab_size, seed) for seed in range(options.streams)]
    with tempfile.TemporaryDirectory() as root, Chain(options.model, options.servers) as chain:
        for seed, name in enumerate(names):
            write_adapter(checkpoint, Path(root) / name, rank=options.rank, seed=seed)
            chain.add_adapter(name, Path(root) / name)
        load_s = [_seconds(chain, prompts[0], name) for name in names]
        again_s = [_seconds(chain, prompts[0], name) for name in names]
        sides: dict[str, Sequence[str]] = {
            "none": [""] * options.streams,
            "one": names[:1] * options.streams,
            "all": names,
        }
        speeds = interleaved(
            {side: partial(_speed, chain, prompts, options.tokens, given) for side, given in sides.items()},
            options.rounds,
        )
    what = f"{options.streams} streams, {options.servers} hops, rank {options.rank}"
    yield figure(f"first use of an adapter, a token included, {options.servers} hops", "s", load_s)
    yield figure("the same, loaded", "s", again_s)
    for side, words in {"none": "no adapter", "one": "one adapter", "all": f"{options.streams} adapters"}.items():
        yield figure(f"{words}, {what}", "tokens/s", speeds[side])
    yield ratio(f"one adapter / none, {what}", speeds["one"], speeds["none"], at_least(0.8))
    yield ratio(f"{options.streams} adapters / none, {what}", speeds["all"], speeds["none"], at_least(0.8))


def write_adapter(checkpoint: Checkpoint, folder: Path, *, rank: int, seed: int) -> None:
    """Writes a random adapter of all linear layers of the usual names, in PEFT's format."""
    generator = torch.Generator().manual_seed(seed)
    block = make_span(checkpoint, Span(0, 1), dtype=torch.float32)
    names = [name for place in PLACES for name in place]
    tensors = {}
    for index in range(checkpoint.num_blocks):
        for name in names:
            place = block.linear_place(0, name)
            if place is not None:
                num_in, num_out = place.shape
                path = f"base_model.model.model.{checkpoint.family.layers}.{index}.{name}"
                tensors[f"{path}.lora_A.weight"] = torch.randn(rank, num_in, generator=generator) * num_in**-0.5
                tensors[f"{path}.lora_B.weight"] = torch.randn(num_out, rank, generator=generator) * _STRENGTH
    folder.mkdir(parents=True)
    save_file(tensors, folder / WEIGHTS_FILE)
    facts = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": "all-linear"}
    (folder / CONFIG_FILE).write_text(json.dumps(facts))


def _seconds(chain: Chain, prompt: list[int], adapter: str) -> float:
    started_s = time.perf_counter()
    chain.answers([prompt], 1, adapters=[adapter])
    return time.perf_counter() - started_s


def _speed(chain: Chain, prompts: list[list[int]], num_tokens: int, adapters: Sequence[str]) -> float:
    started_s = time.perf_counter()
    chain.answers(prompts, num_tokens, adapters=adapters)
    return len(prompts) * num_tokens / (time.perf_counter() - started_s)


if __name__ == "__main__":
    run(__doc__, add_options, measure)
