"""Bytes that lead ever further into the code that takes them apart: targets of atheris, in a process of their own.

    python -m tests.adversary.fuzzing TARGET FOLDER -max_total_time=20

The folder keeps what led further. Of a failure libFuzzer prints the bytes, and keeps them where -artifact_prefix says.
"""

import contextlib
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, cast

import atheris
import torch

with atheris.instrument_imports(include=["corolla", "jinja2"]):
    from jinja2.exceptions import TemplateError

    from corolla.block_server.row_sampling import SessionSampler
    from corolla.cache import store as kv
    from corolla.cache.transfer import TokenCopy, check_tokens, forget_unsent, write_tokens
    from corolla.chassis.errors import CorollaError, InternalError, MalformedMessage, OutOfPages
    from corolla.client.text.template import Template
    from corolla.router.sessions import SessionRecords
    from corolla.router.store import Store
    from corolla.v1 import blocks_pb2 as pb
    from corolla.v1 import common_pb2, router_pb2
    from corolla.wire import frames

from google.protobuf.message import DecodeError

from tests.frame_bytes import join

MAX_FRAME_BYTES: Final = 1 << 12
CHAT_TEMPLATE: Final = (
    "{{ bos_token }}{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] | trim }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
NUM_PAGES, PAGE_TOKENS, WINDOWS, MAX_TOKENS = 32, 4, (None, 6, None), 24
VOCAB_SIZE: Final = 64


def take_frames(data: bytes) -> None:
    """What frames there are does not depend on where the bytes are cut."""

    def found(cut: int) -> tuple[bytes, bool]:
        parser, found = frames.FrameParser(MAX_FRAME_BYTES), b""
        try:
            for start in range(0, len(data), cut):
                for frame in parser.feed(data[start : start + cut]):
                    found += join([frames.encode(*frame)])
        except MalformedMessage:
            return found, True
        return found, False

    cut = data[0] % 64 + 1 if data else 1
    assert found(cut) == found(len(data) + 1)


class Handovers:
    """Parts of sessions into one cache: whatever comes, it holds finite numbers, and its pages add up."""

    def __init__(self) -> None:
        self._store = kv.KVStore(NUM_PAGES, PAGE_TOKENS, WINDOWS)
        one = torch.zeros(1, 1, 2)
        for layer in range(len(WINDOWS)):
            for tensor in self._store.layer_like(layer, one, one):
                tensor.zero_()

    def take(self, data: bytes) -> None:
        given = atheris.FuzzedDataProvider(data)
        cache = self._store.new_cache()
        cache.reserve(MAX_TOKENS)
        for _ in range(given.ConsumeIntInRange(1, 4)):
            self._take_part(cache, given)
            assert cache.num_tokens <= MAX_TOKENS
        cache.clear()
        assert self._store.pool.num_available == NUM_PAGES

    def _take_part(self, cache: kv.SessionCache, given: Any) -> None:
        """Takes a part of a session, as a receiver does."""
        position, num_tokens = (given.ConsumeIntInRange(0, MAX_TOKENS) for _ in range(2))
        if position + num_tokens > MAX_TOKENS or not cache.can_continue_from(position):
            return
        firsts = tuple(given.ConsumeIntInRange(0, MAX_TOKENS * 2) for _ in WINDOWS)
        num_bytes = given.ConsumeIntInRange(0, 16 * len(WINDOWS) * num_tokens)
        # The payload has the right size and any content: wrong sizes alone are soon refused.
        payload = given.ConsumeBytes(num_bytes).ljust(num_bytes, b"\x00")
        layers = range(len(WINDOWS))
        with contextlib.suppress(MalformedMessage, OutOfPages):
            copy = TokenCopy(position, num_tokens, firsts, payload)
            write_tokens(cache, check_tokens(self._store, layers, copy))
            forget_unsent(cache, layers, firsts)
            assert cache.num_tokens == position + num_tokens
            for layer in layers:
                for tensor in self._store.layer(layer):
                    assert tensor.isfinite().all()


def take_record(data: bytes) -> None:
    """What the store holds for a session, on its way through a router."""

    class Held:
        async def call(self, script: str, *arguments: Any) -> list[Any]:
            return [b"ok", data, 0, 1000, 3, b"store"]

    records = SessionRecords(cast(Store, Held()))
    hop = common_pb2.Hop(server_id="s", address="a:1", span=common_pb2.BlockSpan(start=0, end=5))
    for work in (records.get("m", "s", "t"), records.move("m", "s", "t", "r", hop)):
        try:
            work.send(None)
        except StopIteration:
            continue
        except CorollaError as error:
            if type(error) is InternalError and "cannot be read" not in error.message:
                raise


def take_sampler(data: bytes) -> None:
    """What is known of a session's answer, on its way to another last hop."""
    with contextlib.suppress(DecodeError):
        sampler = pb.Sampler.FromString(data)
        with contextlib.suppress(CorollaError):
            SessionSampler.read(sampler, None, vocab_size=VOCAB_SIZE, max_tokens=MAX_TOKENS)


def take_template(data: bytes) -> None:
    """A template is read or refused. The process that it runs in bounds what one may cost; that is not tested here."""
    source = data.decode(errors="replace")
    if not re.search(r"\*|\d{4}", source):
        with contextlib.suppress(TemplateError, SyntaxError, MemoryError, RecursionError):
            Template(source, {})


_CHAT: Final = Template(CHAT_TEMPLATE, {"bos_token": "<s>"})


def take_messages(data: bytes) -> None:
    """What callers write is text to a template."""
    given = atheris.FuzzedDataProvider(data)
    messages = [
        {"role": given.ConsumeUnicode(8), "content": given.ConsumeUnicode(64)}
        for _ in range(given.ConsumeIntInRange(0, 3))
    ]
    with contextlib.suppress(TemplateError):
        assert isinstance(_CHAT.render(messages, add_generation_prompt=given.ConsumeBool()), str)


def _frame_seeds() -> list[bytes]:
    return [join([frames.encode(cls(), b"payload")]) for cls in frames.CONTROL_CLASSES.values()]


def _record_seeds() -> list[bytes]:
    hops = [
        common_pb2.Hop(server_id=name, address="a:1", span=common_pb2.BlockSpan(start=start, end=start + 5))
        for name, start in (("s", 0), ("r", 5))
    ]
    chain = common_pb2.Chain(hops=hops, fingerprint="f")
    record = router_pb2.SessionRecord(session_id="s", tenant="t", model="m", token_log=[1, 300, 3], chain=chain)
    return [record.SerializeToString()]


def _sampler_seeds() -> list[bytes]:
    plain = pb.Sampler(num_tokens_left=8)
    drawn = pb.Sampler(
        parameters=common_pb2.SamplingParameters(top_p=0.5, top_k=4, repetition_penalty=1.2), num_tokens_left=8, seed=3
    )
    return [each.SerializeToString() for each in (plain, drawn)]


_SOURCES: Final = (
    CHAT_TEMPLATE,
    "{% generation %}{{ messages|tojson }}{% endgeneration %}",
    "{% set n = namespace(a=dict(b=1)) %}{% for m in messages %}{% break %}{% else %}{{ m['role'] }}{% endfor %}",
    "{% macro a(b) %}{{ raise_exception(b) }}{% endmacro %}{{ strftime_now('%Y')[:2] ~ a(x is defined) }}",
)

TARGETS: Final[Mapping[str, tuple[Callable[[bytes], None], Sequence[bytes]]]] = {
    "frames": (take_frames, _frame_seeds()),
    "handovers": (Handovers().take, ()),
    "records": (take_record, _record_seeds()),
    "samplers": (take_sampler, _sampler_seeds()),
    "templates": (take_template, [each.encode() for each in _SOURCES]),
    "messages": (take_messages, ()),
}
"""And bytes to begin with."""


def main(name: str, folder: str, *options: str) -> None:
    take, seeds = TARGETS[name]
    for number, seed in enumerate(seeds):
        (Path(folder) / f"seed-{number}").write_bytes(seed)
    atheris.Setup([sys.argv[0], *options, folder], take)
    atheris.Fuzz()


if __name__ == "__main__":
    main(*sys.argv[1:])
