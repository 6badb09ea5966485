"""The origins of pages that a service lets in where it asks no caller for a key."""

import pytest

from corolla.chassis.errors import InvalidRequest
from corolla.client.http.origins import AllowedOrigins, OwnPages


@pytest.mark.parametrize(
    "listens, host, origin",
    [
        ("127.0.0.1", "elsewhere.example", None),
        ("127.0.0.1", "127.0.0.1:8080", "http://127.0.0.1:8080"),
        ("127.0.0.1", "localhost:8080", "http://localhost:8080"),
        ("localhost", "LOCALHOST", "http://localhost"),
        ("::1", "[::1]:8080", "http://[::1]:8080"),
        ("[::1]", "[::1]", "http://[::1]"),
        ("0.0.0.0", "llm.example", "https://llm.example"),
        ("", "llm.example:8080", "https://llm.example:8080"),
    ],
)
def test_programs_and_own_pages_are_let_in(listens: str, host: str, origin: str | None) -> None:
    OwnPages(listens).check({"host": host} if origin is None else {"host": host, "origin": origin})


@pytest.mark.parametrize(
    "listens, host, origin",
    [
        ("127.0.0.1", "127.0.0.1:8080", "https://elsewhere.example"),
        ("127.0.0.1", "127.0.0.1:8080", "http://127.0.0.1:3000"),
        ("127.0.0.1", "127.0.0.1:8080", "null"),
        ("127.0.0.1", "", "null"),
        ("127.0.0.1", "127.0.0.1:8080", "http://127.0.0.1:8080.elsewhere.example"),
        ("127.0.0.1", "elsewhere.example:8080", "http://elsewhere.example:8080"),
        ("localhost", "localhost.elsewhere.example", "http://localhost.elsewhere.example"),
        ("::1", "elsewhere.example", "http://elsewhere.example"),
        ("0.0.0.0", "llm.example", "https://elsewhere.example"),
    ],
)
def test_pages_of_other_hosts_are_refused(listens: str, host: str, origin: str) -> None:
    with pytest.raises(InvalidRequest) as refusal:
        OwnPages(listens).check({"host": host, "origin": origin})
    assert refusal.value.violations[0][0] == "origin"


@pytest.mark.parametrize(
    "listens, host, is_let_in",
    [
        ("127.0.0.1", "127.0.0.1:8080", True),
        ("127.0.0.1", "localhost", True),
        ("127.0.0.1", "elsewhere.example:8080", False),
        ("127.0.0.1", "", False),
        ("0.0.0.0", "llm.example", True),
    ],
)
def test_a_page_reads_by_a_name_of_this_machine_only(listens: str, host: str, is_let_in: bool) -> None:
    if is_let_in:
        OwnPages(listens).check_reader({"host": host})
        return
    with pytest.raises(InvalidRequest) as refusal:
        OwnPages(listens).check_reader({"host": host})
    assert refusal.value.violations[0][0] == "host"


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
