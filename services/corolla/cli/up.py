"""`corolla up`."""

import time

from corolla.cli.interruption import Interrupted, interruptible
from corolla.cli.stack_console import StackConsole
from corolla.local.options import StackOptions
from corolla.local.stack import Stack

_REFRESH_S = 0.5


def run_up(options: StackOptions, *, verbose: bool, as_json: bool) -> int:
    """Runs a stack until Ctrl-C or SIGTERM."""
    view = StackConsole(verbose=verbose, as_json=as_json)
    stack = Stack(options)
    try:
        with interruptible():
            try:
                if not as_json:
                    view.line("stack", f"logs are in {options.log_folder}")
                stack.start(view.report)
                _say_what_to_try(view, stack, as_json=as_json)
                with view.live():
                    while True:
                        view.log_lines(stack)
                        view.placement(stack.placement())
                        time.sleep(_REFRESH_S)
            finally:
                view.end_progress()
                view.end_live()
                if not as_json:
                    view.line("stack", "stopping")
                stack.stop()
    except Interrupted:
        return 0
    return 0


def _say_what_to_try(view: StackConsole, stack: Stack, *, as_json: bool) -> None:
    if as_json:
        pids = {process.name: stack.pid(process.name) for process in stack.processes}
        view.tell(
            "addresses",
            client=stack.client_address,
            router=stack.router_address,
            log_folder=str(stack.options.log_folder),
            processes=pids,
            start_seconds=stack.start_s,
        )
        return
    for command in (
        f'corolla generate "The capital of France is" --server {stack.client_address}',
        f"corolla chat --server {stack.client_address}",
        f"corolla status --router {stack.router_address}",
    ):
        view.line("try", command, "bold")
    view.line("stack", "Ctrl-C stops it")
