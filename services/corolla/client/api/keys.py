"""The file of callers' keys.

A file has a line for each key: a JSON object with the key's hash and permissions (`KeyRecord.line`), or, in the simple
form, `tenant:key` in plain text. Empty lines and lines that begin with `#` are ignored.
"""

import hashlib
import hmac
import re
import secrets
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from enum import Enum
from typing import Annotated, Final, Self

from pydantic import AfterValidator, AwareDatetime, BaseModel, ConfigDict, StringConstraints, ValidationError

from corolla.wire.frames import MAX_TENANT_CHARS, is_tenant_name

MIN_KEY_CHARS: Final = 16
"""A shorter key could be found by trial."""
MAX_KEY_CHARS: Final = 512
_SECRET_BYTES: Final = 32
_FORM: Final = re.compile(r"ck_([0-9a-f]{16})_[A-Za-z0-9_-]{43}")

# Characters that end a line for `str.splitlines` or for a terminal; a file of keys has one line for each key.
_ONE_LINE: Final = r"\x00-\x1f\x7f-\x9f\u2028\u2029"


def _checked_tenant(name: str) -> str:
    if not is_tenant_name(name):
        raise ValueError("a tenant's name has characters that cannot be printed")
    return name


Tenant = Annotated[
    str,
    StringConstraints(min_length=1, max_length=MAX_TENANT_CHARS, pattern=rf"^[^{_ONE_LINE}:]+$"),
    AfterValidator(_checked_tenant),
]
ModelName = Annotated[str, StringConstraints(min_length=1, pattern=rf"^[^{_ONE_LINE}]+$")]


class Scope(Enum):
    """The kinds of calls that a key may be limited to. Every key may list the models."""

    GENERATE = "generate"
    CHAT = "chat"
    SESSIONS = "sessions"
    TOKENIZE = "tokenize"


class KeyRecord(BaseModel):
    """The stored facts about a key, without its secret. A secret of 256 random bits needs no slow hash, only SHA-256.

    Attributes:
        models: the names of the models that the key is for; empty: all.
        scopes: the kinds of calls that the key is for; empty: all.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    id: Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{16}$")]
    sha256: Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]
    tenant: Tenant
    created: AwareDatetime
    expires: AwareDatetime | None = None
    models: frozenset[ModelName] = frozenset()
    scopes: frozenset[Scope] = frozenset()

    def allows(self, scope: Scope | None, model: str) -> bool:
        """The key allows calls of `scope` to `model`; scope None stands for calls that every key may make."""
        return (scope is None or not self.scopes or scope in self.scopes) and (not self.models or model in self.models)

    @property
    def is_simple(self) -> bool:
        """The key was read in the simple form, in which keys have no id."""
        return self.id == _NO_ID

    @property
    def line(self) -> str:
        """The key's line in a file."""
        return self.model_dump_json(exclude_defaults=True)


class NewKey:
    """A new random key.

    Attributes:
        key: the key for the caller; it is stored nowhere.
        record: the key's record for the file.
    """

    def __init__(
        self,
        tenant: str,
        *,
        expires: datetime | None = None,
        models: Iterable[str] = (),
        scopes: Iterable[Scope] = (),
    ) -> None:
        """Draws a key. Raises ValueError if the tenant's name is not valid."""
        key_id = secrets.token_hex(8)
        self.key = f"ck_{key_id}_{secrets.token_urlsafe(_SECRET_BYTES)}"
        try:
            self.record = KeyRecord(
                id=key_id, sha256=_digest(self.key), tenant=tenant, created=datetime.now(UTC).replace(microsecond=0),
                expires=expires, models=frozenset(models), scopes=frozenset(scopes),
            )  # fmt: skip
        except ValidationError as failure:
            raise ValueError(_sentence(failure)) from None


