"""Commands that run one service in this process, and the command that drains a block server."""

import os
import sys
import threading
from contextlib import suppress
from importlib import import_module
from typing import Annotated, Any, Final

import typer

from corolla.cli.interruption import EXIT_INTERRUPTED, Interrupted, interruptible

ISSUER_VARIABLE: Final = "COROLLA_ISSUER"
_PORT: dict[str, Any] = {"min": 0, "max": 65535, "metavar": "PORT"}


def _option(text: str, **more: Any) -> Any:
    return typer.Option(help=text, show_default=False, **more)


Settings = Annotated[
    bool, typer.Option("--settings", help="Print every setting with its variable and default, and end.")
]
Port = Annotated[int | None, _option("Port to listen on; 0 takes a free one.", **_PORT)]
Host = Annotated[str | None, _option("Address to listen on.")]
MetricsPort = Annotated[int | None, _option("Port of the metrics; 0 takes a free one.", **_PORT)]
LogLevel = Annotated[str | None, _option("debug, info, warning or error.")]
Model = Annotated[str | None, _option("Checkpoint folder, GGUF file, hub id, or demo.")]
ServedModelName = Annotated[
    str | None, _option("Names that callers may give as the model, separated by commas.", metavar="NAME,...")
]
Router = Annotated[str | None, _option("The router.", metavar="HOST:PORT")]
Dtype = Annotated[str | None, _option("float32 (fp32), bfloat16 (bf16) or float16 (fp16).")]
Quantization = Annotated[str | None, _option("Quantisation of the block servers' weights: none, int8, int4 or packed.")]
Threads = Annotated[int | None, _option("Torch threads.")]
Device = Annotated[str | None, _option("cpu, cuda or cuda:1.")]

REST = "Set everything else with COROLLA_... variables; --settings lists them all."


def router(
    context: typer.Context,
    port: Port = None,
    host: Host = None,
    redis_url: Annotated[str | None, _option("Redis that holds all state, or its Sentinels.")] = None,
    metrics_port: MetricsPort = None,
    log_level: LogLevel = None,
    settings: Settings = False,
) -> int:
    """Runs a router: it records which servers hold which blocks, and the sessions."""
    return _run(context.params, "corolla.router.settings.RouterSettings", "corolla.router.service")


def block_server(
    context: typer.Context,
    model: Model = None,
    blocks: Annotated[str | None, _option("start:end, or auto, to let the router choose.")] = None,
    capacity_blocks: Annotated[int | None, _option("The most blocks to hold, with --blocks auto.")] = None,
    router: Router = None,
    port: Port = None,
    host: Host = None,
    advertised_host: Annotated[str | None, _option("Address by which others reach this server.")] = None,
    dtype: Dtype = None,
    quantization: Quantization = None,
    device: Device = None,
    threads: Threads = None,
    kv_cache_mib: Annotated[int | None, _option("Memory for the KV cache, in MiB.")] = None,
    control_port: Annotated[int | None, _option("Port of gRPC, for health and status.", **_PORT)] = None,
    metrics_port: MetricsPort = None,
    log_level: LogLevel = None,
    settings: Settings = False,
    check: Annotated[
        bool,
        typer.Option("--check", help="Try what a start does here, joining no router; end with a table and 0 or 1."),
    ] = False,
) -> int:
    """Runs a block server: it holds a span of the model's blocks and computes them."""
    module = "corolla.cli.start_check" if context.params.pop("check") else "corolla.block_server.__main__"
    return _run(context.params, "corolla.block_server.settings.BlockServerSettings", module)


def client(
    context: typer.Context,
    model: Model = None,
    router: Router = None,
    port: Port = None,
    http_port: Annotated[int | None, _option("Port of HTTP, in OpenAI's dialect; 0 takes a free one.", **_PORT)] = None,
    host: Host = None,
    served_model_name: ServedModelName = None,
    dtype: Dtype = None,
    quantization: Quantization = None,
    api_keys_file: Annotated[str | None, _option("File of callers' keys, as corolla keys writes it.")] = None,
    metrics_port: MetricsPort = None,
    log_level: LogLevel = None,
    settings: Settings = False,
) -> int:
    """Runs a client service: the public API for completions and chats."""
    return _run(context.params, "corolla.client.settings.ClientSettings", "corolla.client.__main__")


