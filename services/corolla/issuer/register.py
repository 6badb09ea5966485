"""Decides which keys get a certificate, by a stack's tokens and machines. Pure: time and random names are passed in."""

import hashlib
from collections.abc import Iterable, Iterator
from typing import Annotated, Final

from pydantic import BaseModel, ConfigDict, Field

from corolla.chassis.errors import QueueFull, StartupError, Unauthenticated
from corolla.trust.join_token import JoinToken
from corolla.trust.workload import Role, Workload

DEFAULT_USES: Final = 16
MOST_USES: Final = 1024
TOKEN_LIFETIME_S: Final = 86_400
CERTIFICATE_LIFETIME_S: Final = 86_400
MOST_TOKENS: Final = 256
MOST_MACHINES: Final = 4096
MOST_CERTIFICATES: Final = 8
"""The most certificates of one machine that have not ended; each is a number in the revocation list."""
_KEPT_S: Final = 30 * 86_400
"""How long a machine may be away, and still get another certificate without a token."""
JOINABLE: Final = frozenset({Role.BLOCK, Role.LIBRARY, Role.CLIENT})
"""The roles that a token may give; routers, operators and issuers never join by one."""


class TokenRecord(BaseModel):
    """What the issuer keeps of a token.

    Attributes:
        tenant: The tenant of libraries that join by it; empty for other roles.
        expires: The Unix time at which it ends.
        uses: How many more keys may join by it.
        revoked: Whether an operator has revoked it.
    """

    model_config = ConfigDict(extra="forbid")

    id: str
    sha256: str
    role: Role
    tenant: str = ""
    expires: int
    uses: int
    revoked: bool = False


class MachineRecord(BaseModel):
    """What the issuer keeps of a machine that joined.

    Attributes:
        name: The name in its certificates, which for libraries is their tenant's and otherwise random.
        key: The SHA-256 digest of its public key.
        token: The id of the token by which it joined.
        certificates: The serial numbers and ends of its certificates that have not ended.
        certificate: The newest one, in PEM; empty before the first one is signed.
        revoked: Whether an operator has revoked it.
    """

    model_config = ConfigDict(extra="forbid")

    id: str
    key: str
    token: str
    role: Role
    name: str
    certificates: Annotated[list[tuple[int, int]], Field(max_length=MOST_CERTIFICATES)] = []
    certificate: str = ""
    revoked: bool = False

    def is_fresh(self, now: int) -> bool:
        """The newest certificate has more than half of its life left, so the machine needs no other one."""
        return bool(self.certificates) and self.certificates[-1][1] - now > CERTIFICATE_LIFETIME_S // 2

    def is_gone(self, now: int) -> bool:
        """Its last certificate ended so long ago that the machine needs a token again."""
        return bool(self.certificates) and self.certificates[-1][1] + _KEPT_S <= now

    def signed(self, serial_number: int, ends: int, certificate: str, now: int) -> None:
        """Notes a new certificate. Raises QueueFull if too many have not ended."""
        left = [each for each in self.certificates if each[1] > now]
        if len(left) >= MOST_CERTIFICATES:
            raise QueueFull("this machine has too many certificates; try again tomorrow", retry_after_s=3600.0)
        self.certificates = [*left, (serial_number, ends)]
        self.certificate = certificate


