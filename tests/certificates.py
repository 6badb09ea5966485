"""A certificate for this machine, for TLS between processes of tests and benchmarks."""

import ssl
import subprocess
from pathlib import Path
from typing import Final

_CERTIFICATE: Final = "certificate.pem"
_KEY: Final = "key.pem"


def make_certificate(folder: Path) -> None:
    """Writes a certificate for 127.0.0.1 that is valid for a day, and its key."""
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days",
         "1", "-subj", "/CN=127.0.0.1", "-addext", "subjectAltName=IP:127.0.0.1", "-keyout", folder / _KEY,
         "-out", folder / _CERTIFICATE],
        check=True, capture_output=True,
    )  # fmt: skip


def server_tls(folder: Path) -> ssl.SSLContext:
    """For who has the certificate."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(folder / _CERTIFICATE, folder / _KEY)
    return context


def client_tls(folder: Path) -> ssl.SSLContext:
    """For who trusts the certificate, and no other."""
    return ssl.create_default_context(cafile=str(folder / _CERTIFICATE))
