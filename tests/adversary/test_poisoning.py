"""The owner of a block server and of a library of another tenant puts wrong keys and values where a victim looks."""

import asyncio
import logging
import secrets
import zlib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import pytest_asyncio

from corolla.block_server.handover.sender import HandoverLink
from corolla.block_server.hop_session import SessionState
from corolla.cache.transfer import token_bytes
from corolla.chassis import audit
from corolla.trust.capabilities import Capabilities
from corolla.trust.credentials import Credentials, Signer
from corolla.trust.workload import Role
from corolla.v1 import blocks_pb2 as pb
from corolla.v1 import common_pb2
from corolla.wire.frames import Frame
from corolla.wire.network import Network
from corolla.wire.page_hashes import page_hashes
from corolla.wire.stream import Stream
from tests.checkpoints import make_tiny_checkpoint
from tests.identities import Identities
from tests.integration.swarm import Swarm
from tests.integration.waiting import until
from tests.reference import Unsplit

pytestmark = pytest.mark.asyncio(loop_scope="module")

NUM_TRIES = 100
PAGE_TOKENS = 32
BLOCKS = common_pb2.BlockSpan(start=0, end=5)
KEY = "key-of-the-victim"
WARM = [*range(1, 2 * PAGE_TOKENS + 2)]
PROMPT = [*range(5, 2 * PAGE_TOKENS + 6)]
NUM_TOKENS = 2 * PAGE_TOKENS
NUM_NEW = 8


@dataclass
class Place:
    """A swarm, the answers of the unsplit model, and the opens that a rogue block server has seen go by."""

    swarm: Swarm
    identities: Identities
    unsplit: Unsplit
    fingerprint: str = ""
    seen: list[pb.Open] = field(default_factory=list)

    def credentials(self, role: Role, name: str) -> Credentials:
        return Credentials(self.identities.folder_of(role, name))

    def network(self, role: Role, name: str) -> Network:
        return Network.from_folder(self.identities.folder_of(role, name))

    async def ask(self, prompt: list[int]) -> tuple[list[int], int]:
        """The victim's answer, and how many tokens of the prompt hops had."""
        async with self.swarm.connect() as client:
            answer = await client.generate(prompt, max_tokens=NUM_NEW, ignore_eos=True)
        return list(answer.token_ids), answer.usage.cached_tokens

    def truth(self, prompt: list[int]) -> list[int]:
        return self.unsplit.generate(prompt, NUM_NEW, ignore_eos=True).token_ids

    async def num_cached_pages(self) -> int:
        (status,) = await self.swarm.statuses()
        return status.num_cached_pages


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def place(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Place]:
    folder: Path = tmp_path_factory.mktemp("poisoning")
    model = make_tiny_checkpoint("llama", folder / "tiny")
    keys = folder / "keys.txt"
    keys.write_text(f"victim:{KEY}\n")
    async with Swarm(
        folder, model, ["0:5"], server={"page_tokens": PAGE_TOKENS, "kv_cache_mib": 16},
        client={"api_keys_file": keys}, api_key=KEY, is_encrypted=True,
    ) as swarm:  # fmt: skip
        place = Place(swarm, swarm.identities, Unsplit(model))
        place.fingerprint = (await swarm.statuses())[0].fingerprint

        def note(address: str, frame: Frame) -> Frame:
            if isinstance(frame.control, pb.Open):
                place.seen.append(frame.control)
            return frame

        swarm.wires_of(swarm.clients[0]).on_sent = note
        await place.ask(WARM)
        await swarm.until_empty()
        yield place


