"""Makes the salts with which the digests of a tenant's cached pages begin. Pure.

Hops find cached pages by these digests alone. A salt that is made from a secret keeps an outsider who knows a tenant's
text from computing the digests of its pages.
"""

import hashlib
import hmac
from collections.abc import Sequence
from typing import Final

from corolla.chassis.errors import SettingsError

MIN_SECRET_CHARS: Final = 32
_PURPOSE: Final = b"corolla pages of "


def salt_behind(salt: bytes, numerics: Sequence[str]) -> bytes:
    """Returns the salt for a hop behind others, so that sessions share pages only if equal servers computed the input.

    Args:
        salt: The salt of the text.
        numerics: Those of the hops before this one, in order, and then its own. If all are equal, the salt stays.
    """
    if len(set(numerics)) == 1:
        return salt
    return hashlib.sha256(b"\0".join([salt, *(each.encode() for each in numerics)])).digest()


class CacheSalts:
    """Makes the salts of all tenants.

    Args:
        secret: all client services and libraries of a model share it. If it is empty, equal texts of requests with
            equal salts have equal digests for all tenants.

    Raises:
        SettingsError: the secret is so short that it could be found by trial. The message does not quote it.
    """

    def __init__(self, secret: str) -> None:
        if secret and len(secret) < MIN_SECRET_CHARS:
            raise SettingsError(f"COROLLA_CACHE_SECRET must have at least {MIN_SECRET_CHARS} characters")
        self._secret = secret.encode()

    def of(self, tenant: str, cache_salt: str) -> bytes:
        """Returns the salt for a request. If there is a secret, the salt looks random to all that do not know it.

        Args:
            cache_salt: the request's own salt.
        """
        if not self._secret:
            return cache_salt.encode()
        tenant_secret = hmac.digest(self._secret, _PURPOSE + tenant.encode(), "sha256")
        return hmac.digest(tenant_secret, cache_salt.encode(), "sha256")
