"""The lock pins the whole closure of pyproject.toml, each package by its hashes, and nothing else.

The closure is walked through the metadata of the installed packages, for the platform and Python of this run.
"""

import json
import re
import subprocess
import sys
import tomllib
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.architecture.sources import ROOT
from tools.locked_install import locked, uv_variables

LOCK = ROOT / "requirements" / "lock.txt"
TOOLS = ROOT / "tools"
PYPROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
STAND_INS: dict[str, list[str]] = {
    entry["name"]: entry["requires-dist"] for entry in PYPROJECT["tool"]["uv"]["dependency-metadata"]
}
OUTSIDE = {"corolla", "torch"}
IMAGE_LOCKS = {
    "server": ["block-server", "packed", "tracing"],
    "client": ["client", "router", "tracing"],
    "demo": ["demo"],
}


def read_lock(path: Path = LOCK) -> tuple[dict[str, Requirement], set[str]]:
    """The pins by package name, and the names of those without a hash."""
    pins: dict[str, Requirement] = {}
    unhashed: set[str] = set()
    logical_lines = re.sub(r"\\\n\s*", " ", path.read_text(encoding="utf-8")).splitlines()
    for line in logical_lines:
        if not line or line.startswith("#"):
            continue
        pin, *hashes = line.split(" --hash=sha256:")
        requirement = Requirement(pin.strip())
        name = canonicalize_name(requirement.name)
        pins[name] = requirement
        if not hashes:
            unhashed.add(name)
    return pins, unhashed


def pins_here() -> dict[str, Requirement]:
    """The pins that apply to this platform and Python."""
    return {name: pin for name, pin in read_lock()[0].items() if pin.marker is None or pin.marker.evaluate()}


def requirements_of(name: str) -> list[str]:
    project = PYPROJECT["project"]
    if extra := re.fullmatch(r"corolla\[(.+)\]", name):
        return [*project["dependencies"], *project["optional-dependencies"][extra[1]]]
    if name == "corolla":
        return [
            *project["dependencies"],
            *(requirement for extra in project["optional-dependencies"].values() for requirement in extra),
        ]
    if name in STAND_INS:
        return STAND_INS[name]
    return metadata.requires(name) or []


def closure(beginnings: Sequence[str] = ("corolla",)) -> dict[str, list[Requirement]]:
    """Every package that the project, or some of its extras, need here, with each requirement made of it."""
    wanted: dict[str, list[Requirement]] = {}
    seen: set[tuple[str, str]] = set()
    todo = [(name, "") for name in beginnings]
    while todo:
        package, extra = todo.pop()
        if (package, extra) in seen:
            continue
        seen.add((package, extra))
        for requirement in map(Requirement, requirements_of(package)):
            if requirement.marker and not requirement.marker.evaluate({"extra": extra}):
                continue
            name = canonicalize_name(requirement.name)
            wanted.setdefault(name, []).append(requirement)
            if name == "corolla":
                todo += [(f"corolla[{own_extra}]", "") for own_extra in requirement.extras]
            else:
                todo += [(name, wanted_extra) for wanted_extra in ("", *requirement.extras)]
    return wanted


def test_every_pin_is_exact_and_has_a_hash() -> None:
    pins, unhashed = read_lock()
    assert unhashed == set()
    assert [str(pin) for pin in pins.values() if not re.fullmatch(r"==[^*,]+", str(pin.specifier))] == []


def test_the_lock_names_no_place() -> None:
    text = LOCK.read_text(encoding="utf-8")
    assert re.findall(r"^.*(?:://|@ |--index|--find-links|--extra-index).*$", text, flags=re.MULTILINE) == []


def test_the_lock_is_the_closure_of_the_project() -> None:
    assert set(pins_here()) == set(closure()) - OUTSIDE, "run: make lock"


@pytest.mark.parametrize("image", IMAGE_LOCKS)
def test_an_image_installs_the_locked_packages_of_its_extras(image: str) -> None:
    everything, _ = read_lock()
    pins, unhashed = read_lock(LOCK.parent / f"{image}.txt")
    assert unhashed == set()
    # Markers may differ: what the image needs on some platforms only, another extra may need on all.
    assert {name: pin.specifier for name, pin in pins.items()} == {name: everything[name].specifier for name in pins}
    here = {name for name, pin in pins.items() if pin.marker is None or pin.marker.evaluate()}
    assert here == set(closure([f"corolla[{extra}]" for extra in IMAGE_LOCKS[image]])) - OUTSIDE, "run: make lock"


