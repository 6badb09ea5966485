"""The tokens of pods: one for each role, in files that only the pods of that role and the issuer have."""

import secrets
from pathlib import Path
from typing import Final

from corolla.chassis.private_files import write_private
from corolla.trust.authority import Authority
from corolla.trust.join_token import MAX_TOKEN_CHARS, SECRET_BYTES, JoinToken
from corolla.trust.workload import Role

ROLES: Final = (Role.BLOCK, Role.CLIENT, Role.ROUTER, Role.REDIS)
"""The roles of pods. Operators get no certificate by a token, and the issuer signs its own."""


class RoleTokens:
    """Knows the role that a token gives, by the files `<role>.token` in a folder.

    Args:
        folder: The folder, such as a mounted Secret; None: no token gives a role.
    """

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder

    def role_of(self, token: JoinToken) -> Role | None:
        """Returns the role; None: it is another kind of token. A changed file counts at once."""
        if self._folder is None:
            return None
        for role in ROLES:
            known = _read(_path(self._folder, role))
            if known is not None and token.id == known.id and token.has_hash(known.sha256):
                return role
        return None

    @classmethod
    def make(cls, folder: Path) -> None:
        """Writes an authority and a token for each role into a private folder; what is there already stays.

        Raises:
            SettingsError: The folder cannot be used.
            OSError: A file cannot be written.
        """
        authority = Authority.kept_in(folder)
        for role in ROLES:
            token = JoinToken(authority.digest, secrets.token_hex(8), secrets.token_bytes(SECRET_BYTES))
            if not _path(folder, role).exists():
                write_private(_path(folder, role), token.written.encode())


def _path(folder: Path, role: Role) -> Path:
    return folder / f"{role.value}.token"


def _read(path: Path) -> JoinToken | None:
    try:
        with path.open(encoding="ascii") as file:
            return JoinToken.parse(file.read(MAX_TOKEN_CHARS + 64).strip())
    except (OSError, UnicodeDecodeError):
        return None
