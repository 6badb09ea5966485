"""`corolla generate` against a service that echoes."""

import io
import json
import sys
from pathlib import Path

import pytest

from corolla.chassis import errors
from corolla.chassis.status import parse_status, to_status
from corolla.cli.advice import sentence_of
from corolla.cli.app import main
from corolla.cli.ask_options import Place
from corolla.v1 import generation_pb2 as pb
from tests.generation_server import API_KEY, GenerationServer
from tests.terminal import Terminal


@pytest.fixture(autouse=True)
def _address(server: GenerationServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COROLLA_SERVER", server.address)


def give_stdin(monkeypatch: pytest.MonkeyPatch, data: bytes) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data), encoding="utf-8"))


@pytest.mark.parametrize("how", [[], ["--stream"], ["--no-stream"]])
def test_the_text_and_nothing_else(how: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "one two", *how]) == 0
    captured = capsys.readouterr()
    assert captured.out == "one two\n"
    assert captured.err == ""


def test_a_prompt_from_standard_input(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    give_stdin(monkeypatch, b"one\ntwo \xff\n")
    assert main(["generate", "-"]) == 0
    assert capsys.readouterr().out == "one\ntwo �\n"


def test_json_is_one_object(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "one two", "--json", "--logprobs", "1"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["model"] == "echo"
    assert answer["completions"][0]["finish_reason"] == "length"
    assert answer["completions"][0]["logprobs"][0]["logprob"] == -0.5
    assert answer["usage"]["completion_tokens"] == 2


def test_log_probabilities_without_json_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "one two", "--logprobs", "1"]) == 2
    assert "--logprobs needs --json" in capsys.readouterr().err


@pytest.mark.parametrize(
    "field, option",
    [
        ("stopping.max_tokens", "--max-tokens"),
        ("response_format.json_schema", "--json-schema"),
        ("speculation.mode", "--speculation"),
        ("speculation", "--speculation"),
        ("num_completions", "-n"),
        ("prompt", "prompt"),
    ],
)
def test_an_error_names_the_option_in_place_of_the_field(field: str, option: str) -> None:
    failure = parse_status(to_status(errors.InvalidRequest(field, "must be another")))
    assert sentence_of(failure) == f"{option}: must be another"


def test_a_stream_of_json_is_one_object_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "one two", "--json", "--stream"]) == 0
    first, last = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert (first["text"], first["usage"]) == ("one", None)
    assert (last["text"], last["finish_reason"]) == (" two", "eos")
    assert last["usage"]["prompt_tokens"] == 7


def test_a_file_of_a_key_is_read_at_each_request(tmp_path: Path) -> None:
    file = tmp_path / "token"
    shown = Place(api_key="given", api_key_file=file).key
    for token in ("first", "second"):
        file.write_text(f"{token}\n")
        assert callable(shown)
        assert shown() == token
    assert Place(api_key="given").key == "given"
    assert main(["generate", "one two", "--api-key-file", str(file)]) == 0


def test_several_completions_are_numbered(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "one two", "-n", "2"]) == 0
    assert capsys.readouterr().out == "[1] one two\n[2] one two\n"


def test_the_options_arrive(server: GenerationServer) -> None:
    given = "--max-tokens 5 --temperature 0 --seed 0 --stop a --stop b --top-p .5 --time-limit 2 --speculation off"
    assert main(["generate", "one", *given.split(), "--ignore-eos"]) == 0
    (request,) = server.servicer.requests
    assert request.stopping.max_tokens == 5
    assert request.sampling.HasField("temperature")
    assert request.sampling.HasField("seed")
    assert request.sampling.top_p == 0.5
    assert list(request.stopping.stop) == ["a", "b"]
    assert request.stopping.ignore_eos
    assert request.stopping.time_limit_ms == 2000
    assert request.speculation.mode == pb.SPECULATION_MODE_OFF
    assert not request.sampling.HasField("top_k")


@pytest.mark.parametrize(
    "failure, said",
    [
        (errors.InvalidRequest("sampling.top_p", "must be in (0, 1]"), "corolla: --top-p: must be in (0, 1]\n"),
        (errors.NoChain("no server holds blocks 3:7"), "corolla: no server holds blocks 3:7; try again in 2 s\n"),
        (errors.Unauthenticated("a key is wanted here"), "--api-key or COROLLA_API_KEY"),
    ],
    ids=lambda each: type(each).__name__,
)
def test_a_failure_names_the_option_the_delay_or_what_to_do(
    server: GenerationServer, failure: errors.CorollaError, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    server.servicer.failure = failure
    assert main(["generate", "one", "--api-key", API_KEY]) == 1
    shown = capsys.readouterr().err
    assert said == shown if said.endswith("\n") else said in shown


def test_ctrl_c_cancels_the_call_and_one_sentence_says_so(server: GenerationServer) -> None:
    terminal = Terminal([sys.executable, "-m", "corolla", "generate", "endless"])
    terminal.wait_for("on and on")
    terminal.type("\x03")
    terminal.wait_for("\r\ncorolla: a signal ended the command before it was done")
    assert terminal.close() == 130
    assert server.servicer.cancelled.wait(30)
    assert "Traceback" not in terminal.shown


def test_a_form_arrives(server: GenerationServer, tmp_path: Path) -> None:
    schema = tmp_path / "schema.json"
    schema.write_text('{"type": "object"}')
    assert main(["generate", "one", "--json-schema", str(schema)]) == 0
    assert main(["generate", "one", "--regex", "[a-z]+"]) == 0
    by_schema, by_regex = server.servicer.requests
    assert json.loads(by_schema.response_format.json_schema) == {"type": "object"}
    assert by_regex.response_format.regex == "[a-z]+"


@pytest.mark.parametrize("how", ["--stream", "--no-stream"])
def test_what_has_no_effect_is_said(
    server: GenerationServer, tmp_path: Path, how: str, capsys: pytest.CaptureFixture[str]
) -> None:
    schema = tmp_path / "schema.json"
    schema.write_text('{"not": {}}')
    server.servicer.ignored = ("response_format.json_schema.not",)
    assert main(["generate", "one", "--json-schema", str(schema), how]) == 0
    assert capsys.readouterr() == ("one\n", "without effect: response_format.json_schema.not\n")


@pytest.mark.parametrize("text, more", [("{", []), ("{}", ["--regex", "a"])], ids=["no JSON", "two forms"])
def test_a_form_that_is_none_is_refused_before_the_call(
    server: GenerationServer, tmp_path: Path, text: str, more: list[str]
) -> None:
    schema = tmp_path / "schema.json"
    schema.write_text(text)
    assert main(["generate", "one", "--json-schema", str(schema), *more]) == 2
    assert not server.servicer.requests
