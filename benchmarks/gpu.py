"""A chain on one CUDA device, spans as processes beside each other: speed, and how much of the memory's speed it uses.

    python -m benchmarks.gpu --size 1b --servers 1 2 4
    python -m benchmarks.gpu --size 1b --servers 1 --graphs auto off     # CUDA graphs on and off
    python -m benchmarks.gpu --suite --size 8b --streams 1 8 32 64 --rounds 3
    python -m benchmarks.gpu --suite --size 8b --parts hops company       # some parts of it
    python -m benchmarks.gpu --suite --size 8b --scratch /dev/shm         # with the checkpoint in memory
    python -m benchmarks.gpu --products --rounds 3                        # 1 and 8 rows by layouts of 4 bits
    python -m benchmarks.gpu --device cpu --size tiny --dtype float32     # only shows that it runs

The model is a Llama of usual shape with random bfloat16 weights, made on the spot. To give one token, a device reads
all weights once: bytes of weights times tokens per second, over the bandwidth that a large copy reaches, is the
fraction of the roofline. Streams that run together share one reading, so their tokens count once for all of them.

The parts of the suite share chains. A part that fails is a row with its error; the others go on, and the exit status
is 1.

With both kinds of `--graphs` two chains stand beside each other, one with CUDA graphs and one without, and take turns.
"""

import argparse
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Final

import torch

from benchmarks.chain import Chain
from benchmarks.command import interleaved, random_ids, run
from benchmarks.figures import Figure, failure, figure, ratio
from benchmarks.gpu_faults import handover, kills
from benchmarks.gpu_products import products
from benchmarks.gpu_suite import (
    Suite,
    cache_mib,
    company,
    first_token,
    four_bits,
    hops,
    long_row,
    ready,
    sampled,
    streams,
)
from benchmarks.local_model import LocalModel
from benchmarks.random_llama import SHAPES, read_bytes, write_checkpoint
from benchmarks.streams import speed
from corolla.compute.device import device_name
from corolla.models.checkpoint import Checkpoint
from corolla.wire.tensors import DTYPES

_PROMPT_TOKENS = 128
PARTS: Final[Mapping[str, Callable[[Suite], Iterator[Figure]]]] = {
    "streams": streams, "first_token": first_token, "long_row": long_row, "sampled": sampled, "hops": hops,
    "company": company, "kills": kills, "handover": handover, "four_bits": four_bits, "ready": ready,
}  # fmt: skip
"""The parts of the suite, by the names that `--parts` takes.

In this order neighbours share chains: `hops` uses the chain of one server, and then that of two.
"""
_COPY_BYTES = {"cuda": 4 << 30, "cpu": 256 << 20}


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--size", default="1b", choices=sorted(SHAPES))
    parser.add_argument("--scratch", type=Path, help="folder for checkpoints, such as /dev/shm; else that of TMPDIR")
    parser.add_argument("--dtype", default="bfloat16", choices=sorted(DTYPES))
    parser.add_argument("--servers", type=int, nargs="+", default=[1, 2, 4], help="hops, one chain after another")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=64, help="tokens of one answer")
    parser.add_argument("--suite", action="store_true", help="what callers see, each figure beside its goal for 8B")
    parser.add_argument(
        "--products", nargs="?", const="four-bits", choices=["all", "four-bits"],
        help="1 and 8 rows by packed layouts, no servers",
    )  # fmt: skip
    parser.add_argument("--parts", nargs="+", default=list(PARTS), choices=list(PARTS), help="of the suite")
    parser.add_argument("--prompts", type=int, nargs="+", default=[512, 2048, 8000], help="of the suite's first tokens")
    parser.add_argument("--long-row", type=int, default=0, help="tokens of its prompt; 0: 30,000, and 512 of tiny")
    parser.add_argument("--kills", type=int, default=3, help="servers that are killed, one after another")
    parser.add_argument(
        "--handover-gib", type=float, default=0.0, help="keys and values that are handed over; 0: 8, and 1/512 of tiny"
    )
    parser.add_argument("--logs", type=Path, help="folder that keeps the logs of the suite's servers")
    parser.add_argument("--quantization", default="none", choices=["none", "int8", "int4"])
    parser.add_argument("--kv-cache-mib", type=int, default=0, help="of each block server; 0: what the device has")
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
    if options.products:
        bandwidth = _copy_bandwidth(options.device)
        dtype, in_four_bits = DTYPES[options.dtype], options.products == "four-bits"
        yield from products(options.device, dtype, options.rounds, bandwidth, in_four_bits=in_four_bits)
        return
    with tempfile.TemporaryDirectory(dir=options.scratch) as scratch:
        folder = Path(scratch) / f"llama-{options.size}"
        write_checkpoint(folder, options.size, DTYPES[options.dtype], options.device)
        yield from _measure_suite(folder, options) if options.suite else _measure_model(folder, options)


