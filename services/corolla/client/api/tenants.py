"""Finds the caller of a request by a key from the configured file, or by a token of an identity provider."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, Final

from corolla.chassis.calls import Call, Context
from corolla.chassis.errors import ScopeDenied, Unauthenticated
from corolla.client.api.issuer import IssuerKeys
from corolla.client.api.keys import KeyRecord, KeyTable, Scope
from corolla.client.api.tokens import IssuerKey, TokenGrant, TokenRules
from corolla.trust.watched_files import Contents, WatchedFiles

PUBLIC: Final = "public"

_SCHEME: Final = "bearer "


@dataclass(frozen=True, slots=True)
class KeyHolder:
    """A caller: its tenant, its key or token if it needs one, and a check whether that key or token is still valid."""

    tenant: str
    key: KeyRecord | TokenGrant | None = None
    is_good: Callable[[], bool] = lambda: True

    def check(self, scope: Scope | None, *models: str) -> None:
        """Raises ScopeDenied if the key or token does not allow calls of this kind to any of the named models.

        Args:
            scope: the kind of the call; None for calls that every key may make.
            models: the names that the called model has.
        """
        if self.key is not None and not any(self.key.allows(scope, model) for model in models):
            raise ScopeDenied("this key or token does not allow this call or model; ask the operator for its scopes")

    def check_again(self) -> None:
        """Raises Unauthenticated if the key or token was revoked or has expired since the call began."""
        if not self.is_good():
            raise Unauthenticated("the key or token has expired or was revoked")

    def audited(self) -> Mapping[str, str]:
        """The caller's tenant and the id of its key, for the audit log. A key in the file's simple form has no id."""
        match self.key:
            case None | KeyRecord(is_simple=True):
                return {"tenant": self.tenant}
            case key:
                return {"tenant": self.tenant, "key": key.id}


class Tokens:
    """Finds the key holder to whom an issuer has given a token."""

    def __init__(self, rules: TokenRules, keys: IssuerKeys) -> None:
        self._rules = rules
        self.keys = keys

    async def find(self, token: str) -> KeyHolder | None:
        """The holder of a token; None if the token is not valid."""
        key_id = self._rules.key_id(token)
        key = await self.keys.find(key_id) if key_id is not None else None
        grant = self._rules.grant(token, key) if key is not None else None
        if key is None or grant is None:
            return None
        return KeyHolder(grant.tenant, grant, partial(self._is_good, grant, key))

    def _is_good(self, grant: TokenGrant, key: IssuerKey) -> bool:
        return datetime.now(UTC) < grant.expires and self.keys.holds(key)


class Tenants:
    """Finds the tenant of a call. Without a file of keys and without tokens, every caller is the tenant `public`.

    Args:
        keys_file: the file, in the format of `KeyTable`.
        tokens: finds the holders of tokens; None: tokens are not accepted.

    Attributes:
        files: the files to watch; None without a file of keys.

    Raises:
        SettingsError: the file cannot be read, or has another format.
    """

    def __init__(self, keys_file: Path | None, tokens: Tokens | None = None) -> None:
        self._keys: KeyTable | None = None
        self._tokens = tokens
        self.files: WatchedFiles | None = None
        if keys_file is not None:
            self.files = WatchedFiles(
                "COROLLA_API_KEYS_FILE", keys_file.parent, (keys_file.name,), self._take, named=keys_file
            )

    @property
    def are_several(self) -> bool:
        """There may be several tenants. Tokens may name any number of them."""
        return self._tokens is not None or (self._keys is not None and len(self._keys.tenants) > 1)

    async def authenticate(self, call: Call[Any]) -> None:
        """Sets the caller of a call. Raises Unauthenticated without a valid key or token, and hides the reason."""
        call.caller = await self._holder(call.context)

    async def _holder(self, context: Context) -> KeyHolder:
        if self._keys is None and self._tokens is None:
            return KeyHolder(PUBLIC)
        shown = _shown(context)
        if shown is None:
            raise Unauthenticated("send the metadata `authorization: Bearer <key or token>`, or `x-api-key: <key>`")
        holder = self._key_holder(shown)
        if holder is None and self._tokens is not None:
            holder = self._apart(await self._tokens.find(shown))
        if holder is None:
            raise Unauthenticated("the key or token is not known")
        return holder

    def _apart(self, bearer: KeyHolder | None) -> KeyHolder | None:
        """The holder of a token; None if the file has keys of the same tenant, since tokens cannot replace those."""

        def is_good() -> bool:
            has_keys = self._keys is not None and bearer is not None and bearer.tenant in self._keys.tenants
            return bearer is not None and not has_keys and bearer.is_good()

        return replace(bearer, is_good=is_good) if bearer is not None and is_good() else None

    def _key_holder(self, shown: str) -> KeyHolder | None:
        record = self._keys.find(shown, datetime.now(UTC)) if self._keys is not None else None
        return KeyHolder(record.tenant, record, partial(self._is_good, record)) if record is not None else None

    def _is_good(self, record: KeyRecord) -> bool:
        return self._keys is not None and self._keys.holds(record, datetime.now(UTC))

    def _take(self, contents: Contents) -> None:
        try:
            text = contents[0].decode()
        except UnicodeDecodeError:
            raise ValueError("cannot be read") from None
        self._keys = KeyTable.parse(text)


def _shown(context: Context) -> str | None:
    """The key or token of a caller, by `authorization` or else as clients of Anthropic show it; None: there is none."""
    shown = None
    for name, value in context.invocation_metadata() or ():
        if name in ("authorization", "x-api-key"):
            text = value.decode("latin-1") if isinstance(value, bytes) else value
            if name == "x-api-key":
                shown = text.strip() if shown is None else shown
            elif text.lower().startswith(_SCHEME):
                return text[len(_SCHEME) :].strip()
    return shown
