"""Questions whose answers are known, put to a release."""

import json
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from itertools import chain, cycle, islice, pairwise
from typing import Final

import httpx2

from corolla import Client
from tests.golden import NUM_NEW_TOKENS, GoldenAnswer, golden_answers
from tests.http_clients import command_of, script, variables

GREEDY: Final = [each for each in golden_answers() if not each.sampling and len(each.prompt_ids) < 200]
"""Short questions, answered by always taking the likeliest token."""


NUM_LONG_TOKENS: Final = 4000
NUM_DISTURBED_TOKENS: Final = 2 * NUM_NEW_TOKENS
"""So many tokens behind a long text take longer than a pod takes to leave: it may go on for two seconds."""


@dataclass
class Streamed:
    """An answer as its tokens came.

    Attributes:
        waits_s: how long each chunk of tokens was waited for after the disturbance, in order.
    """

    token_ids: list[int]
    num_recoveries: int
    waits_s: list[float]


def answer_of(address: str, golden: GoldenAnswer) -> tuple[list[int], int]:
    """The streamed token ids, and how many recoveries it took."""
    streamed = _streamed(address, golden.prompt_ids, len(golden.token_ids))
    return streamed.token_ids, streamed.num_recoveries


def disturbed(address: str, disturb: Callable[[], None]) -> Streamed:
    """An answer behind a long text, whose tokens are right; `disturb` runs when its first tokens are there."""
    expected = _undisturbed(address)
    streamed = _streamed(address, _long_text(), NUM_DISTURBED_TOKENS, disturb)
    assert streamed.token_ids == expected
    return streamed


@cache
def _long_text() -> list[int]:
    """The known prompts, again and again."""
    return list(islice(cycle(chain.from_iterable(each.prompt_ids for each in golden_answers())), NUM_LONG_TOKENS))


@cache
def _undisturbed(address: str) -> list[int]:
    return _streamed(address, _long_text(), NUM_DISTURBED_TOKENS).token_ids


def _streamed(
    address: str, prompt_ids: list[int], max_tokens: int, disturb: Callable[[], None] | None = None
) -> Streamed:
    token_ids: list[int] = []
    arrived_s: list[float] = []
    with Client(address, timeout=600) as client:
        stream = client.stream(prompt_ids, max_tokens=max_tokens, temperature=0, ignore_eos=True)
        for chunk in stream:
            token_ids += chunk.token_ids
            if disturb is not None:
                disturb()
                disturb = None
            arrived_s.append(time.monotonic())
        assert stream.usage is not None
    waits_s = [after - before for before, after in pairwise(arrived_s)]
    return Streamed(token_ids, stream.usage.recoveries, waits_s)


def answer_over_http(address: str, golden: GoldenAnswer) -> list[int]:
    """The token ids, by OpenAI's dialect."""
    options = {"max_tokens": len(golden.token_ids), "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    body = {"prompt": list(golden.prompt_ids), **options}
    reply = httpx2.post(f"http://{address}/v1/completions", json=body, timeout=600)
    assert reply.is_success, reply.text
    return list(reply.json()["choices"][0]["token_ids"])


def ask_with_openai(address: str, what: str, golden: GoldenAnswer) -> None:
    """Asks by the `openai` package, and fails where it does."""
    (model,) = [each["id"] for each in httpx2.get(f"http://{address}/v1/models", timeout=60).json()["data"]]
    command = command_of(script("openai"), f"http://{address}", "no key", what, model)
    known = json.dumps({"prompt": list(golden.prompt_ids), "answer": list(golden.token_ids)})
    done = subprocess.run(command, env=variables(), input=known, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-6000:]


@contextmanager
def load(address: str) -> Iterator[list[str]]:
    """Asks one question after the other meanwhile. Yields the list of failures."""
    golden = GREEDY[0]
    problems: list[str] = []
    is_over = threading.Event()
    num_answers = 0

    def ask() -> None:
        nonlocal num_answers
        while not is_over.is_set():
            try:
                with Client(address, timeout=300) as client:
                    answer = client.generate(golden.prompt_ids, max_tokens=16, temperature=0, ignore_eos=True)
                if list(answer.token_ids) != golden.token_ids[:16]:
                    problems.append("other tokens")
                num_answers += 1
            except Exception as failure:
                problems.append(repr(failure))
                time.sleep(0.5)

    thread = threading.Thread(target=ask)
    thread.start()
    try:
        yield problems
    finally:
        is_over.set()
        thread.join()
    assert num_answers > 0
