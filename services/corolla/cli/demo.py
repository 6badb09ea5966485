"""`corolla demo`: starts a stack, completes a text and chats, in about a minute."""

import time

from rich.console import Console
from rich.panel import Panel
from rich.rule import Rule
from rich.text import Text

from corolla.chassis.errors import InternalError
from corolla.cli.advice import command_name
from corolla.cli.generate import usage_text
from corolla.cli.interruption import EXIT_INTERRUPTED, Interrupted, interruptible
from corolla.cli.placement_table import placement_table
from corolla.cli.stack_console import StackConsole
from corolla.local.options import StackOptions
from corolla.local.stack import Stack
from corolla.sdk.client import Client, Stream
from corolla.sdk.results import Usage

_PROMPT = "Once upon a time, in a small village by the sea,"
_QUESTIONS = ("What is the capital of France? Answer in one sentence.", "And of Italy?")


def run_demo(options: StackOptions) -> int:
    """Starts a stack, completes a text, holds a chat of two turns, and stops the stack. Returns the exit status.

    Raises:
        CorollaError: one of these steps failed.
    """
    view = StackConsole()
    console = view.console
    console.print(
        Panel(
            "One language model, split over several processes. Each block server\n"
            "computes some of its blocks; every token goes through all of them.",
            title="Corolla",
            expand=False,
        )
    )
    stack = Stack(options)
    started = time.perf_counter()
    try:
        with interruptible():
            try:
                console.print(Rule("1. Start", align="left"))
                view.line("stack", f"logs are in {options.log_folder}")
                stack.start(view.report)
                placement = stack.placement()
                if placement is None:
                    raise InternalError("the router stopped answering")
                console.print(placement_table(placement))
                with Client(stack.client_address, timeout=120) as client:
                    _talk(console, client)
            finally:
                stack.stop()
    except Interrupted:
        return EXIT_INTERRUPTED
    start_s = sum(seconds for stage, seconds in stack.start_s.items() if stage != "imports")
    all_s = time.perf_counter() - started
    console.print(f"{len(stack.servers)} block servers, started in {start_s:.1f} s; all in {all_s:.1f} s")
    console.print(f"Run a stack of your own: [bold]{command_name()} up[/bold]")
    return 0


def _talk(console: Console, client: Client) -> None:
    console.print(Rule("2. Complete a text", align="left"))
    with client.stream(_PROMPT, max_tokens=48, temperature=0) as stream:
        _show(console, _PROMPT, stream)
    console.print(Rule("3. Chat: the second turn sends only its new tokens", align="left"))
    with client.chat(max_tokens=48, temperature=0) as chat:
        for question in _QUESTIONS:
            console.print(Text.assemble(("you    ", "bold cyan"), question))
            console.print(Text("model  ", style="bold green"), end="")
            with chat.stream(question) as stream:
                usage = _show(console, "", stream)
    if not usage.cached_tokens:
        raise InternalError("the second turn found nothing of the first one in the servers' caches")


def _show(console: Console, before: str, stream: Stream) -> Usage:
    console.print(Text(before, style="bold"), end="")
    num_chunks = 0
    for chunk in stream:
        # Chunks go to the file directly: rich would wrap the text.
        console.file.write(chunk.text)
        console.file.flush()
        num_chunks += 1
    console.print()
    if stream.usage is None or not stream.token_ids or not num_chunks:
        raise InternalError("the model's answer is empty")
    console.print(Text(f"       {usage_text(stream.usage, stream.finish_reason)}\n", style="dim"), soft_wrap=True)
    return stream.usage