def _measure_suite(folder: Path, options: argparse.Namespace) -> Iterator[Figure]:
    bandwidth, weight_bytes = _copy_bandwidth(options.device), read_bytes(folder)
    yield figure(f"bandwidth of a large copy on {device_name(torch.device(options.device))}", "GB/s", [bandwidth / 1e9])
    yield figure("roofline of one stream", "tokens/s", [bandwidth / weight_bytes])
    with Suite(folder, options, weight_bytes, bandwidth) as suite:
        for name, part in PARTS.items():
            if name not in options.parts:
                continue
            try:
                for found in part(suite):
                    # The goals are those of 8B on one H100.
                    yield found if options.size == "8b" else replace(found, target=None)
            except Exception as error:
                # The next parts get a chain that this failure cannot have touched.
                suite.close()
                yield failure(name, error)


def _measure_model(folder: Path, options: argparse.Namespace) -> Iterator[Figure]:
    checkpoint = Checkpoint.from_pretrained(str(folder))
    prompts = [random_ids(_PROMPT_TOKENS, checkpoint.vocab_size, seed) for seed in range(max(options.streams))]
    bandwidth = _copy_bandwidth(options.device)
    weight_bytes = read_bytes(folder)
    yield figure("weights read for a token, as stored in the checkpoint", "GB", [weight_bytes / 1e9])
    yield figure("bandwidth of a large copy, reading and writing", "GB/s", [bandwidth / 1e9])
    local = LocalModel(folder, options.dtype, options.device)
    environment = {
        "COROLLA_DEVICE": options.device,
        "COROLLA_PAGE_TOKENS": str(options.page_tokens),
    }

    def of_local() -> float:
        return local.answer(prompts[0], options.tokens, torch.get_num_threads()).tokens_per_s

    def of_chain(chain: Chain, count: int) -> float:
        if count == 1:
            return chain.answer(prompts[0], options.tokens).tokens_per_s
        return speed(chain, prompts[:count], options.tokens)

    modes = list(dict.fromkeys(options.graphs))
    for num_hops in options.servers:
        environment["COROLLA_KV_CACHE_MIB"] = str(cache_mib(options, folder, num_hops * len(modes), len(modes)))
        with ExitStack() as chains:
            sides: dict[str, Callable[[], float]] = {"local": of_local}
            for mode in modes:
                chain = chains.enter_context(
                    Chain(
                        folder, num_hops, dtype=options.dtype, quantization=options.quantization,
                        environment={**environment, "COROLLA_CUDA_GRAPHS": mode},
                    )
                )  # fmt: skip
                sides |= {f"{mode} {count}": partial(of_chain, chain, count) for count in options.streams}
            speeds = interleaved(sides, options.rounds)
        yield figure(f"local transformers beside {num_hops} hops", "tokens/s", speeds["local"])
        for mode in modes:
            kind = f"{num_hops} hops, graphs {mode}" if len(modes) > 1 else f"{num_hops} hops"
            for count in options.streams:
                rounds = speeds[f"{mode} {count}"]
                yield figure(f"{count} streams, {kind}", "tokens/s", rounds)
                used = [each / count * weight_bytes / bandwidth for each in rounds]
                yield figure(f"{count} streams, {kind}, fraction of the bandwidth roofline", "", used)
            if 1 in options.streams:
                yield ratio(f"1 stream, {kind} / local transformers", speeds[f"{mode} 1"], speeds["local"])
        if len(modes) > 1:
            for count in options.streams:
                yield ratio(f"{count} streams, {num_hops} hops, graphs auto / off", speeds[f"auto {count}"],
                            speeds[f"off {count}"])  # fmt: skip


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
    num_bytes = 2 * source.nbytes
    del source, target
    if device.startswith("cuda"):
        # The block servers need this memory.
        torch.cuda.empty_cache()
    return num_bytes / min(seconds)


def _synchronize(device: str) -> None:
    if device.startswith("cuda"):
        torch.cuda.synchronize(device)


if __name__ == "__main__":
    run(__doc__, add_options, measure)
