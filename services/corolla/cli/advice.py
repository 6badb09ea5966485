"""Failures as one sentence that says what to do."""

from corolla.chassis import errors


def sentence_of(failure: errors.CorollaError) -> str:
    """The error's message, with advice where a newcomer needs it."""
    if isinstance(failure, errors.ServiceUnavailable):
        return f"{failure.message}; start a stack with `corolla up`, or name another address with --server"
    if isinstance(failure, errors.RouterUnavailable):
        return f"{failure.message}; start a stack with `corolla up`, or name another address with --router"
    if isinstance(failure, errors.Unauthenticated):
        return f"{failure.message}; give your key with --api-key or COROLLA_API_KEY"
    if failure.retry_after_s is not None and not isinstance(failure, errors.StartupError):
        return f"{failure.message}; try again in {failure.retry_after_s:g} s"
    return failure.message
