"""`corolla chat` over pipes and on a pseudo-terminal, against a service that echoes."""

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.generation_server import GenerationServer
from tests.terminal import Terminal


def chat_command(server: GenerationServer, *options: str) -> list[str]:
    return [sys.executable, "-m", "corolla", "chat", "--server", server.address, *options]


def piped(server: GenerationServer, text: str, *options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        chat_command(server, *options), input=text, capture_output=True, text=True, check=False, timeout=30
    )


def test_each_line_is_a_turn(server: GenerationServer) -> None:
    done = piped(server, "hello\n\nand now\n", "--system", "be brief", "--max-tokens", "9")
    assert done.returncode == 0
    assert done.stdout == "> hello\nhello\n\n> and now\nand now\n\n"
    assert done.stderr == ""
    _, first, second = server.servicer.requests
    assert [each.role for each in first.messages] == ["system", "user"]
    assert [each.role for each in second.messages] == ["user"]
    assert first.stopping.max_tokens == 9
    assert server.servicer.sessions == {}


def test_a_reset_starts_another_session(server: GenerationServer) -> None:
    assert piped(server, "a\n/reset\nb\n/exit\nc\n").stdout == "> a\na\n\n> b\nb\n\n"
    chats = [each for each in server.servicer.requests if hasattr(each, "messages")]
    assert chats[0].session_id != chats[1].session_id


def test_the_next_lines_are_the_results_of_the_tools_that_were_called(server: GenerationServer, tmp_path: Path) -> None:
    tools = tmp_path / "tools.json"
    tools.write_text('[{"name": "now"}, {"name": "get_weather"}]')
    options = ("--tools", str(tools), "--tool-choice", "auto")
    done = piped(server, "hi\nnoon\nblue\n", *options)
    assert done.stdout == '> hi\n\nnow({"a": 1})\nget_weather({"a": 1})\n\n> blue\nblue\n\n'
    results = server.servicer.requests[-1].messages
    assert [(each.role, each.content, each.tool_call_id, each.name) for each in results] == [
        ("tool", "noon", "c0", "now"),
        ("tool", "blue", "c1", "get_weather"),
    ]
    first, _ = [json.loads(line) for line in piped(server, "hi\nnoon\nblue\n", "--json", *options).stdout.splitlines()]
    assert [call["name"] for call in first["tool_calls"]] == ["now", "get_weather"]
    tools.write_text("{")
    assert "is not JSON" in piped(server, "hi\n", "--tools", str(tools)).stderr


def test_json_has_a_line_for_each_turn(server: GenerationServer) -> None:
    turns = [json.loads(line) for line in piped(server, "a\nb\n", "--json").stdout.splitlines()]
    assert [turn["text"] for turn in turns] == ["a", "b"]
    assert turns[0]["session"] == turns[1]["session"]
    assert turns[1]["usage"]["cached_tokens"] == 10


def test_a_session_can_be_continued(server: GenerationServer) -> None:
    from corolla import Client

    with Client(server.address) as client:
        session_id = client.create_session().session_id
    assert piped(server, "a\n", "--session", session_id).returncode == 0
    assert server.servicer.sessions[session_id].num_turns == 1


def test_an_unknown_session_is_a_failure(server: GenerationServer) -> None:
    done = piped(server, "a\n", "--session", "0" * 32)
    assert done.returncode == 1
    assert done.stderr == "corolla: there is no such session\n"


@pytest.fixture
def terminal(server: GenerationServer) -> Iterator[Terminal]:
    opened = Terminal(chat_command(server))
    yield opened
    opened.kill()


def test_a_conversation_on_a_terminal(terminal: Terminal, server: GenerationServer) -> None:
    terminal.wait_for("you>")
    terminal.type("hello there\n")
    terminal.wait_for("hello there\r\nhello there")
    terminal.wait_for("2 tokens")
    terminal.wait_for("you>")
    terminal.type("/reset\n")
    terminal.wait_for("A new conversation.")
    terminal.wait_for("you>")
    terminal.type("\x04")
    assert terminal.close() == 0
    assert server.servicer.sessions == {}


def test_ctrl_c_stops_the_answer_and_not_the_program(terminal: Terminal, server: GenerationServer) -> None:
    terminal.wait_for("you>")
    terminal.type("endless\n")
    terminal.wait_for("on and on")
    terminal.type("\x03")
    terminal.wait_for("(stopped)")
    assert server.servicer.cancelled.wait(30)
    terminal.wait_for("you>")
    # An interrupt between the prompt and readline's waiting for a key is seen only with the next key.
    time.sleep(0.5)
    terminal.type("\x03")
    terminal.wait_for("Ctrl-D leaves.")
    terminal.type("still here\n")
    terminal.wait_for("still here\r\nstill here")
    terminal.wait_for("you>")
    terminal.type("/exit\n")
    assert terminal.close() == 0
