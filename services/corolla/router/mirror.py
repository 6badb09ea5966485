"""The placement of one model as this router read it last. A reading asks the store only for what may have changed."""

import asyncio
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any, Final, TypeVar

from google.protobuf.message import DecodeError

from corolla.chassis.errors import InvalidRequest
from corolla.router.roster import Roster, place_of
from corolla.router.store import Store
from corolla.router.validation import check, check_placed
from corolla.v1 import common_pb2
from corolla.v1 import router_pb2 as pb
from corolla.wire.adapter_version import AdapterVersion

Parsed = TypeVar("Parsed")

_DIGEST_CHARS: Final = 64


@dataclass(frozen=True, slots=True)
class _Entry:
    """A server and the bytes that the store listed for it."""

    record: bytes
    placed: pb.PlacedServer
    place: tuple[int, int, str]


class Mirror:
    """Follows the placement of one model in the store.

    A reading lists only the servers that changed, that sent heartbeats, or on which a mark has ended since the last
    reading. So it takes as long with a thousand servers as with ten. It lists all servers where the store cannot tell
    what changed, such as after a loss of data, and every `read_whole_s`, in case that somebody changed a record by
    hand.
    """

    def __init__(self, model: str, store: Store, lease_ms: int, read_whole_s: float) -> None:
        self._model = model
        self._store = store
        self._lease_ms = lease_ms
        self._read_whole_s = read_whole_s
        self._next_whole_s = 0.0
        self._read_ms: str | bytes = "0"
        self._entries: dict[str, _Entry] = {}
        # The adapters as the store lists them, and the removed ones.
        self._stored_adapters: tuple[Any, Any] = ([], [])
        # When marks on servers end at the earliest, in time of the event loop.
        self._mark_ends_s: dict[str, float] = {}
        self._roster = Roster(model, 0, 0)
        self._running: asyncio.Task[Roster] | None = None
        self._next: asyncio.Task[Roster] | None = None

    @property
    def is_in_use(self) -> bool:
        """The store knows the model, or a reading is under way."""
        return self._roster.is_known or self._running is not None or self._next is not None

    async def read(self) -> Roster:
        """Returns the placement at a time after this call began.

        Readings run one at a time. Calls that come during a reading share the next one.
        """
        # A reading that was cancelled while it waited is done, and never began.
        if self._next is None or self._next.done():
            self._next = asyncio.get_running_loop().create_task(self._read_after(self._running), name="placement")
            # All callers may be cancelled before a reading fails.
            self._next.add_done_callback(lambda task: None if task.cancelled() else task.exception())
        return await asyncio.shield(self._next)

    async def _read_after(self, running: "asyncio.Task[Roster] | None") -> Roster:
        if running is not None:
            await asyncio.wait([running])
        self._running, self._next = self._next, None
        try:
            return await self._read()
        finally:
            self._running = None

    async def _read(self) -> Roster:
        now_s = asyncio.get_running_loop().time()
        is_due = now_s >= self._next_whole_s
        ended = [server_id for server_id, end_s in self._mark_ends_s.items() if end_s <= now_s]
        before = self._roster
        version, num_blocks, last_change, read_ms, is_whole, listed, gone, adapters, removed = await self._store.call(
            "snapshot", self._model, self._lease_ms, "0-0" if is_due else before.last_change, before.version,
            self._read_ms, *ended,
        )  # fmt: skip
        if is_whole:
            self._next_whole_s = now_s + self._read_whole_s
        servers = self._take(listed, gone, now_s, is_whole=bool(is_whole))
        if not num_blocks.isdigit() or len(num_blocks) > 4:
            num_blocks = 0
        # This is at least the number that the servers report, even if the store's number is wrong.
        num_blocks = max([int(num_blocks), *(entry.placed.server.num_model_blocks for entry in self._entries.values())])
        roster = replace(
            before,
            version=int(version),
            num_blocks=num_blocks,
            servers=servers,
            last_change=last_change.decode(),
        )
        if adapters is not None and (adapters, removed) != self._stored_adapters:
            self._stored_adapters = adapters, removed
            known = self._parsed_all("adapter", zip(adapters[::2], adapters[1::2], strict=True), _adapter)
            names = sorted(removed[::2])
            roster = replace(
                roster,
                adapters=tuple(sorted(known, key=lambda each: each.version.name)),
                removed_adapters=tuple(self._parsed_all("adapter", zip(names, names, strict=True), _removed)),
            )
        self._read_ms = read_ms
        # Equal rosters are one object, so what was derived from it stays valid.
        if roster != before:
            self._roster = roster
        return self._roster

    def _take(
        self, listed: Sequence[Any], gone: Iterable[bytes], now_s: float, *, is_whole: bool
    ) -> tuple[pb.PlacedServer, ...]:
        """Takes what the store listed, and returns all servers."""
        entries = {} if is_whole else dict(self._entries)
        for name in gone:
            entries.pop(name.decode(errors="replace"), None)
            self._mark_ends_s.pop(name.decode(errors="replace"), None)
        for name, record, mark_ms in zip(listed[::3], listed[1::3], listed[2::3], strict=True):
            server_id = name.decode(errors="replace")
            self._mark_ends_s.pop(server_id, None)
            entry = self._entries.get(server_id)
            if entry is None or entry.record != record:
                placed = parsed(self._store, "server", self._model, name, record, _placed)
                entry = None if placed is None else _Entry(record, placed, place_of(placed))
            if entry is None:
                entries.pop(server_id, None)
                continue
            entries[server_id] = entry
            if mark_ms:
                self._mark_ends_s[server_id] = now_s + mark_ms / 1000
        if entries == self._entries:
            return self._roster.servers
        self._entries = entries
        return tuple(entry.placed for entry in sorted(entries.values(), key=attrgetter("place")))

    def _parsed_all(
        self, kind: str, records: Iterable[tuple[bytes, bytes]], parse: Callable[[bytes], Parsed]
    ) -> list[Parsed]:
        """Parses the records that follow their names, except those that cannot be parsed."""
        found = [parsed(self._store, kind, self._model, name, data, parse) for name, data in records]
        return [each for each in found if each is not None]


def parsed(
    store: Store, kind: str, model: str, name: bytes, data: bytes, parse: Callable[[bytes], Parsed]
) -> Parsed | None:
    """Parses a record of the store; None if that is impossible, which the store counts."""
    try:
        return parse(data)
    except (DecodeError, InvalidRequest, ValueError):
        store.skip(kind, model, name.decode(errors="replace"))
        return None


def _placed(record: bytes) -> pb.PlacedServer:
    return check_placed(pb.PlacedServer.FromString(record))


def _adapter(entry: bytes) -> pb.RegisteredAdapter:
    return check(pb.RegisteredAdapter.FromString(entry[_DIGEST_CHARS:]))


def _removed(entry: bytes) -> common_pb2.AdapterVersion:
    name, _, digest = entry.decode(errors="replace").partition(" ")
    return AdapterVersion(name, digest).to_message()
