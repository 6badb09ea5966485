"""Writes the chart's values.schema.json and README.md from values.yaml and the services' settings models.

python tools/chart.py FOLDER
"""

import json
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import yaml
from pydantic_settings import BaseSettings

from corolla.block_server.settings import BlockServerSettings
from corolla.chassis.metrics import INTER_TOKEN_BUCKETS, TIME_TO_FIRST_TOKEN_BUCKETS
from corolla.client.settings import ClientSettings
from corolla.issuer.settings import IssuerSettings
from corolla.router.settings import RouterSettings

CHART: Final = Path(__file__).resolve().parents[1] / "charts" / "corolla"

SETTINGS: Final[dict[str, type[BaseSettings]]] = {
    "blockServer.defaults": BlockServerSettings,
    "router": RouterSettings,
    "issuer": IssuerSettings,
    "client": ClientSettings,
}
"""Where in the values each service's `settings` stand."""

SET_BY_THE_CHART: Final = {
    "blockServer.defaults": frozenset(
        {
            "adapters_dir", "adapters_mib", "advertised_host", "blocks", "control_port", "device", "dtype",
            "kv_cache_dtype", "metrics_port", "model", "node", "pod_uid", "port", "quantization", "revision",
            "router", "tls_dir",
        }
    ),
    "router": frozenset(
        {"metrics_port", "pod_name", "pod_selector", "pod_uid", "port", "redis_password", "redis_url", "tls_dir"}
    ),
    "issuer": frozenset({"authority_dir", "metrics_port", "pods_dir", "port", "redis", "router", "trust_domain"}),
    "client": frozenset(
        {
            "api_keys_file", "cache_secret", "dtype", "http_port", "kv_cache_dtype", "metrics_port", "model",
            "oidc_audience", "oidc_ca_file", "oidc_issuer", "oidc_jwks", "oidc_tenant_claim", "port", "quantization",
            "revision", "router", "tls_dir",
        }
    ),
}  # fmt: skip
"""Settings that have values of their own, or follow from the release and its pods."""

Schema = dict[str, Any]

