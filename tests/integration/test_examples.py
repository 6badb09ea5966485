"""Every example of README.md and docs/*.md runs: against the README's stack, or the one that its page starts."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Final

import pytest
import yaml

from corolla import Client
from corolla.chassis.errors import NoChain, ServiceUnavailable
from corolla.chassis.tenant_limits import QuotaTable
from corolla.local.ports import Ports
from tests.architecture.sources import ROOT
from tests.charts.rendering import ALL_APIS, helm, render
from tests.checkpoints import make_tiny_checkpoint
from tests.embedded_redis import EmbeddedRedis
from tests.examples import PAGES, Example, addressed, examples_of
from tests.http_clients import command_of, variables
from tests.integration.running_up import COROLLA, RunningUp
from tests.reference import Unsplit
from tests.trace_collector import TraceCollector

TIMEOUT_S: Final = 120
NUM_TOKENS: Final = 8
"""Every example runs with answers as short as these, since their length proves nothing."""
LANGUAGES: Final = ("console", "json", "python", "sh", "yaml")

TESTED_ELSEWHERE: Final = {
    # These tests also compare the values that the examples leave behind.
    "docs/library.md": "tests/integration/hf/test_library_docs.py",
    "docs/models.md": "tests/integration/test_adapters.py",
}

STAND_INS: Final = {
    # Programs that cannot run here, or not as they stand, why, and what runs in their place.
    "docker": ("there is no container runtime; tests/cluster runs the images", ":"),
    "kind": ("there is no container runtime", ":"),
    "minikube": ("there is no container runtime", ":"),
    "kubectl": ("there is no cluster; tests/cluster asks one", ":"),
    "pip": ("the tests' packages are installed from locks; tests/release/test_wheel.py installs the wheel", ":"),
    "claude": ("it is a large download; tests/integration/test_claude_code.py runs it", ":"),
    "helm": (
        "without a cluster, the chart is rendered as for one with every API",
        'if [ "$1" = install ]; then command helm template "${@:2}" $RENDERED >rendered.yaml; fi',
    ),
    "make": (
        "its targets run these tests; the target must exist",
        'grep -q "^$1:" "$ROOT/Makefile" || { echo "there is no target $1"; return 1; }',
    ),
    "curl": ("an error must fail the test", 'command curl --fail-with-body "$@"'),
    "corolla": (
        "a stack is up, so services only read their options, and tests below start those of other pages; "
        "tests/integration/test_join.py joins machines; a chat reads lines; a bench takes a minute; there is no hub to "
        "plan for",
        """case $1 in
            up | demo | join | router | block-server | client) command corolla "$@" --help >options ;;
            chat) echo "Name a colour." | command corolla "$@" ;;
            bench) command corolla "$@" --rate 2 --seconds 1 --prompt-tokens 16 --answer-tokens 4 ;;
            plan) command corolla "$@" --model demo ;;
            *) command corolla "$@" ;;
        esac""",
    ),
}


def start_command() -> list[str]:
    """The options of the README's `corolla up`."""
    (shown,) = (each.text for each in examples_of("README.md") if each.language == "console")
    return shlex.split(shown.partition("corolla up")[2].partition("\n")[0])


@pytest.fixture(scope="module")
def up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningUp]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COROLLA_DEFAULT_MAX_TOKENS", str(2 * NUM_TOKENS))
        running = RunningUp(tmp_path_factory.mktemp("up"), *start_command())
    yield running
    if running.process.poll() is None:
        running.end()


def run_shell(example: Example, up: RunningUp, folder: Path) -> None:
    text = addressed(example.text, up.addresses).replace(".venv/bin/", "")
    if example.language == "console":
        text = "\n".join(line.removeprefix("$ ") for line in text.splitlines() if line.startswith("$ "))
    environment = {
        **os.environ,
        "ROOT": str(ROOT),
        "PYTHONPATH": str(ROOT),
        "RENDERED": " ".join(("--set issuer.existingSecret=a", *(f"--api-versions {each}" for each in ALL_APIS))),
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), str(Path(helm()).parent), os.environ["PATH"]]),
        "COROLLA_SERVER": up.addresses["client"],
        "COROLLA_ROUTER": up.addresses["router"],
    }
    functions = [f"{name}() {{\n{body}\n}}" for name, (_, body) in STAND_INS.items()]
    check(["bash", "-c", "\n".join(["set -e -o pipefail", *functions, text])], environment, folder, str(example))


def run_python(examples: list[Example], page: str, up: RunningUp, folder: Path) -> None:
    """Runs the examples of a page one after the other in one process, since later ones use names of earlier ones."""
    program = addressed("\n".join(each.text for each in examples), up.addresses)
    has_clients = re.search(r"^from (?:anthropic|openai) import", program, re.MULTILINE)
    command = command_of("-c", program) if has_clients else [sys.executable, "-W", "ignore", "-c", program]
    check(command, variables() if has_clients else os.environ, folder, page)


def check(command: list[str], environment: Mapping[str, str], folder: Path, what: str) -> None:
    done = subprocess.run(
        command, env=environment, cwd=folder, capture_output=True, text=True, check=False, timeout=TIMEOUT_S
    )
    assert done.returncode == 0, f"{what}\n{done.stdout}\n{done.stderr}"


def test_every_example_has_a_language_that_is_run() -> None:
    assert {example.language for page in PAGES for example in examples_of(page)} <= set(LANGUAGES)
    for page, file in TESTED_ELSEWHERE.items():
        assert Path(page).name in (ROOT / file).read_text(encoding="utf-8")


