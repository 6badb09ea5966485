"""Converts exceptions of huggingface_hub to errors that tell the operator what to do."""

import errno
from typing import Final

from huggingface_hub.errors import (
    EntryNotFoundError,
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
    RevisionResolutionError,
)

from corolla.chassis.errors import CheckpointError, HubUnavailable

_TRY_AGAIN: Final = frozenset({408, 425, 429})
_FULL: Final = frozenset({errno.ENOSPC, errno.EDQUOT})
_UNWRITABLE: Final = frozenset({errno.EACCES, errno.EPERM, errno.EROFS})


def hub_failure(error: Exception, repository: str, cache: str) -> CheckpointError | HubUnavailable:
    """Corolla's error for an exception of huggingface_hub: HubUnavailable if a retry may help, else CheckpointError.

    The exception's text is not repeated, since it may contain signed addresses.
    """
    error = _cause(error)
    if isinstance(error, GatedRepoError):
        return CheckpointError(
            f"{repository!r} is gated: accept its terms on the hub, and give an access token of that account in "
            "HF_TOKEN, or in the file that HF_TOKEN_PATH names."
        )
    if isinstance(error, RevisionNotFoundError):
        return CheckpointError(f"{repository!r} has no such revision; give a branch, a tag or a commit that it has.")
    if isinstance(error, EntryNotFoundError) and not isinstance(error, LocalEntryNotFoundError):
        return CheckpointError(
            f"The hub lists a file of {repository!r} that it does not have; choose another revision."
        )
    if isinstance(error, (RepositoryNotFoundError, HFValidationError)):
        return CheckpointError(
            f"{repository!r} is not a local folder, and the hub does not know it or does not show it to this access "
            "token; check the name and HF_TOKEN, or give a local folder."
        )
    if isinstance(error, HfHubHTTPError):
        status = error.response.status_code
        if status in (401, 403):
            return CheckpointError(
                f"The hub refuses access to {repository!r} (status {status}); give an access token that may read it in "
                "HF_TOKEN, or in the file that HF_TOKEN_PATH names."
            )
        if 400 <= status < 500 and status not in _TRY_AGAIN:
            return CheckpointError(
                f"The hub refuses {repository!r} (status {status}); check the name and HF_ENDPOINT, or give a local "
                "folder."
            )
    elif isinstance(error, OSError) and error.errno in _FULL:
        return CheckpointError(f"{cache} is full; give the cache more room, or hold fewer blocks.")
    elif isinstance(error, OSError) and error.errno in _UNWRITABLE:
        return CheckpointError(f"{cache} cannot be written to; set HF_HOME to a folder that can.")
    return HubUnavailable(
        f"{repository!r} is not a local folder, and the hub cannot be reached or its answers break off; check the "
        "network, the proxy and HF_ENDPOINT, or give a local folder."
    )


def _cause(error: Exception) -> Exception:
    """The underlying exception, if huggingface_hub has wrapped it in one that says only that no file was found."""
    wrappers = (LocalEntryNotFoundError, RevisionResolutionError, ValueError)
    while isinstance(error, wrappers) and not isinstance(error, HfHubHTTPError):
        if not isinstance(error.__cause__, Exception):
            break
        error = error.__cause__
    return error
