"""Perplexity on a fixed text beside speed and memory, for each weight format.

    python -m benchmarks.quality --formats float32 bfloat16 int8/float32 int4/bfloat16

The text is `passage.txt`, in the public domain; each window of 512 tokens is predicted from its own beginning. The
blocks run in this process as block servers run them; int8 and int4 leave embedding and head alone. With a GGUF file,
`packed/float32` runs its weights as they are.
"""

import argparse
import math
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer

from benchmarks.command import interleaved, progress, random_ids, run
from benchmarks.figures import Figure, figure
from benchmarks.local_blocks import LocalBlocks
from corolla.chassis.weight_formats import full_dtype_name, weight_format
from corolla.models.checkpoint import Checkpoint

PASSAGE = Path(__file__).with_name("passage.txt")
_WINDOW_TOKENS = 512


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default="demo", help="checkpoint folder, GGUF file, hub id or demo")
    parser.add_argument(
        "--formats", nargs="+", default=["float32", "bfloat16", "int8/float32", "int8/bfloat16", "int4/bfloat16"],
        help="a dtype, or quantisation/dtype",
    )  # fmt: skip
    parser.add_argument(
        "--kv-cache-dtypes", nargs="+", default=["auto"], help="how each of them stores keys and values"
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=16, help="tokens of one answer, for the speed")


def measure(options: argparse.Namespace) -> Iterator[Figure]:
    checkpoint = Checkpoint.from_pretrained(options.model)
    checkpoint.fetch()
    library: Any = AutoTokenizer
    token_ids = library.from_pretrained(checkpoint.folder).encode(PASSAGE.read_text(encoding="utf-8"))
    prompt = random_ids(16, checkpoint.vocab_size, seed=0)
    loaded: dict[str, LocalBlocks] = {}
    for each in options.formats:
        quantization, _, dtype = each.rpartition("/")
        name = weight_format(full_dtype_name(dtype), quantization or "none")
        for stored in options.kv_cache_dtypes:
            named = name if stored == "auto" else f"{name}, keys and values in {stored}"
            loaded[named] = LocalBlocks(checkpoint, full_dtype_name(dtype), quantization or "none", stored)

    def tokens_per_s(blocks: LocalBlocks) -> float:
        return blocks.answer(prompt, options.tokens).tokens_per_s

    torch.set_num_threads(1)
    for name, blocks in loaded.items():
        yield figure(f"{name}, perplexity over {len(token_ids)} tokens", "", [perplexity(blocks, token_ids)])
        yield figure(f"{name}, all blocks", "MiB", [blocks.model.nbytes / (1 << 20)])
        yield figure(f"{name}, keys and values of a token", "KiB", [blocks.cache_bytes_per_token / (1 << 10)])
    speeds = interleaved({name: partial(tokens_per_s, blocks) for name, blocks in loaded.items()}, options.rounds)
    for name, rounds in speeds.items():
        yield figure(f"{name}, one stream, one thread, in one process", "tokens/s", rounds)


def perplexity(blocks: LocalBlocks, token_ids: list[int]) -> float:
    """Over windows of 512 tokens, each from its own beginning."""
    losses = []
    for start in range(0, len(token_ids) - 1, _WINDOW_TOKENS):
        progress(f"token {start} of {len(token_ids)}")
        losses.append(blocks.negative_log_likelihoods(token_ids[start : start + _WINDOW_TOKENS]))
    progress("")
    return math.exp(float(torch.cat(losses).mean()))


if __name__ == "__main__":
    run(__doc__, add_options, measure)
