"""An identity provider on this machine: it signs tokens, and serves its key set over HTTPS."""

import json
import ssl
import threading
import time
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

import jwt
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from jwt.algorithms import ECAlgorithm, RSAAlgorithm

from corolla.trust.authority import Authority
from corolla.trust.credentials import AUTHORITY_FILE, CERTIFICATE_FILE, KEY_FILE
from corolla.trust.workload import Role, Workload

AUDIENCE: Final = "corolla"


class SigningKey:
    """A key of an issuer: RS256, or ES256 where it has a curve."""

    def __init__(self, key_id: str, *, has_curve: bool = False, rsa_bits: int = 2048) -> None:
        self.id = key_id
        self.algorithm = "ES256" if has_curve else "RS256"
        self.private: Any = (
            ec.generate_private_key(ec.SECP256R1()) if has_curve else rsa.generate_private_key(65537, rsa_bits)
        )

    @property
    def described(self) -> dict[str, Any]:
        """The key as a JSON Web Key."""
        of_kind: Any = ECAlgorithm if self.algorithm == "ES256" else RSAAlgorithm
        public: dict[str, Any] = of_kind.to_jwk(self.private.public_key(), as_dict=True)
        return {**public, "kid": self.id, "use": "sig"}

    def sign(self, claims: Mapping[str, Any], headers: Mapping[str, Any] | None = None) -> str:
        return jwt.encode(dict(claims), self.private, self.algorithm, {"kid": self.id, **(headers or {})})

    def sign_any(self, claims: Any) -> str:
        """Whatever JSON can say, which need be no claims."""
        return jwt.PyJWS().encode(json.dumps(claims).encode(), self.private, self.algorithm, {"kid": self.id})


def key_set(*keys: SigningKey) -> bytes:
    return json.dumps({"keys": [each.described for each in keys]}).encode()


class IdentityProvider:
    """Serves its description and its key set.

    Attributes:
        keys: which it has now.
        status: what every request is answered with; 0: as it should be.
        may_give_keys: until it is set, who asks for the key set waits.
        num_requests: for the key set.
        describes: what its description says besides, or in other words.
    """

    def __init__(self, folder: Path, *keys: SigningKey) -> None:
        authority = Authority()
        authority.issue(folder, Workload("idp", Role.OPERATOR, "idp"), ("127.0.0.1",))
        self.ca_file = folder / AUTHORITY_FILE
        self.keys = list(keys)
        self.status = 0
        self.may_give_keys = threading.Event()
        self.may_give_keys.set()
        self.num_requests = 0
        self.describes: dict[str, Any] = {}
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(folder / CERTIFICATE_FILE, folder / KEY_FILE)
        # In the thread of each connection: one that never begins would keep the server from its end.
        self._server.socket = context.wrap_socket(self._server.socket, server_side=True, do_handshake_on_connect=False)
        self.issuer = f"https://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, failure: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._server.shutdown()
        self._server.server_close()

    @property
    def settings(self) -> dict[str, Any]:
        """The settings of a client service that takes this provider's tokens."""
        return {"oidc_issuer": self.issuer, "oidc_audience": AUDIENCE, "oidc_ca_file": self.ca_file}

    def claims(self, **others: Any) -> dict[str, Any]:
        """The claims of a token that holds for a minute. None leaves one out."""
        now = int(time.time())
        usual = {"iss": self.issuer, "aud": AUDIENCE, "sub": "ada", "iat": now, "exp": now + 60}
        return {name: value for name, value in {**usual, **others}.items() if value is not None}

    def token(self, **claims: Any) -> str:
        """Signed with its first key."""
        return self.keys[0].sign(self.claims(**claims))

    def answer(self, path: str) -> tuple[int, bytes]:
        """Status and content of what is asked for."""
        if self.status:
            return self.status, b""
        if path == "/.well-known/openid-configuration":
            return 200, json.dumps(
                {"issuer": self.issuer, "jwks_uri": f"{self.issuer}/keys", **self.describes}
            ).encode()
        self.may_give_keys.wait(60)
        return 200, key_set(*self.keys)

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        provider = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                provider.num_requests += self.path == "/keys"
                status, content = provider.answer(self.path)
                self.send_response(status)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, format: str, *arguments: Any) -> None:  # noqa: A002 - the library's name
                """Nothing."""

        return Handler
