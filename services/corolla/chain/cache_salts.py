"""Makes the salts with which the digests of a tenant's cached pages begin. Pure.

Hops find cached pages by these digests alone. A salt that is made from a secret keeps an outsider who knows a tenant's
text from computing the digests of its pages.
"""

import hmac
from typing import Final

from corolla.chassis.errors import SettingsError

MIN_SECRET_CHARS: Final = 32
_PURPOSE: Final = b"corolla pages of "


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
