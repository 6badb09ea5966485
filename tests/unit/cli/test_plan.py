"""`corolla plan` says what to set, in values that the chart accepts."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from corolla.cli.app import main
from tests.charts.rendering import named, pod_specs, render
from tests.checkpoints import make_tiny_checkpoint


def planned(capsys: pytest.CaptureFixture[str], *arguments: str) -> Any:
    assert main(["plan", *arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_each_kind_of_device_gets_a_plan_with_values_for_the_chart(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = str(make_tiny_checkpoint("llama", tmp_path / "llama"))
    given = ("--model", folder, "--sessions", "2", "--session-tokens", "64", "--replicas", "3")
    large, small = planned(capsys, *given, "--memory", "2.7GiB", "--gpu", "h100")
    assert small["tokens_per_second"] is None
    assert large["tokens_per_second"]["8"] > large["tokens_per_second"]["1"] > 0
    assert [each["blocks"] for each in large["servers"]] == [[0, 5]]
    for each in (large, small):
        pool = each["values"]["blockServer"]["defaults"]
        assert pool["replicas"] == 3 * len(each["servers"])
        settings = named(render(each["values"]), "ConfigMap", "rel-corolla-block-server-main")["data"]
        assert settings["COROLLA_CAPACITY_BLOCKS"] == str(
            max(end - start for start, end in map(tuple, each_blocks(each)))
        )
        (container,) = pod_specs(render(each["values"]))["rel-corolla-block-server-main"]["containers"]
        assert container["resources"]["requests"] == {"cpu": "2", "memory": "5Gi"}
        assert container["resources"]["limits"]["nvidia.com/gpu"] == 1
        assert int(container["resources"]["limits"]["memory"].removesuffix("Gi")) >= 9
        assert (settings["COROLLA_DTYPE"], settings["COROLLA_DEVICE"]) == ("bfloat16", "cuda")


def each_blocks(facts: Any) -> list[list[int]]:
    return [server["blocks"] for server in facts["servers"]]


@pytest.mark.kind
def test_the_text_ends_with_the_same_values(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = str(make_tiny_checkpoint("llama", tmp_path / "llama"))
    (facts,) = planned(capsys, "--model", folder, "--gpu", "l4")
    assert main(["plan", "--model", folder, "--gpu", "l4"]) == 0
    text = capsys.readouterr().out
    assert yaml.safe_load(text[text.index("model: {") :]) == facts["values"]
    assert "l4: 1 server for one copy" in text


@pytest.mark.parametrize(
    "arguments, status, says",
    [
        ((), 2, "give --memory SIZE or --gpu NAME"),
        (("--gpu", "gtx"), 2, "--gpu gtx is not known"),
        (("--memory", "much"), 1, "much is no size of memory"),
        (("--memory", "1GiB"), 1, "and the device has 1.0 GiB: take a larger one"),
    ],
)
def test_what_cannot_be_planned_is_said_in_a_sentence(
    arguments: tuple[str, ...], status: int, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", *arguments]) == status
    assert says in capsys.readouterr().err


MACHINES = """
[[machine]]
name = "fast"
gpu = "l4"

[[machine]]
name = "slow"
count = 2
memory = "3GiB"
bandwidth = 30
link = 0.1
latency = 20
"""


def test_unlike_machines_get_blocks_as_a_router_gives_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, machines = str(make_tiny_checkpoint("llama", tmp_path / "llama")), tmp_path / "machines.toml"
    machines.write_text(MACHINES)
    given = ("--model", folder, "--sessions", "2", "--session-tokens", "64", "--machines", str(machines))
    facts = planned(capsys, *given)
    assert [each["name"] for each in facts["machines"]] == ["fast", "slow-1", "slow-2"]
    assert facts["machines"][0]["blocks"] == [0, 5]
    assert facts["machines"][0]["chain_blocks"] == [0, 5]
    assert facts["uncovered"] == []
    # One machine has the whole chain, so no link costs anything.
    assert facts["tokens_per_second"]["1"] > 1000
    assert main(["plan", *given]) == 0
    text = capsys.readouterr().out
    assert "slow-2" in text
    assert "tokens/s of streams: 1:" in text


@pytest.mark.parametrize(
    "text, says",
    [
        ("", "has no table"),
        ("machine = 1", "has no table"),
        ("[[machine]", "is no TOML"),
        ("[[machine]]\nname = 'a'\n", "a: give gpu, or memory and bandwidth"),
        ("[[machine]]\nname = 'a'\ngpu = 'gtx'\n", "gpu gtx is not known"),
        ("[[machine]]\nname = 'a'\ncolour = 'red'\n", "colour: Extra inputs"),
        ("[[machine]]\nname = 'a'\nmemory = '1GiB'\nbandwidth = 1\n", "blocks 0:30 have no machine"),
    ],
)
def test_lists_of_machines_that_cannot_serve_are_said(
    text: str, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    machines = tmp_path / "machines.toml"
    machines.write_text(text)
    assert main(["plan", "--machines", str(machines)]) == 1
    said = capsys.readouterr()
    assert says in said.err + said.out
