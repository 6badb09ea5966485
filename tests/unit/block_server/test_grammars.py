"""A last hop reads each grammar once, and keeps the latest."""

import asyncio
import threading
from collections.abc import Callable

import pytest
from prometheus_client import CollectorRegistry

from corolla.block_server.grammars import Grammars
from corolla.block_server.row_sampling import SessionSampler
from corolla.chassis.errors import MalformedMessage
from corolla.chassis.metrics import GrammarMetrics
from corolla.client.text import formats
from corolla.decoding.grammar_text import read_grammar
from corolla.decoding.parameters import SamplingParams
from corolla.decoding.sampler_record import SamplerRecord
from corolla.models.checkpoint import Checkpoint
from corolla.v1 import blocks_pb2 as pb
from corolla.v1.common_pb2 import SamplingParameters
from tests.checkpoints import VOCAB_SIZE, make_tiny_checkpoint, make_tokenizer

FORM = formats.grammar_of(formats.regex("[ab]{1,5}", "regex")).text
DEEP = formats.grammar_of(
    formats.lark("start: r0\n" + "".join(f"r{n}:r{n + 1}\n" for n in range(5000)) + 'r5000:"a"', "lark")
).text


def a_servers(checkpoint: Checkpoint, registry: CollectorRegistry | None = None) -> Grammars:
    return Grammars(checkpoint, GrammarMetrics(registry or CollectorRegistry(), "corolla_hop_grammar"))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return Checkpoint.from_pretrained(str(make_tiny_checkpoint("llama", tmp_path_factory.mktemp("grammars") / "tiny")))


def test_answers_that_break_the_grammar_and_texts_that_are_none_are_refused(checkpoint: Checkpoint) -> None:
    grammars = a_servers(checkpoint)
    for text, token_ids in ((FORM, [50]), ("no grammar", []), ("", [])):
        with pytest.raises(MalformedMessage):
            grammars.begin(text, token_ids)
    assert grammars.has(FORM)
    assert not grammars.has("no grammar")


def test_rules_as_deep_as_a_grammar_can_have_do_not_end_the_process(checkpoint: Checkpoint) -> None:
    grammar = a_servers(checkpoint).begin(DEEP, [])
    assert grammar.forced()


def test_only_the_latest_are_kept(checkpoint: Checkpoint) -> None:
    grammars = a_servers(checkpoint)
    grammars.begin(FORM, [])
    for number in range(70):
        grammars.begin(formats.grammar_of(formats.regex(f"a{number}", "regex")).text, [])
        if number == 50:
            grammars.begin(FORM, [])
    assert grammars.has(FORM)
    assert not grammars.has(formats.grammar_of(formats.regex("a0", "regex")).text)


def hold_up(monkeypatch: pytest.MonkeyPatch, may_end: threading.Event, on_begun: Callable[[str], None]) -> None:
    """No grammar is read before `may_end` is set; `on_begun` gets the text of each one that is to be."""

    def read_slowly(tokenizer: object, text: str) -> object:
        on_begun(text)
        assert may_end.wait(60)
        return read_grammar(tokenizer, text)  # type: ignore[arg-type]

    monkeypatch.setattr("corolla.block_server.grammars.read_grammar", read_slowly)


def test_who_has_a_grammar_does_not_wait_for_one_that_is_read(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    grammars, begun, may_end = a_servers(checkpoint), threading.Event(), threading.Event()
    grammars.begin(FORM, [])
    hold_up(monkeypatch, may_end, lambda text: begun.set())
    reading = threading.Thread(target=grammars.begin, args=(DEEP, []))
    reading.start()
    try:
        assert begun.wait(60)
        assert not grammars.has(DEEP)
        grammars.begin(FORM, [])
    finally:
        may_end.set()
        reading.join()
    assert grammars.has(DEEP)


async def test_each_grammar_is_read_once_however_many_wait_and_nobody_elses_work_does(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    grammars, may_end, texts = a_servers(checkpoint), threading.Event(), list[str]()
    hold_up(monkeypatch, may_end, texts.append)
    waiting = [asyncio.ensure_future(grammars.read("one", text)) for text in (FORM, DEEP) for _ in range(50)]
    try:
        assert await asyncio.wait_for(asyncio.to_thread(lambda: "done"), 30) == "done"
        assert not grammars.has(FORM)
        # No session waits any more for a grammar that was not begun.
        for each in waiting[50:]:
            each.cancel()
    finally:
        may_end.set()
        await asyncio.wait(waiting)
    assert grammars.has(FORM)
    assert not grammars.has(DEEP)
    assert texts == [FORM]


async def test_a_tenant_does_not_wait_for_all_the_grammars_of_another_one(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    grammars, may_end, texts = a_servers(checkpoint), threading.Event(), list[str]()
    hold_up(monkeypatch, may_end, texts.append)
    many = [formats.grammar_of(formats.regex(f"a{{{number}}}", "regex")).text for number in range(1, 1001)]
    noisy = [asyncio.ensure_future(grammars.read("noisy", text)) for text in many]
    await asyncio.sleep(0)
    quiet = asyncio.ensure_future(grammars.read("quiet", FORM))
    may_end.set()
    await asyncio.wait_for(quiet, 30)
    assert texts.index(FORM) <= 2
    for each in noisy:
        each.cancel()
    await asyncio.wait(noisy)


async def test_grammars_are_counted_by_what_became_of_them(checkpoint: Checkpoint) -> None:
    registry = CollectorRegistry()
    grammars = a_servers(checkpoint, registry)
    await grammars.read("one", FORM)
    await grammars.read("one", FORM)
    assert grammars.has(FORM)
    with pytest.raises(MalformedMessage):
        await grammars.read("one", "no grammar")

    def count(outcome: str) -> float | None:
        return registry.get_sample_value("corolla_hop_grammars_total", {"outcome": outcome})

    assert [count(outcome) for outcome in ("compiled", "cached", "refused")] == [1, 1, 1]
    assert registry.get_sample_value("corolla_hop_grammar_compile_seconds_count") == 2


@pytest.mark.parametrize(
    "broken",
    [
        pb.Sampler(grammar=pb.Grammar(text="no grammar")),
        pb.Sampler(parameters=SamplingParameters(logit_bias={VOCAB_SIZE: 1.0})),
        pb.Sampler(parameters=SamplingParameters(logit_bias={1: 1000.0})),
    ],
)
def test_samplers_that_make_no_sense_are_refused(checkpoint: Checkpoint, broken: pb.Sampler) -> None:
    message = SamplerRecord(SamplingParams(), 0, [1], max_new_tokens=5).message()
    message.MergeFrom(broken)
    with pytest.raises(MalformedMessage):
        SessionSampler.read(message, None, vocab_size=VOCAB_SIZE, max_tokens=9, grammars=a_servers(checkpoint))


def test_a_record_has_no_more_of_the_text_than_a_grammar_needs(checkpoint: Checkpoint) -> None:
    record = SamplerRecord(SamplingParams(logit_bias=((4, 1.5),)), 0, [7] * 1000, max_new_tokens=9, grammar=FORM)
    token_id = make_tokenizer().encode("a")[0]
    record.accept([token_id])
    message = record.message()
    assert (list(message.token_ids), message.num_prompt_tokens) == ([token_id], 0)
    sampler = SessionSampler.read(message, None, vocab_size=VOCAB_SIZE, max_tokens=2000, grammars=a_servers(checkpoint))
    assert sampler.sampler.params.logit_bias == ((4, 1.5),)
    assert not sampler.takes_likeliest
