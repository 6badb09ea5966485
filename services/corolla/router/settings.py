"""The router's settings."""

import re
from collections.abc import Mapping
from typing import ClassVar, Final, NamedTuple

from pydantic import Field, SecretStr, field_validator

from corolla.chassis.settings import ServiceSettings


class ExpectedModel(NamedTuple):
    """The facts that a model's block servers must report to be accepted.

    Attributes:
        num_blocks: The model's number of blocks; 0: the number that its first server reports.
        fingerprint: The fingerprint of the model's weights; empty: any.
    """

    num_blocks: int
    fingerprint: str


_HEARTBEATS_IN_A_LEASE: Final = 4
_EXPECTED: Final = re.compile(r"(?P<name>[^=,]+)(=(?P<num_blocks>[1-9][0-9]{0,3})(@(?P<fingerprint>[^,]+))?)?")


class RouterSettings(ServiceSettings):
    """The router's settings. The Redis address may hold a password, so the store checks it, and never quotes it."""

    service_name: ClassVar[str] = "corolla-router"

    port: int = Field(50050, ge=0, le=65535, description="Port of RouterService; 0 takes a free one.")
    redis_url: SecretStr = Field(
        SecretStr("redis://127.0.0.1:6379/0"),
        description="Address of Redis 6.2 or later, with user and password if needed: redis://, rediss:// or unix://, "
        "or redis+sentinel://host1,host2,host3/service of Sentinels that know the primary.",
    )
    redis_password: SecretStr = Field(
        SecretStr(""), description="Password of Redis, unless the address has one; nothing in it has to be escaped."
    )
    redis_timeout_ms: int = Field(
        250,
        ge=10,
        le=10_000,
        description="Milliseconds after which Redis counts as silent; the router asks once more, then gives up.",
    )
    models: str = Field(
        "",
        description="The only models that block servers may register, like `name,second=30,third=64@fingerprint`: "
        "each with its number of blocks if that is known, and with its fingerprint to accept only those weights. "
        "Empty: any. Without a number here, the first server of a model sets its number of blocks.",
    )
    lease_ms: int = Field(
        6000,
        ge=100,
        le=600_000,
        description="Milliseconds without a heartbeat after which a block server counts as lost. It sends four in that "
        "time.",
    )
    load_push_interval_s: float = Field(
        5.0, ge=0.1, le=600, description="Seconds after which watchers learn of changed load when nothing else changes."
    )
    rebalance: bool = Field(
        True,
        description="Whether the router may move block servers whose blocks it chose to other blocks. If not, no spare "
        "takes lost blocks over, either.",
    )
    rebalance_min_gain: float = Field(
        0.25,
        ge=0,
        le=100,
        description="Part by which a move must make the slowest block faster; moves to uncovered blocks, or to those "
        "of a lone server of the same kind, need no gain.",
    )
    kubernetes: str = Field(
        "auto",
        description="The cluster where the router watches and tags the pods of its block servers, and records Events: "
        "`auto`, the cluster that it runs in, if it has a service account's token; `off`, none; else the cluster of "
        "the kubeconfig at this path.",
    )
    pod_selector: str = Field(
        "app.kubernetes.io/component=block-server", description="Label selector of the block servers' pods."
    )
    pod_name: str = Field(
        "", description="Name of the router's own Kubernetes pod, to which Events about spans are attached."
    )
    pod_uid: str = Field("", description="UID of the router's own Kubernetes pod.")
    max_tenant_sessions: int = Field(
        10_000, ge=0, description="Session records that one tenant may have stored at a time; 0: any number."
    )
    max_tenant_session_mib: int = Field(
        128,
        ge=0,
        description="MiB that the sessions and stored responses of one tenant and model may take in Redis; further "
        "turns are refused with a quota's error; 0: any number.",
    )
    max_session_mib: int = Field(
        256,
        ge=0,
        description="The same for all tenants together, two thirds of what the chart's Redis may hold; 0: any number.",
    )
    max_request_bytes: int = Field(
        8 << 20, ge=1024, le=64 << 20, description="Largest request in bytes; a session record is the largest of them."
    )

    @field_validator("models")
    @classmethod
    def _models_can_be_read(cls, models: str) -> str:
        _expected_models(models)
        return models

    @property
    def heartbeat_interval_ms(self) -> int:
        """The time between a block server's heartbeats; three in a row may be lost before its lease ends."""
        return self.lease_ms // _HEARTBEATS_IN_A_LEASE

    @property
    def expected_models(self) -> Mapping[str, ExpectedModel]:
        """The expected models by name, from the setting `models`; empty: any model is accepted."""
        return _expected_models(self.models)


def _expected_models(models: str) -> Mapping[str, ExpectedModel]:
    expected: dict[str, ExpectedModel] = {}
    for entry in models.split(",") if models else []:
        found = _EXPECTED.fullmatch(entry.strip())
        if found is None:
            raise ValueError("must be like name,second=30,third=64@fingerprint")
        expected[found["name"]] = ExpectedModel(int(found["num_blocks"] or 0), found["fingerprint"] or "")
    return expected
