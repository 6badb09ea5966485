"""Who calls: a bearer key, looked up in the configured file."""

import hashlib
import hmac
from pathlib import Path
from typing import Final

from corolla.chassis.errors import SettingsError, Unauthenticated
from corolla.chassis.handlers import Context
from corolla.wire.frames import MAX_TENANT_CHARS

PUBLIC: Final = "public"
MIN_KEY_CHARS: Final = 16
"""A shorter key could be found by trying."""

_SCHEME: Final = "bearer "


class Tenants:
    """Maps a call to its tenant. Without a file of keys, every caller is the tenant `public`.

    Args:
        keys_file: lines `tenant:key`, also several of one tenant; empty lines and those that begin with `#` are passed
            over, and so are spaces around tenant and key.

    Raises:
        SettingsError: the file cannot be read, a line is not of that form, a key is shorter than `MIN_KEY_CHARS` or
            stands for two tenants, a tenant's name is longer than `MAX_TENANT_CHARS`.
    """

    def __init__(self, keys_file: Path | None) -> None:
        self._tenant_by_digest = _read(keys_file) if keys_file else None

    @property
    def count(self) -> int:
        """How many there are."""
        return len(set((self._tenant_by_digest or {b"": PUBLIC}).values()))

    def of(self, context: Context) -> str:
        """The caller's tenant. Raises Unauthenticated."""
        if self._tenant_by_digest is None:
            return PUBLIC
        given = next((value for key, value in context.invocation_metadata() or () if key == "authorization"), "")
        text = given.decode("latin-1") if isinstance(given, bytes) else given
        if not text.lower().startswith(_SCHEME):
            raise Unauthenticated("send the metadata `authorization: Bearer <key>`")
        digest = _digest(text[len(_SCHEME) :].strip())
        # Digests are compared in constant time, and all of them, so that timing tells nothing about the keys.
        found = [tenant for known, tenant in self._tenant_by_digest.items() if hmac.compare_digest(known, digest)]
        if not found:
            raise Unauthenticated("the key is not known")
        return found[0]


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()


def _read(keys_file: Path) -> dict[bytes, str]:
    try:
        lines = keys_file.read_text().splitlines()
    except (OSError, UnicodeDecodeError):
        raise SettingsError(f"COROLLA_API_KEYS_FILE={keys_file} cannot be read") from None
    tenants: dict[bytes, str] = {}
    first_lines: dict[bytes, int] = {}
    for number, line in enumerate(map(str.strip, lines), start=1):
        if not line or line.startswith("#"):
            continue
        tenant, _, key = map(str.strip, line.partition(":"))
        place = f"COROLLA_API_KEYS_FILE={keys_file}: line {number}"
        if not (tenant and key):
            raise SettingsError(f"{place} is not of the form tenant:key")
        if len(tenant) > MAX_TENANT_CHARS:
            raise SettingsError(f"{place}: a tenant's name has at most {MAX_TENANT_CHARS} characters")
        if len(key) < MIN_KEY_CHARS:
            raise SettingsError(f"{place}: a key has at least {MIN_KEY_CHARS} characters; draw it at random")
        digest = _digest(key)
        if tenants.setdefault(digest, tenant) != tenant:
            raise SettingsError(f"{place}: the key of line {first_lines[digest]} belongs to another tenant")
        first_lines.setdefault(digest, number)
    if not tenants:
        raise SettingsError(f"COROLLA_API_KEYS_FILE={keys_file} holds no keys")
    return tenants
