"""Files of keys: what is written is read, what is found is found by its secret only, and mistakes name their line."""

from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from corolla.client.api.keys import KeyTable, NewKey, Scope

NOW = datetime(2026, 11, 24, tzinfo=UTC)
NAMES = st.text(st.characters(exclude_categories=["C", "Z"], exclude_characters=":#{"), min_size=1, max_size=40)


def table(*made: NewKey) -> KeyTable:
    return KeyTable.parse("".join(f"{each.record.line}\n" for each in made))


@given(NAMES, st.sets(NAMES), st.sets(st.sampled_from(Scope)), st.none() | st.just(NOW + timedelta(days=1)))
def test_what_is_written_is_read(tenant: str, models: set[str], scopes: set[Scope], expires: datetime | None) -> None:
    made = NewKey(tenant, models=models, scopes=scopes, expires=expires)
    assert table(made).find(made.key, NOW) == made.record


def test_no_line_holds_a_secret() -> None:
    made = NewKey("acme")
    secret = made.key.split("_", 2)[2]
    assert secret not in made.record.line
    assert len(secret) == 43


def test_a_key_is_found_by_its_secret_and_not_by_its_id() -> None:
    made, other = NewKey("acme"), NewKey("other")
    keys = table(made, other)
    forged = f"ck_{made.record.id}_{other.key.split('_', 2)[2]}"
    assert keys.find(forged, NOW) is None
    assert keys.find(made.key + "x", NOW) is None
    assert keys.find(made.key[:-1], NOW) is None
    assert keys.find("k" * 1_000_000, NOW) is None
    assert keys.find("", NOW) is None


def test_a_key_holds_until_it_expires() -> None:
    made = NewKey("acme", expires=NOW)
    assert table(made).find(made.key, NOW - timedelta(seconds=1)) == made.record
    assert table(made).find(made.key, NOW) is None


def test_a_key_allows_what_it_was_made_for() -> None:
    record = NewKey("acme", models=["llama"], scopes=[Scope.CHAT]).record
    assert record.allows(Scope.CHAT, "llama")
    assert record.allows(None, "llama")
    assert not record.allows(Scope.GENERATE, "llama")
    assert not record.allows(Scope.CHAT, "other")
    assert all(NewKey("acme").record.allows(scope, "any") for scope in Scope)


def test_both_forms_stand_in_one_file() -> None:
    made = NewKey("acme")
    keys = KeyTable.parse(f"# callers\nalice:key-of-alice-0001\n\n{made.record.line}\n")
    alice = keys.find("key-of-alice-0001", NOW)
    assert alice is not None
    assert alice.tenant == "alice"
    assert keys.tenants == {"alice", "acme"}


@pytest.mark.parametrize(
    "line, says",
    [
        ("{}", "line 1: id: Field required"),
        ('{"id": "x"}', "line 1: id: String should match"),
        ("{nonsense", "line 1: the line: Invalid JSON"),
        ("ac\tme:key-of-acme-0001", "^line 1: tenant: String should match pattern [^\n]*$"),
        (NewKey("acme").record.line.replace('"acme"', '""'), "line 1: tenant: String should have at least 1 character"),
        (NewKey("acme").record.line.replace('"tenant"', '"owner"'), "line 1: tenant: Field required"),
    ],
    ids=["empty", "id", "json", "control character", "no name", "no tenant"],
)
def test_a_mistake_names_its_line(line: str, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        KeyTable.parse(line)


@pytest.mark.parametrize("tenant", ["", "a:b", "two\nlines", "x" * 300], ids=["none", "colon", "lines", "long"])
def test_a_tenant_that_is_none_gets_no_key(tenant: str) -> None:
    with pytest.raises(ValueError, match="tenant: "):
        NewKey(tenant)
