"""Grammars are tried in a small process that can be ended."""

import asyncio
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from corolla.chassis.errors import InvalidRequest, QueueFull
from corolla.chassis.metrics import GrammarMetrics
from corolla.client.text import formats, worker_process
from corolla.client.text.grammar_process import GrammarProcess
from corolla.client.text.tokenizer import TextTokenizer

VOCAB_SIZE = 400
MOST_MIB = 200


@pytest.fixture
def registry() -> CollectorRegistry:
    return CollectorRegistry()


@pytest.fixture
def grammars(byte_level_tokenizer: TextTokenizer, registry: CollectorRegistry) -> Iterator[GrammarProcess]:
    metrics = GrammarMetrics(registry, "corolla_grammar")
    grammars = GrammarProcess(byte_level_tokenizer, VOCAB_SIZE, [1], metrics)
    yield grammars
    grammars.close()


def refusal(grammars: GrammarProcess, form: formats.AnswerFormat, received: list[int] | None = None) -> str | None:
    try:
        grammars.check(form, received or [])
    except InvalidRequest as error:
        return error.message
    return None


def pid_of(grammars: GrammarProcess) -> int:
    assert grammars.pid is not None
    return grammars.pid


def test_forms_are_tried_once(grammars: GrammarProcess) -> None:
    good, bad = formats.regex("[ab]+", "good"), formats.regex("(", "bad")
    for _ in range(2):
        assert refusal(grammars, good) is None
        assert "bad: " in str(refusal(grammars, bad))
        # What is known needs no process.
        os.kill(pid_of(grammars), signal.SIGSTOP)
    os.kill(pid_of(grammars), signal.SIGKILL)
    assert refusal(grammars, formats.regex("[cd]+", "next")) is None


def test_forms_are_counted_by_what_became_of_them(grammars: GrammarProcess, registry: CollectorRegistry) -> None:
    for expression in ("a+", "a+", "a+", "(", "("):
        refusal(grammars, formats.regex(expression, "regex"))

    def count(outcome: str) -> float | None:
        return registry.get_sample_value("corolla_grammars_total", {"outcome": outcome})

    assert [count(outcome) for outcome in ("compiled", "cached", "refused")] == [1, 2, 2]
    assert registry.get_sample_value("corolla_grammar_compile_seconds_count") == 2


def test_a_grammar_that_exhausts_the_process_is_refused_and_the_next_one_tried(grammars: GrammarProcess) -> None:
    deep = "start: r0\n" + "".join(f"r{n}:r{n + 1}\n" for n in range(5000)) + 'r5000:"a"'
    assert "too much memory" in str(refusal(grammars, formats.lark(deep, "lark")))
    assert refusal(grammars, formats.regex("a", "regex")) is None


AHEAD = {"type": "object", "properties": {"a": {"pattern": "^(?!x)"}, "b": {"pattern": "^y"}}, "required": ["b"]}
IMPOSSIBLE = {"type": "integer", "minimum": 5, "maximum": 3}


def test_a_pattern_that_looks_ahead_is_left_out_and_named(grammars: GrammarProcess) -> None:
    for _ in range(2):
        admitted = grammars.check(formats.json_schema(json.dumps(AHEAD), "f"))
        assert admitted.ignored == ("f.properties.a.pattern",)
        assert "(?!" not in admitted.grammar
        assert "^y" in admitted.grammar
    strict = formats.json_schema(json.dumps(AHEAD), "f", is_strict=True)
    assert refusal(grammars, strict) == "f: is strict, and grammars cannot follow properties.a.pattern"


def test_a_schema_that_nothing_fits_is_refused_by_its_field_or_left_out(grammars: GrammarProcess) -> None:
    def form(*, may_be_any: bool) -> formats.AnswerFormat:
        fine = formats.FormPart("a", json_schema=AHEAD, field="first")
        impossible = formats.FormPart("b", json_schema=IMPOSSIBLE, field="second", may_be_any=may_be_any)
        return formats.calls_or("start: @a | @b", [fine, impossible], None, "", "tools")

    assert str(refusal(grammars, form(may_be_any=False))).startswith("second: cannot be a grammar: Unsatisfiable")
    assert grammars.check(form(may_be_any=True)).ignored == ("second", "first.properties.a.pattern")


async def test_a_tenant_does_not_wait_for_all_the_grammars_of_another_one(grammars: GrammarProcess) -> None:
    def deep(number: int) -> formats.AnswerFormat:
        rules = "".join(f"r{n}:r{n + 1}\n" for n in range(5000 + number))
        return formats.lark(f'start: r0\n{rules}r{5000 + number}:"a"', "lark")

    refused: list[int] = []

    async def ask(number: int) -> None:
        with pytest.raises(InvalidRequest):
            await grammars.admit("noisy", deep(number), ())
        refused.append(number)

    noisy = [asyncio.ensure_future(ask(number)) for number in range(6)]
    await asyncio.wait(noisy, return_when=asyncio.FIRST_COMPLETED)
    before = len(refused)
    await grammars.admit("quiet", formats.regex("a", "regex"), ())
    assert len(refused) <= before + 2
    await asyncio.gather(*noisy)


async def test_a_tenant_that_asks_for_a_thousand_forms_takes_nobody_elses_place(grammars: GrammarProcess) -> None:
    noisy = [
        asyncio.ensure_future(grammars.admit("noisy", formats.regex(f"a{{{number}}}", "regex"), ()))
        for number in range(1, 1001)
    ]
    await asyncio.sleep(0)
    await grammars.admit("quiet", formats.regex("b", "regex"), ())
    assert sum(each.done() and each.exception() is None for each in noisy) <= 2
    ends = await asyncio.gather(*noisy, return_exceptions=True)
    assert any(isinstance(each, QueueFull) for each in ends)


@pytest.mark.full
def test_tokens_that_take_long_do_not_count_against_their_grammar(
    grammars: GrammarProcess, byte_level_tokenizer: TextTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    # So many have to be sent, too, and a busy machine takes its time.
    monkeypatch.setattr(worker_process, "LONGEST_S", 120.0)
    form = formats.regex("a*", "regex")
    received = byte_level_tokenizer.encode("a", add_special_tokens=False) * 20_000_000
    assert "received.ids" in str(refusal(grammars, form, received))
    assert refusal(grammars, form) is None


def test_tokens_that_have_come_are_tried_too(grammars: GrammarProcess, byte_level_tokenizer: TextTokenizer) -> None:
    form = formats.regex("[ab]+", "regex")
    encode = byte_level_tokenizer.encode
    assert refusal(grammars, form, encode("abba", add_special_tokens=False)) is None
    assert "received.ids" in str(refusal(grammars, form, encode("abc", add_special_tokens=False)))
    assert refusal(grammars, form) is None


def test_the_process_is_small(grammars: GrammarProcess) -> None:
    """No torch, no transformers."""
    assert refusal(grammars, formats.json_object("object")) is None
    folder = Path(f"/proc/{pid_of(grammars)}")
    assert "torch" not in (folder / "maps").read_text()
    rss_pages = int((folder / "statm").read_text().split()[1])
    assert rss_pages * os.sysconf("SC_PAGE_SIZE") < MOST_MIB << 20


def test_a_model_without_end_tokens_has_no_forms(byte_level_tokenizer: TextTokenizer) -> None:
    metrics = GrammarMetrics(CollectorRegistry(), "corolla_grammar")
    assert "end-of-sequence" in str(
        refusal(GrammarProcess(byte_level_tokenizer, VOCAB_SIZE, [], metrics), formats.regex("a", "f"))
    )
