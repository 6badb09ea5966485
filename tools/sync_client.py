"""Writes the blocking Python client from the one for asyncio: `python tools/sync_client.py services/corolla/sdk`.

The source is `async_client.py`. Words are replaced and `async` and `await` left out, as httpcore's `unasync.py` does;
what differs for other reasons stands in `transport.py`, by hand.
"""

import re
import subprocess
import sys
from pathlib import Path

SDK = Path(__file__).resolve().parent.parent / "services" / "corolla" / "sdk"

SOURCE, WRITTEN = "async_client.py", "client.py"

# In this order.
REPLACED = (
    # A property cannot be awaited, so that only the blocking classes have the session's id as one.
    (r"async def open\(self\)", "@property\n    def session_id(self)"),
    (r"await ([\w.]+)\.open\(\)", r"\1.session_id"),
    (r"\(await (self\._client\.create_session\([\w.]+\))\)", r"\1"),
    (r"\basync (def|with|for)\b", r"\1"),
    (r"\bawait ", ""),
    (r"__a(enter|exit|iter|next)__", r"__\1__"),
    (r"\bStopAsyncIteration\b", "StopIteration"),
    (r"\bAsyncIterator\b", "Iterator"),
    (r"Cancels the call if it still runs\.", "Cancels the call if it still runs. May be called from any thread."),
    (r"\bAsync(Client|Session|Chat|Stream|ApiKey)\b", r"\1"),
    (r"\basync_(begun|called|call_metadata|read)\b", r"\1"),
    (r"from grpc import aio\n", ""),
    (r"\baio\.", "grpc."),
    (r"import asyncio\n", "import threading\n"),
    (r"asyncio\.Lock", "threading.Lock"),
    (r"asyncio\.sleep", "time.sleep"),
    (r"for asyncio\b", "for ordinary, blocking code"),
    (r"Made and used in one event loop", "Safe to share between threads"),
)


def blocking(source: str) -> str:
    """The blocking twin of the module's text."""
    for pattern, replacement in REPLACED:
        source = re.sub(pattern, replacement, source)
    docstring, rest = source.split("\n", 1)
    note = f"# Written by tools/sync_client.py from {SOURCE}; change that, then run `make sync-client`."
    text = f"{docstring}\n\n{note}\n{rest}"
    for command in (["check", "--quiet", "--select", "I", "--fix"], ["format", "--quiet"]):
        done = subprocess.run(
            ["ruff", *command, "--stdin-filename", str(SDK / WRITTEN), "-"],
            input=text, capture_output=True, text=True, check=True,
        )  # fmt: skip
        text = done.stdout
    return text


def main(folder: Path) -> None:
    (folder / WRITTEN).write_text(blocking((SDK / SOURCE).read_text()))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
