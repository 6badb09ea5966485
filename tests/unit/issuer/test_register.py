"""The register gives certificates to keys with a token that counts, and to none else."""

import pytest

from corolla.chassis.errors import QueueFull, StartupError, Unauthenticated
from corolla.issuer.register import CERTIFICATE_LIFETIME_S, MOST_CERTIFICATES, MOST_MACHINES, MOST_TOKENS, Register
from corolla.trust.join_token import JoinToken
from corolla.trust.workload import Role

NOW = 1_800_000_000
DAY_S = 86_400
AUTHORITY = bytes(32)


def token_of(number: int = 1) -> JoinToken:
    return JoinToken(AUTHORITY, f"{number:016x}", number.to_bytes(32, "big"))


def register_with(uses: int = 2, role: Role = Role.BLOCK, tenant: str = "") -> tuple[Register, JoinToken]:
    register, token = Register(), token_of()
    register.add(token, role, tenant, uses, NOW + DAY_S, NOW)
    return register, token


def test_each_key_costs_a_use_once() -> None:
    register, token = register_with(uses=2)
    first = register.accept(b"one", token, "m1", NOW)
    assert register.accept(b"one", token, "another name", NOW) is first
    assert (first.id, first.name, first.role) == ("m1", "m1", Role.BLOCK)
    register.accept(b"two", token, "m2", NOW)
    with pytest.raises(Unauthenticated, match="spent"):
        register.accept(b"three", token, "m3", NOW)
    # A machine whose answer was lost asks again, also when the token is spent.
    assert register.accept(b"one", token, "m4", NOW) is first


def test_a_token_counts_until_its_end_and_its_revocation() -> None:
    register, token = register_with()
    register.accept(b"one", token, "m1", NOW + DAY_S - 1)
    with pytest.raises(Unauthenticated, match="expired"):
        register.accept(b"one", token, "m1", NOW + DAY_S)
    assert register.known(b"one", NOW) is not None  # its own key goes on
    assert register.revoke(token.id, with_machines=False) == 0
    with pytest.raises(Unauthenticated, match="revoked"):
        register.accept(b"two", token, "m2", NOW)
    assert register.known(b"one", NOW) is not None


def test_a_wrong_secret_learns_nothing_about_a_token() -> None:
    register, token = register_with()
    register.revoke(token.id, with_machines=False)
    said = []
    for wrong in (JoinToken(AUTHORITY, token.id, bytes(32)), token_of(2)):
        with pytest.raises(Unauthenticated) as refused:
            register.accept(b"one", wrong, "m1", NOW)
        said.append(refused.value.message)
    assert said[0] == said[1]
    assert "revoked" not in said[0]


def test_machines_of_a_token_are_revoked_together_and_one_by_its_name() -> None:
    register, token = register_with(uses=3)
    for number, key in enumerate((b"one", b"two", b"three")):
        machine = register.accept(key, token, f"m{number}", NOW)
        machine.signed(number + 1, NOW + DAY_S, "pem", NOW)
    assert register.revoke("m0", with_machines=False) == 1
    with pytest.raises(Unauthenticated, match="m0"):
        register.accept(b"one", token, "m9", NOW)
    assert list(register.revoked_numbers(NOW)) == [1]
    assert register.revoke(token.id, with_machines=True) == 2
    assert list(register.revoked_numbers(NOW)) == [1, 2, 3]
    assert list(register.revoked_numbers(NOW + DAY_S)) == []
    with pytest.raises(StartupError, match="called nothing"):
        register.revoke("nothing", with_machines=True)


@pytest.mark.parametrize("role", [Role.ROUTER, Role.OPERATOR, Role.ISSUER])
def test_no_token_gives_a_role_that_commands_others(role: Role) -> None:
    with pytest.raises(StartupError, match=role.value):
        Register().add(token_of(), role, "", 1, NOW + 1, NOW)


def test_a_library_is_named_by_its_tenant_and_nothing_else_is() -> None:
    register, token = register_with(role=Role.LIBRARY, tenant="acme")
    assert register.accept(b"one", token, "m1", NOW).name == "acme"
    for role, tenant in ((Role.LIBRARY, ""), (Role.BLOCK, "acme"), (Role.CLIENT, "acme")):
        with pytest.raises(StartupError):
            register.add(token_of(2), role, tenant, 1, NOW + 1, NOW)


@pytest.mark.parametrize("tenant", ["a/b", "a b", "ä", "x" * 256])
def test_a_tenant_that_no_certificate_can_name_gets_no_token(tenant: str) -> None:
    with pytest.raises(StartupError, match="tenant"):
        Register().add(token_of(), Role.LIBRARY, tenant, 1, NOW + 1, NOW)


def test_a_certificate_is_fresh_for_half_of_its_life() -> None:
    register, token = register_with()
    machine = register.accept(b"one", token, "m1", NOW)
    assert not machine.is_fresh(NOW)
    machine.signed(1, NOW + CERTIFICATE_LIFETIME_S, "pem", NOW)
    assert machine.is_fresh(NOW + CERTIFICATE_LIFETIME_S // 2 - 1)
    assert not machine.is_fresh(NOW + CERTIFICATE_LIFETIME_S // 2)


def test_a_machine_that_was_away_for_a_month_needs_a_token_and_a_revoked_one_stays_out() -> None:
    register, token = register_with(uses=3)
    for number, key in enumerate((b"one", b"two")):
        register.accept(key, token, f"m{number}", NOW).signed(number, NOW + DAY_S, "pem", NOW)
    register.revoke("m1", with_machines=False)
    late = NOW + 31 * DAY_S
    assert register.known(b"one", late - 1) is not None
    assert register.known(b"one", late) is None
    with pytest.raises(Unauthenticated, match="m1"):
        register.known(b"two", late)
    other = token_of(2)
    register.add(other, Role.BLOCK, "", 1, late + DAY_S, late)
    assert register.accept(b"one", other, "m9", late).id == "m9"
    assert next(each.uses for each in register.tokens if each.id == other.id) == 0


def test_everything_has_a_bound() -> None:
    register, token = register_with(uses=1024)
    for number in range(2, MOST_TOKENS + 2):
        register.add(token_of(number), Role.BLOCK, "", 1024, NOW + DAY_S + number, NOW)
    assert len(register.tokens) == MOST_TOKENS
    with pytest.raises(Unauthenticated, match="does not know"):  # it ended first, so it went first
        register.accept(b"one", token, "m1", NOW)
    machine = register.accept(b"one", token_of(2), "m1", NOW)
    for number in range(MOST_CERTIFICATES):
        machine.signed(number, NOW + DAY_S, "pem", NOW)
    with pytest.raises(QueueFull):
        machine.signed(99, NOW + DAY_S, "pem", NOW)
    machine.signed(99, NOW + 2 * DAY_S, "pem", NOW + DAY_S)
    for number in range(MOST_MACHINES - 1):
        register.accept(number.to_bytes(4, "big"), token_of(3 + number // 1024), f"n{number}", NOW).signed(
            number, NOW + 3 * DAY_S, "pem", NOW
        )
    with pytest.raises(QueueFull):
        register.accept(b"more", token_of(9), "m2", NOW)
    # Machines that have been gone for a month make room.
    late = token_of(9999)
    register.add(late, Role.BLOCK, "", 1, NOW + 60 * DAY_S, NOW + 59 * DAY_S)
    register.accept(b"more", late, "m2", NOW + 59 * DAY_S)
    assert len(register.machines) == 1
