"""Recovery by length of text: how long an answer stalls when a server dies in the middle of it, and whether it changes.

    python -m benchmarks.recovery --lengths 256 2048 --kills 20
    python -m benchmarks.recovery --url http://HOST:8000/v1 --model NAME \
        --kill-command 'kubectl delete pod --force --grace-period=0 POD' --settle-seconds 60

Without `--url` it starts a chain of its own, with two servers for each half of the model, and kills the servers of both
halves in turn. With it, any service that speaks OpenAI's completions is measured, whose server the command kills.

Each kill has a prompt of its own, which no server has seen. Its greedy answer is heard first with a kill at a random
token, and then undisturbed. The stall is the longest wait for a token after the kill. An answer that the kill did not
hit (a chain of its own tells) is asked for again with another prompt.
"""

import argparse
import json
import random
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import Any, Final

import httpx2

from benchmarks.chain import Chain
from benchmarks.command import progress, random_ids, run
from benchmarks.figures import Figure, at_least, figure, percentile
from corolla.local.processes import ManagedProcess
from corolla.models.checkpoint import Checkpoint

_MOST_TRIES: Final = 8
"""Times that a kill is tried until it hits: the answer may have ended."""
_TIMEOUT_S: Final = 600.0
_DONE: Final = "[DONE]"


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--url", help="OpenAI's base URL of a running service; default: a chain of its own")
    parser.add_argument("--key", default="none", help="of the service at --url")
    parser.add_argument("--kill-command", help="kills a server of the service at --url")
    parser.add_argument("--settle-seconds", type=float, default=30.0, help="after which a killed server is back")
    parser.add_argument("--model", default="demo", help="checkpoint folder, hub id or demo; the name at --url")
    parser.add_argument("--vocab-size", type=int, default=10_000, help="token ids of prompts at --url lie below it")
    parser.add_argument("--lengths", type=int, nargs="+", default=[32, 256, 2048], help="tokens of the prompts")
    parser.add_argument("--tokens", type=int, default=64, help="tokens of one answer")
    parser.add_argument("--kills", type=int, default=10, help="for each length")
    parser.add_argument(
        "--at-token", type=int, default=0, help="of the answer, when it kills; 0: a random one of its first half"
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--setting", action="append", default=[], metavar="NAME=VALUE", help="of the chain of its own")


def measure(options: argparse.Namespace) -> Iterator[Figure]:
    if bool(options.url) != bool(options.kill_command):
        raise SystemExit("--url and --kill-command belong together")
    with ExitStack() as exits:
        service = _theirs(options) if options.url else _ours(options, exits)
        http = httpx2.Client(
            base_url=service.url, timeout=_TIMEOUT_S, headers={"authorization": f"Bearer {options.key}"}
        )
        exits.callback(http.close)
        generator = random.Random(options.seed)
        for length in options.lengths:
            kills: list[_Kill] = []
            for number in range(options.kills):
                progress(f"kill {number + 1} of {options.kills} at {length} tokens")
                kills.append(_one_kill(options, service, http, length, generator))
            progress("")
            name, stalls_s = f"prompt of {length}, {len(kills)} kills", [each.stall_s for each in kills]
            yield figure(f"{name}: stall", "s", stalls_s)
            yield figure(f"{name}: stall, p99", "s", [percentile(stalls_s, 99)])
            longest = max(kills, key=lambda kill: kill.stall_s)
            yield figure(f"{name}: token at which the longest was killed", "", [longest.at_token])
            share = sum(each.is_equal for each in kills) / len(kills)
            yield figure(f"{name}: answers equal to undisturbed ones", "share", [share], at_least(1.0))
            yield figure(f"{name}: further ones that hit no answer", "", [sum(each.num_missed for each in kills)])


@dataclass(slots=True)
class _Service:
    """What is measured.

    Attributes:
        kill: kills a server.
        restore: waits until what was killed is back.
        tells_hits: whether the usage of an answer says how often it was recovered.
    """

    url: str
    model: str
    vocab_size: int
    kill: Callable[[], None]
    restore: Callable[[], None]
    tells_hits: bool


def _theirs(options: argparse.Namespace) -> _Service:
    def kill() -> None:
        subprocess.run(options.kill_command, shell=True, check=True)

    restore = partial(time.sleep, options.settle_seconds)
    return _Service(options.url, options.model, options.vocab_size, kill, restore, tells_hits=False)


def _ours(options: argparse.Namespace, exits: ExitStack) -> _Service:
    checkpoint = Checkpoint.from_pretrained(options.model)
    half, end = checkpoint.num_blocks // 2, checkpoint.num_blocks
    environment = dict(each.partition("=")[::2] for each in options.setting)
    blocks = f"0:{half},{half}:{end},0:{half},{half}:{end}"
    chain = exits.enter_context(
        Chain(options.model, len(blocks.split(",")), blocks=blocks, environment=environment, restarts=False)
    )
    victims = _Victims(chain)
    with httpx2.Client(base_url=f"{chain.http_url}/v1", timeout=_TIMEOUT_S) as http:
        model = http.get("models").json()["data"][0]["id"]
    return _Service(
        f"{chain.http_url}/v1", model, checkpoint.vocab_size, victims.kill, victims.restore, tells_hits=True
    )


class _Victims:
    """Kills the block servers of a chain, the two halves in turn, and starts them again."""

    def __init__(self, chain: Chain) -> None:
        self._chain = chain
        self._spans = sorted({server.blocks for server in chain.servers})
        self._dead: list[ManagedProcess] = []

    def kill(self) -> None:
        span = self._spans[0]
        self._spans = [*self._spans[1:], span]
        victim = max(
            (server for server in self._chain.servers if server.blocks == span),
            key=lambda server: self._chain.status(server).num_running_sessions,
        )
        self._chain.kill(victim)
        self._dead.append(victim)

    def restore(self) -> None:
        for victim in self._dead:
            self._chain.until(partial(self._is_dead, victim), f"the end of {victim.name}")
            self._chain.launch(victim)
            self._chain.until_ready(victim)
        self._dead.clear()

    def _is_dead(self, victim: ManagedProcess) -> bool:
        return not self._chain.is_alive(victim)


@dataclass(slots=True)
class _Heard:
    """What came of one answer; `num_recoveries` only from a service that tells it."""

    text: str = ""
    arrived_s: list[float] = field(default_factory=list)
    num_recoveries: int = 0


@dataclass(frozen=True, slots=True)
class _Kill:
    """What one kill did to an answer.

    Attributes:
        at_token: of the answer, when it was done.
        is_equal: whether the answer equals the undisturbed one.
        num_missed: how many kills before it hit no answer.
    """

    at_token: int
    stall_s: float
    is_equal: bool
    num_missed: int


def _one_kill(
    options: argparse.Namespace, service: _Service, http: httpx2.Client, length: int, generator: random.Random
) -> _Kill:
    for num_missed in range(_MOST_TRIES):
        prompt = random_ids(length, service.vocab_size, generator.getrandbits(32))
        at_token = options.at_token or generator.randrange(1, options.tokens // 2)
        body = {
            "model": service.model, "prompt": prompt, "max_tokens": options.tokens, "temperature": 0,
            "ignore_eos": True, "stream": True, "stream_options": {"include_usage": True},
        }  # fmt: skip
        killed_s = 0.0

        def kill_at(num_tokens: int, at_token: int = at_token) -> None:
            nonlocal killed_s
            if num_tokens >= at_token and not killed_s:
                service.kill()
                killed_s = time.perf_counter()

        disturbed = _hear(http, body, kill_at)
        service.restore()
        if service.tells_hits and not disturbed.num_recoveries:
            continue
        # Pages that were copied would change both answers alike, if they were wrong.
        alone = {"cache_salt": "undisturbed"} if service.tells_hits else {}
        undisturbed = _hear(http, body | alone, lambda _: None)
        stall_s = _longest_wait_s(disturbed.arrived_s, killed_s)
        return _Kill(at_token, stall_s, disturbed.text == undisturbed.text, num_missed)
    raise RuntimeError(f"no answer lost its server in {_MOST_TRIES} tries")


def _hear(http: httpx2.Client, body: dict[str, Any], at_token: Callable[[int], None]) -> _Heard:
    """Reads one answer, and calls `at_token` with the number of events with text so far."""
    heard = _Heard()
    with http.stream("POST", "completions", json=body) as reply:
        if reply.status_code != httpx2.codes.OK:
            raise RuntimeError(f"{reply.status_code}: {reply.read().decode(errors='replace')[:500]}")
        for line in reply.iter_lines():
            data = line.removeprefix("data: ")
            if data in (line, _DONE):
                continue
            event = json.loads(data)
            if event.get("usage"):
                heard.num_recoveries = event["usage"].get("recoveries", 0)
            if "error" in event:
                raise RuntimeError(f"the answer ended with {json.dumps(event['error'])[:500]}")
            for choice in event.get("choices", ()):
                heard.text += choice.get("text", "")
                heard.arrived_s.append(time.perf_counter())
                at_token(len(heard.arrived_s))
    return heard


def _longest_wait_s(arrived_s: list[float], since_s: float) -> float:
    """Between two events, of which the second one came after `since_s`."""
    return max(later - earlier for earlier, later in pairwise(arrived_s) if later > since_s)


if __name__ == "__main__":
    run(__doc__, add_options, measure)
