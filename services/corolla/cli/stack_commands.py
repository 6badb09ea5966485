"""Commands for a whole stack: up and demo run one, join adds a machine to one, plan says what one on GPUs needs."""

from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from corolla.chassis.weight_formats import KVCacheDtypeName, QuantizationName, full_dtype_name

_MAX_DEFAULT_THREADS = 8

DtypeOption = Literal["float32", "fp32", "bfloat16", "bf16", "float16", "fp16"]
Model = Annotated[str, typer.Option("--model", "-m", help="Checkpoint folder, GGUF file, hub id, or demo.")]
Threads = Annotated[
    int | None,
    typer.Option(min=1, max=1024, show_default="all cores, at most 8", help="Torch threads of each process."),
]
StateFolder = Annotated[
    Path | None,
    typer.Option(
        help="Folder where a shared stack keeps its authority; the user's own if not given.", show_default=False
    ),
]
Verbose = Annotated[bool, typer.Option("--verbose", "-v", help="Show every log line.")]
Json = Annotated[bool, typer.Option("--json", help="Print events as JSON lines.")]
LogFolder = Annotated[
    Path | None, typer.Option(help="Folder for the log files; a new one if not given.", show_default=False)
]


def up(
    model: Model = "demo",
    servers: Annotated[
        int | None,
        typer.Option(min=1, help="Block servers, with even parts of the model.", show_default="2; one for each GPU"),
    ] = None,
    blocks: Annotated[
        str, typer.Option(help='A span for each block server, such as "0:10,10:30", or auto, to let the router choose.')
    ] = "",
    port: Annotated[
        int | None,
        typer.Option(min=0, max=65535, help="Port of the client service.", show_default="50051, or a free one"),
    ] = None,
    http_port: Annotated[
        int | None,
        typer.Option(min=0, max=65535, help="Port of HTTP, in OpenAI's dialect.", show_default="8080, or a free one"),
    ] = None,
    router_port: Annotated[
        int | None, typer.Option(min=0, max=65535, help="Port of the router.", show_default="50050, or a free one")
    ] = None,
    host: Annotated[str, typer.Option(help="Address that the client service listens on.")] = "127.0.0.1",
    redis_url: Annotated[
        str | None,
        typer.Option(
            envvar="COROLLA_REDIS_URL",
            help="Address of a running Redis or its Sentinels.",
            show_default="start one",
        ),
    ] = None,
    dtype: Annotated[
        DtypeOption | None, typer.Option(help="Type of weights and cache.", show_default="float32; bfloat16 on GPUs")
    ] = None,
    device: Annotated[
        str,
        typer.Option(envvar="COROLLA_DEVICE", help="cpu; cuda, for one server on each GPU; cuda:1.", show_envvar=False),
    ] = "cpu",
    quantization: Annotated[QuantizationName, typer.Option(help="Quantisation of the weights.")] = "none",
    threads: Threads = None,
    share: Annotated[bool, typer.Option("--share", help="Let other machines join, by corolla join.")] = False,
    share_host: Annotated[
        str | None,
        typer.Option(help="Address by which other machines reach this one.", show_default="of the default route"),
    ] = None,
    share_gated: Annotated[
        bool, typer.Option("--share-gated", help="Give machines that join also a gated or private model of the hub.")
    ] = False,
    issuer_port: Annotated[
        int | None,
        typer.Option(min=0, max=65535, help="Port where machines join.", show_default="50054, or a free one"),
    ] = None,
    state_folder: StateFolder = None,
    log_folder: LogFolder = None,
    verbose: Verbose = False,
    json: Json = False,
) -> int:
    """Starts Redis, router, block servers and client service, and runs them until Ctrl-C."""
    from corolla.cli.up import run_up
    from corolla.local.log_files import new_log_folder
    from corolla.local.options import StackOptions

    shared: dict[str, Any] = {}
    if share or share_host is not None:
        from corolla.cli.join import shared_folder, shared_host

        shared = {
            "shared_host": shared_host(share_host), "state_folder": shared_folder(state_folder),
            "issuer_port": issuer_port, "shares_gated": share_gated,
        }  # fmt: skip
    if blocks not in ("", "auto") and servers is not None and servers != blocks.count(",") + 1:
        raise typer.BadParameter(f"--servers {servers} contradicts the number of spans in --blocks")
    options = StackOptions(
        model=model, num_servers=servers, blocks=blocks, port=port, http_port=http_port, router_port=router_port,
        host=host, redis_url=redis_url, dtype=None if dtype is None else full_dtype_name(dtype), device=device,
        quantization=quantization, num_threads=_num_threads(threads), log_folder=log_folder or new_log_folder(),
        **shared,
    )  # fmt: skip
    return run_up(options, verbose=verbose, as_json=json)


