"""Gets a service its certificate from an issuer, by a token in a file, and keeps it fresh while the service runs."""

import logging
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Final

from corolla.chassis.channels import TLS_1_3_ONLY
from corolla.chassis.errors import CorollaError, SettingsError, StartupError, Unauthenticated
from corolla.chassis.threads import begun_apart
from corolla.cli.interruption import interruptible
from corolla.local.issuer_client import parsed_address
from corolla.local.membership import Membership
from corolla.trust.join_token import MAX_TOKEN_CHARS, JoinToken
from corolla.trust.loopback import VARIABLE

log = logging.getLogger(__name__)

TOKEN_FILE_VARIABLE: Final = "COROLLA_JOIN_TOKEN_FILE"
_RETRY_S: Final = 0.5
_PATIENCE_S: Final = 1.0
_FOLLOW_INTERVAL_S: Final = 4.0
"""Refusals of one pod then stay below what the issuer counts in a minute, and revocations come within ten seconds."""


@contextmanager
def kept_enrolled(issuer: str) -> Iterator[None]:
    """Enrols at an issuer, and has a thread keep the certificate fresh meanwhile.

    Raises:
        Interrupted: A signal came before there was a certificate.
        StartupError: As `enrolled` raises it.
    """
    with interruptible():
        membership = enrolled(issuer)
    is_over = threading.Event()
    thread = threading.Thread(target=_follow, args=(membership, is_over), name="enrolment", daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join(_PATIENCE_S)


def enrolled(issuer: str) -> Membership:
    """Gets a certificate into `COROLLA_TLS_DIR` from the issuer at `host:port`.

    Waits for an issuer that does not answer, unless a certificate of an earlier start has not ended.

    Raises:
        StartupError: A variable is missing or wrong, or the issuer refuses.
    """
    parsed_address(issuer)
    if not (folder := os.environ.get(VARIABLE)):
        raise SettingsError(f"to enrol at an issuer, set {VARIABLE} to the folder for the certificate")
    os.environ.setdefault(*TLS_1_3_ONLY)
    membership = Membership(issuer, Path(folder))
    is_waiting = False
    while True:
        try:
            begun_apart(partial(membership.enrol_pod, _needed_token())).result()
            return membership
        except (Unauthenticated, StartupError) as refusal:
            raise StartupError(refusal.message) from None
        except CorollaError as failure:
            if membership.is_valid(time.time()):
                return membership
            if not is_waiting:
                log.warning("%s; waiting for it", failure.message)
            is_waiting = True
        time.sleep(_RETRY_S)


def token_of_file() -> JoinToken | None:
    """Returns the token in the file that the environment names, if it names one. Raises StartupError."""
    path = os.environ.get(TOKEN_FILE_VARIABLE)
    if not path:
        return None
    try:
        with open(path, encoding="utf-8") as file:
            return parsed_token(file.read(MAX_TOKEN_CHARS + 64))
    except (OSError, UnicodeDecodeError):
        raise StartupError(f"{TOKEN_FILE_VARIABLE}={path} cannot be read; check its path and permissions") from None


def parsed_token(text: str) -> JoinToken:
    """Returns the token that a person or a file gives. Raises StartupError if the text has another form."""
    token = JoinToken.parse(text.strip())
    if not text.strip():
        raise StartupError(f"give the token on the terminal, on standard input, or by {TOKEN_FILE_VARIABLE}=PATH")
    if token is None:
        raise StartupError(
            "that is no join token, which begins with cj1.; `corolla up --share` and `corolla tokens new` print one"
        )
    return token


def _needed_token() -> JoinToken:
    token = token_of_file()
    if token is None:
        raise SettingsError(f"to enrol at an issuer, set {TOKEN_FILE_VARIABLE} to the file with the token of the role")
    return token


def _follow(membership: Membership, is_over: threading.Event) -> None:
    """Keeps certificate and revocations fresh. Another token in the file counts from then on."""
    is_reached = True
    while not is_over.wait(_FOLLOW_INTERVAL_S):
        try:
            membership.follow(_needed_token())
        except CorollaError as failure:
            if is_reached:
                log.warning("the certificate cannot be kept fresh: %s; trying again", failure.message)
            is_reached = False
        except Exception:
            log.exception("the certificate cannot be kept fresh; trying again")
        else:
            if not is_reached:
                log.info("the certificate is kept fresh again")
            is_reached = True
    membership.close()
