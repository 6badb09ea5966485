"""Decoding through a chain of processes, against `generate()` of transformers in this process.

    python -m benchmarks.decode --servers 2 --rounds 7

One run interleaves both sides, round by round, so that a noisy machine is equally unkind to them. Ratios are formed
within a round; what is printed is their median, with the smallest and the largest.
"""

import argparse
import json
import operator
import statistics
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from prometheus_client.parser import text_string_to_metric_families
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.generation.streamers import BaseStreamer

from corolla import Client
from corolla.local.options import StackOptions
from corolla.local.stack import Stack
from corolla.models.checkpoint import Checkpoint
from corolla.wire.tensors import DTYPES

PROMPT = "Once upon a time, in a small village by the sea, there lived"
NUM_STREAMS = 8
PREFILL_TOKENS = 512


class LocalModel:
    """The unsplit model in this process."""

    def __init__(self, folder: Path, dtype: str) -> None:
        self._model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=DTYPES[dtype])
        self.tokenizer: Any = AutoTokenizer.from_pretrained(folder)

    def decode_tokens_per_s(self, num_tokens: int) -> float:
        """Tokens after the first, over the time after the first."""
        stamps = self._token_times(self.tokenizer.encode(PROMPT), num_tokens)
        return (num_tokens - 1) / (stamps[-1] - stamps[0])

    def time_to_first_token_s(self, prompt_ids: Sequence[int]) -> float:
        started = time.perf_counter()
        return self._token_times(prompt_ids, 1)[0] - started

    def _token_times(self, prompt_ids: Sequence[int], num_tokens: int) -> list[float]:
        stamps = _TokenTimes()
        ids = torch.tensor([prompt_ids])
        self._model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, min_new_tokens=num_tokens,
            max_new_tokens=num_tokens, streamer=stamps,
        )  # fmt: skip
        return stamps.seconds


class _TokenTimes(BaseStreamer):
    def __init__(self) -> None:
        self.seconds: list[float] = []
        self._is_prompt = True

    def put(self, value: torch.Tensor) -> None:
        if not self._is_prompt:
            self.seconds.append(time.perf_counter())
        self._is_prompt = False

    def end(self) -> None:
        pass


@dataclass
class Spread:
    """Median, smallest and largest of several rounds."""

    median: float
    smallest: float
    largest: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Spread":
        return cls(statistics.median(values), min(values), max(values))

    def __str__(self) -> str:
        return f"{self.median:8.2f}  ({self.smallest:.2f} to {self.largest:.2f})"


class Chain:
    """The running stack."""

    def __init__(self, stack: Stack) -> None:
        self._stack = stack
        self._client = Client(stack.client_address)

    def decode_tokens_per_s(self, num_tokens: int) -> float:
        return self._client.generate(PROMPT, max_tokens=num_tokens, ignore_eos=True).usage.tokens_per_s

    def streams_tokens_per_s(self, num_tokens: int) -> float:
        """All tokens of concurrent streams, over the time from the first request to the last answer."""
        started = time.perf_counter()
        threads = [
            threading.Thread(target=self._client.generate, args=(PROMPT,), kwargs=_fixed_length(num_tokens))
            for _ in range(NUM_STREAMS)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return NUM_STREAMS * num_tokens / (time.perf_counter() - started)

    def time_to_first_token_s(self, prompt_ids: Sequence[int]) -> float:
        return self._client.generate(prompt_ids, **_fixed_length(1)).usage.time_to_first_token_s

    def overhead_ms_per_token(self, num_tokens: int) -> float:
        """What a token takes beyond the time in which a block server or the client service computes for it."""
        before = self._compute_seconds()
        usage = self._client.generate(PROMPT, **_fixed_length(num_tokens)).usage
        computed_s = self._compute_seconds() - before
        return 1000 * (usage.total_s - computed_s) / num_tokens

    def _compute_seconds(self) -> float:
        sums = {"corolla_hop_step_seconds_sum", "corolla_edge_compute_seconds_total"}
        ports = [process.metrics_port for process in self._stack.processes if process.metrics_port]
        return sum(_metric(port, sums) for port in ports)

    def memory_mib(self) -> list[dict[str, float | str]]:
        """For each process: resident memory, and the part that it shares with no other."""
        rows: list[dict[str, float | str]] = []
        for process in self._stack.processes:
            pid = self._stack.pid(process.name)
            if pid is None:
                continue
            fields = dict(line.split(":") for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:])
            resident, private = (
                sum(int(fields[key].split()[0]) for key in keys) / 1024
                for keys in (["Rss"], ["Private_Clean", "Private_Dirty"])
            )
            rows.append({"process": process.name, "blocks": process.blocks, "resident": resident, "private": private})
        return rows


