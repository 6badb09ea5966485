"""Shows as a table what `corolla block-server --check` tried."""

from collections.abc import Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from corolla.block_server.start_check import Checked, check_start
from corolla.cli.advice import sentence_of


def run(**overrides: Any) -> int:
    """Tries whether a block server would start. Returns 0 if it would, else 1."""
    checked = check_start(sentence_of, **overrides)
    Console(highlight=False).print(check_table(checked))
    return int(any(each.failure is not None for each in checked))


def check_table(checked: Sequence[Checked]) -> Table:
    """A row for each thing that was tried, with what was found or why it failed."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, header_style="dim")
    table.add_column("part", no_wrap=True)
    table.add_column("", no_wrap=True)
    table.add_column("time", justify="right", no_wrap=True)
    table.add_column("found", overflow="fold")
    for each in checked:
        verdict = Text("ok", style="green") if each.failure is None else Text("failed", style="bold red")
        table.add_row(each.name, verdict, f"{each.seconds:.1f} s", Text(each.failure or each.found))
    return table
