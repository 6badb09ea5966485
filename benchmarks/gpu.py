"""A chain on one CUDA device, spans as processes beside each other: speed, and how much of the memory's speed it uses.

    python -m benchmarks.gpu --size 1b --servers 1 2 4
    python -m benchmarks.gpu --size 1b --servers 1 --graphs auto off     # CUDA graphs on and off
    python -m benchmarks.gpu --suite --size 8b --streams 1 8 32 64 --rounds 3
    python -m benchmarks.gpu --suite --size 8b --parts hops company       # some parts of it
    python -m benchmarks.gpu --device cpu --size tiny --dtype float32     # only shows that it runs

The model is a Llama of usual shape with random bfloat16 weights, made on the spot. To give one token, a device reads
all weights once: bytes of weights times tokens per second, over the bandwidth that a large copy reaches, is the
fraction of the roofline. Streams that run together share one reading, so their tokens count once for all of them.

With both kinds of `--graphs` two chains stand beside each other, one with CUDA graphs and one without, and take turns.
"""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, LlamaConfig

from benchmarks.chain import Chain
from benchmarks.command import interleaved, random_ids, run
from benchmarks.figures import Figure, figure, ratio
from benchmarks.gpu_suite import PARTS, Suite
from benchmarks.local_model import LocalModel
from benchmarks.streams import speed
from corolla.compute.device import device_name
from corolla.models.checkpoint import Checkpoint
from corolla.wire.tensors import DTYPES
from tests.checkpoints import make_tokenizer

_PROMPT_TOKENS = 128
# Llama 3.2 1B and 3B, and Llama 3.1 8B; `tiny` is for smoke tests.
_SHAPES: Mapping[str, Mapping[str, Any]] = {
    "tiny": {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4,
             "num_key_value_heads": 2, "vocab_size": 1024},
    "1b": {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32,
           "num_key_value_heads": 8, "vocab_size": 128256},
    "3b": {"hidden_size": 3072, "intermediate_size": 8192, "num_hidden_layers": 28, "num_attention_heads": 24,
           "num_key_value_heads": 8, "vocab_size": 128256},
    "8b": {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
           "num_key_value_heads": 8, "vocab_size": 128256},
}  # fmt: skip
_COPY_BYTES = {"cuda": 4 << 30, "cpu": 256 << 20}


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--size", default="1b", choices=sorted(_SHAPES))
    parser.add_argument("--dtype", default="bfloat16", choices=sorted(DTYPES))
    parser.add_argument("--servers", type=int, nargs="+", default=[1, 2, 4], help="hops, one chain after another")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=64, help="tokens of one answer")
    parser.add_argument("--suite", action="store_true", help="what callers see, each figure beside its goal for 8B")
    parser.add_argument("--parts", nargs="+", default=list(PARTS), choices=list(PARTS), help="of the suite")
    parser.add_argument("--prompts", type=int, nargs="+", default=[512, 2048, 8000], help="of the suite's first tokens")
    parser.add_argument("--quantization", default="none", choices=["none", "int8", "int4"])
    parser.add_argument("--kv-cache-mib", type=int, default=1024, help="of each block server")
    parser.add_argument("--page-tokens", type=int, default=0, help="of a KV page; 0: as for the device")
    parser.add_argument(
        "--graphs",
        nargs="+",
        default=["auto"],
        choices=["auto", "off"],
        help="COROLLA_CUDA_GRAPHS of the servers; both are measured in turns",
    )


def measure(options: argparse.Namespace) -> Iterator[Figure]:
    if options.device.startswith("cuda") and not torch.cuda.is_available():
        sys.exit("benchmarks.gpu: torch finds no CUDA device here; try --device cpu --size tiny --dtype float32")
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / f"llama-{options.size}"
        _make_checkpoint(folder, _SHAPES[options.size], DTYPES[options.dtype])
        yield from _measure_suite(folder, options) if options.suite else _measure_model(folder, options)


def _measure_suite(folder: Path, options: argparse.Namespace) -> Iterator[Figure]:
    bandwidth, weight_bytes = _copy_bandwidth(options.device), _read_bytes(folder)
    yield figure(f"bandwidth of a large copy on {device_name(torch.device(options.device))}", "GB/s", [bandwidth / 1e9])
    yield figure("roofline of one stream", "tokens/s", [bandwidth / weight_bytes])
    suite = Suite(folder, options, weight_bytes, bandwidth)
    for part in options.parts:
        for found in PARTS[part](suite):
            # The goals are those of 8B on one H100.
            yield found if options.size == "8b" else replace(found, target=None)