def test_each_stand_in_has_an_example() -> None:
    shell = "\n".join(each.text for page in PAGES for each in examples_of(page) if each.language in ("console", "sh"))
    assert [name for name in STAND_INS if not re.search(rf"^(\$ )?(\.venv/bin/)?{name}\b", shell, re.MULTILINE)] == []


def test_commands_are_examples() -> None:
    """Neither a block without a language nor indented text has commands, which no test would run."""
    block = re.compile(r"^( *)```\w+\n.*?^\1```$", re.DOTALL | re.MULTILINE)
    command = re.compile(r"^(?:\$ | {4})(?:\w+=\S+ )*(?:python|make|corolla|curl|pip|docker) .*", re.MULTILINE)
    for page in PAGES:
        assert command.findall(block.sub("", (ROOT / page).read_text(encoding="utf-8"))) == [], page


def example_with(page: str, command: str) -> Example:
    """The page's only example with this command."""
    (found,) = (each for each in examples_of(page) if command in each.text)
    return found


@pytest.mark.full
def test_the_services_of_a_page_serve(tmp_path: Path) -> None:
    """Each line that starts a service is a process, and the model is served by all of them."""
    example = example_with("docs/kubernetes.md", "corolla router")
    model = make_tiny_checkpoint("llama", tmp_path / "my-checkpoint", num_blocks=32)
    redis, ports = EmbeddedRedis.start(tmp_path / "redis"), Ports()
    router, client = ports.free(), ports.free()
    given = {"redis:6379": f"127.0.0.1:{redis.port}", "router:50050": f"127.0.0.1:{router}", "50051": str(client)}
    text = example.text
    for shown, own in given.items():
        assert shown in text
        text = text.replace(shown, own)
    assert "COROLLA_HOST=127.0.0.1" in (ROOT / example.page).read_text(encoding="utf-8")
    environment = {**os.environ, "COROLLA_HOST": "127.0.0.1", "COROLLA_ADVERTISED_HOST": "127.0.0.1"}
    # Several services share this machine, so each has ports of its own.
    own_ports = {
        "router": {"COROLLA_PORT": str(router)},
        "block-server": {"COROLLA_PORT": "0", "COROLLA_CONTROL_PORT": "0"},
    }
    with ExitStack() as stack:
        stack.callback(redis.stop)
        stack.callback(ports.close)
        for line in filter(None, text.splitlines()):
            words = shlex.split(line, comments=True)
            process = subprocess.Popen(
                [*COROLLA, *words[1:]], env={**environment, **own_ports.get(words[1], {})}, cwd=tmp_path,
                stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            )  # fmt: skip
            stack.callback(process.wait, TIMEOUT_S)
            stack.callback(process.terminate)
        with Client(f"127.0.0.1:{client}") as caller:
            answer = answer_of(caller, [5, 6, 7])
    unsplit = Unsplit(model)
    assert list(answer) == unsplit.generate([5, 6, 7], NUM_TOKENS, ignore_eos=True).token_ids


def answer_of(client: Client, prompt: list[int]) -> Sequence[int]:
    """Asks until the services are up."""
    until_s = time.monotonic() + TIMEOUT_S
    while True:
        try:
            return client.generate(prompt, max_tokens=NUM_TOKENS, ignore_eos=True).token_ids
        except (ServiceUnavailable, NoChain):
            assert time.monotonic() < until_s
            time.sleep(0.2)


@pytest.mark.full
@pytest.mark.model
def test_the_stack_of_a_page_sends_its_traces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    *_, command = example_with("docs/tracing.md", "corolla up").text.replace("\\\n", "").strip().splitlines()
    with TraceCollector() as collector:
        variables_shown = dict(word.split("=", 1) for word in shlex.split(command) if "=" in word)
        endpoint = variables_shown.pop("OTEL_EXPORTER_OTLP_ENDPOINT")
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", endpoint.replace("collector:4317", collector.address))
        for name, value in variables_shown.items():
            monkeypatch.setenv(name, value)
        # One request in a hundred is traced; the test does not ask hundreds of times.
        assert variables_shown["OTEL_TRACES_SAMPLER"] == "parentbased_traceidratio"
        monkeypatch.setenv("OTEL_TRACES_SAMPLER_ARG", "1.0")
        up = RunningUp(tmp_path, *shlex.split(command)[len(variables_shown) + 3 :])
        try:
            with Client(up.addresses["client"]) as caller:
                # A router has a span only in a request that needs one.
                session = caller.create_session().session_id
                answer = caller.generate("Once upon a time", max_tokens=NUM_TOKENS, session=session)
                assert len(answer.token_ids) <= NUM_TOKENS
            services = {"corolla-client", "corolla-block-server", "corolla-router"}
            collector.wait(lambda: services <= {each.service for each in collector.spans})
        finally:
            up.end()


@pytest.mark.full
@pytest.mark.model
@pytest.mark.parametrize(
    "page", [page for page in PAGES if page not in TESTED_ELSEWHERE and any(True for _ in examples_of(page))]
)
def test_the_examples_of_a_page_run(page: str, up: RunningUp, tmp_path: Path) -> None:
    assert shutil.which("curl") is not None, "the examples need curl"
    (tmp_path / "charts").symlink_to(ROOT / "charts")
    examples = list(examples_of(page))
    for example in examples:
        if example.language in ("sh", "console"):
            run_shell(example, up, tmp_path)
        elif example.language == "yaml":
            assert render(yaml.safe_load(example.text)), str(example)
        elif example.language == "json":
            assert set(json.loads(example.text)) == {"default", "tenants"}, "this test knows files of quotas only"
            QuotaTable.parse(example.text.encode())
    if programs := [example for example in examples if example.language == "python"]:
        run_python(programs, page, up, tmp_path)