def _fixed_length(num_tokens: int) -> dict[str, Any]:
    return {"max_tokens": num_tokens, "ignore_eos": True}


def _metric(port: int, names: set[str]) -> float:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as answer:
        families = text_string_to_metric_families(answer.read().decode())
        return sum(sample.value for family in families for sample in family.samples if sample.name in names)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--model", default="demo", help="checkpoint folder, hub id or demo")
    parser.add_argument("--blocks", default="", help="spans such as 0:10,10:30; empty: even parts")
    parser.add_argument("--servers", type=int, default=2, help="block servers when --blocks is not given")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=64, help="tokens of one answer")
    parser.add_argument("--threads", type=int, default=1, help="torch threads of each process, this one too")
    parser.add_argument("--dtype", default="float32", choices=sorted(DTYPES))
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    options = parser.parse_args()

    torch.set_num_threads(options.threads)
    folder = Checkpoint.open(options.model).folder
    with tempfile.TemporaryDirectory() as log_folder:
        stack = Stack(
            StackOptions(
                model=str(folder), num_servers=options.servers, blocks=options.blocks, dtype=options.dtype,
                num_threads=options.threads, log_folder=Path(log_folder),
            )
        )  # fmt: skip
        started = time.perf_counter()
        with stack:
            results: dict[str, Any] = {"stack_ready_s": time.perf_counter() - started}
            results |= measure(Chain(stack), LocalModel(folder, options.dtype), options.rounds, options.tokens)
    if options.json:
        print(json.dumps(results, default=asdict, indent=2))
    else:
        report(results)


def measure(chain: Chain, local: LocalModel, num_rounds: int, num_tokens: int) -> dict[str, Any]:
    """All figures, from interleaved rounds."""
    text = "The sea was calm and the boats came home one after another. " * PREFILL_TOKENS
    long_prompt = local.tokenizer.encode(text)[:PREFILL_TOKENS]
    runs: dict[str, Callable[[], float]] = {
        "local": lambda: local.decode_tokens_per_s(num_tokens),
        "chain": lambda: chain.decode_tokens_per_s(num_tokens),
        "streams": lambda: chain.streams_tokens_per_s(num_tokens),
        "overhead_ms": lambda: chain.overhead_ms_per_token(num_tokens),
        "local_ttft_s": lambda: local.time_to_first_token_s(long_prompt),
        "chain_ttft_s": lambda: chain.time_to_first_token_s(long_prompt),
    }
    for run in runs.values():
        run()
    rounds = [{name: run() for name, run in runs.items()} for _ in range(num_rounds)]

    def spread(figure: Callable[[dict[str, float]], float]) -> Spread:
        return Spread.of([figure(each) for each in rounds])

    return {
        "tokens_per_s": {name: spread(operator.itemgetter(name)) for name in ("local", "chain", "streams")},
        "chain_over_local": spread(lambda each: each["chain"] / each["local"]),
        "streams_over_chain": spread(lambda each: each["streams"] / each["chain"]),
        "overhead_ms_per_token": spread(lambda each: each["overhead_ms"]),
        "time_to_first_token_s": {
            "local": spread(lambda each: each["local_ttft_s"]),
            "chain": spread(lambda each: each["chain_ttft_s"]),
        },
        "chain_over_local_ttft": spread(lambda each: each["chain_ttft_s"] / each["local_ttft_s"]),
        "memory_mib": chain.memory_mib(),
    }


def report(results: dict[str, Any]) -> None:
    """The same as a table; medians, with the smallest and the largest round."""
    speed, first = results["tokens_per_s"], results["time_to_first_token_s"]
    lines = [
        ("stack ready, s", f"{results['stack_ready_s']:8.2f}"),
        ("local generate, tokens/s", speed["local"]),
        ("chain, one stream, tokens/s", speed["chain"]),
        (f"chain, {NUM_STREAMS} streams, tokens/s", speed["streams"]),
        ("chain / local", results["chain_over_local"]),
        (f"{NUM_STREAMS} streams / one stream", results["streams_over_chain"]),
        ("beyond computing, ms per token", results["overhead_ms_per_token"]),
        (f"first token of {PREFILL_TOKENS}, local, s", first["local"]),
        (f"first token of {PREFILL_TOKENS}, chain, s", first["chain"]),
        ("first token, chain / local", results["chain_over_local_ttft"]),
    ]
    for name, figure in lines:
        print(f"{name:34} {figure}")
    print(f"\n{'process':12} {'blocks':>8} {'resident MiB':>14} {'of its own MiB':>16}")
    for row in results["memory_mib"]:
        print(f"{row['process']:12} {row['blocks']:>8} {row['resident']:14.0f} {row['private']:16.0f}")


if __name__ == "__main__":
    main()