def _measure_model(folder: Path, options: argparse.Namespace) -> Iterator[Figure]:
    checkpoint = Checkpoint.from_pretrained(str(folder))
    prompts = [random_ids(_PROMPT_TOKENS, checkpoint.vocab_size, seed) for seed in range(max(options.streams))]
    bandwidth = _copy_bandwidth(options.device)
    weight_bytes = _read_bytes(folder)
    yield figure("weights read for a token, as stored in the checkpoint", "GB", [weight_bytes / 1e9])
    yield figure("bandwidth of a large copy, reading and writing", "GB/s", [bandwidth / 1e9])
    local = LocalModel(folder, options.dtype, options.device)
    environment = {
        "COROLLA_DEVICE": options.device,
        "COROLLA_KV_CACHE_MIB": str(options.kv_cache_mib),
        "COROLLA_PAGE_TOKENS": str(options.page_tokens),
    }

    def of_local() -> float:
        return local.answer(prompts[0], options.tokens, torch.get_num_threads()).tokens_per_s

    def of_chain(chain: Chain, count: int) -> float:
        if count == 1:
            return chain.answer(prompts[0], options.tokens).tokens_per_s
        return speed(chain, prompts[:count], options.tokens)

    modes = list(dict.fromkeys(options.graphs))
    for hops in options.servers:
        with ExitStack() as chains:
            sides: dict[str, Callable[[], float]] = {"local": of_local}
            for mode in modes:
                chain = chains.enter_context(
                    Chain(
                        folder, hops, dtype=options.dtype, quantization=options.quantization,
                        environment={**environment, "COROLLA_CUDA_GRAPHS": mode},
                    )
                )  # fmt: skip
                sides |= {f"{mode} {count}": partial(of_chain, chain, count) for count in options.streams}
            speeds = interleaved(sides, options.rounds)
        yield figure(f"local transformers beside {hops} hops", "tokens/s", speeds["local"])
        for mode in modes:
            kind = f"{hops} hops, graphs {mode}" if len(modes) > 1 else f"{hops} hops"
            for count in options.streams:
                rounds = speeds[f"{mode} {count}"]
                yield figure(f"{count} streams, {kind}", "tokens/s", rounds)
                used = [each / count * weight_bytes / bandwidth for each in rounds]
                yield figure(f"{count} streams, {kind}, fraction of the bandwidth roofline", "", used)
            if 1 in options.streams:
                yield ratio(f"1 stream, {kind} / local transformers", speeds[f"{mode} 1"], speeds["local"])
        if len(modes) > 1:
            for count in options.streams:
                yield ratio(f"{count} streams, {hops} hops, graphs auto / off", speeds[f"auto {count}"],
                            speeds[f"off {count}"])  # fmt: skip


def _make_checkpoint(folder: Path, shape: Mapping[str, Any], dtype: torch.dtype) -> None:
    """Writes a complete checkpoint, one shard at a time, so that memory never holds two models."""
    folder.mkdir()
    tokenizer = make_tokenizer()
    config = LlamaConfig(
        **shape, max_position_embeddings=8192, tie_word_embeddings=True, rope_parameters={"rope_theta": 500000.0,
        "rope_type": "default"}, bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id,
    )  # fmt: skip
    library: Any = AutoModelForCausalLM
    with torch.device("meta"):
        empty = library.from_config(config)
    config.architectures = ["LlamaForCausalLM"]
    config.dtype = dtype
    config.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    shards: dict[str, dict[str, torch.Size]] = {}
    for name, parameter in empty.named_parameters():
        block = name.split(".")[2] if ".layers." in name else "edges"
        shards.setdefault(f"block-{block}.safetensors", {})[name] = parameter.shape
    generator = torch.Generator().manual_seed(0)
    for shard, shapes in shards.items():
        save_file({name: _draw(shape, dtype, generator) for name, shape in shapes.items()}, folder / shard)
    weight_map = {name: shard for shard, shapes in shards.items() for name in shapes}
    index = json.dumps({"metadata": {}, "weight_map": weight_map})
    (folder / "model.safetensors.index.json").write_text(index, encoding="utf-8")


def _draw(shape: torch.Size, dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    if len(shape) == 1:
        return torch.ones(shape, dtype=dtype)
    return torch.empty(shape, dtype=dtype).normal_(0.0, 0.02, generator=generator)


def _read_bytes(folder: Path) -> int:
    """Bytes of all matrices; the tied embedding is read once, as the head."""
    index = json.loads((folder / "model.safetensors.index.json").read_text(encoding="utf-8"))
    return sum((folder / shard).stat().st_size for shard in set(index["weight_map"].values()))


def _copy_bandwidth(device: str) -> float:
    """Bytes per second, read and written, of the best of a few copies."""
    source = torch.empty(_COPY_BYTES[torch.device(device).type], dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    seconds = []
    for _ in range(6):
        _synchronize(device)
        started_s = time.perf_counter()
        target.copy_(source)
        _synchronize(device)
        seconds.append(time.perf_counter() - started_s)
    return 2 * source.nbytes / min(seconds)


def _synchronize(device: str) -> None:
    if device.startswith("cuda"):
        torch.cuda.synchronize(device)


if __name__ == "__main__":
    run(__doc__, add_options, measure)