def issuer(
    context: typer.Context,
    port: Port = None,
    host: Host = None,
    authority_dir: Annotated[str | None, _option("Folder with the authority and the register of machines.")] = None,
    router: Router = None,
    model: Model = None,
    dtype: Dtype = None,
    quantization: Quantization = None,
    metrics_port: MetricsPort = None,
    log_level: LogLevel = None,
    settings: Settings = False,
) -> int:
    """Runs an issuer: it signs certificates for machines that join by a token."""
    return _run(context.params, "corolla.issuer.settings.IssuerSettings", "corolla.issuer.service")


def certificate() -> int:
    """Keeps the certificate of a program fresh that cannot enrol itself, such as Redis, until a signal.

    COROLLA_ISSUER names the issuer, COROLLA_JOIN_TOKEN_FILE the token, and COROLLA_TLS_DIR the folder.
    """
    from corolla.chassis.errors import SettingsError
    from corolla.cli.enrolment import kept_enrolled

    if not (address := os.environ.get(ISSUER_VARIABLE)):
        raise SettingsError(f"set {ISSUER_VARIABLE} to the HOST:PORT of the issuer")
    with suppress(Interrupted), interruptible(), kept_enrolled(address):
        threading.Event().wait()
    return 0


def drain(
    address: Annotated[str, typer.Argument(metavar="HOST:PORT", help="The block server, with its COROLLA_ADMIN_PORT.")],
    timeout_s: Annotated[float, typer.Option(help="Seconds to wait until it has ended.")] = 60.0,
) -> int:
    """Makes a block server hand its sessions over and end; waits until it is done."""
    from corolla.chassis.errors import StartupError
    from corolla.cli.control_channel import control_channel
    from corolla.v1 import admin_pb2
    from corolla.v1.admin_pb2_grpc import AdminServiceStub

    # A StartupError, because a ServiceUnavailable would be shown with the advice to start a stack.
    with control_channel(address, StartupError, "block server with COROLLA_ADMIN_PORT") as channel:
        left = AdminServiceStub(channel).Drain(admin_pb2.DrainRequest(), timeout=timeout_s).num_sessions_left
    sys.stdout.write(
        "drained" + (f"; {left} sessions found no room elsewhere and will be replayed" if left else "") + "\n"
    )
    return 0


def _run(options: dict[str, Any], settings: str, module: str) -> int:
    """Calls `run` of a module with a command's options; or prints all settings of the class, if that was asked.

    Both are named, since only one of them is imported, and both are slow to import.
    """
    if options.pop("settings"):
        package, _, name = settings.rpartition(".")
        return _print_settings(getattr(import_module(package), name))
    if not (issuer := os.environ.get(ISSUER_VARIABLE)):
        return int(import_module(module).run(**options))
    from corolla.cli.enrolment import kept_enrolled

    try:
        with kept_enrolled(issuer):
            return int(import_module(module).run(**options))
    except Interrupted:
        return EXIT_INTERRUPTED


def _print_settings(model: Any) -> int:
    """Prints each setting with its default, and its meaning in the lines below, wrapped to the console's width."""
    from rich.console import Console
    from rich.padding import Padding
    from rich.text import Text

    console = Console(highlight=False)
    for name, field in model.model_fields.items():
        default = field.get_default()
        shown = default.get_secret_value() if hasattr(default, "get_secret_value") else default
        value = "" if shown in (None, "") else f"={shown}"
        console.print(Text.assemble((f"COROLLA_{name.upper()}", "bold"), value), soft_wrap=True)
        console.print(Padding(Text(field.description or ""), (0, 0, 0, 4)))
    return 0
