"""Templates render as in transformers, and in a process of their own those that run away cost their caller only."""

import os
import signal
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from corolla.chassis.errors import CorollaError, InternalError, InvalidRequest
from corolla.client.text.chat import TemplateProcess
from corolla.client.text.template import Template
from corolla.client.text.tokenizer import TextTokenizer

MESSAGES = [
    {"role": "system", "content": 'Be <brief> & "kind". 你好 😀'},
    {"role": "user", "content": "  a\n\nb {{ 7 }} {% x %}  "},
    {"role": "assistant", "content": ""},
    {"role": "user", "content": "\\ 'q' é\u2028"},
]
SOURCES = {
    "a loop": "{% for m in messages %}{{ bos_token + m.role + '\n' + m['content'] + eos_token }}{% endfor %}",
    "JSON": "{{ messages | tojson }}{{ messages[0] | tojson(indent=2, sort_keys=True, ensure_ascii=True) }}",
    "lines of their own": "{% if add_generation_prompt %}\n  {% set x = 1 %}\n  {{- x }}\n{% endif %}\nend\n",
    "a namespace": "{% set ns = namespace(n=0, self=3) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}"
    "{{ ns.n + ns.self }}",
    "a hidden name": "{% set ns = namespace(_n=0) %}{{ ns }}",
    "a hidden name later": "{% set ns = namespace() %}{% set ns._n = 1 %}{{ ns._n }}",
    "loop controls": "{% for m in messages %}{% if loop.index == 2 %}{% continue %}{% endif %}{{ m.role }}"
    "{% if loop.index > 2 %}{% break %}{% endif %}{% endfor %}",
    "what is generated": "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}",
    "dictionaries": "{% for k, v in dict(a=1, b=2).items() %}{{ k }}{{ v }}{% endfor %}{{ dict.fromkeys([1, 2], 0) }}",
    "a refusal": "{{ raise_exception('no') }}",
    "dates": "{{ strftime_now('%Y') }}{% if strftime_now is defined %}yes{% endif %}",
    "tools": "{{ tools is none }}{{ documents is none }}{{ custom is defined }}{{ unk_token is defined }}",
    "text": "{{ messages | map(attribute='role') | join(', ') }}{{ messages[1].content | trim | upper }}",
    "an escape": "{{ messages.__class__.__mro__ }}{{ ''.__class__ }}",
    "a change": "{{ messages.append(1) }}",
    "a macro": "{% macro say(m) %}<{{ m.role }}>{% endmacro %}{% for m in messages %}{{ say(m) }}{% endfor %}",
    "no template": "{% for %}",
}
FOREVER = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
HUGE = "{% set ns = namespace(s='x' * 1000000) %}{% for i in range(20) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}"
ON_DEMAND = (
    "{% if messages[0].content == 'forever' %}" + FOREVER + "{% endif %}"
    "{% if messages[0].content == 'huge' %}" + HUGE + "{% endif %}{{ messages[0].content }}"
)


def rendered(render: Any) -> str | None:
    """None where it raises."""
    try:
        return str(render())
    except Exception:
        return None


@pytest.mark.parametrize("source", SOURCES.values(), ids=SOURCES.keys())
@pytest.mark.parametrize("add_generation_prompt", [False, True])
def test_texts_equal_those_of_transformers(
    byte_level_tokenizer: TextTokenizer, source: str, add_generation_prompt: bool
) -> None:
    hf_tokenizer = byte_level_tokenizer.hf_tokenizer
    expected = rendered(
        lambda: hf_tokenizer.apply_chat_template(
            MESSAGES, chat_template=source, tokenize=False, add_generation_prompt=add_generation_prompt
        )
    )
    special_tokens = hf_tokenizer.special_tokens_map
    assert expected == rendered(
        lambda: Template(source, special_tokens).render(MESSAGES, add_generation_prompt=add_generation_prompt)
    )
    process = TemplateProcess(source, special_tokens)
    for _ in range(2):
        assert expected == rendered(lambda: process.render(MESSAGES, add_generation_prompt=add_generation_prompt))
    process.close()


def ask(process: TemplateProcess, content: str) -> str | None:
    return process.render([{"role": "user", "content": content}], add_generation_prompt=True)


@pytest.mark.parametrize("what, why", [("forever", "too long"), ("huge", "too much memory")])
def test_a_template_that_runs_away_is_ended_and_the_next_conversation_rendered(what: str, why: str) -> None:
    process = TemplateProcess(ON_DEMAND, {})
    for _ in range(2):
        with pytest.raises(InvalidRequest) as refused:
            ask(process, what)
        assert why in refused.value.message
        assert ask(process, "hello") == "hello"
    process.close()
    assert process.pid is None


def test_a_source_that_runs_away_while_it_is_read_is_ended() -> None:
    """Jinja computes what is constant when it compiles."""
    process = TemplateProcess("{{ 'a' * 10 ** 12 }}", {})
    with pytest.raises(InvalidRequest):
        ask(process, "hello")
    process.close()


@pytest.mark.parametrize("longest_wait_s, outcome", [(60.0, "hello"), (0.01, "QUEUE_FULL")])
def test_others_wait_for_so_long(longest_wait_s: float, outcome: str) -> None:
    process = TemplateProcess(ON_DEMAND, {}, longest_wait_s=longest_wait_s)

    def outcome_of(content: str) -> str | None:
        try:
            return ask(process, content)
        except CorollaError as error:
            return error.reason

    with ThreadPoolExecutor(1) as threads:
        assert outcome_of("begin") == "begin"
        running = threads.submit(outcome_of, "forever")
        time.sleep(0.1)
        assert outcome_of("hello") == outcome
        assert running.result() == "INVALID_REQUEST"
    process.close()


def test_a_process_that_is_ended_from_outside_is_begun_again() -> None:
    process = TemplateProcess(ON_DEMAND, {})
    ask(process, "begin")
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)
    assert ask(process, "hello") == "hello"
    process.close()


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_process_inherits_no_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COROLLA_CACHE_SECRET", "0123456789abcdef")
    process = TemplateProcess(ON_DEMAND, {})
    assert ask(process, "hello") is not None
    environment = Path(f"/proc/{process.pid}/environ").read_bytes()
    process.close()
    assert b"PATH=" in environment
    assert b"0123456789abcdef" not in environment


def test_a_process_that_cannot_run_is_an_error_of_the_service(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(InternalError):
        ask(TemplateProcess(ON_DEMAND, {}), "hello")


def test_long_conversations_fit() -> None:
    """Memory grows with what is asked for."""
    process = TemplateProcess(ON_DEMAND, {})
    text = "你" * (8 << 20)
    assert ask(process, text) == text
    assert ask(process, "hello") == "hello"
    process.close()
