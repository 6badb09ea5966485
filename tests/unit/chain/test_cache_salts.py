from itertools import combinations

import pytest

from corolla.chain.cache_salts import CacheSalts
from corolla.chassis.errors import SettingsError

SECRET = "0123456789abcdef0123456789abcdef"


def test_each_secret_tenant_and_salt_has_digests_of_its_own() -> None:
    salts = [
        CacheSalts(secret).of(tenant, salt)
        for secret in (SECRET, SECRET[::-1])
        for tenant, salt in (("acme", ""), ("acme", "s"), ("acmes", ""), ("", "acmes"), ("victim", "s"))
    ]
    assert all(one != other for one, other in combinations(salts, 2))
    assert CacheSalts(SECRET).of("acme", "s") == CacheSalts(SECRET).of("acme", "s")


def test_without_a_secret_the_digests_are_of_the_texts_and_the_request_alone() -> None:
    assert [CacheSalts("").of(tenant, salt) for tenant in ("acme", "victim") for salt in ("", "s")] == [b"", b"s"] * 2


def test_client_services_of_all_versions_meet_in_one_cache() -> None:
    # `openssl dgst -sha256 -mac HMAC` gives this digest.
    assert (
        CacheSalts(SECRET).of("acme", "s").hex() == "b27f4a7f6abf856df08888a1dace1ce980716622a5168b8b3ce459afeb963089"
    )


def test_a_short_secret_is_refused_and_not_quoted() -> None:
    with pytest.raises(SettingsError) as refused:
        CacheSalts("hunter2")
    assert "hunter2" not in str(refused.value)
