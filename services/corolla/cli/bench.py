"""`corolla bench`: open-loop load on a running service."""

import asyncio
import contextlib
import json
import random
import signal
import sys
import time
from collections.abc import Callable
from typing import Any

from rich import box
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from corolla.chassis.errors import CorollaError, InvalidRequest
from corolla.cli.ask_options import BenchLoad, Place
from corolla.cli.bench_load import PERCENTILES, REFUSED, AnswerTimes, Load, ServiceLevel, arrivals_s
from corolla.cli.interruption import EXIT_INTERRUPTED
from corolla.sdk.async_client import AsyncClient

_EXIT_FAILED = 1
_FIRST_WORD = 256
"""The lowest token id that prompts use, if the vocabulary is large enough; lower ids are often special tokens."""


def run_bench(place: Place, options: BenchLoad, level: ServiceLevel, *, as_json: bool) -> int:
    """Loads a service and prints the measurements, also after Ctrl-C.

    Returns:
        The exit status: 0; 1 if no request had an answer; 130 after Ctrl-C.
    """
    load = Load()
    # The status shows on a terminal alone.
    with Console(stderr=True, quiet=as_json).status("no requests yet") as status:
        elapsed_s, is_interrupted = asyncio.run(_Bench(options, load, status.update).run(place))
    if as_json:
        sys.stdout.write(json.dumps(load.summary(level, elapsed_s)) + "\n")
    else:
        Console(highlight=False).print(bench_report(load.summary(level, elapsed_s), level))
    if is_interrupted:
        return EXIT_INTERRUPTED
    return 0 if load.answers else _EXIT_FAILED


class _Bench:
    def __init__(self, options: BenchLoad, load: Load, show: Callable[[str], None]) -> None:
        self._options = options
        self._load = load
        self._show = show
        self._random = random.Random(options.seed)
        most = options.concurrency
        self._places = asyncio.Semaphore(most) if most is not None else contextlib.nullcontext()

    async def run(self, place: Place) -> tuple[float, bool]:
        """Sends the requests. Returns the seconds until the last answer, and whether Ctrl-C ended the run early."""
        model = place.model
        async with place.client(AsyncClient) as asked:
            models = await asked.models()
            found = next((each for each in models if model in ("", each.name)), models[0])
            needed = self._options.prompt_tokens + self._options.answer_tokens
            if needed > found.context_length:
                raise InvalidRequest("prompt", f"{needed} tokens exceed the context of {found.context_length}")
            began_s = time.perf_counter()
            sending = asyncio.create_task(self._send(asked, model, found.vocab_size, began_s))
            asyncio.get_running_loop().add_signal_handler(signal.SIGINT, sending.cancel)
            while not sending.done():
                await asyncio.wait({sending}, timeout=0.2)
                load = self._load
                self._show(f"{load.num_done} of {load.num_sent} requests, {load.failures.total()} failed")
            if not sending.cancelled():
                sending.result()
            return time.perf_counter() - began_s, sending.cancelled()

    async def _send(self, client: AsyncClient, model: str, vocab_size: int, began_s: float) -> None:
        async with asyncio.TaskGroup() as group:
            for arrival_s in arrivals_s(self._options.seconds, lambda: self._random.expovariate(self._options.rate)):
                meant_s = began_s + arrival_s
                await asyncio.sleep(max(0.0, meant_s - time.perf_counter()))
                lowest = min(_FIRST_WORD, vocab_size // 2)
                highest = max(vocab_size, 2) - 1
                prompt = [self._random.randint(lowest, highest) for _ in range(self._options.prompt_tokens)]
                self._load.num_sent += 1
                group.create_task(self._ask(client, model, prompt, meant_s))

    async def _ask(self, client: AsyncClient, model: str, prompt: list[int], meant_s: float) -> None:
        stamps_s: list[float] = []
        async with self._places:
            try:
                stream = client.stream(
                    prompt, model=model, max_tokens=self._options.answer_tokens, temperature=0.0, ignore_eos=True
                )
                async for chunk in stream:
                    stamps_s += [time.perf_counter()] * len(chunk.token_ids)
            except CorollaError as failure:
                label = REFUSED if failure.code.name == REFUSED else failure.reason
                self._load.failures[label] += 1
                return
        if stamps_s:
            self._load.answers.append(AnswerTimes(meant_s, stamps_s))


def bench_report(summary: dict[str, Any], level: ServiceLevel) -> RenderableType:
    """The report: percentiles of the times, then the counts, then the definition of a good answer, in 80 columns."""
    times = Table(box=box.SIMPLE_HEAD, header_style="dim", pad_edge=False)
    times.add_column("")
    for percent in PERCENTILES:
        times.add_column(f"p{percent}", justify="right")
    for name, key in (("first token", "first_token_s"), ("between tokens", "inter_token_s"), ("answer", "answer_s")):
        times.add_row(f"{name}, ms", *(f"{1000 * value:.1f}" for value in summary[key].values()))
    counts = Table(box=None, show_header=False, pad_edge=False, padding=(0, 3, 0, 1))
    failures = ", ".join(f"{number} {label}" for label, number in summary["failures"].items()) or "0"
    for name, value in (
        ("requests", f"{summary['requests']} in {summary['seconds']:.1f} s"),
        ("answers", f"{summary['answers']}, {summary['answers_per_s']:.2f}/s"),
        ("unfinished", str(summary["unfinished"])),
        ("failed", failures),
        ("tokens/s", f"{summary['tokens_per_s']:.1f}"),
        ("goodput, tokens/s", f"{summary['goodput_tokens_per_s']:.1f}"),
        ("goodput, answers/s", f"{summary['goodput_answers_per_s']:.2f}"),
    ):
        counts.add_row(name, value)
    kept = (
        f"\n Goodput counts answers whose first token came in {level.first_token_s:g} s, and no other one took longer "
        f"than {level.inter_token_s:g} s."
    )
    return Group(times, counts, Text(kept, style="dim"))