def test_every_requirement_admits_its_pin() -> None:
    pins = pins_here()
    refused = [
        f"{requirement} refuses {pins[name].specifier}"
        for name, requirements in closure().items()
        if name in pins
        for requirement in requirements
        if not requirement.specifier.contains(str(pins[name].specifier).removeprefix("=="), prereleases=True)
    ]
    assert refused == [], "run: make lock"


def test_installed_packages_are_those_of_the_lock() -> None:
    installed = {name: metadata.version(name) for name in pins_here()}
    others = [
        f"{name} {installed[name]}, not {pin.specifier}"
        for name, pin in pins_here().items()
        if not pin.specifier.contains(installed[name], prereleases=True)
    ]
    assert others == [], "run: make setup"


VARIANTS = ["cpu", "cuda"]


@pytest.mark.parametrize("variant", VARIANTS)
def test_torch_is_the_one_that_pyproject_asks_for(variant: str) -> None:
    pins, unhashed = read_lock(LOCK.parent / f"torch-{variant}.txt")
    version = str(pins["torch"].specifier).removeprefix("==")
    (stand_in,) = [entry for entry in PYPROJECT["tool"]["uv"]["dependency-metadata"] if entry["name"] == "torch"]
    (asked,) = [
        r for r in map(Requirement, PYPROJECT["project"]["optional-dependencies"]["tensors"]) if r.name == "torch"
    ]
    assert unhashed == set()
    assert asked.specifier.contains(version)
    assert stand_in["version"] == version
    assert pins["torch"].specifier.contains(metadata.version("torch"))


def test_the_variants_of_torch_share_no_package_with_the_lock_and_no_file_with_each_other() -> None:
    locked, _ = read_lock()
    hashes = []
    for variant in VARIANTS:
        path = LOCK.parent / f"torch-{variant}.txt"
        assert not read_lock(path)[0].keys() & locked.keys()
        hashes.append(set(re.findall(r"sha256:([0-9a-f]{64})", path.read_text(encoding="utf-8"))))
    assert not set.intersection(*hashes)


@pytest.mark.parametrize(
    "file_name, variant",
    [
        ("torch-2.13.0%2Bcpu-cp311-cp311-manylinux_2_28_x86_64.whl", "cpu"),
        ("torch-2.13.0-cp311-cp311-macosx_14_0_arm64.whl", "cpu"),
        ("torch-2.13.0-cp311-cp311-manylinux_2_28_x86_64.whl", "cuda"),
    ],
)
def test_the_file_that_pip_finds_says_which_lock_holds_it(file_name: str, variant: str) -> None:
    report = json.dumps({"install": [{"download_info": {"url": f"https://example.org/{file_name}"}}]})
    script = [sys.executable, str(TOOLS / "torch_variant.py")]
    assert subprocess.run(script, input=report, capture_output=True, text=True, check=True).stdout.strip() == variant


def test_uv_looks_where_pips_settings_say() -> None:
    listing = """:env:.cert='/etc/ca.crt'
:env:.find-links='/env/wheels /more/wheels'
global.extra-index-url='https://one.example/simple https://two.example/simple'
global.find-links='/global/wheels'
global.index-url='https://index.example/simple'
global.quiet='1'
install.trusted-host='index.example'
"""
    assert uv_variables(listing) == {
        "UV_INDEX_STRATEGY": "unsafe-best-match",
        "UV_DEFAULT_INDEX": "https://index.example/simple",
        "UV_INDEX": "https://one.example/simple https://two.example/simple",
        "UV_FIND_LINKS": "/env/wheels,/more/wheels",
        "UV_INSECURE_HOST": "index.example",
        "SSL_CERT_FILE": "/etc/ca.crt",
    }


def test_uv_itself_is_installed_by_its_hashes() -> None:
    entry = locked("uv", LOCK.read_text(encoding="utf-8"))
    assert entry.startswith(f"uv=={metadata.version('uv')} ")
    assert entry.count("==") == 1
    assert entry.count("--hash=sha256:") == entry.count("\n") - 1 > 5


