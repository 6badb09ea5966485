"""Key sets hold what can check a token and nothing else, and whatever is sent as a token is at worst none."""

import json
from datetime import timedelta
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric import rsa
from hypothesis import given
from hypothesis import strategies as st
from jwt.algorithms import RSAAlgorithm

from corolla.client.api.tokens import MAX_TOKEN_CHARS, TokenRules, parse_keys
from tests.identity_provider import SigningKey, key_set

KEY = SigningKey("curve", has_curve=True)
RULES = TokenRules(issuer="https://a", audience="b", skew=timedelta(), tenant_claim="sub")


def described(**others: Any) -> dict[str, Any]:
    return {name: value for name, value in {**KEY.described, **others}.items() if value is not None}


def private() -> dict[str, Any]:
    return {**RSAAlgorithm.to_jwk(rsa.generate_private_key(65537, 2048), as_dict=True), "kid": "private"}


@pytest.mark.parametrize(
    "unfit",
    [
        {"kty": "oct", "k": "c2VjcmV0LXNlY3JldC1zZWNyZXQtc2VjcmV0LXNlY3JldA", "kid": "a"},
        {"kty": "oct", "k": "c2VjcmV0LXNlY3JldC1zZWNyZXQtc2VjcmV0LXNlY3JldA", "kid": "a", "alg": "RS256"},
        described(kid=None), described(kid=7), described(use="enc"), described(alg="HS256"), described(alg="none"),
        described(crv="none"), described(x="!"), described(kty=7), described(alg=["ES256"]),
        SigningKey("weak", rsa_bits=1024).described, private(), 7, None, [],
    ],
    ids=range(16),
)  # fmt: skip
def test_a_key_that_cannot_check_a_token_is_left_out(unfit: Any) -> None:
    good = SigningKey("good", has_curve=True).described
    assert parse_keys(json.dumps({"keys": [unfit, good]}).encode()).keys() == {"good"}
    with pytest.raises(ValueError, match="holds no public key"):
        parse_keys(json.dumps({"keys": [unfit]}).encode())


@pytest.mark.parametrize("text", [b"", b"\xff", b"7", b"[]", b"{}", b'{"keys": 7}', b'{"keys": {}}', b"[" * 100_000])
def test_what_is_no_key_set_is_refused(text: bytes) -> None:
    with pytest.raises(ValueError, match="is not a JSON Web Key Set"):
        parse_keys(text)


def test_a_key_is_for_the_algorithm_that_it_names() -> None:
    key = SigningKey("rsa")
    token = key.sign({"iss": "https://a", "aud": "b", "sub": "ada", "exp": 2**33})
    for algorithm, holds in ((None, True), ("RS256", True), ("RS512", False)):
        named = {"alg": algorithm} if algorithm else {}
        found = parse_keys(json.dumps({"keys": [{**key.described, **named}]}).encode())["rsa"]
        assert (RULES.grant(token, found) is not None) == holds


def test_a_key_that_comes_again_is_the_same() -> None:
    key = parse_keys(key_set(KEY))["curve"]
    assert parse_keys(key_set(SigningKey("x", has_curve=True), KEY))["curve"] == key
    assert parse_keys(key_set(SigningKey("curve", has_curve=True)))["curve"] != key


JSON = st.recursive(st.none() | st.booleans() | st.floats() | st.text(max_size=5), st.lists, max_leaves=5)


@given(st.text() | st.lists(st.text("ABCab01_-"), min_size=3, max_size=3).map(".".join))
def test_whatever_is_sent_is_at_worst_no_token(text: str) -> None:
    assert RULES.key_id(text) is None


@given(st.dictionaries(st.sampled_from(["iss", "aud", "sub", "exp", "nbf", "iat", "jti"]), JSON))
def test_whatever_an_issuer_signs_is_at_worst_no_token(claims: dict[str, Any]) -> None:
    key = parse_keys(key_set(KEY))["curve"]
    usual = {"iss": "https://a", "aud": "b", "sub": "ada", "exp": 2**33}
    grant = RULES.grant(KEY.sign_any({**usual, **claims}), key)
    assert grant is None or grant.tenant == {**usual, **claims}["sub"]


def test_a_token_that_is_very_long_is_not_looked_at() -> None:
    token = KEY.sign({"sub": "x" * MAX_TOKEN_CHARS})
    assert RULES.key_id(token) is None
    assert RULES.key_id(KEY.sign({"sub": "x"})) == "curve"
