"""Who calls: a bearer key, looked up in the configured file."""

import hashlib
import hmac
from pathlib import Path
from typing import Final

from corolla.chassis.errors import SettingsError, Unauthenticated
from corolla.chassis.handlers import Context

PUBLIC: Final = "public"
_SCHEME: Final = "bearer "


class Tenants:
    """Maps a call to its tenant. Without a file of keys, every caller is the tenant `public`.

    Args:
        keys_file: lines `tenant:key`; empty lines and lines that begin with `#` are passed over.

    Raises:
        SettingsError: the file cannot be read, or a line is not of that form.
    """

    def __init__(self, keys_file: Path | None) -> None:
        self._tenant_by_digest = _read(keys_file) if keys_file else None

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
    for number, line in enumerate(lines, start=1):
        if not line.strip() or line.startswith("#"):
            continue
        tenant, separator, key = line.strip().partition(":")
        if not (tenant and separator and key.strip()):
            raise SettingsError(f"COROLLA_API_KEYS_FILE={keys_file}: line {number} is not of the form tenant:key")
        tenants[_digest(key.strip())] = tenant
    if not tenants:
        raise SettingsError(f"COROLLA_API_KEYS_FILE={keys_file} holds no keys")
    return tenants
