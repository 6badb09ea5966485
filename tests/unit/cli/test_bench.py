"""`corolla bench`: its schedule, its statistics, and a run against a service that echoes."""

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from typing import Any

import pytest

from corolla.chassis import errors
from corolla.cli.app import main
from corolla.cli.bench_load import AnswerTimes, Load, ServiceLevel, arrivals_s, percentiles
from corolla.cli.interruption import EXIT_INTERRUPTED
from tests.generation_server import GenerationServer

LEVEL = ServiceLevel(first_token_s=1.0, inter_token_s=0.5)


def test_requests_are_sent_until_the_time_is_over() -> None:
    assert list(arrivals_s(1.0, lambda: 0.25)) == [0.0, 0.25, 0.5, 0.75]
    assert list(arrivals_s(0.1, lambda: 9.0)) == [0.0]


@pytest.mark.parametrize(
    "token_s, is_good",
    [((11.0, 11.5), True), ((11.1, 11.2), False), ((10.5, 11.1), False), ((10.9,), True)],
    ids=["at the limits", "late", "stalled", "one token"],
)
def test_a_good_answer_begins_in_time_and_does_not_stall(token_s: tuple[float, ...], *, is_good: bool) -> None:
    assert LEVEL.is_kept(AnswerTimes(10.0, token_s)) is is_good


def test_percentiles_are_values_that_were_measured() -> None:
    assert percentiles([float(n) for n in range(100, 0, -1)]) == {"p50": 50.0, "p90": 90.0, "p99": 99.0}
    assert percentiles([3.0]) == {"p50": 3.0, "p90": 3.0, "p99": 3.0}
    assert percentiles([]) == {}


def test_a_summary_counts_what_is_good_and_what_is_not() -> None:
    good, late = AnswerTimes(0.0, (0.5, 0.6, 0.7)), AnswerTimes(0.0, (5.0, 5.1))
    load = Load(num_sent=5, answers=[good, late], failures=Counter({"RESOURCE_EXHAUSTED": 2}))
    summary = load.summary(LEVEL, 10.0)
    assert (summary["answers"], summary["unfinished"], summary["good_answers"]) == (2, 1, 1)
    assert (summary["tokens_per_s"], summary["goodput_tokens_per_s"]) == (0.5, 0.3)
    assert summary["first_token_s"]["p99"] == 5.0
    assert summary["failures"] == {"RESOURCE_EXHAUSTED": 2}


RUN = ["bench", "--rate", "50", "--seconds", "0.5", "--prompt-tokens", "4", "--answer-tokens", "2"]


def bench(server: GenerationServer, capsys: pytest.CaptureFixture[str], *more: str) -> tuple[int, dict[str, Any]]:
    status = main([*RUN, "--server", server.address, "--json", *more])
    return status, json.loads(capsys.readouterr().out)


def test_a_run_asks_for_what_it_should(server: GenerationServer, capsys: pytest.CaptureFixture[str]) -> None:
    status, summary = bench(server, capsys)
    assert status == 0
    asked = server.servicer.requests
    assert summary["requests"] == summary["answers"] == len(asked) > 5
    assert all(len(each.tokens.ids) == 4 and each.stopping.max_tokens == 2 for each in asked)
    assert all(each.stopping.ignore_eos for each in asked)


def test_the_same_seed_sends_the_same(server: GenerationServer, capsys: pytest.CaptureFixture[str]) -> None:
    _, first = bench(server, capsys, "--seed", "3")
    _, second = bench(server, capsys, "--seed", "3")
    assert first["requests"] == second["requests"]


def test_refusals_are_counted_and_without_any_answer_it_fails(
    server: GenerationServer, capsys: pytest.CaptureFixture[str]
) -> None:
    server.servicer.failure = errors.QueueFull("too many")
    status, summary = bench(server, capsys)
    assert status == 1
    assert summary["failures"] == {"RESOURCE_EXHAUSTED": summary["requests"]}
    assert summary["first_token_s"] == {}


def test_a_table_for_people(server: GenerationServer, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*RUN, "--server", server.address]) == 0
    shown = capsys.readouterr().out
    for what in ("first token, ms", "between tokens, ms", "goodput, tokens/s", "p99"):
        assert what in shown


def test_ctrl_c_prints_what_was_measured_so_far(server: GenerationServer) -> None:
    # Five requests run at a time, so the tenth is sent only when five answers have come.
    run = [*RUN, "--seconds", "600", "--concurrency", "5"]
    command = [sys.executable, "-m", "corolla", *run, "--server", server.address, "--json"]
    running = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=os.environ)
    while len(server.servicer.requests) < 10:
        assert running.poll() is None
        time.sleep(0.05)
    running.send_signal(signal.SIGINT)
    output, _ = running.communicate(timeout=60)
    assert running.returncode == EXIT_INTERRUPTED
    assert json.loads(output)["answers"] >= 5
