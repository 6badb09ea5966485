"""What counts as exposed, for each service."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from corolla.block_server.settings import BlockServerSettings
from corolla.chassis.errors import StartupError
from corolla.chassis.exposure import check, is_loopback, remind
from corolla.chassis.settings import ServiceSettings, load
from corolla.client.settings import ClientSettings
from corolla.router.settings import RouterSettings

FILE = Path("somewhere")
TOKENS = {"oidc_issuer": "https://a", "oidc_audience": "b"}
HERE = {"host": "127.0.0.1"}


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.8.8", "::1", "[::1]", "localhost"])
def test_this_machine_only(host: str) -> None:
    assert is_loopback(host)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "[::]", "", "10.0.0.7", "128.0.0.1", "no-such-name.invalid", "*"])
def test_others_too(host: str) -> None:
    assert not is_loopback(host)


@pytest.mark.parametrize("service", [RouterSettings, BlockServerSettings, ClientSettings])
def test_an_exposed_service_says_what_to_set(service: type[ServiceSettings]) -> None:
    with pytest.raises(StartupError, match=r"COROLLA_HOST=0\.0\.0\.0.*set COROLLA_\w*TLS_DIR.*COROLLA_INSECURE=true$"):
        check(load(service))
    check(load(service, host="127.0.0.1"))
    check(load(service, insecure=True))


@pytest.mark.parametrize(
    "service, given",
    [
        (RouterSettings, {"tls_dir": FILE}),
        (BlockServerSettings, {"tls_dir": FILE}),
        (ClientSettings, {"public_tls_dir": FILE, "api_keys_file": FILE}),
        (ClientSettings, {"public_tls_dir": FILE, **TOKENS}),
    ],
    ids=["router", "block server", "client service", "tokens"],
)
def test_who_is_guarded_may_listen_anywhere(service: type[ServiceSettings], given: dict[str, Any]) -> None:
    check(load(service, **given))


@pytest.mark.parametrize(
    "service, given, missing",
    [
        (RouterSettings, {}, "COROLLA_TLS_DIR"),
        (ClientSettings, {"tls_dir": FILE, "api_keys_file": FILE}, "set COROLLA_PUBLIC_TLS_DIR, or"),
        (ClientSettings, {"public_tls_dir": FILE}, "set COROLLA_API_KEYS_FILE or COROLLA_OIDC_ISSUER, or"),
        (ClientSettings, {}, "set COROLLA_PUBLIC_TLS_DIR and COROLLA_API_KEYS_FILE or COROLLA_OIDC_ISSUER, or"),
    ],
    ids=["router", "keys in the clear", "encrypted for everybody", "nothing"],
)
def test_half_a_guard_is_none(service: type[ServiceSettings], given: dict[str, Any], missing: str) -> None:
    with pytest.raises(StartupError, match=missing):
        check(load(service, **given))


async def test_the_log_says_again_and_again_that_a_service_is_exposed(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(remind(load(RouterSettings, insecure=True), interval_s=0.01), 0.5)
    assert len(caplog.records) > 2
    facts = vars(caplog.records[-1])
    assert (facts["host"], facts["missing"]) == ("0.0.0.0", "COROLLA_TLS_DIR")


@pytest.mark.parametrize("given", [HERE, {"tls_dir": FILE}], ids=["here", "guarded"])
async def test_a_service_that_is_not_exposed_says_nothing(
    given: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    await asyncio.wait_for(remind(load(RouterSettings, insecure=True, **given)), 1)
    assert caplog.records == []
