"""The wheel of a clean clone serves the model in another environment."""

import os
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path
from zipfile import ZipFile

import pytest

from corolla import Client, __version__
from tests.architecture.sources import ROOT
from tests.integration.running_up import RunningUp

pytestmark = [pytest.mark.full, pytest.mark.model]

PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]


def run(*command: str | Path, where: Path) -> str:
    """The standard output of a command that has only its own folder and environment to find modules in."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(command, cwd=where, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{command}: {done.stderr}"
    return done.stdout


def build_wheel(folder: Path) -> Path:
    """Builds the wheel from a clone of what is committed."""
    run("git", "clone", "--quiet", "--shared", ROOT, folder / "clone", where=folder)
    options = ("--no-deps", "--no-build-isolation", "--wheel-dir", folder)
    run(*PIP, "wheel", *options, folder / "clone", where=folder)
    (wheel,) = folder.glob("corolla-*.whl")
    return wheel


def make_environment(folder: Path, wheel: Path) -> Path:
    """Makes an environment with the wheel, and the tests' packages but for Corolla. Returns its folder of commands.

    A path file adds the packages' folder, and reads none of that folder's own, so the checkout stays out of sight.
    """
    venv.create(folder)
    commands = folder / "bin"
    run(*PIP, "--python", commands / "python", "install", "--no-deps", wheel, where=folder)
    own = run(commands / "python", "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", where=folder).strip()
    (Path(own) / "packages.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return commands


def test_a_wheel_of_a_clone_has_every_file_and_serves_the_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wheel = build_wheel(tmp_path)
    committed = run("git", "ls-files", "services/corolla", where=tmp_path / "clone").split()
    packed = {name for name in ZipFile(wheel).namelist() if name.startswith("corolla/")}
    assert packed == {name.removeprefix("services/") for name in committed} | {"corolla/commit.txt"}

    commands = make_environment(tmp_path / "environment", wheel)
    imported = run(commands / "python", "-c", "import corolla; print(corolla.__file__)", where=tmp_path)
    assert Path(imported.strip()).is_relative_to(tmp_path / "environment")
    commit = run("git", "rev-parse", "--short=12", "HEAD", where=tmp_path / "clone").strip()
    assert run(commands / "corolla", "--version", where=tmp_path) == f"corolla {__version__} ({commit})\n"

    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PYTHONPATH", raising=False)
    up = RunningUp(tmp_path, "--servers", "1", corolla=[str(commands / "corolla")])
    try:
        with Client(up.addresses["client"], timeout=60) as client:
            assert client.generate("The capital of France is", max_tokens=2).text.strip().startswith("Paris")
    finally:
        status = up.end()
    assert status == 0
