"""Who a process is: the SPIFFE id that its certificate carries (https://spiffe.io, "SPIFFE-ID" 2)."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Final, Self

MAX_URI_CHARS: Final = 2048
_URI: Final = re.compile(r"spiffe://([a-z0-9._-]{1,255})/([a-z]+)/([A-Za-z0-9._-]{1,255})")


class Role(Enum):
    """What a process is there for."""

    CLIENT = "client"
    BLOCK = "block"
    ROUTER = "router"
    LIBRARY = "library"
    """Somebody's own program, which steps through chains by itself, for one tenant."""
    OPERATOR = "operator"
    """The command line, and what looks after the others."""


@dataclass(frozen=True, slots=True)
class Workload:
    """One process, or several that share a certificate; of a library, `name` is its tenant."""

    trust_domain: str
    role: Role
    name: str

    @classmethod
    def parse(cls, uri: str) -> Self | None:
        """Reads `spiffe://<trust domain>/<role>/<name>`; None where it is not of that form."""
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
        """Whom the URIs of a certificate name. None unless there is just one: a SPIFFE certificate has no second."""
        found = list(uris)
        return cls.parse(found[0]) if len(found) == 1 else None

    @property
    def owner(self) -> str:
        """Whose sessions they are that it opens: any client service goes on with those of another one."""
        return str(self) if self.role is Role.LIBRARY else f"spiffe://{self.trust_domain}/{self.role.value}"

    def audited(self) -> Mapping[str, str]:
        """What the audit log says of it."""
        return {"workload": str(self)}

    def __str__(self) -> str:
        return f"spiffe://{self.trust_domain}/{self.role.value}/{self.name}"
