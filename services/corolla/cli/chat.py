"""`corolla chat`: a conversation in the terminal, or over a pipe."""

import contextlib
import dataclasses
import json
import sys
from collections.abc import Iterator
from typing import Any

from corolla.chassis.errors import CorollaError, InvalidRequest, SessionNotFound
from corolla.cli.advice import sentence_of
from corolla.cli.generate import print_ignored, say, usage_text
from corolla.cli.interruption import interruption
from corolla.sdk.client import Chat, Client
from corolla.sdk.messages import Turn
from corolla.sdk.results import Message, ToolCall

_HELP = "/reset starts a new conversation, /exit or Ctrl-D leaves, Ctrl-C stops an answer."


def run_chat(client: Client, system: str | None, session: str | None, options: dict[str, Any], *, as_json: bool) -> int:
    """Runs a chat with one turn for each line. A failed turn ends the command, but on a terminal the chat goes on."""
    is_terminal = sys.stdin.isatty() and sys.stdout.isatty() and not as_json
    if is_terminal:
        say(f"Talking with {client.models()[0].name}. {_HELP}")
    while True:
        with client.chat(system=system, session=session, **options) as chat:
            wants_more = _terminal_talk(chat) if is_terminal else _piped_talk(chat, as_json=as_json)
        if not wants_more:
            return 0
        session = None
        say("A new conversation.")


def _terminal_talk(chat: Chat) -> bool:
    """Talks with the user. Returns whether another conversation is wanted."""
    # This import gives `input` line editing and a history.
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401

    while True:
        try:
            text = _asked("you")
        except EOFError:
            sys.stdout.write("\n")
            return False
        except KeyboardInterrupt:
            say("\nCtrl-D leaves.")
            continue
        if text in ("/exit", "/quit"):
            return False
        if text == "/reset":
            return True
        if text.startswith("/"):
            say(_HELP)
        elif text:
            try:
                _talk_about(chat, text)
            except SessionNotFound:
                say("The service does not know this conversation any more.")
                return True
            except CorollaError as failure:
                sys.stderr.write(f"corolla: {sentence_of(failure)}\n")


def _talk_about(chat: Chat, text: str) -> None:
    """Sends a turn. While the model calls tools, asks the user for their results and sends these."""
    calls = _answer_on_terminal(chat, text)
    while calls:
        try:
            results = [_result(call, _asked(call.name)) for call in calls]
        except (EOFError, KeyboardInterrupt):
            say("\nContinuing without the results.")
            return
        calls = _answer_on_terminal(chat, results)


def _asked(who: str) -> str:
    return input(f"\001\033[1;36m\002{who}>\001\033[0m\002 ").strip()


def _answer_on_terminal(chat: Chat, turn: Turn) -> tuple[ToolCall, ...]:
    """Shows the answer to a turn. Returns the calls that wait for results."""
    with interruption() as interrupted:
        stream = chat.stream(turn)
        interrupted.closes(stream)
        for chunk in stream:
            sys.stdout.write(f"\033[2m{chunk.reasoning}\033[0m" if chunk.reasoning else "")
            sys.stdout.write(chunk.text)
            sys.stdout.flush()
    if interrupted.came:
        say("\n(stopped)")
        return ()
    sys.stdout.write("\n" + "".join(map(_called, stream.tool_calls)))
    if stream.usage is not None:
        say(usage_text(stream.usage, stream.finish_reason))
    print_ignored(stream.ignored)
    return stream.tool_calls


def _called(call: ToolCall) -> str:
    return f"{call.name}({call.arguments})\n"


def _result(call: ToolCall, text: str) -> Message:
    return Message("tool", text, tool_call_id=call.id, name=call.name)


def _piped_talk(chat: Chat, *, as_json: bool) -> bool:
    calls: tuple[ToolCall, ...] = ()
    results: list[Message] = []
    for text in _piped_turns():
        if text in ("/exit", "/quit"):
            return False
        if text == "/reset":
            return True
        # After an answer with calls, the next lines are their results, one line for each call.
        if len(results) < len(calls):
            results.append(_result(calls[len(results)], text))
            if len(results) < len(calls):
                continue
        turn: Turn = results or text
        calls = _piped_answer(chat, turn, text, as_json=as_json)
        results = []
    return False


def _piped_answer(chat: Chat, turn: Turn, text: str, *, as_json: bool) -> tuple[ToolCall, ...]:
    """Prints the answer to a turn. Returns the calls that wait for results."""
    if as_json:
        reply = chat.send(turn)
        facts = {"user": text, "session": chat.session_id, **dataclasses.asdict(reply)}
        sys.stdout.write(json.dumps(facts) + "\n")
        sys.stdout.flush()
        return reply.tool_calls
    sys.stdout.write(f"> {text}\n")
    stream = chat.stream(turn)
    for chunk in stream:
        sys.stdout.write(chunk.text)
        sys.stdout.flush()
    sys.stdout.write("\n" + "".join(map(_called, stream.tool_calls)) + "\n")
    sys.stdout.flush()
    print_ignored(stream.ignored)
    return stream.tool_calls


def _piped_turns() -> Iterator[str]:
    try:
        # `readline` returns each line at once, so that the writer can wait for an answer before the next turn.
        while line := sys.stdin.readline():
            if text := line.strip():
                yield text
    except UnicodeDecodeError:
        raise InvalidRequest("standard input", "is not UTF-8 text") from None