class Register:
    """The tokens and machines of one stack.

    Args:
        tokens: The tokens, the oldest one first.
        machines: The machines, likewise.
    """

    def __init__(self, tokens: Iterable[TokenRecord] = (), machines: Iterable[MachineRecord] = ()) -> None:
        self._tokens = {each.id: each for each in tokens}
        self._machines = {each.key: each for each in machines}

    @property
    def tokens(self) -> list[TokenRecord]:
        return list(self._tokens.values())

    @property
    def machines(self) -> list[MachineRecord]:
        return list(self._machines.values())

    def add(self, token: JoinToken, role: Role, tenant: str, uses: int, expires: int, now: int) -> None:
        """Adds a token. Of too many, the one that ends first is dropped, and counts no longer.

        Raises:
            StartupError: No machine joins with this role by a token, or a number is out of range.
        """
        if role not in JOINABLE or (role is Role.LIBRARY) != bool(tenant):
            raise StartupError(f"machines cannot join as {role.value} by a token")
        if tenant and Workload.parse(f"spiffe://t/library/{tenant}") is None:
            raise StartupError("the tenant of a library has 1 to 255 letters, digits, dots, hyphens and underscores")
        if not 1 <= uses <= MOST_USES or expires <= now:
            raise StartupError(f"a token has 1 to {MOST_USES} uses, and ends later than now")
        self._tokens = {each.id: each for each in self.tokens if each.expires > now}
        if len(self._tokens) >= MOST_TOKENS:
            del self._tokens[min(self.tokens, key=lambda each: each.expires).id]
        self._tokens[token.id] = TokenRecord(
            id=token.id, sha256=token.sha256, role=role, tenant=tenant, expires=expires, uses=uses
        )

    def known(self, public_key: bytes, now: int) -> MachineRecord | None:
        """Returns the machine that joined with this key and is not gone. Raises Unauthenticated if it was revoked."""
        machine = self._machines.get(digest_of(public_key))
        if machine is not None and machine.revoked:
            raise Unauthenticated(f"this machine ({machine.id}) was revoked; join again with a new token and key")
        return None if machine is None or machine.is_gone(now) else machine

    def accept(self, public_key: bytes, token: JoinToken, machine_id: str, now: int) -> MachineRecord:
        """Spends a use of the token, and returns the machine that joins by it; a key that is known costs no use.

        Args:
            machine_id: The random name of the machine if it is new.

        Raises:
            Unauthenticated: The token does not count, or the machine was revoked.
            QueueFull: There are too many machines.
        """
        record = self.checked(token, now)
        if (machine := self.known(public_key, now)) is not None:
            return machine
        if not record.uses:
            raise Unauthenticated("all uses of this token are spent; ask for a new one: corolla tokens new")
        if len(self._machines) >= MOST_MACHINES:
            self._forget_the_gone(now)
        if len(self._machines) >= MOST_MACHINES:
            raise QueueFull("too many machines have joined this stack", retry_after_s=3600.0)
        record.uses -= 1
        machine = MachineRecord(
            id=machine_id, key=digest_of(public_key), token=token.id, role=record.role, name=record.tenant or machine_id
        )
        self._machines[machine.key] = machine
        return machine

    def checked(self, token: JoinToken, now: int) -> TokenRecord:
        """Returns the record of a token that counts, though its uses may be spent. Raises Unauthenticated."""
        record = self._tokens.get(token.id)
        # A stranger who tries secrets learns nothing else.
        if record is None or not token.has_hash(record.sha256):
            raise Unauthenticated("this stack does not know the token; copy it again, or ask for a new one")
        if record.revoked:
            raise Unauthenticated("this token was revoked; ask for a new one: corolla tokens new")
        if record.expires <= now:
            raise Unauthenticated("this token has expired; ask for a new one: corolla tokens new")
        return record

    def revoke(self, name: str, *, with_machines: bool) -> int:
        """Revokes a token by its id, and the machines that joined by it if asked; or one machine by its id.

        Returns:
            The number of machines that are revoked now and were not before.

        Raises:
            StartupError: Nothing has the name.
        """
        token = self._tokens.get(name)
        if token is not None:
            token.revoked = True
        found = [each for each in self._machines.values() if each.id == name or (with_machines and each.token == name)]
        if token is None and not found:
            raise StartupError(f"no token or machine is called {name}; `corolla tokens list` shows them")
        revoked = [each for each in found if not each.revoked]
        for each in revoked:
            each.revoked = True
        return len(revoked)

    def revoked_numbers(self, now: int) -> Iterator[int]:
        """Yields the serial numbers of revoked certificates that have not ended."""
        for machine in self._machines.values():
            if machine.revoked:
                yield from (number for number, ends in machine.certificates if ends > now)

    def _forget_the_gone(self, now: int) -> None:
        self._machines = {
            key: each for key, each in self._machines.items() if each.certificates and not each.is_gone(now)
        }


def digest_of(public_key: bytes) -> str:
    return hashlib.sha256(public_key).hexdigest()
