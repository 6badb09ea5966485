"""Each port of the chart asks callers who they are, unless its values say on purpose that it need not."""

from typing import Final

import pytest

from corolla.chassis.settings import load
from corolla.models.demo import demo_checkpoint
from corolla.router.settings import RouterSettings
from tests.charts.rendering import CHART, Object, Refused, named, pod_specs, render
from tests.charts.test_values import TOKENS, merged

KEYS: Final[Object] = {"client": {"apiKeys": {"existingSecret": "keys"}}}
CERTIFICATES: Final[Object] = {"tls": {"certManager": {"issuer": "authority"}}}
IN_THE_CLEAR: Final[Object] = {"tls": {"enabled": False}}
NO_POLICIES: Final[Object] = {"networkPolicy": {"enabled": False}}
SERVICES: Final = ("rel-corolla-router", "rel-corolla-block-server-main", "rel-corolla-client")


def settings(values: Object, name: str = "rel-corolla-client") -> dict[str, str]:
    return dict(named(render(values), "ConfigMap", name)["data"])


def mode(name: str) -> Object:
    return {"auth": {**TOKENS, "mode": name}}


def asks(values: Object) -> tuple[bool, bool]:
    """Whether the client service takes keys, and tokens."""
    given = settings(values)
    return "COROLLA_API_KEYS_FILE" in given, "COROLLA_OIDC_ISSUER" in given


def test_the_mode_follows_from_the_keys_unless_it_is_given() -> None:
    assert asks({}) == asks(mode("none")) == (False, False)
    assert asks(KEYS) == asks(merged(KEYS, mode("keys"))) == (True, False)
    assert asks(mode("oidc")) == (False, True)
    assert asks(merged(KEYS, mode("oidc"))) == (True, True)


@pytest.mark.parametrize(
    "values, says",
    [
        (mode("keys"), "set client.apiKeys.existingSecret"),
        (merged(KEYS, mode("none")), "remove one of the two"),
        ({"auth": {"mode": "oidc", "oidc": {"audience": "a"}}}, "name the issuer"),
        ({"auth": {"mode": "oidc", "oidc": {"issuer": "https://a"}}}, "name what tokens are for"),
        (merged(mode("oidc"), {"auth": {"oidc": {"jwks": "https://a/b", "jwksSecret": "c"}}}), "remove one of them"),
        ({"auth": {"mode": "jwt"}}, "values don't meet the specifications of the schema"),
    ],
    ids=["keys without any", "keys for nobody", "no issuer", "no audience", "two key sets", "unknown"],
)
def test_a_mode_that_makes_no_sense_is_refused(values: Object, says: str) -> None:
    with pytest.raises(Refused, match=says):
        render(values)


@pytest.mark.parametrize("kind", ["LoadBalancer", "NodePort"])
def test_a_service_for_everybody_asks_who_calls(kind: str) -> None:
    service: Object = {"client": {"service": {"type": kind}}}
    for unasked in ({}, mode("none")):
        with pytest.raises(Refused, match=rf"client\.service\.type {kind}, everyone who .* set auth\.mode"):
            render(merged(service, unasked))
    for asked in (KEYS, mode("oidc")):
        render(merged(service, asked))


def test_the_chart_has_no_other_way_in() -> None:
    """A template that offered one would have to ask for the mode, too."""
    templates = "".join(each.read_text(encoding="utf-8") for each in (CHART / "templates").rglob("*.yaml"))
    assert not any(f"kind: {kind}" in templates for kind in ("Ingress", "HTTPRoute", "GRPCRoute", "Gateway"))


def test_the_authority_of_an_issuer_is_mounted() -> None:
    pod = pod_specs(render(mode("oidc")))["rel-corolla-client"]
    (volume,) = [each for each in pod["volumes"] if each["name"] == "oidc-ca"]
    assert volume["secret"]["secretName"] == "ca"
    mounts = {each["name"]: each["mountPath"] for each in pod["containers"][0]["volumeMounts"]}
    assert f"{mounts['oidc-ca']}/ca.crt" == settings(mode("oidc"))["COROLLA_OIDC_CA_FILE"]


