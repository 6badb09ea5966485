"""The identity of a process: the SPIFFE id in its certificate (https://spiffe.io, "SPIFFE-ID", section 2)."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Final, Self

MAX_URI_CHARS: Final = 2048
_URI: Final = re.compile(r"spiffe://([a-z0-9._-]{1,255})/([a-z]+)/([A-Za-z0-9._-]{1,255})")


class Role(Enum):
    """The role of a process, which decides the calls that it may make."""

    CLIENT = "client"
    BLOCK = "block"
    ROUTER = "router"
    LIBRARY = "library"
    """A user's own program, which sends steps through chains itself, for one tenant."""
    OPERATOR = "operator"
    """The command line, and programs that operate the services."""
    ISSUER = "issuer"
    """The process that signs certificates for machines that join; it calls no other process."""
    REDIS = "redis"
    """The Redis of a release; it calls no other process."""


@dataclass(frozen=True, slots=True)
class Workload:
    """One process, or several that share a certificate. The `name` of a library is its tenant."""

    trust_domain: str
    role: Role
    name: str

    @classmethod
    def parse(cls, uri: str) -> Self | None:
        """Reads `spiffe://<trust domain>/<role>/<name>`; returns None if the URI has another form."""
        matched = _URI.fullmatch(uri) if len(uri) <= MAX_URI_CHARS else None
        if matched is None:
            return None
        trust_domain, role, name = matched.groups()
        try:
            return cls(trust_domain, Role(role), name)
        except ValueError:
            return None

    @classmethod
    def only_one(cls, uris: Iterable[str]) -> Self | None:
        """Returns the workload of a certificate's URIs; None unless there is exactly one, as SPIFFE demands."""
        found = list(uris)
        return cls.parse(found[0]) if len(found) == 1 else None

    @property
    def owner(self) -> str:
        """The owner of the sessions that this workload opens. All client services are one owner, and share sessions."""
        return str(self) if self.role is Role.LIBRARY else f"spiffe://{self.trust_domain}/{self.role.value}"

    def audited(self) -> Mapping[str, str]:
        """Returns the facts that the audit log holds about the workload."""
        return {"workload": str(self)}

    def __str__(self) -> str:
        return f"spiffe://{self.trust_domain}/{self.role.value}/{self.name}"
