"""What an error of Redis means for the router.

Redis begins the text of an error with a code, which redis-py turns into a class, or leaves in the text. Redis 6 repeats
an error of a script after the place where it happened: `Error running script (call to f_...): @user_script:12:
@user_script: 12: -READONLY You can't write against a read only replica.`
"""

import re
from enum import Enum
from typing import Final

from redis.exceptions import (
    AuthenticationError,
    AuthenticationWrongNumberOfArgsError,
    DataError,
    NoPermissionError,
    RedisError,
    ResponseError,
)


class RedisFailure(Enum):
    """What an error means."""

    OUTAGE = "outage"
    """This Redis cannot serve now, or is no longer the right one. A new connection may lead to another one."""
    NO_ACCESS = "no access"
    """Redis refuses the login, the database, or a command to this user; else the same as OUTAGE."""
    FULL = "full"
    """Redis has no memory left. It refuses writes that need some, and answers everything else."""
    NO_WRITES = "no writes"
    """Redis cannot store or replicate, and refuses all writes. It answers everything else."""
    BAD_RECORD = "bad record"
    """Redis is well, and a key has another type or value than a router writes."""
    BUG = "bug"
    """The error does not come from Redis or the network, but from this program."""


ANSWERED: Final = frozenset({RedisFailure.FULL, RedisFailure.NO_WRITES, RedisFailure.BAD_RECORD})
"""Failures of a Redis that answers other calls: they neither open the breaker nor end connections."""

_ON_A_CLOSED_TRANSPORT: Final = "unable to perform operation on <"
_NO_ACCESS: Final = (AuthenticationError, AuthenticationWrongNumberOfArgsError, NoPermissionError)
# A key of another type, and a script that failed on a value.
_BAD_RECORD: Final = re.compile(r"(.*@user_script: ?\d+: )?(WRONGTYPE |user_script: ?\d+: |.* is not an integer)")
_CODE: Final = re.compile(r"(?:.*@user_script: ?\d+: )?-?(?P<code>[A-Z]+) ")
_NO_CODE: Final = "ERR"
_BY_CODE: Final = {
    "OOM": RedisFailure.FULL,
    "MISCONF": RedisFailure.NO_WRITES,
    "NOREPLICAS": RedisFailure.NO_WRITES,
}


def failure_of(error: Exception) -> RedisFailure:
    """Returns what an error of a call to Redis means.

    Args:
        error: A RedisError; an OSError; or a RuntimeError, which uvloop raises for a write to a connection that was
            just reset: "unable to perform operation on <TCPTransport closed=True ...>; the handler is closed".
    """
    text = str(error)
    if not isinstance(error, RedisError):
        is_reset = not isinstance(error, RuntimeError) or text.startswith(_ON_A_CLOSED_TRANSPORT)
        return RedisFailure.OUTAGE if is_reset else RedisFailure.BUG
    if isinstance(error, DataError):
        return RedisFailure.BUG
    if isinstance(error, _NO_ACCESS) or text == "DB index is out of range":
        return RedisFailure.NO_ACCESS
    if not isinstance(error, ResponseError):
        return RedisFailure.OUTAGE
    if _BAD_RECORD.match(text):
        return RedisFailure.BAD_RECORD
    # Most codes mean that another Redis should answer, such as READONLY, MASTERDOWN, CLUSTERDOWN and UNBLOCKED.
    return _BY_CODE.get(code_of(error), RedisFailure.OUTAGE)


def code_of(error: Exception) -> str:
    """Returns the code that Redis gave an error, such as `READONLY`; empty if the error does not come from Redis."""
    code = error.status_code if isinstance(error, RedisError) else None
    if code in (None, _NO_CODE) and isinstance(error, ResponseError) and (found := _CODE.match(str(error))):
        code = found["code"]
    return code or ""
