"""Shows a running stack on the console: events, log lines with their process, and the placement when it changes."""

import json
import re
import sys
import threading
from collections.abc import Iterable, Mapping
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from corolla.cli.placement_table import placement_facts, placement_table
from corolla.local.processes import ManagedProcess
from corolla.local.supervisor import StackEvent
from corolla.v1 import router_pb2

_COLOURS = ("cyan", "magenta", "blue", "yellow", "green", "bright_cyan", "bright_magenta", "bright_blue")
_NAME_WIDTH = 9
_IMPORTANT = re.compile(r"\b(WARNING|ERROR|CRITICAL)\b|^corolla: |^Traceback|^\w*(Error|Exception)\b")
_EVENT_STYLES = {"problem": "bold red", "recovered": "green", "ready": "bold green"}


class StackConsole:
    """Prints what a stack does on standard output: as text, or as lines of JSON if `as_json`."""

    def __init__(self, *, verbose: bool = False, as_json: bool = False) -> None:
        self.console = Console(highlight=False, stderr=as_json)
        self._verbose = verbose
        self._as_json = as_json
        self._lock = threading.Lock()
        self._colours: dict[str, str] = {}
        self._last_placement: tuple[Any, ...] = ()

    def report(self, event: StackEvent) -> None:
        """Prints an event of the stack. Any thread may call it."""
        with self._lock:
            if self._as_json:
                self.tell(event.kind, source=event.source, text=event.text)
            else:
                self.line(event.source, event.text, _EVENT_STYLES.get(event.kind, ""))

    def tell(self, event: str, **facts: Any) -> None:
        """Prints one line of JSON."""
        sys.stdout.write(json.dumps({"event": event, **facts}) + "\n")
        sys.stdout.flush()

    def line(self, source: str, text: str, style: str = "") -> None:
        """Prints one line with its source in front."""
        colour = self._colours.setdefault(source, _COLOURS[len(self._colours) % len(_COLOURS)])
        line = Text.assemble((f"{source:>{_NAME_WIDTH}} ", colour), ("| ", "dim"), (text, style))
        self.console.print(line, soft_wrap=True)

    def facts(self, event: str, facts: Mapping[str, Any]) -> None:
        """Prints facts as a table with a row for each, or as one line of JSON."""
        if self._as_json:
            self.tell(event, **facts)
            return
        table = Table(box=box.SIMPLE_HEAD, show_header=False, pad_edge=False)
        table.add_column(style="dim", no_wrap=True)
        table.add_column(overflow="fold")
        for name, value in facts.items():
            table.add_row(name, ", ".join(value) if isinstance(value, list) else str(value))
        with self._lock:
            self.console.print(table)

    def log_lines(self, processes: Iterable[ManagedProcess]) -> None:
        """Prints what the processes logged since the last call: warnings and errors, or everything if verbose.

        With `as_json`, it prints nothing.
        """
        if self._as_json:
            return
        for process in processes:
            for text in process.log.new_lines():
                # Redis warns about settings of the machine that do not matter here.
                is_important = process.name != "redis" and _IMPORTANT.search(text)
                if text and (self._verbose or is_important):
                    self.line(process.name, text)

    def placement(self, placement: router_pb2.Placement | None) -> None:
        """Shows which server holds which blocks, anew after each change."""
        if placement is None:
            return
        shape = tuple(
            sorted((each.server.address, each.span.start, each.span.end, each.state) for each in placement.servers)
        )
        if shape != self._last_placement and self._as_json:
            self.tell("placement", **placement_facts(placement, 0))
        elif shape != self._last_placement:
            self.console.print(placement_table(placement))
        self._last_placement = shape
