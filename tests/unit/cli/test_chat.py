"""`corolla chat` over pipes and on a pseudo-terminal, against a service that echoes."""

import json
import os
import pty
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from tests.generation_server import GenerationServer


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


class Terminal:
    """A command on a pseudo-terminal."""

    def __init__(self, command: list[str]) -> None:
        self._pid, self._fd = pty.fork()
        if self._pid == 0:
            os.execv(command[0], command)
        self.shown = ""
        self._is_closed = False

    def wait_for(self, text: str, timeout_s: float = 20.0) -> None:
        """Fails unless the text appears after what was waited for last."""
        give_up = time.monotonic() + timeout_s
        while text not in self.shown:
            if time.monotonic() > give_up:
                pytest.fail(f"{text!r} did not appear in {self.shown!r}")
            if select.select([self._fd], [], [], 0.2)[0]:
                try:
                    self.shown += os.read(self._fd, 4096).decode()
                except OSError:
                    pytest.fail(f"the command ended before {text!r} appeared in {self.shown!r}")
        self.shown = self.shown.partition(text)[2]

    def type(self, text: str) -> None:
        os.write(self._fd, text.encode())

    def close(self) -> int:
        """Returns the exit status."""
        _, status = os.waitpid(self._pid, 0)
        os.close(self._fd)
        self._is_closed = True
        return os.waitstatus_to_exitcode(status)

    def kill(self) -> None:
        """After a test that failed half-way."""
        if not self._is_closed:
            os.kill(self._pid, signal.SIGKILL)
            self.close()


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
    assert server.servicer.cancelled.wait(5)
    terminal.wait_for("you>")
    terminal.type("\x03")
    terminal.wait_for("Ctrl-D leaves.")
    terminal.type("still here\n")
    terminal.wait_for("still here\r\nstill here")
    terminal.wait_for("you>")
    terminal.type("/exit\n")
    assert terminal.close() == 0
