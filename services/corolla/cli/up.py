"""`corolla up`: runs a whole stack on this machine."""

import sys
import time

from corolla.chassis.errors import StartupError
from corolla.cli.advice import command_name
from corolla.cli.interruption import EXIT_INTERRUPTED, Interrupted, interruptible
from corolla.cli.stack_console import StackConsole
from corolla.issuer.register_file import RegisterFile
from corolla.local.options import LOOPBACK, StackOptions
from corolla.local.stack import Stack

EXIT_REFUSED = 2
_REFRESH_S = 0.5


def run_up(options: StackOptions, *, verbose: bool, as_json: bool) -> int:
    """Runs a stack until SIGINT, SIGTERM or SIGHUP.

    Returns:
        The exit status: 0; 130 if a signal came before the stack was up; 2 if other machines could reach the client
        service without authentication, and no setting allows that.
    """
    if (sentence := _refusal(options.host)) is not None:
        sys.stderr.write(f"corolla: {sentence}\n")
        return EXIT_REFUSED
    view = StackConsole(verbose=verbose, as_json=as_json)
    stack = Stack(options)
    is_up = False
    with interruptible():
        try:
            if not as_json:
                view.line("stack", f"logs are in {options.log_folder}")
            stack.start(view.report)
            is_up = True
            _say_what_to_try(view, stack, as_json=as_json)
            while True:
                view.log_lines(stack.processes)
                view.placement(stack.placement())
                time.sleep(_REFRESH_S)
        except Interrupted:
            if not as_json:
                view.line("stack", "stopping")
        finally:
            stack.stop()
    return 0 if is_up else EXIT_INTERRUPTED


def _refusal(host: str) -> str | None:
    """The message with which the client service would refuse to listen on `host`; None if it would start."""
    if host == LOOPBACK:
        return None
    # These modules are slow to import, and rarely needed.
    from corolla.chassis.exposure import check
    from corolla.chassis.settings import load
    from corolla.client.settings import ClientSettings

    try:
        check(load(ClientSettings, host=host, port=0))
    except StartupError as failure:
        return failure.message
    return None


def _say_what_to_try(view: StackConsole, stack: Stack, *, as_json: bool) -> None:
    if as_json:
        pids = {process.name: stack.pid(process.name) for process in stack.processes}
        view.tell(
            "addresses",
            client=stack.client_address,
            http=stack.http_address,
            page=stack.page_url,
            metrics={process.name: url for process, url in stack.metrics_urls},
            router=stack.router_address,
            **({"join": stack.join_address} if stack.join_address else {}),
            log_folder=str(stack.options.log_folder),
            processes=pids,
            start_seconds=stack.start_s,
        )
        return
    view.line("page", f"{stack.page_url} shows a chat, and the model at work", "bold")
    view.line("http", f"http://{stack.http_address}/v1 speaks OpenAI's dialect", "bold")
    for process, url in stack.metrics_urls:
        view.line("metrics", f"{url} of {process.title.removeprefix('corolla ')}")
    corolla = command_name()
    for command in (
        f'{corolla} generate "Once upon a time, in a small village by the sea," --server {stack.client_address}',
        f"{corolla} chat --server {stack.client_address}",
        f"{corolla} status --router {stack.router_address}",
    ):
        view.line("try", command, "bold")
    if stack.options.state_folder is not None:
        # What is not a terminal is a file or a journal, which keeps the token, and others may read it.
        if view.console.file.isatty():
            token = f"token: {RegisterFile(stack.options.state_folder).new_token().written}"
        else:
            token = f"`{corolla} tokens new --state-folder {stack.options.state_folder}` prints a token"
        view.line("stack", f"others join by:  corolla join {stack.join_address}      {token}", "bold")
    view.line("stack", "Ctrl-C stops it")
