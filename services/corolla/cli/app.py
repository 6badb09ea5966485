"""The commands and their options. Modules that are slow to import are imported when a command runs."""

import os
import sys
from collections.abc import Sequence
from typing import Annotated

import typer
from typer.exceptions import TyperException

from corolla.cli import (
    adapter_commands,
    ask_commands,
    kernel_commands,
    key_commands,
    service_commands,
    stack_commands,
    token_commands,
)
from corolla.cli.interruption import EXIT_INTERRUPTED, INTERRUPTED

EXIT_FAILED = 1

app = typer.Typer(
    name="corolla",
    help="Serves one language model whose blocks are spread over several processes or machines.",
    epilog="Start with: corolla up",
    no_args_is_help=True,
    add_completion=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for panel, epilog, commands in (
    ("Run a whole stack", None, (stack_commands.up, stack_commands.join, stack_commands.demo, stack_commands.plan)),
    ("Ask a model", None, (ask_commands.generate, ask_commands.chat, ask_commands.status, ask_commands.bench)),
    (
        "Run one service", service_commands.REST,
        (service_commands.router, service_commands.block_server, service_commands.client),
    ),
    ("Run one service", None, (service_commands.issuer, service_commands.certificate, service_commands.drain)),
):  # fmt: skip
    for command in commands:
        app.command(rich_help_panel=panel, epilog=epilog)(command)
for group in (key_commands.keys, token_commands.tokens, kernel_commands.kernels, adapter_commands.adapters):
    app.add_typer(group, rich_help_panel="More")


def _show_version(wanted: bool) -> None:
    if wanted:
        from corolla.cli.version import version

        sys.stdout.write(f"corolla {version()}\n")
        raise typer.Exit


@app.callback()
def _options(
    show_version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print version and commit.")
    ] = False,
) -> None:
    pass


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command. Returns the exit status: 0, 1 for a failure, 2 for a wrong call, 130 after Ctrl-C.

    A command that fails, or is interrupted before it is done, says so in one sentence on standard error.
    """
    # gRPC reads this when it is imported. Without it, gRPC prints its own notes into a command's output and before the
    # sentence that says what failed.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    try:
        status = _run(sys.argv[1:] if arguments is None else list(arguments))
        if status == EXIT_INTERRUPTED:
            sys.stderr.write(INTERRUPTED)
        return status
    except KeyboardInterrupt:
        sys.stderr.write(INTERRUPTED)
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # The reader of the output closed the pipe. Python would complain again when it closes the stream.
        sys.stdout = None
        return EXIT_FAILED


def _run(arguments: list[str]) -> int:
    try:
        status = app(arguments, prog_name="corolla", standalone_mode=False)
    except TyperException as failure:
        context = getattr(failure, "ctx", None)
        command = context.command_path if context is not None else "corolla"
        text = failure.format_message().rstrip(".")
        # `corolla` without a command prints its help and no error.
        if text:
            _complain(f"{text[:1].lower()}{text[1:]}; see {command} --help")
        return failure.exit_code
    except typer.Abort:
        return EXIT_INTERRUPTED
    except Exception as failure:
        from corolla.cli.advice import sentence_of

        sentence = sentence_of(failure)
        if sentence is None:
            raise
        _complain(sentence)
        return EXIT_FAILED
    return int(status or 0)


def _complain(sentence: str) -> None:
    sys.stderr.write(f"corolla: {sentence}\n")


if __name__ == "__main__":
    sys.exit(main())
