"""The contracts of pyproject.toml guard something, and light rooms load nothing heavy at run time."""

import subprocess
import sys
import tomllib
from graphlib import TopologicalSorter

import grimp
import pytest

from tests.architecture.sources import PACKAGE, ROOT, dotted, own_modules

HEAVY = ("numpy", "safetensors", "tokenizers", "torch", "transformers")
ROOMS_TO_COME = {"corolla.hf.**", "corolla.sdk.**"}


@pytest.fixture(scope="module")
def graph() -> grimp.ImportGraph:
    return grimp.build_graph("corolla", cache_dir=None)


def test_no_module_imports_itself_by_way_of_others(graph: grimp.ImportGraph) -> None:
    """Imports for type checkers count, too."""
    imports = {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}
    TopologicalSorter(imports).prepare()


def test_every_contract_guards_something(graph: grimp.ImportGraph) -> None:
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["importlinter"][
        "contracts"
    ]
    expressions = {name for contract in contracts for name in contract.get("source_modules", ())}
    idle = {name for name in expressions if not graph.find_matching_modules(name)}
    assert idle <= ROOMS_TO_COME


def loaded_after_importing(modules: list[str]) -> set[str]:
    """Top-level packages that a fresh interpreter holds once it has imported the modules."""
    program = "\n".join([*(f"import {module}" for module in modules), "import sys", "print(*sys.modules)"])
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return {name.partition(".")[0] for name in done.stdout.split()}


@pytest.mark.parametrize("room", ["v1", "chassis", "router", "sdk"])
def test_a_light_room_loads_nothing_heavy(room: str) -> None:
    modules = [dotted(path) for path in own_modules(PACKAGE / room) if path.name != "__main__.py"]
    if not modules and room != "v1":
        pytest.skip(f"no room {room}")
    assert loaded_after_importing(["corolla", *modules]).isdisjoint(HEAVY)


def test_a_router_outside_of_a_cluster_does_not_load_its_client() -> None:
    modules = [dotted(path) for path in own_modules(PACKAGE / "router") if path.name != "__main__.py"]
    assert loaded_after_importing(modules).isdisjoint({"kubernetes", "urllib3", "yaml"})


def test_the_python_client_does_not_know_opentelemetry() -> None:
    """It is installed without the services' packages."""
    modules = [dotted(path) for path in own_modules(PACKAGE / "sdk")]
    assert "opentelemetry" not in loaded_after_importing(["corolla", *modules])


def test_the_package_itself_loads_nothing_heavy() -> None:
    assert loaded_after_importing(["corolla"]).isdisjoint(HEAVY)