@pytest.mark.parametrize(
    "lock, packages",
    [
        ("tools.txt", {"cyclonedx-bom", "pip-audit"}),
        ("evaluation.txt", {"datasets", "lm-eval"}),
        ("browser.txt", {"axe-playwright-python", "playwright"}),
        ("triton.txt", {"numpy", "triton"}),
        ("llama-cpp.txt", {"llama-cpp-python"}),
        ("http-clients.txt", {"langchain-openai", "litellm", "openai", "pydantic-ai-slim", "schemathesis"}),
    ],
)
def test_what_has_a_folder_of_its_own_is_pinned_by_hash(lock: str, packages: set[str]) -> None:
    pins, unhashed = read_lock(LOCK.parent / lock)
    assert packages <= pins.keys()
    assert unhashed == set()


def test_the_interpreter_runs_kernels_of_the_triton_that_comes_with_torch() -> None:
    interpreted, _ = read_lock(LOCK.parent / "triton.txt")
    (with_torch,) = re.findall(r"^triton==([0-9.]+)", (LOCK.parent / "torch-cuda.txt").read_text("utf-8"), re.MULTILINE)
    assert interpreted["triton"].specifier.contains(with_torch)
    assert not interpreted["numpy"].specifier.contains("2.3"), "the interpreter fails with later versions"
    assert "triton" not in read_lock()[0]


SOUND = {"name": "sound", "version": "1.0", "vulns": []}
BAD = {"name": "bad", "version": "2.0", "vulns": [{"id": "PYSEC-1", "fix_versions": ["2.1"]}]}
UNKNOWN = {"name": "unknown", "skip_reason": "not found"}


@pytest.mark.parametrize(
    "report, status, words",
    [
        (json.dumps({"dependencies": [SOUND]}), 0, "1 of 1 packages audited"),
        (json.dumps({"dependencies": [SOUND, BAD]}), 1, "bad 2.0: PYSEC-1; fixed in: 2.1"),
        (json.dumps({"dependencies": [SOUND, UNKNOWN]}), 0, "unknown WAS NOT AUDITED: not found"),
        (json.dumps({"dependencies": [UNKNOWN]}), 0, "a.txt WAS NOT AUDITED"),
        ("", 0, "a.txt WAS NOT AUDITED"),
    ],
)
def test_an_audit_out_of_reach_is_no_clean_one(report: str, status: int, words: str) -> None:
    done = verdict(report, "a.txt")
    assert done.returncode == status
    assert words in done.stdout


def verdict(report: str, lock: str) -> "subprocess.CompletedProcess[str]":
    script = [sys.executable, str(TOOLS / "audit_verdict.py"), lock]
    return subprocess.run(script, input=report, capture_output=True, text=True)


def snapshot_of(*reports: str) -> "subprocess.CompletedProcess[str]":
    """The snapshot of what was reported for two locks."""
    script = [sys.executable, str(TOOLS / "advisories.py"), "2"]
    return subprocess.run(script, input="\n".join(reports), capture_output=True, text=True)


def test_an_audit_out_of_reach_goes_by_the_stored_advisories(tmp_path: Path) -> None:
    lock, stored = tmp_path / "a.txt", tmp_path / "advisories.json"
    lock.write_text("sound==1.0 \\\n    --hash=sha256:00\nbad==2.0 ; python_version < '4'\nunknown==3.0\n")
    taken = snapshot_of(json.dumps({"dependencies": [SOUND, UNKNOWN]}), json.dumps({"dependencies": [BAD]}))
    stored.write_text(taken.stdout)
    done = verdict("", str(lock))
    assert done.returncode == 1
    assert "0 days ago" in done.stdout
    assert "bad 2.0: PYSEC-1" in done.stdout
    assert "2 of 3 packages audited" in done.stdout
    assert "unknown WAS NOT AUDITED: not in the snapshot" in done.stdout
    assert "OLD" not in done.stdout
    stored.write_text(json.dumps({**json.loads(taken.stdout), "taken": "2026-01-31"}))
    assert "!!! THESE ADVISORIES ARE OLD" in verdict("", str(lock)).stdout
    lock.write_text("bad==2.1\n")
    assert verdict("", str(lock)).returncode == 0


@pytest.mark.parametrize(
    "reports", [(), (json.dumps({"dependencies": [SOUND]}),), (json.dumps({"dependencies": []}),) * 2]
)
def test_of_half_an_audit_no_advisories_are_stored(reports: tuple[str, ...]) -> None:
    taken = snapshot_of(*reports)
    assert (taken.returncode, taken.stdout) == (1, "")
