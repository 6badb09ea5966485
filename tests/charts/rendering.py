"""The chart as helm renders it: once for the same values and cluster in a session of tests."""

import copy
import functools
import json
import re
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import pytest
import yaml

from tests.architecture.sources import ROOT

CHART: Final = ROOT / "charts" / "corolla"
CI_VALUES: Final = sorted((CHART / "ci").glob("*-values.yaml"))
OLDEST, CURRENT = "1.20.2", "1.34.0"
ALL_APIS: Final = ("monitoring.coreos.com/v1", "keda.sh/v1alpha1", "resource.k8s.io/v1")
ADMISSION_API: Final = "admissionregistration.k8s.io/v1/ValidatingAdmissionPolicy"

Object = dict[str, Any]
NAMED: Final[Object] = {"issuer": {"existingSecret": "rel-corolla-identities"}}
"""The chart wants to know the Secret's name where it sees no cluster."""


class Refused(Exception):
    """helm's own words."""


@functools.cache
def helm() -> str:
    found = shutil.which("helm")
    if found is None:
        pytest.fail("helm is not on PATH; `make test` fetches it")
    return found


def render(
    values: Object | None = None,
    *,
    files: Sequence[Path] = (),
    kubernetes: str = CURRENT,
    apis: Sequence[str] = ALL_APIS,
    upgrades: bool = False,
) -> list[Object]:
    """The objects of release `rel` in namespace `ns`, of which the caller may change its copy. Raises Refused."""
    values = dict(values or {})
    values["issuer"] = NAMED["issuer"] | values.get("issuer", {})
    return copy.deepcopy(_rendered(json.dumps(values), tuple(files), kubernetes, tuple(apis), upgrades))


@functools.cache
def _rendered(
    values: str, files: tuple[Path, ...], kubernetes: str, apis: tuple[str, ...], upgrades: bool
) -> list[Object]:
    arguments = ["--kube-version", kubernetes]
    for file in files:
        arguments += ["--values", str(file)]
    for api in apis:
        arguments += ["--api-versions", api]
    if upgrades:
        arguments.append("--is-upgrade")
    return template(arguments, values)


def template(arguments: Sequence[str], values: str = "{}", environment: dict[str, str] | None = None) -> list[Object]:
    """Renders the chart with `helm template`. Raises Refused."""
    command = [helm(), "template", "rel", str(CHART), "--namespace", "ns", *arguments, "--values", "-"]
    done = subprocess.run(command, input=values, capture_output=True, text=True, env=environment)
    if done.returncode:
        raise Refused(done.stderr)
    return [each for each in yaml.load_all(done.stdout, yaml.CSafeLoader) if each]


def of_kind(objects: Sequence[Object], *kinds: str) -> list[Object]:
    return [each for each in objects if each["kind"] in kinds]


def named(objects: Sequence[Object], kind: str, name: str) -> Object:
    (found,) = [each for each in of_kind(objects, kind) if each["metadata"]["name"] == name]
    return found


def pod_specs(objects: Sequence[Object]) -> dict[str, Object]:
    """Every pod that the release starts, by the name of its object."""
    specs = {
        each["metadata"]["name"]: each["spec"]["template"]["spec"]
        for each in of_kind(objects, "Deployment", "StatefulSet")
    }
    return specs | {each["metadata"]["name"]: each["spec"] for each in of_kind(objects, "Pod")}


def pod_labels(objects: Sequence[Object]) -> dict[str, dict[str, str]]:
    """The labels of every pod that the release starts, by the name of its object."""
    labels = {
        each["metadata"]["name"]: each["spec"]["template"]["metadata"]["labels"]
        for each in of_kind(objects, "Deployment", "StatefulSet")
    }
    return labels | {each["metadata"]["name"]: each["metadata"]["labels"] for each in of_kind(objects, "Pod")}


def quantity(text: str) -> float:
    """Kubernetes' way to write a number: 250m, 1536Mi."""
    units = {"m": 1e-3, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30}
    number, unit = re.fullmatch(r"([\d.]+)(\D*)", str(text)).groups()  # type: ignore[union-attr]
    return float(number) * units[unit] if unit else float(number)
