"""The file of quotas."""

import json
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from corolla.chassis.errors import SettingsError
from corolla.chassis.tenant_limits import COUNTED, NO_LIMITS, PERIODS_MS, QUOTAS, QuotaTable, TenantLimits
from corolla.client.metrics import ClientMetrics
from corolla.client.quotas.enforcer import QuotaEnforcer
from corolla.v1 import router_pb2 as pb


def parse(value: Any) -> QuotaTable:
    return QuotaTable.parse(json.dumps(value).encode())


def test_a_tenants_own_entry_stands_over_the_default() -> None:
    table = parse(
        {
            "default": {"requests_per_second": 5, "running_sequences": 8},
            "tenants": {"acme": {"requests_per_second": 50, "answer_seconds": 60}, "free": {"running_sequences": None}},
        }
    )
    assert table.of("anybody") == TenantLimits(requests_per_second=5, running_sequences=8)
    assert table.of("acme") == TenantLimits(requests_per_second=50, running_sequences=8, answer_seconds=60)
    assert table.of("free") == TenantLimits(requests_per_second=5)


def test_without_a_default_others_have_no_limits() -> None:
    assert parse({"tenants": {"acme": {"running_requests": 1}}}).of("other") == NO_LIMITS
    assert parse({}).of("other") == NO_LIMITS


@pytest.mark.parametrize(
    "limits, are_counted",
    [
        (NO_LIMITS, False),
        (TenantLimits(answer_seconds=1), False),
        (TenantLimits(withhold_cached_tokens=True), False),
        (TenantLimits(standby="all"), False),
        *((TenantLimits.model_validate({quota: 1}), quota in COUNTED) for quota in QUOTAS),
    ],
)
def test_only_what_has_to_be_counted_is(limits: TenantLimits, *, are_counted: bool) -> None:
    assert limits.are_counted is are_counted


@pytest.mark.parametrize(
    "value, place",
    [
        ({"default": {"requests_per_minute": 5}}, "default.requests_per_minute"),
        ({"tenants": {"acme": {"running_sequences": 0}}}, "tenants.acme.running_sequences"),
        ({"tenants": {"acme": {"running_sequences": 10**13}}}, "tenants.acme.running_sequences"),
        ({"tenants": {"": {}}}, "tenants"),
        ({"default": {"answer_seconds": -1}}, "default.answer_seconds"),
        ({"acme": {}}, "acme"),
        ({"default": {"guaranteed_tokens": 5}}, "default"),
        ({"default": {"guaranteed_sequences": 5}}, "default"),
        ({"tenants": {"acme": {"guaranteed_tokens": 9, "reserved_tokens": 8}}}, "tenants.acme.guaranteed_tokens"),
        (
            {"default": {"running_sequences": 8}, "tenants": {"acme": {"guaranteed_sequences": 9}}},
            "tenants.acme.guaranteed_sequences",
        ),
    ],
)
def test_what_makes_no_sense_is_refused_by_its_place(value: Any, place: str) -> None:
    with pytest.raises(ValueError, match=f"^{place}"):
        parse(value)


def test_what_is_no_json_is_refused() -> None:
    with pytest.raises(ValueError, match="JSON"):
        QuotaTable.parse(b"default: {}")


def test_only_what_is_limited_is_counted() -> None:
    limits = TenantLimits(requests_per_second=5, reserved_tokens=100)
    assert limits.uses({"requests_per_second": 1, "running_requests": 1, "reserved_tokens": 7}, must_fit=True) == (
        pb.QuotaUse(quota="requests_per_second", amount=1, limit=5, must_fit=True, period_ms=1000),
        pb.QuotaUse(quota="reserved_tokens", amount=7, limit=100, must_fit=True),
    )


def test_every_other_field_is_a_quota() -> None:
    others = {"answer_seconds", "withhold_cached_tokens", "standby", "guaranteed_tokens", "guaranteed_sequences"}
    assert {*QUOTAS} | others == TenantLimits.model_fields.keys()
    assert set(PERIODS_MS) <= set(QUOTAS)


def test_no_more_places_are_guaranteed_than_there_are(tmp_path: Path) -> None:
    file = tmp_path / "quotas"
    file.write_text('{"tenants": {"acme": {"guaranteed_sequences": 5}, "free": {"guaranteed_sequences": 3}}}')
    quotas = QuotaEnforcer(file, ClientMetrics(CollectorRegistry()), max_running=9)
    assert quotas.guaranteed_sequences() == {"acme": 5, "free": 3}
    with pytest.raises(SettingsError, match=r"add up to 8.*COROLLA_MAX_RUNNING_REQUESTS"):
        QuotaEnforcer(file, ClientMetrics(CollectorRegistry()), max_running=8)


def test_a_file_that_breaks_later_leaves_the_limits_that_were(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "quotas"
    file.write_text('{"default": {"stored_sessions": 5}}')
    quotas = QuotaEnforcer(file, ClientMetrics(CollectorRegistry()))
    assert quotas.files is not None
    for broken in ("nonsense", "", '{"default": {"stored_sessions": -1}}'):
        file.write_text(broken)
        quotas.files.refresh()
        assert quotas.limits("acme").stored_sessions == 5
        assert caplog.records[-1].levelname == "ERROR"
    file.write_text('{"default": {"stored_sessions": 6}}')
    quotas.files.refresh()
    assert quotas.limits("acme").stored_sessions == 6