def test_a_key_set_in_a_secret_is_a_file_of_the_pods() -> None:
    values = merged(mode("oidc"), {"auth": {"oidc": {"jwksSecret": "login", "jwksKey": "keys"}}})
    pod = pod_specs(render(values))["rel-corolla-client"]
    (volume,) = [each for each in pod["volumes"] if each["name"] == "oidc-keys"]
    assert volume["secret"] == {"secretName": "login"}
    mounts = {each["name"]: each for each in pod["containers"][0]["volumeMounts"]}
    assert mounts["oidc-keys"]["readOnly"]
    assert settings(values)["COROLLA_OIDC_JWKS"] == f"{mounts['oidc-keys']['mountPath']}/keys"


def test_client_services_may_ask_the_issuer() -> None:
    def ports(values: Object) -> set[int]:
        policy = named(render({"model": {"offline": True}, **values}), "NetworkPolicy", "rel-corolla-client")
        return {each["port"] for rule in policy["spec"]["egress"] if "to" not in rule for each in rule["ports"]}

    assert ports({}) == set()
    assert ports(mode("oidc")) == {443, 8443}
    assert ports(merged(mode("oidc"), {"auth": {"oidc": {"jwksSecret": "login"}}})) == set()


@pytest.mark.parametrize(
    "model, expected",
    [
        ({"name": "demo"}, demo_checkpoint().stem),
        ({"name": "org/model", "numBlocks": 30}, "org/model=30"),
        ({"name": "/models/llama/", "numBlocks": 80}, "llama=80"),
        ({"name": "/models/llama.Q4_1-00001-of-00003.gguf"}, "llama.Q4_1"),
        ({"name": "org/model/llama.gguf"}, "llama"),
    ],
    ids=["demo", "hub", "folder", "parts of a file", "file on the hub"],
)
def test_routers_take_block_servers_of_the_releases_model_only(model: Object, expected: str) -> None:
    given = settings({"model": model}, "rel-corolla-router")["COROLLA_MODELS"]
    assert given == expected
    assert load(RouterSettings, models=given).expected_models.keys() == {expected.partition("=")[0]}
    for others in ("", "one,two=2"):
        values = {"model": model, "router": {"settings": {"models": others}}}
        assert settings(values, "rel-corolla-router")["COROLLA_MODELS"] == others


@pytest.mark.parametrize("name", SERVICES)
def test_pods_that_only_policies_guard_are_so_on_purpose(name: str) -> None:
    everything = merged(merged(CERTIFICATES, KEYS), {"client": {"tls": {"existingSecret": "public"}}})
    assert settings(IN_THE_CLEAR, name)["COROLLA_INSECURE"] == "true"
    for values in (everything, merged(everything, NO_POLICIES)):
        assert "COROLLA_INSECURE" not in settings(values, name)
    # Callers alone are not asked who they are, unless values say otherwise.
    assert ("COROLLA_INSECURE" in settings({}, name)) == (name == "rel-corolla-client")


@pytest.mark.parametrize(
    "values, says",
    [
        (IN_THE_CLEAR, "without networkPolicy.enabled and"),
        ({}, "client.tls.existingSecret and auth.mode"),
        (CERTIFICATES, "client.tls.existingSecret and auth.mode"),
        (merged(CERTIFICATES, KEYS), "client.tls.existingSecret and auth.mode"),
        (merged(CERTIFICATES, {"client": {"tls": {"existingSecret": "public"}}}), "client.tls.existingSecret and auth"),
        (
            merged(IN_THE_CLEAR, {"client": {"settings": {"insecure": True}}}),
            "without networkPolicy.enabled and tls.enabled",
        ),
    ],
    ids=["nothing", "defaults", "callers are not asked", "keys in the clear", "encrypted for everybody", "the others"],
)
def test_pods_that_nothing_guards_are_refused(values: Object, says: str) -> None:
    with pytest.raises(Refused, match=says):
        render(merged(values, NO_POLICIES))


def test_pods_that_nothing_guards_are_rendered_for_those_who_insist() -> None:
    insist = {"settings": {"insecure": True}}
    insisting = {"router": insist, "client": insist, "blockServer": {"defaults": insist}}
    values = merged(merged(NO_POLICIES, IN_THE_CLEAR), insisting)
    assert [settings(values, name)["COROLLA_INSECURE"] for name in SERVICES] == ["true"] * 3
