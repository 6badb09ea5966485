"""Files that hold secrets."""

import os
import secrets
from pathlib import Path


def write_private(path: Path, content: bytes) -> None:
    """Writes a file whole or not at all, readable by its owner only. A link stays one.

    Raises:
        OSError: it cannot be written; what there was stays, and nothing of the new content.
    """
    path = path.resolve()
    draft = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        # Exclusively: in a folder for all, somebody else's file or link of that name must not get it.
        with open(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(content)
        draft.replace(path)
    except OSError:
        draft.unlink(missing_ok=True)
        raise
