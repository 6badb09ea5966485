"""The origins of pages that a service lets in where it asks no caller for a key."""

import pytest

from corolla.chassis.errors import InvalidRequest
from corolla.trust.origins import AllowedOrigins, OwnPages


@pytest.mark.parametrize(
    "listens, host, origin",
    [
        ("127.0.0.1", "127.0.0.1:8080", None), ("127.0.0.1", "127.0.0.1:8080", "http://127.0.0.1:8080"),
        ("127.0.0.1", "localhost:8080", "http://localhost:8080"), ("localhost", "LOCALHOST", "http://localhost"),
        ("::1", "[::1]:8080", "http://[::1]:8080"), ("[::1]", "[::1]", "http://[::1]"),
        ("127.0.0.1", "127.0.0.1:8080", "http://127.0.0.1:3000"),
        ("127.0.0.1", "localhost:8080", "https://LOCALHOST:5173"), ("localhost", "127.0.0.1:8080", "http://[::1]:3000"),
        ("0.0.0.0", "llm.example", None), ("0.0.0.0", "llm.example", "https://llm.example"),
        ("", "llm.example:8080", "https://llm.example:8080"),
    ],
)  # fmt: skip
def test_programs_and_pages_of_this_machine_are_let_in(listens: str, host: str, origin: str | None) -> None:
    pages, headers = OwnPages(listens), {"host": host} if origin is None else {"host": host, "origin": origin}
    pages.check(headers)
    is_elsewhere = origin is not None and origin.lower().partition("://")[2] != host.lower()
    if is_elsewhere or listens not in ("0.0.0.0", ""):
        assert pages.origins.headers(headers).get("access-control-allow-origin") == origin
    # What only the service's own page may read, no other page of this machine does.
    if is_elsewhere:
        with pytest.raises(InvalidRequest, match="origin"):
            pages.check_reader(headers)
    else:
        pages.check_reader(headers)


@pytest.mark.parametrize(
    "listens, host, origin, field",
    [
        ("127.0.0.1", "127.0.0.1:8080", "https://elsewhere.example", "origin"),
        ("127.0.0.1", "127.0.0.1:8080", "null", "origin"),
        ("127.0.0.1", "127.0.0.1:8080", "http://127.0.0.1:8080.elsewhere.example", "origin"),
        ("127.0.0.1", "localhost", "http://localhost.elsewhere.example:80", "origin"),
        ("127.0.0.1", "", "null", "host"),
        ("127.0.0.1", "elsewhere.example:8080", "http://elsewhere.example:8080", "host"),
        ("127.0.0.1", "elsewhere.example:8080", "http://localhost:8080", "host"),
        ("localhost", "localhost.elsewhere.example", "http://localhost.elsewhere.example", "host"),
        ("::1", "elsewhere.example", "http://elsewhere.example", "host"),
        ("127.0.0.1", "elsewhere.example:8080", None, "host"),
        ("0.0.0.0", "llm.example", "https://elsewhere.example", "origin"),
        ("0.0.0.0", "llm.example", "http://localhost:3000", "origin"),
    ],
)
def test_pages_of_other_hosts_are_refused(listens: str, host: str, origin: str | None, field: str) -> None:
    pages, headers = OwnPages(listens), {"host": host} if origin is None else {"host": host, "origin": origin}
    for check in (pages.check, pages.check_reader, *([pages.check_host] if field == "host" else [])):
        with pytest.raises(InvalidRequest) as refusal:
            check(headers)
        assert refusal.value.violations[0][0] == field
    assert "access-control-allow-origin" not in pages.origins.headers(headers)


def test_the_host_of_an_allowed_origin_is_known() -> None:
    """A proxy on this machine passes such a name on."""
    pages = OwnPages("127.0.0.1", AllowedOrigins.parse("https://llm.example"))
    pages.check({"host": "llm.example"})
    pages.check({"host": "llm.example", "origin": "https://llm.example"})
    with pytest.raises(InvalidRequest):
        pages.check({"host": "elsewhere.example"})


@pytest.mark.parametrize("origin", ["https://chat.example.org", "HTTPS://chat.example.org", "http://localhost:3000"])
def test_pages_of_allowed_origins_are_let_in_and_read(origin: str) -> None:
    origins = AllowedOrigins.parse("https://chat.example.org/, http://localhost:3000")
    OwnPages("127.0.0.1", origins).check({"host": "127.0.0.1:8080", "origin": origin})
    assert origins.headers({"origin": origin})["access-control-allow-origin"] == origin
    with pytest.raises(InvalidRequest):
        OwnPages("127.0.0.1", origins).check_reader({"host": "127.0.0.1:8080", "origin": origin})


@pytest.mark.parametrize("origin", ["https://example.org", "https://chat.example.org:8443", "null", "http://localhost"])
def test_pages_of_other_origins_read_nothing(origin: str) -> None:
    origins = AllowedOrigins.parse("https://chat.example.org, http://localhost:3000")
    assert origins.headers({"origin": origin}) == {"vary": "origin"}
    assert AllowedOrigins.parse("*").headers({"origin": origin})["access-control-allow-origin"] == origin
    assert AllowedOrigins.parse("").headers({"origin": origin}) == {}


@pytest.mark.parametrize("text", ["chat.example.org", "https://", "https://*.example.org", "https://a.example/path"])
def test_what_is_no_origin_is_refused_at_the_start(text: str) -> None:
    with pytest.raises(ValueError, match="origin"):
        AllowedOrigins.parse(text)
