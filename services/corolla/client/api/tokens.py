"""Checks tokens (JWTs) of an identity provider by configured rules and by the public keys of their issuer.

Until the signature of a token is checked, only its key id and its algorithm are used.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, Final

import jwt
from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePublicKey
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from cryptography.hazmat.primitives.asymmetric.rsa import RSAPublicKey

from corolla.client.api.keys import Scope
from corolla.wire.frames import is_tenant_name

ALGORITHMS: Final = (
    "RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512", "EdDSA",
)  # fmt: skip
"""The algorithms with a private and a public key. With others, a service that checks tokens could also issue them."""

MAX_TOKEN_CHARS: Final = 16 << 10
_MAX_KEYS: Final = 256
_MIN_RSA_BITS: Final = 2048
_REQUIRED: Final = ("aud", "exp", "iss", "sub")

PublicKey = RSAPublicKey | EllipticCurvePublicKey | Ed25519PublicKey


@dataclass(frozen=True, slots=True)
class IssuerKey:
    """One public key of an issuer.

    Attributes:
        id: the id by which tokens name the key.
        algorithm: the only algorithm for which the key may be used; None: any algorithm of its type.
    """

    id: str
    public: PublicKey
    algorithm: str | None


def parse_keys(text: bytes) -> dict[str, IssuerKey]:
    """The keys of a JSON Web Key Set by their ids. Weak keys, and keys that are not for signatures, are left out.

    Raises:
        ValueError: the text is not a key set, or has no key that can check a token.
    """
    try:
        described = json.loads(text)["keys"][:_MAX_KEYS]
    except (ValueError, KeyError, TypeError, RecursionError):
        raise ValueError("is not a JSON Web Key Set") from None
    keys = {key.id: key for each in described if (key := _issuer_key(each)) is not None}
    if not keys:
        raise ValueError("holds no public key with an id, for signatures")
    return keys


@dataclass(frozen=True, slots=True)
class TokenGrant:
    """The claims of a valid token about its bearer.

    Attributes:
        id: 16 hex digits for the audit log, the same for all tokens of a subject; they do not reveal the subject.
        expires: the time until which the token is valid; the allowed skew of clocks is added.
        models: the names of the models that the token is for; None: all.
        scopes: the kinds of calls that the token is for; None: all.
    """

    id: str
    tenant: str
    expires: datetime
    models: frozenset[str] | None
    scopes: frozenset[Scope] | None

    def allows(self, scope: Scope | None, model: str) -> bool:
        """The token allows a call to a model. A `scope` of None stands for calls that every token may make."""
        has_scope = scope is None or self.scopes is None or scope in self.scopes
        return has_scope and (self.models is None or model in self.models)


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenRules:
    """The rules for valid tokens.

    Attributes:
        skew: how much clocks may differ.
        tenant_claim: the claim with the tenant's name.
        models_claim: the claim that names models, in a JSON list or in a text with blanks between the names; a token
            without this claim is for no model. If `models_claim` is empty, all tokens are for all models.
        scopes_claim: the claim that names scopes, by the same rules; unknown scopes are ignored.
    """

    issuer: str
    audience: str
    skew: timedelta
    tenant_claim: str
    models_claim: str = ""
    scopes_claim: str = ""

    def key_id(self, token: str) -> str | None:
        """The id of the key that a token names; None if the token cannot be valid with any key."""
        if len(token) > MAX_TOKEN_CHARS:
            return None
        try:
            header = jwt.get_unverified_header(token)
        except _FAILURES:
            return None
        key_id = header.get("kid")
        return key_id if isinstance(key_id, str) and header.get("alg") in ALGORITHMS else None

    def grant(self, token: str, key: IssuerKey) -> TokenGrant | None:
        """The claims of a token that this key signed; None, without a reason, if the token is not valid."""
        try:
            claims = jwt.decode(
                token, key.public, ALGORITHMS if key.algorithm is None else [key.algorithm],
                {"require": list(_REQUIRED)},
                audience=self.audience, issuer=self.issuer, leeway=self.skew,
            )  # fmt: skip
            expires = datetime.fromtimestamp(int(claims["exp"]), UTC) + self.skew
        except _FAILURES:
            return None
        tenant = claims.get(self.tenant_claim)
        if not (isinstance(tenant, str) and is_tenant_name(tenant)):
            return None
        models, scopes = (_words(claims, name) for name in (self.models_claim, self.scopes_claim))
        return TokenGrant(
            hashlib.sha256(f"{claims['iss']}\0{claims['sub']}".encode()).hexdigest()[:16],
            tenant,
            expires,
            models,
            None if scopes is None else frozenset(each for each in Scope if each.value in scopes),
        )


# The errors that arbitrary text can cause: PyJWT's own, and those of parsers below it, such as for deep nesting.
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
