"""Who calls: a bearer key, looked up in the configured file."""

from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from corolla.chassis.errors import ScopeDenied, Unauthenticated
from corolla.chassis.handlers import Context
from corolla.client.api.keys import KeyTable, Scope
from corolla.trust.watched_files import Contents, WatchedFiles

PUBLIC: Final = "public"

_SCHEME: Final = "bearer "


class Tenants:
    """Maps a call to its tenant. Without a file of keys, every caller is the tenant `public`.

    Args:
        keys_file: as `KeyTable` reads it. Changes count for calls that begin after they were seen.
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

    def of(self, context: Context, scope: Scope | None = None, model: str = "") -> str:
        """The caller's tenant.

        Args:
            scope: what the call is for; None: what every key may.
            model: which it is for.

        Raises:
            Unauthenticated: no key, or none that holds. Which of the two of an unknown one, nobody learns.
            ScopeDenied: the key is for something else.
        """
        if self._keys is None:
            return PUBLIC
        given = next((value for key, value in context.invocation_metadata() or () if key == "authorization"), "")
        text = given.decode("latin-1") if isinstance(given, bytes) else given
        if not text.lower().startswith(_SCHEME):
            raise Unauthenticated("send the metadata `authorization: Bearer <key>`")
        record = self._keys.find(text[len(_SCHEME) :].strip(), self._clock())
        if record is None:
            raise Unauthenticated("the key is not known")
        if not record.allows(scope, model):
            raise ScopeDenied("this key is for other calls or models")
        return record.tenant

    def _take(self, contents: Contents) -> None:
        try:
            text = contents[0].decode()
        except UnicodeDecodeError:
            raise ValueError("cannot be read") from None
        self._keys = KeyTable.parse(text)
