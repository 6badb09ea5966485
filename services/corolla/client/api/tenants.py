"""Who calls: a bearer key, looked up in the configured file."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, Final

from corolla.chassis.errors import ScopeDenied, Unauthenticated
from corolla.chassis.handlers import Call, Context
from corolla.client.api.keys import KeyRecord, KeyTable, Scope
from corolla.trust.watched_files import Contents, WatchedFiles

PUBLIC: Final = "public"

_SCHEME: Final = "bearer "


@dataclass(frozen=True, slots=True)
class KeyHolder:
    """A caller: its tenant and, where keys are asked for, the one that it showed, and whether that is good now."""

    tenant: str
    key: KeyRecord | None = None
    is_good: Callable[[], bool] = lambda: True

    def check(self, scope: Scope, model: str) -> None:
        """Raises ScopeDenied: the key is for other calls or models."""
        if self.key is not None and not self.key.allows(scope, model):
            raise ScopeDenied("this key is for other calls or models")

    def check_again(self) -> None:
        """Raises Unauthenticated: the key was revoked, or has expired, since the call began."""
        if not self.is_good():
            raise Unauthenticated("the key is good no more")

    def audited(self) -> Mapping[str, str]:
        """What the audit log says of it. Keys of the simple form have no id."""
        has_id = self.key is not None and not self.key.is_simple
        return {"tenant": self.tenant, "key": self.key.id} if self.key and has_id else {"tenant": self.tenant}


class Tenants:
    """Maps a call to its tenant. Without a file of keys, every caller is the tenant `public`.

    Args:
        keys_file: as `KeyTable` reads it.
        clock: the time of day.

    Attributes:
        files: which are to be watched; None where there are no keys.

    Raises:
        SettingsError: the file cannot be read, or holds something else.
    """

    def __init__(self, keys_file: Path | None, clock: Callable[[], datetime] = lambda: datetime.now(UTC)) -> None:
        self._clock = clock
        self._keys: KeyTable | None = None
        self.files: WatchedFiles | None = None
        if keys_file is not None:
            self.files = WatchedFiles(
                "COROLLA_API_KEYS_FILE", keys_file.parent, (keys_file.name,), self._take, named=keys_file
            )

    @property
    def count(self) -> int:
        """How many there are."""
        return len(self._keys.tenants) if self._keys is not None else 1

    def authenticate(self, call: Call[Any]) -> None:
        """Finds out who calls. Raises Unauthenticated: no key, or none that holds; which of the two, nobody learns."""
        call.caller = self._holder(call.context)

    def _holder(self, context: Context) -> KeyHolder:
        if self._keys is None:
            return KeyHolder(PUBLIC)
        given = next((value for key, value in context.invocation_metadata() or () if key == "authorization"), "")
        text = given.decode("latin-1") if isinstance(given, bytes) else given
        if not text.lower().startswith(_SCHEME):
            raise Unauthenticated("send the metadata `authorization: Bearer <key>`")
        record = self._keys.find(text[len(_SCHEME) :].strip(), self._clock())
        if record is None:
            raise Unauthenticated("the key is not known")
        return KeyHolder(record.tenant, record, partial(self._is_good, record))

    def _is_good(self, record: KeyRecord) -> bool:
        return self._keys is not None and self._keys.holds(record, self._clock())

    def _take(self, contents: Contents) -> None:
        try:
            text = contents[0].decode()
        except UnicodeDecodeError:
            raise ValueError("cannot be read") from None
        self._keys = KeyTable.parse(text)