_NUMBER: Final[Schema] = {"type": "integer", "minimum": 0}
_PORT: Final[Schema] = {"type": "integer", "minimum": 1, "maximum": 65535}
_TEXTS: Final[Schema] = {"type": "object", "additionalProperties": {"type": "string"}}
_QUANTITIES: Final[Schema] = {"type": "object", "additionalProperties": {"type": ["string", "number"]}}
_DIGEST: Final[Schema] = {"type": "string", "pattern": r"^(sha256:[0-9a-f]{64})?$"}
_OBJECTS: Final[Schema] = {"type": "array", "items": {"type": "object"}}
_NAMED: Final[Schema] = {"type": "object", "required": ["name"], "properties": {"name": {"type": "string"}}}
_CONTAINERS: Final[Schema] = {"type": "array", "items": {**_NAMED, "required": ["name", "image"]}}
# Helm takes out what is null of the defaults, and not of pools.
_SECURITY_CONTEXT: Final[Schema] = {"type": ["object", "null"]}
_SECRET_NAMES: Final[Schema] = {"type": "array", "items": {"anyOf": [{"type": "string", "minLength": 1}, _NAMED]}}
_BY_NAME: Final[dict[str, Schema]] = {
    "affinity": {
        "type": "object",
        "properties": {name: {"type": "object"} for name in ("nodeAffinity", "podAffinity", "podAntiAffinity")},
        "additionalProperties": False,
    },
    "annotations": _TEXTS,
    "blocks": {"type": "string", "pattern": r"^(auto|\d+:\d+)$"},
    "commonLabels": _TEXTS,
    "envFrom": {
        "type": "array",
        "items": {
            "type": "object",
            "properties": {
                "prefix": {"type": "string"},
                **{
                    source: {**_NAMED, "properties": {**_NAMED["properties"], "optional": {"type": "boolean"}}}
                    for source in ("configMapRef", "secretRef")
                },
            },
            "additionalProperties": False,
        },
    },
    "extraContainers": _CONTAINERS,
    "extraEnv": {"type": "array", "items": _NAMED},
    "extraInitContainers": _CONTAINERS,
    "extraVolumeMounts": {"type": "array", "items": {**_NAMED, "required": ["name", "mountPath"]}},
    "extraVolumes": {"type": "array", "items": _NAMED},
    "hostAliases": {
        "type": "array",
        "items": {
            "type": "object",
            "required": ["ip", "hostnames"],
            "properties": {"ip": {"type": "string"}, "hostnames": {"type": "array", "items": {"type": "string"}}},
            "additionalProperties": False,
        },
    },
    "imagePullSecrets": _SECRET_NAMES,
    "labels": _TEXTS,
    "maxUnavailable": {"type": ["integer", "string"]},
    "nodeSelector": _TEXTS,
    "podAnnotations": _TEXTS,
    "podLabels": _TEXTS,
    "port": _PORT,
    "podSecurityContext": _SECURITY_CONTEXT,
    "pullSecrets": _SECRET_NAMES,
    "resources": {
        "type": "object",
        "properties": {"requests": _QUANTITIES, "limits": _QUANTITIES},
        "additionalProperties": False,
    },
    "securityContext": _SECURITY_CONTEXT,
    "strategy": {
        "type": "object",
        "required": ["type"],
        "properties": {
            "type": {"enum": ["RollingUpdate", "Recreate"]},
            "rollingUpdate": {
                "type": "object",
                "properties": {name: {"type": ["integer", "string"]} for name in ("maxSurge", "maxUnavailable")},
                "additionalProperties": False,
            },
        },
        "additionalProperties": False,
    },
}
_BY_PATH: Final[dict[str, Schema]] = {
    "auth.mode": {"enum": ["", "keys", "oidc", "none"]},
    "client.service.httpPort": {"type": "integer", "minimum": 0, "maximum": 65535},
    "client.service.type": {"enum": ["ClusterIP", "NodePort", "LoadBalancer"]},
    "image.digest.client": _DIGEST,
    "image.digest.server": _DIGEST,
    "image.pullPolicy": {"enum": ["Always", "IfNotPresent", "Never"]},
    "model.dtype": {"enum": ["", "float32", "bfloat16", "float16"]},
    "model.kvCacheDtype": {"enum": ["auto", "fp8", "int8"]},
    "redis.external.sentinelPort": {"type": "integer", "minimum": 0, "maximum": 65535},
    "model.quantization": {"enum": ["none", "int8", "int4", "packed"]},
    "tracing.endpoint": {"type": "string", "pattern": r"^(https?://[^/\s]+)?$"},
    "tracing.sampleRatio": {"type": "number", "minimum": 0, "maximum": 1},
    "monitoring.prometheusRule.interTokenSeconds": {"enum": [str(float(each)) for each in INTER_TOKEN_BUCKETS]},
    "monitoring.prometheusRule.timeToFirstTokenSeconds": {
        "enum": [str(float(each)) for each in TIME_TO_FIRST_TOKEN_BUCKETS]
    },
}
_KEY: Final = re.compile(r"( *)([A-Za-z]\w*):(.*)")


@dataclass
class Value:
    """One key of values.yaml. Keys below a key are documented if any of them has a sentence of its own."""

    path: str
    sentence: str
    default: Any = None
    below: list["Value"] = field(default_factory=list)

    @property
    def name(self) -> str:
        return self.path.rpartition(".")[2]

    @property
    def is_group(self) -> bool:
        return any(each.sentence or each.is_group for each in self.below)

    def leaves(self) -> Iterator["Value"]:
        """The keys that somebody sets."""
        if self.is_group:
            for each in self.below:
                yield from each.leaves()
        else:
            yield self


