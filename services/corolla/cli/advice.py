"""Turns a failure into one sentence that says what to do."""

from typing import overload

from corolla.chassis import errors


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
        return f"{failure.message}; start a stack with `corolla up`, or name another address with --server"
    if isinstance(failure, errors.RouterUnavailable):
        return f"{failure.message}; start a stack with `corolla up`, or name another address with --router"
    if isinstance(failure, errors.Unauthenticated):
        return f"{failure.message}; give your key with --api-key or COROLLA_API_KEY"
    if failure.retry_after_s is not None and not isinstance(failure, errors.StartupError):
        return f"{failure.message}; try again in {failure.retry_after_s:g} s"
    return failure.message
