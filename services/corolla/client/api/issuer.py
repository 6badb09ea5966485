"""The public keys of an issuer of tokens (OpenID Connect), read from a file or fetched from the issuer regularly."""

import asyncio
import json
import logging
import ssl
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Final

import httpx2

from corolla.chassis.errors import SettingsError
from corolla.client.api.tokens import IssuerKey, parse_keys
from corolla.trust.watched_files import Contents, WatchedFiles

log = logging.getLogger(__name__)

_TIMEOUT_S: Final = 5.0
_PAUSES_IN_A_REFRESH: Final = 30
_MAX_WAITING: Final = 1000
_MAX_BYTES: Final = 1 << 20
_HTTPS: Final = "https://"
_DISCOVERY: Final = "/.well-known/openid-configuration"

Fetch = Callable[[], Awaitable[Mapping[str, IssuerKey]]]
"""Fetches the keys. Raises ValueError, OSError, TimeoutError or HTTPError."""


class IssuerKeys:
    """The known keys of an issuer by their ids.

    Attributes:
        is_away: whether the last try to fetch the keys failed.
    """

    is_away = False

    def __init__(self) -> None:
        self._keys: Mapping[str, IssuerKey] = {}

    async def find(self, key_id: str) -> IssuerKey | None:
        """Returns the key with this id; None if it is unknown. FetchedKeys fetches the keys again first."""
        return self._keys.get(key_id)

    def holds(self, key: IssuerKey) -> bool:
        """A key that was found before is still one of the known keys."""
        return self._keys.get(key.id) == key

    async def ready(self) -> None:
        """Waits until there are keys."""

    async def run(self) -> None:
        """Follows the issuer's changes, for ever."""
        raise NotImplementedError


class KeysInFile(IssuerKeys):
    """Keys in a file, which is read again when it changes.

    Raises:
        SettingsError: the file cannot be read, or holds no keys.
    """

    def __init__(self, file: Path) -> None:
        super().__init__()
        self._files = WatchedFiles("COROLLA_OIDC_JWKS", file.parent, (file.name,), self._take, named=file)

    async def run(self) -> None:
        await self._files.run()

    def _take(self, contents: Contents) -> None:
        self._keys = parse_keys(contents[0])


class FetchedKeys(IssuerKeys):
    """Keys that are fetched every `refresh_s` seconds, and when a token names an unknown key.

    After each fetch there is a pause of a thirtieth of `refresh_s`, so that tokens with invented ids cause few requests
    to the issuer. While the issuer is away, a new try follows each pause, and the known keys stay.
    """

    def __init__(self, fetch: Fetch, refresh_s: float) -> None:
        super().__init__()
        self._fetch = fetch
        self._refresh_s = refresh_s
        self._pause_s = refresh_s / _PAUSES_IN_A_REFRESH
        self._are_wanted = asyncio.Event()
        # This event is set at the end of the running or the next fetch.
        self._end_of_fetch = asyncio.Event()
        self._is_pausing = False
        self._num_waiting = 0

    async def find(self, key_id: str) -> IssuerKey | None:
        known = await super().find(key_id)
        if known is not None or self._is_pausing or self._num_waiting >= _MAX_WAITING:
            return known
        self._are_wanted.set()
        self._num_waiting += 1
        try:
            await self._end_of_fetch.wait()
        finally:
            self._num_waiting -= 1
        return await super().find(key_id)

    async def ready(self) -> None:
        while not self._keys:
            await self._end_of_fetch.wait()

    async def run(self) -> None:
        while True:
            await self._fetch_once()
            self._is_pausing = True
            self._are_wanted.clear()
            self._end_of_fetch.set()
            self._end_of_fetch = asyncio.Event()
            await asyncio.sleep(self._pause_s)
            self._is_pausing = False
            if not self.is_away:
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._are_wanted.wait(), self._refresh_s - self._pause_s)

    async def _fetch_once(self) -> None:
        try:
            keys = await self._fetch()
        except (ValueError, OSError, TimeoutError, httpx2.HTTPError, httpx2.InvalidURL) as failure:
            if not self.is_away:
                cause = str(failure) if type(failure) is ValueError else type(failure).__name__
                log.error("cannot fetch the issuer's keys; continuing with the known ones", extra={"cause": cause})
            self.is_away = True
            return
        if self.is_away or not self._keys:
            log.info("fetched the issuer's keys")
        self._keys, self.is_away = keys, False


def issuer_keys(issuer: str, jwks: str, ca_file: Path | None, refresh_s: float) -> IssuerKeys:
    """The keys of an issuer, from a file or fetched.

    Args:
        issuer: the issuer's address.
        jwks: the place of the keys: a file, or an https address; empty: the issuer's OpenID configuration names it.
        ca_file: file with the trusted certificate authorities in PEM; None: those of the system.
        refresh_s: the seconds between two fetches.

    Raises:
        SettingsError: a file cannot be read, or holds something else.
    """
    if jwks and not jwks.startswith(_HTTPS):
        return KeysInFile(Path(jwks))
    try:
        ssl.create_default_context(cafile=ca_file)
    except OSError:
        raise SettingsError(f"COROLLA_OIDC_CA_FILE={ca_file}: cannot be read, or holds no certificates") from None

    async def fetch() -> Mapping[str, IssuerKey]:
        # Each fetch reads the file, which may have changed. A thread reads it, since the system's file takes a while.
        context = await asyncio.to_thread(ssl.create_default_context, cafile=ca_file)
        async with asyncio.timeout(_TIMEOUT_S), httpx2.AsyncClient(verify=context, timeout=_TIMEOUT_S) as client:
            return parse_keys(await _get(client, jwks or await _discover(client, issuer)))

    return FetchedKeys(fetch, refresh_s)


async def _discover(client: httpx2.AsyncClient, issuer: str) -> str:
    try:
        described = json.loads(await _get(client, issuer.rstrip("/") + _DISCOVERY))
        name, address = described["issuer"], described["jwks_uri"]
    except (KeyError, TypeError, RecursionError):
        raise ValueError("the issuer's description is not valid") from None
    if name != issuer:
        raise ValueError("the issuer's description is of another issuer")
    if not isinstance(address, str) or not address.startswith(_HTTPS):
        raise ValueError("the issuer's keys are not at an https address")
    return address


async def _get(client: httpx2.AsyncClient, address: str) -> bytes:
    """Fetches an address. Raises ValueError if the answer is an error or too large. Does not follow redirections."""
    async with client.stream("GET", address) as response:
        if response.status_code != httpx2.codes.OK:
            raise ValueError(f"the issuer answers {response.status_code}")
        content = b""
        async for part in response.aiter_bytes():
            content += part
            if len(content) > _MAX_BYTES:
                raise ValueError("the issuer's answer is too large")
    return content
