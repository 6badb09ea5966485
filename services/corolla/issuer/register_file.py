"""Keeps the register in a file next to the authority. Each record has the issuer's MAC, so that no other one counts."""

import hashlib
import hmac
import json
import logging
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, TypeVar

from cryptography import x509
from pydantic import BaseModel, ValidationError

from corolla.chassis.errors import StartupError
from corolla.chassis.private_files import changing, write_private
from corolla.issuer.register import (
    CERTIFICATE_LIFETIME_S,
    DEFAULT_USES,
    TOKEN_LIFETIME_S,
    MachineRecord,
    Register,
    TokenRecord,
)
from corolla.trust.authority import Authority
from corolla.trust.certificate_verifier import signed_list
from corolla.trust.credentials import REVOCATIONS_FILE
from corolla.trust.join_token import SECRET_BYTES, JoinToken
from corolla.trust.workload import Role

log = logging.getLogger(__name__)

REGISTER_FILE: Final = "machines.json"
_PURPOSE: Final = b"corolla register 1"
_MAX_BYTES: Final = 64 << 20

Record = TypeVar("Record", bound=BaseModel)


class RegisterFile:
    """The register of the authority in a folder, which the issuer and `corolla tokens` change.

    Args:
        folder: The folder.
        authority: The authority; None: the folder keeps it, too.

    Raises:
        SettingsError: The folder cannot be used, does not hold an authority, or other users can read it.
    """

    def __init__(self, folder: Path, authority: Authority | None = None) -> None:
        self.authority = authority or Authority.kept_in(folder)
        self._path = folder / REGISTER_FILE
        self._revocations = folder / REVOCATIONS_FILE
        self._mac_key = self.authority.secret(_PURPOSE)
        self._read: tuple[tuple[int, int, int], Register] | None = None

    def register(self) -> Register:
        """Returns the register for reading; the file is read only if it has changed.

        Raises:
            StartupError: The file cannot be read.
        """
        try:
            found = self._path.stat()
        except FileNotFoundError:
            return Register()
        version = (found.st_ino, found.st_mtime_ns, found.st_size)
        if self._read is None or self._read[0] != version:
            self._read = (version, self._load())
        return self._read[1]

    @contextmanager
    def changing(self) -> Iterator[Register]:
        """Yields the register, and writes it and the revocation list unless the caller fails.

        Raises:
            StartupError: The files cannot be read or written.
        """
        with self._locked() as register:
            yield register
            write_private(self._path, self._written(register))
            self._write_revocations(register)

    def write_revocations(self) -> None:
        """Writes the revocation list anew, since the last change may have ended before. Raises StartupError."""
        with self._locked() as register:
            self._write_revocations(register)

    def revocations(self) -> bytes:
        """Returns the revocation list in PEM; empty before the first change of the register."""
        try:
            return self._revocations.read_bytes()
        except FileNotFoundError:
            return b""

    def new_token(
        self, role: Role = Role.BLOCK, tenant: str = "", uses: int = DEFAULT_USES, lifetime_s: int = TOKEN_LIFETIME_S
    ) -> JoinToken:
        """Makes a token, whose secret is stored nowhere. Raises what `Register.add` raises."""
        token = JoinToken(self.authority.digest, secrets.token_hex(8), secrets.token_bytes(SECRET_BYTES))
        now = int(time.time())
        with self.changing() as register:
            register.add(token, role, tenant, uses, now + lifetime_s, now)
        return token

    @contextmanager
    def _locked(self) -> Iterator[Register]:
        try:
            with changing(self._path):
                yield self._load() if self._path.exists() else Register()
        except OSError as failure:
            raise StartupError(f"cannot write {self._path.parent}: {failure.strerror}") from None

    def _write_revocations(self, register: Register) -> None:
        now = int(time.time())
        numbers = set(register.revoked_numbers(now))
        # A register that is lost or damaged gives no stolen certificate back: what was listed stays listed until the
        # certificate has surely ended.
        listed = signed_list(self.revocations(), x509.load_pem_x509_certificate(self.authority.certificate_pem))
        earlier = [
            each
            for each in listed or ()
            if each.serial_number not in numbers and each.revocation_date_utc.timestamp() + CERTIFICATE_LIFETIME_S > now
        ]
        write_private(self._revocations, self.authority.revocations(numbers, earlier))

    def _load(self) -> Register:
        try:
            if self._path.stat().st_size > _MAX_BYTES:
                raise ValueError("too large")
            content = json.loads(self._path.read_bytes())
            tokens, machines = list(content["tokens"]), list(content["machines"])
        except (ValueError, KeyError, TypeError, RecursionError):
            log.error("the register is damaged, so none of its tokens and machines counts")
            return Register()
        return Register(self._own(TokenRecord, tokens), self._own(MachineRecord, machines))

    def _own(self, kind: type[Record], stored: list[dict[str, Any]]) -> Iterator[Record]:
        """Yields the records whose MAC is this issuer's."""
        for each in stored:
            try:
                mac, record = each["mac"], kind.model_validate_json(each["record"])
                if not hmac.compare_digest(mac, self._mac(kind, each["record"])):
                    raise ValueError("another MAC")
            except (ValueError, KeyError, TypeError, ValidationError):
                log.error("a record of the register was changed, and counts no longer")
            else:
                yield record

    def _written(self, register: Register) -> bytes:
        return json.dumps(
            {
                "tokens": [self._stored(each) for each in register.tokens],
                "machines": [self._stored(each) for each in register.machines],
            }
        ).encode()

    def _stored(self, record: BaseModel) -> dict[str, str]:
        text = record.model_dump_json()
        return {"record": text, "mac": self._mac(type(record), text)}

    def _mac(self, kind: type[BaseModel], text: str) -> str:
        return hmac.new(self._mac_key, f"{kind.__name__}\0{text}".encode(), hashlib.sha256).hexdigest()
