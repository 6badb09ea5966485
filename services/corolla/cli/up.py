"""`corolla up`."""

import time

from corolla.cli.interruption import EXIT_INTERRUPTED, Interrupted, interruptible
from corolla.cli.stack_console import StackConsole
from corolla.local.options import StackOptions
from corolla.local.stack import Stack

_REFRESH_S = 0.5


def run_up(options: StackOptions, *, verbose: bool, as_json: bool) -> int:
    """Runs a stack until Ctrl-C or SIGTERM. Returns 0, or 130 when it had not come up by then."""
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
            with view.live():
                while True:
                    view.log_lines(stack)
                    view.placement(stack.placement())
                    time.sleep(_REFRESH_S)
        except Interrupted:
            view.end_progress()
            view.end_live()
            if not as_json:
                view.line("stack", "stopping")
        finally:
            view.end_progress()
            view.end_live()
            stack.stop()
    return 0 if is_up else EXIT_INTERRUPTED


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
        f'corolla generate "Once upon a time, in a small village by the sea," --server {stack.client_address}',
        f"corolla chat --server {stack.client_address}",
        f"corolla status --router {stack.router_address}",
    ):
        view.line("try", command, "bold")
    view.line("stack", "Ctrl-C stops it")