class KeyTable:
    """The keys of one file.

    Args:
        by_id: the keys that contain an id, by that id.
        simple: the keys in the simple form, by the hash of the whole key.

    Attributes:
        tenants: the tenants that have keys.
    """

    def __init__(self, by_id: Mapping[str, KeyRecord], simple: Mapping[str, KeyRecord]) -> None:
        self._by_id = by_id
        self._simple = simple
        self.tenants = frozenset(record.tenant for record in self.records)

    @classmethod
    def parse(cls, text: str) -> Self:
        """Reads a file's text. Raises ValueError with a sentence that names the line, and no key."""
        by_id: dict[str, KeyRecord] = {}
        simple: dict[str, KeyRecord] = {}
        first_lines: dict[str, int] = {}
        for number, line in enumerate(map(str.strip, text.splitlines()), start=1):
            if not line or line.startswith("#"):
                continue
            try:
                record = _read_json(line) if line.startswith("{") else _read_simple(line)
            except ValueError as failure:
                raise ValueError(f"line {number}{failure}") from None
            same = by_id.get(record.id) or simple.get(record.sha256)
            if same is not None and same.tenant != record.tenant:
                raise ValueError(f"line {number}: the key of line {first_lines[same.sha256]} belongs to another tenant")
            first_lines.setdefault(record.sha256, number)
            if record.is_simple:
                simple[record.sha256] = record
            else:
                by_id[record.id] = record
        if not by_id and not simple:
            raise ValueError("holds no keys")
        return cls(by_id, simple)

    @property
    def records(self) -> tuple[KeyRecord, ...]:
        return (*self._by_id.values(), *self._simple.values())

    def find(self, key: str, now: datetime) -> KeyRecord | None:
        """The record of a key; None if the key is not valid. Comparisons take constant time, so they reveal nothing."""
        if len(key) > MAX_KEY_CHARS:
            return None
        digest, matched = _digest(key), _FORM.fullmatch(key)
        named = self._by_id.get(matched[1]) if matched else None
        if named is not None and hmac.compare_digest(named.sha256, digest):
            return named if named.expires is None or now < named.expires else None
        found = [record for known, record in self._simple.items() if hmac.compare_digest(known, digest)]
        return found[0] if found else None

    def holds(self, record: KeyRecord, now: datetime) -> bool:
        """A key that was found before, perhaps in an older file, is still valid."""
        known = self._simple.get(record.sha256) if record.is_simple else self._by_id.get(record.id)
        return known == record and (record.expires is None or now < record.expires)


def without_key(text: str, key_id: str) -> str:
    """The text of a file without the lines of the key with this id."""
    return "".join(
        f"{line}\n"
        for line in text.splitlines()
        if not (line.strip().startswith("{") and _read_json(line.strip()).id == key_id)
    )


_NO_ID: Final = "0" * 16
_LONG_AGO: Final = datetime.fromtimestamp(0, UTC)


def _digest(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


def _read_json(line: str) -> KeyRecord:
    try:
        return KeyRecord.model_validate_json(line)
    except ValidationError as failure:
        raise ValueError(f": {_sentence(failure)}") from None


def _read_simple(line: str) -> KeyRecord:
    tenant, _, key = map(str.strip, line.partition(":"))
    if not (tenant and key):
        raise ValueError(" is not of the form tenant:key")
    if len(tenant) > MAX_TENANT_CHARS:
        raise ValueError(f": a tenant's name has at most {MAX_TENANT_CHARS} characters")
    if len(key) < MIN_KEY_CHARS:
        raise ValueError(f": a key has at least {MIN_KEY_CHARS} characters; draw it at random")
    try:
        return KeyRecord(id=_NO_ID, sha256=_digest(key), tenant=tenant, created=_LONG_AGO)
    except ValidationError as failure:
        raise ValueError(f": {_sentence(failure)}") from None


def _sentence(failure: ValidationError) -> str:
    """The first problem of a record as a sentence, without the given value, which may be a key."""
    first = failure.errors(include_input=False, include_url=False)[0]
    return f"{'.'.join(map(str, first['loc'])) or 'the line'}: {first['msg']}"