def join(
    address: Annotated[str, typer.Argument(metavar="HOST:PORT", help="Where `corolla up --share` lets machines join.")],
    model: Annotated[
        str | None, typer.Option("--model", "-m", help="The stack's model on this machine.", show_default="as there")
    ] = None,
    blocks: Annotated[str, typer.Option(help="start:end, or auto, to let the router choose.")] = "auto",
    capacity_blocks: Annotated[
        int, typer.Option(min=0, help="The most blocks to hold, with --blocks auto.", show_default="all")
    ] = 0,
    spare_mib: Annotated[
        int,
        typer.Option(
            min=0,
            envvar="COROLLA_SPARE_MIB",
            help="Memory for blocks of other machines, to take them over at once if they are lost.",
            show_envvar=False,
            show_default="none",
        ),
    ] = 0,
    port: Annotated[
        int | None, typer.Option(min=0, max=65535, help="Port for other servers.", show_default="50052, or a free one")
    ] = None,
    host: Annotated[
        str | None,
        typer.Option(help="Address by which the others reach this machine.", show_default="of the route to HOST"),
    ] = None,
    device: Annotated[
        str | None,
        typer.Option(
            envvar="COROLLA_DEVICE",
            help="cpu; cuda, for one server on each GPU; cuda:1.",
            show_envvar=False,
            show_default="the GPUs, if there are any",
        ),
    ] = None,
    threads: Threads = None,
    log_folder: LogFolder = None,
    verbose: Verbose = False,
    json: Json = False,
) -> int:
    """Joins a stack of another machine with a block server, until Ctrl-C; asks for the token, or reads it.

    The token may also come on standard input, or in the file that COROLLA_JOIN_TOKEN_FILE names. A machine that has
    joined before needs none.
    """
    from corolla.cli.join import JoinOptions, run_join
    from corolla.local.log_files import new_log_folder

    if spare_mib and blocks != "auto":
        raise typer.BadParameter(
            f"--spare-mib has no use with --blocks {blocks}: only a server with automatic blocks moves to others"
        )
    options = JoinOptions(
        address=address, model=model, blocks=blocks, capacity_blocks=capacity_blocks, spare_mib=spare_mib,
        port=port, host=host, device=device, num_threads=_num_threads(threads),
        log_folder=log_folder or new_log_folder(),
    )  # fmt: skip
    return run_join(options, verbose=verbose, as_json=json)


def demo(
    servers: Annotated[int, typer.Option(min=1, help="Block servers.")] = 3,
    threads: Threads = None,
    log_folder: LogFolder = None,
) -> int:
    """Starts a stack with a real model, streams an answer and a chat, and stops the stack."""
    from corolla.cli.demo import run_demo
    from corolla.local.log_files import new_log_folder
    from corolla.local.options import StackOptions

    options = StackOptions(
        num_servers=servers, num_threads=_num_threads(threads), log_folder=log_folder or new_log_folder()
    )
    return run_demo(options)


def plan(
    model: Model = "demo",
    memory: Annotated[
        list[str] | None,
        typer.Option(help="Memory of a device, such as 24GiB; again for another kind.", show_default=False),
    ] = None,
    gpu: Annotated[
        list[str] | None,
        typer.Option(help="A GPU by name, such as l4 or h100; again for another kind.", show_default=False),
    ] = None,
    bandwidth: Annotated[
        float | None, typer.Option(min=0.001, help="GB/s that devices of --memory read.", show_default=False)
    ] = None,
    dtype: Annotated[
        DtypeOption | None, typer.Option(help="Type of weights and cache.", show_default="bfloat16")
    ] = None,
    quantization: Annotated[QuantizationName, typer.Option(help="Quantisation of the weights.")] = "none",
    kv_cache_dtype: Annotated[KVCacheDtypeName, typer.Option(help="How keys and values are stored.")] = "auto",
    sessions: Annotated[int, typer.Option(min=1, help="Sessions at the same time.")] = 8,
    session_tokens: Annotated[
        int, typer.Option(min=1, help="Length of each session, prompt and answer, in tokens.")
    ] = 8192,
    replicas: Annotated[int, typer.Option(min=1, help="Servers that hold each block.")] = 2,
    revision: Annotated[str | None, typer.Option(help="Revision of a hub id.", show_default=False)] = None,
    machines: Annotated[
        Path | None,
        typer.Option(
            help="TOML file with a table `machine` for each kind; says which blocks each would get.", show_default=False
        ),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")] = False,
) -> int:
    """Says how many GPU servers a model needs, what speed they allow, and which values to set; reads no weights.

    With --machines, it says which blocks unlike machines would get, and how fast tokens can come.
    """
    from corolla.block_server.settings import BlockServerSettings
    from corolla.cli.plan import PlanOptions, run_plan
    from corolla.compute.gpus import GPUS, DeviceKind
    from corolla.compute.sizing import MIB, Demand, parse_bytes

    if unknown := sorted(set(gpu or ()) - set(GPUS)):
        raise typer.BadParameter(
            f"--gpu {unknown[0]} is not known: give --memory and --bandwidth, or {', '.join(GPUS)}"
        )
    reads = None if bandwidth is None else bandwidth * 1e9
    kinds = [GPUS[name] for name in gpu or ()]
    kinds += [DeviceKind(size, parse_bytes(size), reads) for size in memory or ()]
    if bool(kinds) == (machines is not None):
        raise typer.BadParameter("give --memory SIZE or --gpu NAME, or --machines FILE")
    usual = BlockServerSettings.model_validate({"device": "cuda"})
    demand = Demand(
        sessions, session_tokens, usual.num_page_tokens, usual.max_tokens_per_frame, usual.adapters_mib * MIB
    )
    options = PlanOptions(
        model=model, revision=revision, dtype=None if dtype is None else full_dtype_name(dtype),
        quantization=quantization, kv_cache_dtype=kv_cache_dtype, kinds=kinds, replicas=replicas, demand=demand,
        machines=machines,
    )  # fmt: skip
    return run_plan(options, as_json=json)


def _num_threads(asked_for: int | None) -> int:
    """The number of torch threads of each process. Servers share cores, and are fastest if each uses all in turn."""
    from corolla.chassis.processors import available_cores

    return asked_for or min(available_cores(), _MAX_DEFAULT_THREADS)
