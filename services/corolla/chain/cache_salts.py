"""The salts with which the digests of a tenant's pages begin. Pure.

Hops find cached pages by digests of the text alone. A salt made from a secret keeps an outsider who knows a text from
computing the digests that a tenant with the same text has.
"""

import hmac
from typing import Final

from corolla.chassis.errors import SettingsError

MIN_SECRET_CHARS: Final = 32
_PURPOSE: Final = b"corolla pages of "


class CacheSalts:
    """Makes the salts of all tenants.

    Args:
        secret: all client services and libraries of a model share it. If it is empty, texts whose requests have the
            same salt have the same digests, whatever the tenant.

    Raises:
        SettingsError: the secret is so short that it could be found by trial. The message does not quote it.
    """

    def __init__(self, secret: str) -> None:
        if secret and len(secret) < MIN_SECRET_CHARS:
            raise SettingsError(f"COROLLA_CACHE_SECRET must have at least {MIN_SECRET_CHARS} characters")
        self._secret = secret.encode()

    def of(self, tenant: str, cache_salt: str) -> bytes:
        """The salt for a request. Without the secret, it looks like random bytes.

        Args:
            cache_salt: the request's own salt.
        """
        if not self._secret:
            return cache_salt.encode()
        tenant_secret = hmac.digest(self._secret, _PURPOSE + tenant.encode(), "sha256")
        return hmac.digest(tenant_secret, cache_salt.encode(), "sha256")
