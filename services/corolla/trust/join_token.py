"""Join tokens, by which a machine gets its first certificate of a stack. Pure.

A token is written `cj1.<digest>.<id>.<secret>`. The digest is that of the stack's authority, so that a machine sends
the secret to no other issuer.
"""

import base64
import binascii
import hashlib
import hmac
import re
from dataclasses import dataclass, field
from typing import Final, Self

SECRET_BYTES: Final = 32
MAX_TOKEN_CHARS: Final = 160
_FORM: Final = re.compile(r"cj1\.([0-9a-f]{64})\.([0-9a-f]{16})\.([A-Za-z0-9_-]{43})")


@dataclass(frozen=True, slots=True)
class JoinToken:
    """A token as a machine shows it. Only `written` has the secret, so that no log or traceback shows it.

    Attributes:
        authority: The SHA-256 digest of the authority's certificate in DER.
        id: The token's name, which may be shown.
        secret: 256 random bits, which need no slow hash.
    """

    authority: bytes
    id: str
    secret: bytes = field(repr=False)

    @classmethod
    def parse(cls, text: str) -> Self | None:
        """Reads a token; returns None if the text has another form."""
        found = _FORM.fullmatch(text) if len(text) <= MAX_TOKEN_CHARS else None
        if found is None:
            return None
        authority, token_id, secret = found.groups()
        try:
            return cls(bytes.fromhex(authority), token_id, _decoded(secret))
        except binascii.Error:
            return None

    @property
    def written(self) -> str:
        """The token with its secret, as a person copies it."""
        secret = base64.urlsafe_b64encode(self.secret).decode().rstrip("=")
        return f"cj1.{self.authority.hex()}.{self.id}.{secret}"

    @property
    def sha256(self) -> str:
        """The hash of the secret, which the issuer keeps."""
        return hashlib.sha256(self.secret).hexdigest()

    def has_hash(self, sha256: str) -> bool:
        """The hash is that of this token's secret; the time that this takes does not depend on the secret."""
        return hmac.compare_digest(self.sha256, sha256)


def _decoded(text: str) -> bytes:
    return base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))