class Rogue:
    """Hands sessions over as a block server does, and says what they hold as a library does."""

    def __init__(self, place: Place, link: HandoverLink, library: Stream, client_id: bytes) -> None:
        self._link = link
        self._library = library
        self._client_id = client_id
        self._payload = bytes(NUM_TOKENS * token_bytes(place.swarm.servers[0].engine.runner.store, range(5)))  # type: ignore[attr-defined]

    async def poison(self, session_id: bytes, epoch: int, capability: pb.SignedCapability | None) -> str:
        """Offers a session of the victim. Returns the reason of the refusal; empty: it was taken."""
        transfer_id = secrets.token_bytes(16)
        offer = pb.Handover(
            session_id=session_id, epoch=epoch, tenant="victim", client_id=self._client_id, max_tokens=NUM_TOKENS,
            blocks=BLOCKS, lease_ms=60_000, transfer_id=transfer_id, capability=capability,
        )  # fmt: skip
        refused = (await self._link.request(offer)).reason
        part = pb.HandoverTokens(
            session_id=session_id, epoch=epoch, num_tokens=NUM_TOKENS, first_tokens=[0] * 5, transfer_id=transfer_id,
            checksum=zlib.crc32(self._payload), is_last=True, is_idle=True,
        )  # fmt: skip
        written = (await self._link.request(part, self._payload)).reason
        assert bool(written) == bool(refused)
        text = pb.ExpectedText(num_tokens=NUM_TOKENS, page_hashes=page_hashes(PROMPT[:NUM_TOKENS], PAGE_TOKENS))
        self._library.send(pb.Holds(session_id=session_id, epoch=epoch, text=text))
        self._link.send(pb.Close(session_id=session_id, epoch=epoch))
        return refused


@pytest_asyncio.fixture(loop_scope="module")
async def rogue(place: Place) -> AsyncIterator[Rogue]:
    address = place.swarm.servers[0].address
    client_id = secrets.token_bytes(16)
    library = place.network(Role.LIBRARY, "mallory").connect(address, lambda _: lambda _: None)
    library.send(pb.Hello(client_id=client_id, fingerprint=place.fingerprint))
    link = HandoverLink(address, place.network(Role.BLOCK, "rogue").connect)
    async with link.connect(place.fingerprint):
        yield Rogue(place, link, library, client_id)
    library.close()
    await place.swarm.until_empty()


Forgery = Callable[[Place, pb.Open], None]


def signed_by_its_own_certificate(place: Place, opening: pb.Open) -> None:
    library = Capabilities(place.credentials(Role.LIBRARY, "mallory"), place.fingerprint)
    library.sign(opening)
    folder = place.identities.folder_of(Role.BLOCK, "rogue")
    signer = Signer((folder / "tls.crt").read_bytes(), (folder / "tls.key").read_bytes())
    capability = opening.capability
    capability.certificates[:] = signer.certificates
    capability.signature = signer.sign(b"corolla capability 1\0" + capability.capability)


def signed_for_its_own_tenant(place: Place, opening: pb.Open) -> None:
    opening.tenant = "mallory"
    Capabilities(place.credentials(Role.LIBRARY, "mallory"), place.fingerprint).sign(opening)


def signed_by_the_library_for_the_victim(place: Place, opening: pb.Open) -> None:
    Capabilities(place.credentials(Role.LIBRARY, "mallory"), place.fingerprint).sign(opening)


def altered(place: Place, opening: pb.Open) -> None:
    signed_for_its_own_tenant(place, opening)
    capability = pb.Capability.FromString(opening.capability.capability)
    capability.tenant = "victim"
    opening.capability.capability = capability.SerializeToString()


def of_another_session(place: Place, opening: pb.Open) -> None:
    opening.capability.CopyFrom(place.seen[0].capability)


def of_another_authority(place: Place, opening: pb.Open) -> None:
    strangers = Identities(place.identities.folder_of(Role.BLOCK, "rogue") / "strangers")
    Capabilities(Credentials(strangers.folder_of(Role.CLIENT, "1")), place.fingerprint).sign(opening)


def expired(place: Place, opening: pb.Open) -> None:
    Capabilities(place.credentials(Role.CLIENT, "1"), place.fingerprint, clock=lambda: 0).sign(opening)


def missing(place: Place, opening: pb.Open) -> None: ...


