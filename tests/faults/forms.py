"""kill -9 of each hop in the middle of answers that must have a form: JSON of a schema, and calls of tools.

Each schema is asked for over gRPC, greedy and sampled, with draft tokens and without, and as a stream of events over
HTTP: as the answer's form, and as the arguments of a tool that must be called. Each answer loses each hop once.
"""

import asyncio
import contextlib
import json
import math
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final

import httpx2
import jsonschema
from transformers import AutoTokenizer

from corolla.chassis.errors import CorollaError
from corolla.local.processes import ManagedProcess
from corolla.sdk.results import FinishReason
from tests.faults.figures import Figures, say
from tests.faults.running_stack import RunningStack
from tests.faults.streams import longest_wait_s
from tests.integration.metrics import sample
from tests.json_schemas import SUITE, made_schemas

MAX_STALL_S = 2.0
LEAST_WHOLE = 0.9
"""The others come to the end of their tokens before their JSON ends: the model is a random one. A run of the gate has
about twelve answers.
"""
LEAST_HIT = 0.9
_NUM_SCHEMAS: Final = 300
_MAX_TOKENS: Final = 400
_AT_A_TIME: Final = 64
_SCHEMAS_AT_A_TIME: Final = 32
"""Schemas whose grammars the last hops still have when the answers are asked for again, so that all run at once."""
_MOST_TRIES: Final = 20
"""Times that an answer is asked for until the kill hits it: it may run on the other server, or end before."""
_LATEST_KILL: Final = 0.4
"""Part of all tokens of the answers that run together, after which the kill comes at the latest."""
_NUM_FULL_SPEED: Final = 2
"""Tries before the victim is slowed down: a short answer has often ended when its first token arrives here."""
_SLOW_KILLS: Final = (0.2, 0.4)
"""Parts of all tokens of the answers that run together: most tokens of the other server come within them."""
_SLOW_WAIT_S: Final = (0.02, 2.0)
"""Seconds after which a slowed victim dies at the latest, drawn by their logarithm: an answer whose drafts all fit
comes whole in one step, so only a kill before it can hit.
"""
_PROMPT: Final = "the thin the thin"
_CLOSING_BIAS: Final = 6.0
_CHATS: Final = "/v1/chat/completions"
_TOOL: Final = "take"
_OTHER_TOOL: Final = "leave"
_NOTHING: Final = {"type": "object", "maxProperties": 0}
_REFERRING: Final = ('"$ref"', '"$dynamicRef"', '"$id"', '"$anchor"', '"$dynamicAnchor"')


class Interface(StrEnum):
    """The interface through which an answer is requested."""

    GRPC = "gRPC"
    HTTP = "HTTP"
    TOOL = "a tool over HTTP"


@dataclass(frozen=True, slots=True)
class Wanted:
    """One answer.

    Attributes:
        number: of the schema, from 1 on.
        sampling: temperature and seed; nothing: greedy.
    """

    number: int
    interface: Interface
    sampling: tuple[tuple[str, Any], ...]
    speculation: str

    @property
    def undisturbed(self) -> "Wanted":
        """Draft tokens change nothing."""
        return Wanted(self.number, self.interface, self.sampling, "off")


@dataclass(slots=True)
class Heard:
    """What came of an answer.

    Attributes:
        text: of the answer, or the arguments of its call.
        is_whole: whether the model ended it.
    """

    token_ids: list[int] = field(default_factory=list)
    arrived_s: list[float] = field(default_factory=list)
    text: str = ""
    tool: str = ""
    is_whole: bool = False
    num_recoveries: int = 0
    failure: str = ""

    def take(self, token_ids: Sequence[int], text: str) -> None:
        self.token_ids += token_ids
        self.arrived_s += [time.monotonic()] * len(token_ids)
        self.text += text

    def longest_wait_s(self, since_s: float) -> float:
        """Between two tokens, of which the second one came after `since_s`."""
        return longest_wait_s(self.arrived_s, since_s)

    @property
    def said(self) -> tuple[list[int], str, str]:
        return self.token_ids, self.tool, self.text


