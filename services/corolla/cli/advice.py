"""Turns a failure into one sentence that says what to do."""

import shutil
import sys
from pathlib import Path
from types import MappingProxyType
from typing import Final, overload

from corolla.chassis import errors

_OPTIONS: Final = MappingProxyType(
    {
        "address": "the address",
        "num_completions": "-n",
        "speculation": "--speculation",
        "speculation.mode": "--speculation",
        "stopping.time_limit_ms": "--time-limit",
    }
)
"""Options whose names differ from the fields that they set."""
_GROUPS: Final = ("sampling", "stopping", "speculation", "response_format")
"""Parts of a request whose fields have options of the same names."""


@overload
def sentence_of(failure: errors.CorollaError) -> str: ...


@overload
def sentence_of(failure: Exception) -> str | None: ...


def sentence_of(failure: Exception) -> str | None:
    """Returns the failure's message, with advice for newcomers; None if it is unexpected and needs its traceback."""
    if isinstance(failure, OSError) and failure.filename is not None:
        return f"cannot use {failure.filename}: {failure.strerror}; correct the path or its permissions"
    if not isinstance(failure, errors.CorollaError):
        return None
    if isinstance(failure, errors.ServiceUnavailable):
        return f"{failure.message}; start a stack with `corolla up`, or correct --server, --tls or --ca-file"
    if isinstance(failure, errors.RouterUnavailable):
        return f"{failure.message}; start a stack with `corolla up`, or name another address with --router"
    if isinstance(failure, errors.InvalidRequest):
        return "; ".join(f"{option_of(field)}: {text}" for field, text in failure.violations) or failure.message
    if isinstance(failure, errors.Unauthenticated):
        return f"{failure.message}; give your key with --api-key or COROLLA_API_KEY"
    if failure.retry_after_s is not None and not isinstance(failure, errors.StartupError):
        return f"{failure.message}; try again in {failure.retry_after_s:g} s"
    return failure.message


def option_of(field: str) -> str:
    """Returns the option that sets a field of a request; the field itself if no option does."""
    group, _, name = field.partition(".")
    shared = f"--{name.replace('_', '-')}" if group in _GROUPS and name else field
    return _OPTIONS.get(field, shared)


def command_name() -> str:
    """Returns the words that run `corolla` in this shell: its path if PATH does not lead to this installation."""
    own = Path(sys.executable).with_name("corolla")
    found = shutil.which("corolla")
    if not own.is_file() or (found is not None and Path(found).resolve() == own.resolve()):
        return "corolla"
    return str(own.relative_to(Path.cwd())) if own.is_relative_to(Path.cwd()) else str(own)