FORGERIES: tuple[Forgery, ...] = (
    missing, signed_by_its_own_certificate, signed_for_its_own_tenant, signed_by_the_library_for_the_victim, altered,
    of_another_session, of_another_authority, expired,
)  # fmt: skip


@pytest.mark.parametrize("forge", FORGERIES)
async def test_nobody_hands_a_session_over_in_the_name_of_another_tenant(
    place: Place, rogue: Rogue, forge: Forgery, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, audit.LOGGER)
    num_cached_pages = await place.num_cached_pages()
    opening = pb.Open(
        session_id=secrets.token_bytes(16), epoch=1, tenant="victim", max_tokens=NUM_TOKENS, blocks=BLOCKS,
        lease_ms=60_000,
    )  # fmt: skip
    forge(place, opening)
    capability = opening.capability if opening.HasField("capability") else None
    refused = await rogue.poison(opening.session_id, 1, capability)
    assert refused == ("ROLE_DENIED" if forge is signed_by_the_library_for_the_victim else "CAPABILITY_DENIED")
    (line,) = [vars(record) for record in caplog.records if record.getMessage() == "handover"]
    assert (line["outcome"], line["workload"]) == (refused, "spiffe://test/block/rogue")
    assert not place.swarm.servers[0].sessions
    assert await place.num_cached_pages() == num_cached_pages


async def test_a_server_ends_no_session_that_it_has_not_handed_over(place: Place) -> None:
    """Not even one whose id it knows, since it is another hop of the session."""
    (server,) = place.swarm.servers
    async with place.swarm.connect() as client:
        session = (await client.create_session()).session_id
        await client.generate(WARM, max_tokens=NUM_NEW, ignore_eos=True, session=session)
        await until(lambda: [each.state for each in server.sessions] == [SessionState.PARKED])
        held = [(each, each.state, each.version, each.request.epoch, each.cache.num_tokens) for each in server.sessions]
        link = HandoverLink(server.address, place.network(Role.BLOCK, "rogue").connect)
        async with link.connect(place.fingerprint):
            session_id, epoch = bytes.fromhex(session), 2**32 - 1
            link.send(pb.Truncate(session_id=session_id, epoch=epoch, position=0, idle=True))
            link.send(pb.Close(session_id=session_id, epoch=epoch))
            # An answer: the frames before it have been handled.
            refused = await link.request(
                pb.Handover(
                    session_id=session_id, client_id=bytes(16), transfer_id=bytes(16), blocks=BLOCKS, epoch=epoch,
                    max_tokens=1, lease_ms=1,
                )
            )  # fmt: skip
            assert refused.reason == "CAPABILITY_DENIED"
        await asyncio.sleep(0.1)
        now = [(each, each.state, each.version, each.request.epoch, each.cache.num_tokens) for each in server.sessions]
        assert now == held
        again = await client.generate(WARM, max_tokens=NUM_NEW, ignore_eos=True, session=session)
        assert again.usage.cached_tokens > len(WARM)
        await client.delete_session(session)
        await place.swarm.until_empty()


async def test_the_victim_never_finds_what_a_rogue_computed(place: Place, rogue: Rogue) -> None:
    """Not even in sessions of the victim that the rogue has seen go by, and which it may hand over."""
    num_cached_pages, num_taken = await place.num_cached_pages(), 0
    for number in range(NUM_TRIES):
        seen = place.seen[number % len(place.seen)]
        session_id = seen.session_id if number % 2 else secrets.token_bytes(16)
        num_taken += not await rogue.poison(session_id, seen.epoch, seen.capability)
    await until(lambda: not place.swarm.servers[0].sessions)
    assert 0 < num_taken <= NUM_TRIES // 2
    assert await place.num_cached_pages() == num_cached_pages
    assert await place.ask(PROMPT) == (place.truth(PROMPT), 0)
    assert await place.ask(WARM) == (place.truth(WARM), NUM_TOKENS)