class Asker:
    """Asks for answers of the schemas.

    Args:
        schemas: by their numbers, less one.
    """

    def __init__(self, stack: RunningStack, http: httpx2.AsyncClient, schemas: Sequence[dict[str, Any]]) -> None:
        self._client = stack.client
        self._http = http
        self._schemas = schemas
        # A random model would seldom end what a schema leaves open.
        tokenizer = AutoTokenizer.from_pretrained(stack.local.options.model, local_files_only=True)
        closing = [tokenizer.eos_token_id, *(tokenizer.convert_tokens_to_ids(mark) for mark in '"}]')]
        self._bias = dict.fromkeys(closing, _CLOSING_BIAS)

    def all_wanted(self) -> Iterator[Wanted]:
        """Every answer that is to lose each hop."""
        modes = ("off", "prompt_lookup")
        for number, schema in enumerate(self._schemas, 1):
            samplings: list[tuple[tuple[str, Any], ...]] = [(), (("temperature", 1.0), ("seed", number))]
            for sampling in samplings:
                for mode in modes:
                    yield Wanted(number, Interface.GRPC, sampling, mode)
            yield Wanted(number, Interface.HTTP, samplings[number % 2], modes[number // 2 % 2])
            if _can_be_a_property(schema):
                yield Wanted(number, Interface.TOOL, samplings[1 - number % 2], modes[1 - number // 2 % 2])

    def check(self, wanted: Wanted, heard: Heard) -> None:
        """Raises ValueError or ValidationError: a whole answer is not of its form."""
        if heard.is_whole:
            schema = self._schemas[wanted.number - 1]
            if wanted.interface is Interface.TOOL:
                schema = _NOTHING if heard.tool == _OTHER_TOOL else _arguments_of(schema)
            jsonschema.validate(json.loads(heard.text), schema)

    async def listen(self, wanted: Wanted, heard: Heard) -> None:
        """Fills `heard` as the answer comes."""
        try:
            if wanted.interface is Interface.GRPC:
                await self._stream(wanted, heard)
            else:
                await self._events(wanted, heard)
        except CorollaError as failure:
            heard.failure = f"{type(failure).__name__}: {failure}"
        except (httpx2.HTTPError, ValueError) as failure:
            heard.failure = repr(failure)

    async def _stream(self, wanted: Wanted, heard: Heard) -> None:
        options: dict[str, Any] = dict(wanted.sampling)
        stream = self._client.stream(
            _PROMPT, response_format=_format(self._schemas[wanted.number - 1]), max_tokens=_MAX_TOKENS,
            logit_bias=self._bias, speculation=wanted.speculation, **options,
        )  # fmt: skip
        async for chunk in stream:
            heard.take(chunk.token_ids, chunk.text)
            if chunk.usage is not None:
                heard.num_recoveries = chunk.usage.recoveries
                heard.is_whole = chunk.finish_reason is FinishReason.EOS

    async def _events(self, wanted: Wanted, heard: Heard) -> None:
        body = self._body(wanted)
        async with self._http.stream("POST", _CHATS, json=body) as reply:
            if reply.status_code != httpx2.codes.OK:
                heard.failure = (await reply.aread()).decode(errors="replace")
                return
            async for line in reply.aiter_lines():
                if line.startswith("data: {"):
                    _take_event(json.loads(line.removeprefix("data: ")), heard)

    def _body(self, wanted: Wanted) -> dict[str, Any]:
        schema = self._schemas[wanted.number - 1]
        body: dict[str, Any] = {
            "messages": [{"role": "user", "content": _PROMPT}], "max_tokens": _MAX_TOKENS, "temperature": 0,
            "logit_bias": {str(token_id): bias for token_id, bias in self._bias.items()},
            "speculation": wanted.speculation, "return_token_ids": True, "stream": True,
            "stream_options": {"include_usage": True}, **dict(wanted.sampling),
        }  # fmt: skip
        if wanted.interface is Interface.HTTP:
            return {**body, "response_format": _format(schema)}
        function = {"name": _TOOL, "parameters": _arguments_of(schema), "strict": True}
        other = {"type": "function", "function": {"name": _OTHER_TOOL}}
        named = {"type": "function", "function": {"name": _TOOL}}
        return {
            **body,
            "tools": [{"type": "function", "function": function}, other],
            "tool_choice": named if wanted.number // 4 % 2 else "required",
            "parallel_tool_calls": False,
        }


async def forms(stack: RunningStack, rng: random.Random, runs: range) -> int:
    """Each run has a number of schemas: every answer of them is asked for, many at a time, and loses each hop once."""
    figures = Figures()
    limits = httpx2.Limits(max_connections=_AT_A_TIME)
    async with httpx2.AsyncClient(base_url=f"http://{stack.local.http_address}", timeout=120, limits=limits) as http:
        asker = Asker(stack, http, _chosen(runs))
        row = _Row(stack, rng, figures, asker)
        num_answers = len(row.wanted)
        await row.ask_undisturbed()
        num_hit = sum([await row.lose(span) for span in stack.spans])
    num_whole, num_expected = sum(each.is_whole for each in row.expected.values()), len(row.expected)
    figures.num_runs = len(runs)
    figures.check(num_whole >= LEAST_WHOLE * num_expected, f"only {num_whole} of {num_expected} answers were whole")
    num_hits = num_answers * len(stack.spans)
    figures.check(num_hit >= LEAST_HIT * num_hits, f"only {num_hit} of {num_hits} answers lost their hop")
    say(f"{len(runs)} schemas, {num_expected} undisturbed answers, of which the model ended {num_whole}; "
        f"{num_hit} of {num_hits} answers lost their hop on the way")  # fmt: skip
    return figures.conclude(MAX_STALL_S)


def _chosen(runs: range) -> list[dict[str, Any]]:
    """A schema for each run, those of the public suite and made ones as they are mixed in all."""
    schemas = [each["schema"] for each in SUITE]
    schemas += made_schemas(max(len(runs), _NUM_SCHEMAS) - len(schemas))
    return [schemas[(runs.start + index * len(schemas) // len(runs)) % len(schemas)] for index in range(len(runs))]


class _Row:
    """All answers, and what became of them.

    Attributes:
        wanted: those that are to lose each hop.
        expected: of each the undisturbed answer.
    """

    def __init__(self, stack: RunningStack, rng: random.Random, figures: Figures, asker: Asker) -> None:
        self._stack = stack
        self._rng = rng
        self._figures = figures
        self._asker = asker
        self.wanted = list(asker.all_wanted())
        self.expected: dict[Wanted, Heard] = {}

    async def ask_undisturbed(self) -> None:
        for batch in _batches(list(dict.fromkeys(each.undisturbed for each in self.wanted))):
            for each, heard in zip(batch, await self._heard(batch), strict=True):
                self.expected[each] = heard
                self._check(each, heard)

    async def lose(self, span: str) -> int:
        """Each answer is asked for until it has lost a server of the span. Returns how many have."""
        waiting, num_kills, began_s = self.wanted, 0, time.monotonic()
        for number in range(1, _MOST_TRIES + 1):
            missed: list[Wanted] = []
            is_slowed = number > _NUM_FULL_SPEED
            kills = _SLOW_KILLS if is_slowed else (0, _LATEST_KILL / number)
            # Those that are of a length are in their midst at the same time, and short ones only soon.
            for batch in _batches(sorted(waiting, key=self._length), _AT_A_TIME // (number // 3 + 1)):
                missed += await self._lose_one(batch, span, self._rng.uniform(*kills), is_slowed=is_slowed)
                num_kills += 1
            waiting = missed
        say(f"servers of {span}: {num_kills} killed under {len(self.wanted)} answers, of which {len(waiting)} were "
            f"never hit, in {time.monotonic() - began_s:.0f} s")  # fmt: skip
        for each in waiting:
            say(f"  never hit, of {self._length(each)} tokens: {each}")
        return len(self.wanted) - len(waiting)

    def _length(self, wanted: Wanted) -> int:
        return len(self.expected[wanted.undisturbed].token_ids)

    async def _lose_one(self, batch: Sequence[Wanted], span: str, share: float, *, is_slowed: bool) -> list[Wanted]:
        """A server of the span dies when this share of all tokens has come. Returns the answers that were not hit."""
        # The last hops have read the grammars then, and of many answers most run again where most did. One alone may go
        # to the other server each time, so later tries draw theirs.
        servers = [server for server in self._stack.servers if server.blocks == span]
        before = [await _num_tokens(server) for server in servers]
        for each, heard in zip(batch, await self._heard(batch), strict=True):
            self._check(each, heard)
        done = [await _num_tokens(server) - num for server, num in zip(servers, before, strict=True)]
        victim = self._rng.choice(servers) if is_slowed else servers[done.index(max(done))]
        num_tokens = max(1, round(share * sum(map(self._length, batch))))
        answers = [Heard() for _ in batch]
        most_s = math.exp(self._rng.uniform(*map(math.log, _SLOW_WAIT_S))) if is_slowed else math.inf
        until_s = time.monotonic() + most_s
        with self._stack.slowed(victim) if is_slowed else contextlib.nullcontext():
            asking = asyncio.gather(*map(self._asker.listen, batch, answers))
            while sum(len(each.token_ids) for each in answers) < num_tokens and time.monotonic() < until_s:
                if asking.done():
                    break
                await asyncio.sleep(0.001)
        killed_s = time.monotonic()
        self._stack.kill(victim)
        await asking
        for each, heard in zip(batch, answers, strict=True):
            self._check(each, heard)
            if heard.num_recoveries:
                self._figures.stalls_s.append(heard.longest_wait_s(killed_s))
        await self._stack.restart(victim)
        return [each for each, heard in zip(batch, answers, strict=True) if not heard.num_recoveries]

    async def _heard(self, batch: Sequence[Wanted]) -> list[Heard]:
        heard = [Heard() for _ in batch]
        await asyncio.gather(*map(self._asker.listen, batch, heard))
        return heard

    def _check(self, wanted: Wanted, heard: Heard) -> None:
        self._figures.num_runs = wanted.number
        self._figures.check(not heard.failure, f"{wanted}: {heard.failure}")
        expected = self.expected[wanted.undisturbed]
        self._figures.check(heard.said == expected.said, f"{wanted} is not the undisturbed answer")
        try:
            self._asker.check(wanted, heard)
        except (ValueError, jsonschema.ValidationError) as failure:
            self._figures.check(False, f"{wanted} is not of its form: {failure}")


async def _num_tokens(server: ManagedProcess) -> float:
    """That it has computed one by one."""
    return await sample(server.metrics_port, "corolla_hop_tokens_total", kind="decode")


def _batches(wanted: Sequence[Wanted], most: int = _AT_A_TIME) -> Iterator[Sequence[Wanted]]:
    """Those that are asked for at a time, in order."""
    batch: list[Wanted] = []
    for each in wanted:
        numbers = {before.number for before in batch} | {each.number}
        if len(batch) == most or len(numbers) > _SCHEMAS_AT_A_TIME:
            yield batch
            batch = []
        batch.append(each)
    if batch:
        yield batch


def _format(schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "it", "strict": True, "schema": schema}}


def _can_be_a_property(schema: dict[str, Any]) -> bool:
    """Whether what it refers to is found within another schema, too."""
    text = json.dumps(schema)
    return not any(each in text for each in _REFERRING)


def _arguments_of(schema: dict[str, Any]) -> dict[str, Any]:
    """What a tool takes: one value of the schema."""
    inner = {key: value for key, value in schema.items() if key != "$schema"}
    return {"type": "object", "properties": {"it": inner}, "required": ["it"], "additionalProperties": False}


def _take_event(event: dict[str, Any], heard: Heard) -> None:
    if event.get("usage"):
        heard.num_recoveries = event["usage"]["recoveries"]
    if "error" in event:
        heard.failure = json.dumps(event["error"])
    for choice in event.get("choices", ()):
        delta = choice["delta"]
        calls = delta.get("tool_calls", ())
        heard.tool += "".join(call["function"].get("name", "") for call in calls)
        arguments = "".join(call["function"]["arguments"] for call in calls)
        heard.take(choice.get("token_ids") or (), delta.get("content", "") + arguments)
        if choice["finish_reason"] is not None:
            heard.is_whole = choice["finish_reason"] in ("stop", "tool_calls")
