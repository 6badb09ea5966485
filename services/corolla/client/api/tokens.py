"""Tokens of an identity provider: JWTs, checked against rules and the public keys of their issuer.

Nothing of a token counts before its signature has been checked, but which key and algorithm it names.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, Final

import jwt
from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePublicKey
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from cryptography.hazmat.primitives.asymmetric.rsa import RSAPublicKey

from corolla.client.api.keys import Scope
from corolla.wire.frames import MAX_TENANT_CHARS

ALGORITHMS: Final = (
    "RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512", "EdDSA",
)  # fmt: skip
"""With a private and a public key: whoever can check a token of another one could also make it."""

MAX_TOKEN_CHARS: Final = 16 << 10
_MAX_KEYS: Final = 256
_MIN_RSA_BITS: Final = 2048
_REQUIRED: Final = ("aud", "exp", "iss", "sub")

PublicKey = RSAPublicKey | EllipticCurvePublicKey | Ed25519PublicKey


@dataclass(frozen=True, slots=True)
class IssuerKey:
    """One public key of an issuer.

    Attributes:
        id: by which tokens name it.
        algorithm: the only one that it is for; None: whatever its kind allows.
    """

    id: str
    public: PublicKey
    algorithm: str | None


def parse_keys(text: bytes) -> dict[str, IssuerKey]:
    """The keys of a JSON Web Key Set by their ids. Those that are for something else, or too weak, are left out.

    Raises:
        ValueError: it is none, or holds no key that can check a token.
    """
    try:
        described = json.loads(text)["keys"][:_MAX_KEYS]
    except (ValueError, KeyError, TypeError, RecursionError):
        raise ValueError("is no JSON Web Key Set") from None
    keys = {key.id: key for each in described if (key := _issuer_key(each)) is not None}
    if not keys:
        raise ValueError("holds no public key with an id, for signatures")
    return keys


@dataclass(frozen=True, slots=True)
class TokenGrant:
    """What a token that holds says of its bearer.

    Attributes:
        id: for the audit log, 16 hex digits: the same for all tokens of a subject, who is not to be read from it.
        expires: skew included.
        models: by name; None: all.
        scopes: None: all.
    """

    id: str
    tenant: str
    expires: datetime
    models: frozenset[str] | None
    scopes: frozenset[Scope] | None

    def allows(self, scope: Scope | None, model: str) -> bool:
        """Whether it is for calls of a scope, to a model; None: whatever every token may."""
        has_scope = scope is None or self.scopes is None or scope in self.scopes
        return has_scope and (self.models is None or model in self.models)


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenRules:
    """Which tokens hold.

    Attributes:
        algorithms: of ALGORITHMS.
        skew: by which clocks may differ.
        tenant_claim: whose value is the tenant's name.
        models_claim: whose value, a list or words, names the models; a token without it is for none. Empty: all are for
            all models.
        scopes_claim: likewise; words that are no scopes are for others.
    """

    issuer: str
    audience: str
    algorithms: Sequence[str]
    skew: timedelta
    tenant_claim: str
    models_claim: str = ""
    scopes_claim: str = ""

    def key_id(self, token: str) -> str | None:
        """Which key a token says it was signed with. None: it cannot hold, whatever the keys are."""
        if len(token) > MAX_TOKEN_CHARS:
            return None
        try:
            header = jwt.get_unverified_header(token)
        except _FAILURES:
            return None
        key_id = header.get("kid")
        return key_id if isinstance(key_id, str) and header.get("alg") in self.algorithms else None

    def grant(self, token: str, key: IssuerKey) -> TokenGrant | None:
        """What a token that was signed with a key says. None: it does not hold; why not, nobody learns."""
        algorithms = [each for each in self.algorithms if key.algorithm in (None, each)]
        try:
            claims = jwt.decode(
                token, key.public, algorithms, {"require": list(_REQUIRED)},
                audience=self.audience, issuer=self.issuer, leeway=self.skew,
            )  # fmt: skip
            expires = datetime.fromtimestamp(int(claims["exp"]), UTC) + self.skew
        except _FAILURES:
            return None
        tenant = claims.get(self.tenant_claim)
        if not (isinstance(tenant, str) and 0 < len(tenant) <= MAX_TENANT_CHARS and tenant.isprintable()):
            return None
        models, scopes = (_words(claims, name) for name in (self.models_claim, self.scopes_claim))
        return TokenGrant(
            hashlib.sha256(f"{claims['iss']}\0{claims['sub']}".encode()).hexdigest()[:16],
            tenant,
            expires,
            models,
            None if scopes is None else frozenset(each for each in Scope if each.value in scopes),
        )


# A token is whatever somebody sent: the library's own errors, and what its parts raise at numbers and nesting.
_FAILURES: Final = (jwt.PyJWTError, ArithmeticError, OSError, RecursionError, TypeError, ValueError)


def _words(claims: Mapping[str, Any], name: str) -> frozenset[str] | None:
    if not name:
        return None
    given = claims.get(name)
    words = given.split() if isinstance(given, str) else given if isinstance(given, list) else ()
    return frozenset(each for each in words if isinstance(each, str))


def _issuer_key(described: Any) -> IssuerKey | None:
    if not isinstance(described, dict) or not isinstance(described.get("kid"), str):
        return None
    algorithm = described.get("alg")
    if described.get("use", "sig") != "sig" or (algorithm is not None and algorithm not in ALGORITHMS):
        return None
    try:
        public = jwt.PyJWK(described).key
    except _FAILURES:
        return None
    if not isinstance(public, PublicKey) or (isinstance(public, RSAPublicKey) and public.key_size < _MIN_RSA_BITS):
        return None
    return IssuerKey(described["kid"], public, algorithm)
