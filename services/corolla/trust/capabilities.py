"""Who may hold a session for which tenant: signed by who opens it, verified by each hop that gets it.

So a hop believes neither an open nor another hop about the tenant, but the key of a client service's certificate.
"""

import time
from collections.abc import Callable
from typing import Final

from google.protobuf.message import DecodeError

from corolla.chassis.errors import CapabilityDenied, RoleDenied
from corolla.trust.credentials import Credentials
from corolla.trust.workload import Role, Workload
from corolla.v1 import blocks_pb2 as pb

_PURPOSE: Final = b"corolla capability 1\0"
"""In front of what is signed: the same key shakes hands."""
_SIGNERS: Final = frozenset({Role.CLIENT, Role.LIBRARY})
GRACE_MS: Final = 3_600_000
"""How much longer than its lease a session may be handed over. Its steps renew the lease, and not the capability; what
runs longer is computed again elsewhere, with the same tokens."""


class Capabilities:
    """Of the sessions of one model.

    Args:
        credentials: of this process.
        fingerprint: of the model.
        clock: Unix time in seconds.
    """

    def __init__(self, credentials: Credentials, fingerprint: str, clock: Callable[[], float] = time.time) -> None:
        self._credentials = credentials
        self._fingerprint = fingerprint
        self._clock = clock

    def sign(self, opening: pb.Open) -> None:
        """Adds the capability for just this. Raises RoleDenied: of a process that opens no sessions."""
        signer = self._credentials.signer
        if signer is None:
            raise RoleDenied("this process opens no sessions")
        capability = pb.Capability(
            fingerprint=self._fingerprint,
            session_id=opening.session_id,
            epoch=opening.epoch,
            tenant=opening.tenant,
            blocks=opening.blocks,
            max_tokens=opening.max_tokens,
            expires_at_ms=self._now_ms() + opening.lease_ms + GRACE_MS,
        ).SerializeToString()
        signed = pb.SignedCapability(
            capability=capability, signature=signer.sign(_PURPOSE + capability), certificates=signer.certificates
        )
        opening.capability.CopyFrom(signed)

    def verify(self, asked: pb.Open | pb.Handover) -> Workload:
        """Who opened the session that is asked for.

        Raises:
            CapabilityDenied: nobody who may has signed for this session, tenant and epoch, for these blocks and for so
                many tokens, or no longer.
            RoleDenied: a library has, for a tenant that is not its own.
        """
        signed = asked.capability
        signatory = self._credentials.signatories.find(signed.certificates)
        if signatory is None or not signatory.has_signed(signed.signature, _PURPOSE + signed.capability):
            raise CapabilityDenied("no workload that this server knows has signed for the session")
        workload = signatory.workload
        if not self._credentials.counts(signed.certificates[0]):
            raise CapabilityDenied("the certificate of who has signed for the session counts no longer")
        if not self._credentials.knows(workload) or workload.role not in _SIGNERS:
            raise CapabilityDenied("who has signed for the session may open none")
        try:
            capability = pb.Capability.FromString(signed.capability)
        except DecodeError:
            raise CapabilityDenied("what was signed is no capability") from None
        if workload.role is Role.LIBRARY and workload.name != capability.tenant:
            raise RoleDenied("a library's certificate names its tenant; this one is another")
        if self._now_ms() >= capability.expires_at_ms:
            raise CapabilityDenied("the capability of the session has expired")
        if capability.fingerprint != self._fingerprint or not _covers(capability, asked):
            raise CapabilityDenied("the capability is for something else")
        return workload

    def _now_ms(self) -> int:
        return int(self._clock() * 1000)


def _covers(capability: pb.Capability, asked: pb.Open | pb.Handover) -> bool:
    is_same = (capability.session_id, capability.epoch, capability.tenant) == (
        asked.session_id, asked.epoch, asked.tenant,
    )  # fmt: skip
    blocks = capability.blocks
    is_within = blocks.start <= asked.blocks.start and asked.blocks.end <= blocks.end
    return is_same and is_within and asked.max_tokens <= capability.max_tokens
