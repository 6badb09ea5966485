"""What a machine signs when it asks an issuer for a certificate, and how the issuer reads the machine's key."""

from importlib import metadata
from typing import Final

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from corolla.chassis.errors import InvalidRequest
from corolla.v1 import issuer_pb2 as pb

RELEASE: Final = metadata.version("corolla")
"""The release of this process; machines join only a stack of the same one."""
_PURPOSE: Final = b"corolla enrolment 1\0"
_ALGORITHM: Final = ec.ECDSA(hashes.SHA256())
_MAX_KEY_BYTES: Final = 128
_MAX_SIGNATURE_BYTES: Final = 80


def enrolment_request(key: ec.EllipticCurvePrivateKey, authority: bytes, token: str = "") -> pb.EnrolRequest:
    """Returns the request of the owner of a key.

    Args:
        authority: The digest of the authority that shall sign.
        token: A join token; empty: the key has a certificate already.
    """
    return pb.EnrolRequest(
        public_key=public_der(key.public_key()), signature=key.sign(_PURPOSE + authority, _ALGORITHM), token=token
    )


def checked_key(request: pb.EnrolRequest | pb.ReachRequest, authority: bytes) -> ec.EllipticCurvePublicKey:
    """Returns the key of a request, after checking that the caller has its private key. Raises InvalidRequest."""
    if not 0 < len(request.public_key) <= _MAX_KEY_BYTES or not 0 < len(request.signature) <= _MAX_SIGNATURE_BYTES:
        raise InvalidRequest("public_key", "must be a key on P-256, with a signature by it")
    try:
        key = serialization.load_der_public_key(request.public_key)
        if not isinstance(key, ec.EllipticCurvePublicKey) or not isinstance(key.curve, ec.SECP256R1):
            raise InvalidRequest("public_key", "must be a key on P-256")
        if public_der(key) != request.public_key:
            raise InvalidRequest("public_key", "must be in the usual form, since the same key counts as one machine")
        key.verify(request.signature, _PURPOSE + authority, _ALGORITHM)
    except InvalidSignature:
        raise InvalidRequest("signature", "must be the key's, for this authority") from None
    except ValueError:
        raise InvalidRequest("public_key", "must be a key in DER") from None
    return key


def public_der(key: ec.EllipticCurvePublicKey) -> bytes:
    """Returns a public key as SubjectPublicKeyInfo in DER."""
    return key.public_bytes(serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo)
