"""What commands print in columns is readable on a terminal of 80 columns, with the long values of real use."""

from pathlib import Path
from typing import Any

import pytest
from rich.console import Console, RenderableType
from typer.main import get_command

from corolla.chassis import errors
from corolla.cli.adapter_commands import adapter_lines
from corolla.cli.app import app, main
from corolla.cli.bench import bench_report
from corolla.cli.bench_load import AnswerTimes, Load, ServiceLevel
from corolla.cli.placement_table import placement_table
from corolla.compute.kernel_choices import KernelChoices
from corolla.v1 import common_pb2, router_pb2

WIDTH = 80
Q4 = "float32: Q4_1 expanded, Q8_0 expanded"


@pytest.fixture(autouse=True)
def _terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(WIDTH))


def drawn(shown: RenderableType) -> list[str]:
    console = Console(width=WIDTH, force_terminal=False)
    with console.capture() as capture:
        console.print(shown)
    return lines_of(capture.get())


def lines_of(text: str) -> list[str]:
    """The lines, once none is too long and nothing was cut off."""
    lines = text.splitlines()
    assert [line for line in lines if len(line) > WIDTH] == []
    assert "…" not in text
    return lines


def placement(*servers: tuple[str, str]) -> router_pb2.Placement:
    """A placement of 126 blocks on busy servers, each with an address and a dtype."""
    placed = [
        router_pb2.PlacedServer(
            server=router_pb2.ServerDescription(address=address, dtype=dtype),
            span=common_pb2.BlockSpan(start=100 + number, end=126),
            state=router_pb2.SERVER_STATE_DRAINING,
            load=router_pb2.ServerLoad(
                num_sessions=1024, num_pages=65536, num_free_pages=65530, decode_step_seconds=1.2345
            ),
        )
        for number, (address, dtype) in enumerate(servers)
    ]
    return router_pb2.Placement(model="Llama-3.3-70B-Instruct.Q4_K_M", num_model_blocks=126, servers=placed)


def test_each_server_has_one_line_and_their_dtype_stands_below_the_table() -> None:
    lines = drawn(placement_table(placement(("10.244.100.231:50052", Q4), ("10.244.101.12:50052", Q4)), 20000))
    for address in ("10.244.100.231:50052", "10.244.101.12:50052"):
        (row,) = (line for line in lines if address in line)
        assert row.split()[1:] == ["draining", row.split()[2], "1024", "65530/65536", "1234.5", "ms"]
    assert lines[-1].split(maxsplit=1) == ["dtype", Q4]


def test_servers_of_several_dtypes_are_named_by_their_dtype() -> None:
    lines = drawn(placement_table(placement(("10.0.0.1:50052", Q4), ("10.0.0.2:50052", "bfloat16"))))
    assert [line.split(maxsplit=1)[1] for line in lines[-2:]] == [
        f"{Q4} on 10.0.0.1:50052",
        "bfloat16 on 10.0.0.2:50052",
    ]


def test_servers_of_several_numerics_are_named_by_the_beginning_of_their_digests() -> None:
    shown = placement(("10.0.0.1:50052", "bfloat16"), ("10.0.0.2:50052", "bfloat16"), ("10.0.0.3:50052", "bfloat16"))
    for placed, numerics in zip(shown.servers, ("0123456789ab", "0123456789ab+ba9876543210", ""), strict=True):
        placed.load.numerics = numerics
    assert drawn(placement_table(shown))[-2:] == [
        "numerics 01234567 on 10.0.0.1:50052, 10.0.0.2:50052",
        "numerics not known on 10.0.0.3:50052",
    ]


def test_the_kernels_of_servers_stand_below_the_table() -> None:
    shown = placement(("10.0.0.1:50052", "bfloat16"), ("10.0.0.2:50052", "bfloat16"))
    choices = KernelChoices("triton", "triton")
    for placed, recorded_rows in zip(shown.servers, (128, 0), strict=True):
        placed.load.kernels = choices.summary(recorded_rows)
    assert " ".join(" ".join(drawn(placement_table(shown))[-3:]).split()) == (
        "kernels triton blocks, triton attention, steps of up to 128 rows recorded on 10.0.0.1:50052 "
        "kernels triton blocks, triton attention on 10.0.0.2:50052"
    )


def test_a_long_name_of_a_server_goes_on_in_the_next_line() -> None:
    name = "block-server-0.block-server.models.svc.cluster.local:50052"
    lines = drawn(placement_table(placement((name, Q4))))
    column = "".join(line[:24].strip() for line in lines[4:-2])
    assert name in column


def test_what_bench_measured() -> None:
    load = Load(num_sent=12345)
    load.answers.extend(AnswerTimes(0.0, (100.0, 190.0, 290.0)) for _ in range(3))
    load.failures.update({errors.QueueFull.reason: 1234, errors.NoChain.reason: 567, "DEADLINE_EXCEEDED": 8})
    level = ServiceLevel(first_token_s=2.0, inter_token_s=0.25)
    text = " ".join(" ".join(drawn(bench_report(load.summary(level, 3600.0), level))).split())
    for shown in ("first token, ms 100000.0 100000.0 100000.0", "12345 in 3600.0 s", "567 NO_CHAIN", "0.25 s"):
        assert shown in text


@pytest.mark.parametrize("command", ["router", "block-server", "client"])
def test_settings(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([command, "--settings"]) == 0
    lines = lines_of(capsys.readouterr().out)
    number = lines.index("COROLLA_LOG_LEVEL=INFO")
    assert lines[number + 1].rstrip() == "    Least severe level that is logged; upper and lower case mean the same."


def test_keys(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, model = tmp_path / "keys", "Llama-3.3-70B-Instruct-with-a-long-name.Q4_K_M"
    limits = ["--model", model, "--model", f"{model}:legal", "--scope", "chat", "--scope", "sessions"]
    assert (
        main(["keys", "new", str(file), "--tenant", "research-and-development", "--expires-days", "30", *limits]) == 0
    )
    capsys.readouterr()
    assert main(["keys", "list", str(file)]) == 0
    first, *rest = lines_of(capsys.readouterr().out)
    assert "research-and-development  since" in first
    assert [line.strip() for line in rest] == [
        f"only model {model}",
        f"only model {model}:legal",
        "only for chat, sessions",
    ]


def test_adapters() -> None:
    adapter = router_pb2.RegisteredAdapter(
        version=common_pb2.AdapterVersion(name="legal", digest="5f" * 32),
        source="research/legal-adapter-of-the-large-model",
        revision="6f" * 20,
        tenants=["acme", "beta"],
    )
    assert [line.split(maxsplit=1) for line in lines_of("\n".join(adapter_lines(adapter)))] == [
        ["legal"],
        ["digest", "5f" * 32],
        ["source", "research/legal-adapter-of-the-large-model"],
        ["revision", "6f" * 20],
        ["tenants", "acme, beta"],
    ]


def commands() -> list[list[str]]:
    """The names of all commands, those of groups included."""
    root: Any = get_command(app)
    names: list[list[str]] = [[]]
    for name, command in root.commands.items():
        names.append([name])
        names += [[name, each] for each in getattr(command, "commands", {})]
    return names


@pytest.mark.parametrize("command", commands(), ids=" ".join)
def test_help(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*command, "--help"]) == 0
    assert lines_of(capsys.readouterr().out)
