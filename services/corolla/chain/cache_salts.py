"""With what the digests of a tenant's pages begin. Pure.

Hops find pages by digests of the text alone. Begun with a secret, the digests that somebody makes of a text are not
those of a tenant that has the same text.
"""

import hmac
from typing import Final

from corolla.chassis.errors import SettingsError

MIN_SECRET_CHARS: Final = 32
_PURPOSE: Final = b"corolla pages of "


class CacheSalts:
    """Of all tenants.

    Args:
        secret: which all client services and libraries of a model share; empty: there is none, and texts with the same
            salt of the request have the same digests.

    Raises:
        SettingsError: it is so short that somebody could find it by trying. The sentence does not quote it.
    """

    def __init__(self, secret: str) -> None:
        if secret and len(secret) < MIN_SECRET_CHARS:
            raise SettingsError(f"COROLLA_CACHE_SECRET must have at least {MIN_SECRET_CHARS} characters")
        self._secret = secret.encode()

    def of(self, tenant: str, cache_salt: str) -> bytes:
        """For a request; nobody without the secret can tell it, or that of another tenant or salt, from random bytes.

        Args:
            cache_salt: of the request.
        """
        if not self._secret:
            return cache_salt.encode()
        tenant_secret = hmac.digest(self._secret, _PURPOSE + tenant.encode(), "sha256")
        return hmac.digest(tenant_secret, cache_salt.encode(), "sha256")