def read_values(text: str) -> Value:
    """The tree of keys, each with the sentence above it."""
    root = Value("", "", yaml.safe_load(text))
    open_keys = [(-1, root)]
    sentence: list[str] = []
    for line in text.splitlines():
        if line.lstrip().startswith("#"):
            sentence.append(line.strip("# "))
            continue
        if match := _KEY.fullmatch(line):
            indent = len(match[1])
            while open_keys[-1][0] >= indent:
                open_keys.pop()
            above = open_keys[-1][1]
            key = Value(f"{above.path}.{match[2]}".lstrip("."), " ".join(sentence), above.default[match[2]])
            above.below.append(key)
            open_keys.append((indent, key))
        sentence = []
    return root


def schema(root: Value) -> Schema:
    whole = {"$schema": "http://json-schema.org/draft-07/schema#", **_schema_of(root)}
    # A chart that depends on this one has further values there.
    whole["properties"]["global"]["additionalProperties"] = True
    whole["properties"]["blockServer"]["properties"]["pools"] = {
        "type": "object",
        "description": "Pools of block servers by name.",
        "propertyNames": {"pattern": "^[a-z]([a-z0-9-]{0,14}[a-z0-9])?$"},
        "additionalProperties": {"anyOf": [{"type": "null"}, {"$ref": "#/properties/blockServer/properties/defaults"}]},
    }
    return whole


def _schema_of(value: Value) -> Schema:
    described = {"description": value.sentence} if value.sentence else {}
    if value.is_group:
        properties = {each.name: _schema_of(each) for each in value.below}
        return {"type": "object", **described, "properties": properties, "additionalProperties": False}
    component, _, name = value.path.rpartition(".")
    if name == "settings":
        return {**described, **settings_schema(component)}
    return {**described, **(_BY_PATH.get(value.path) or _BY_NAME.get(name) or _schema_of_default(value.default))}


def _schema_of_default(default: Any) -> Schema:
    if isinstance(default, bool):
        return {"type": "boolean"}
    if isinstance(default, int):
        return _NUMBER
    if isinstance(default, list):
        return _OBJECTS
    return {"type": "object"} if isinstance(default, dict) else {"type": "string"}


def settings_schema(component: str) -> Schema:
    """A service's settings as JSON Schema, by the names that they have in the values."""
    described = SETTINGS[component].model_json_schema()["properties"]
    properties = {
        camel_case(name): {key: value for key, value in facts.items() if key not in ("title", "default", "format")}
        for name, facts in described.items()
        if name not in SET_BY_THE_CHART[component]
    }
    return {"type": "object", "properties": properties, "additionalProperties": False}


def camel_case(name: str) -> str:
    return re.sub(r"_(\w)", lambda match: match[1].upper(), name)


def readme(root: Value) -> Iterator[str]:
    yield "# The Corolla chart"
    yield ""
    yield "Installs block servers, routers, client services, an issuer of their certificates and, unless there is one,"
    yield "a Redis, on Kubernetes 1.20 or later. The names below are checked when a release is installed: a mistyped"
    yield "one is refused. Generated by `make chart`."
    yield ""
    yield "```sh"
    yield "helm install corolla charts/corolla --set model.name=org/model"
    yield "helm test corolla"
    yield "```"
    yield ""
    yield "[ci](ci) holds values for CPUs, for GPUs of two kinds, for a pool for each span, for a Redis from elsewhere,"
    yield "for OpenShift, and for containers and volumes of your own. Whatever"
    yield "[docs/configuration.md](../../docs/configuration.md) lists is a setting by its name in `settings`, or has a"
    yield "value of its own."
    yield ""
    yield "| value | default | meaning |"
    yield "| --- | --- | --- |"
    for value in root.leaves():
        default = "" if value.default in ("", None) else f"`{json.dumps(value.default)}`"
        yield f"| `{value.path}` | {default} | {value.sentence} |"


def main(folder: Path) -> None:
    root = read_values((CHART / "values.yaml").read_text(encoding="utf-8"))
    (folder / "values.schema.json").write_text(json.dumps(schema(root), indent=2) + "\n", encoding="utf-8")
    (folder / "README.md").write_text("\n".join(readme(root)) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
