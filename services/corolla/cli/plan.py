"""Shows how many servers a model needs on devices of a kind, and the values that start them."""

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from rich import box
from rich.console import Console
from rich.table import Table

from corolla.chassis.weight_formats import default_dtype
from corolla.cli.machines_plan import plan_machines, read_machines, show_machines
from corolla.compute.gpus import DeviceKind
from corolla.compute.sizes import model_size
from corolla.compute.sizing import GIB, Demand, ModelPlan, ModelSize, plan_servers
from corolla.models.checkpoint import Checkpoint
from corolla.models.hub import Hub
from corolla.wire.tensors import DTYPES

_STREAMS: Final = (1, 8, 32, 64)
_SIZES: Final = ("weight_bytes", "edge_bytes", "work_bytes", "cache_bytes", "session_bytes")
_CORES: Final = "2"
"""One core launches steps while another one samples and serves sockets."""


@dataclass(frozen=True, slots=True)
class PlanOptions:
    """What `corolla plan` was asked.

    Attributes:
        model: checkpoint folder, GGUF file, hub id, or demo.
        revision: revision of a hub id.
        dtype: the dtype of weights and cache; None: that of GPUs.
        quantization: how servers hold the weights.
        kv_cache_dtype: how they store keys and values.
        kinds: the kinds of devices, each planned by itself.
        replicas: how many servers hold each block.
        demand: what the servers hold at the same time.
        machines: a file of unlike machines, which takes the place of `kinds`.
    """

    model: str
    revision: str | None
    dtype: str | None
    quantization: str
    kv_cache_dtype: str
    kinds: Sequence[DeviceKind]
    replicas: int
    demand: Demand
    machines: Path | None = None


def run_plan(options: PlanOptions, *, as_json: bool) -> int:
    """Prints a plan for each kind of device. Returns the exit status.

    Raises:
        StartupError: the checkpoint cannot be read, or a block does not fit into a device.
    """
    rows = read_machines(options.machines) if options.machines is not None else None
    dtype = options.dtype or default_dtype("cuda")
    checkpoint = Checkpoint.from_pretrained(options.model, revision=options.revision, hub=Hub())
    model = model_size(checkpoint, DTYPES[dtype], options.quantization, options.kv_cache_dtype)
    if rows is not None:
        return show_machines(model, plan_machines(model, rows, options.demand), as_json=as_json)
    plans = [(kind, plan_servers(model, kind.memory_bytes, options.demand)) for kind in options.kinds]
    if as_json:
        facts = [{**_facts(model, kind, plan, options), "unread": list(checkpoint.unread)} for kind, plan in plans]
        sys.stdout.write(json.dumps(facts) + "\n")
        return 0
    console = Console(highlight=False)
    console.print(
        f"{model.name}: {len(model.blocks)} blocks; one token reads {model.read_bytes / 1e9:.2f} GB of weights, "
        f"and keeps {sum(block.token_bytes for block in model.blocks) / 1024:.0f} KiB of keys and values"
    )
    if checkpoint.unread:
        console.print(f"its language model alone is served, without {', '.join(checkpoint.unread)}")
    for kind, plan in plans:
        _show(console, model, kind, plan, options)
    return 0


def values_of(model: str, plan: ModelPlan, options: PlanOptions) -> dict[str, Any]:
    """Values of the chart that start the servers of a plan, `options.replicas` of them for each block.

    A server with a GPU of its own takes what weights and steps leave for keys and values, so no value sets that.
    """
    dtype = options.dtype or default_dtype("cuda")
    revision = {} if options.revision is None else {"revision": options.revision}
    return {
        "model": {
            "name": model, **revision, "dtype": dtype, "quantization": options.quantization,
            "kvCacheDtype": options.kv_cache_dtype,
        },
        "blockServer": {
            "defaults": {
                "gpu": {"count": 1},
                "replicas": options.replicas * len(plan.servers),
                "resources": {
                    "requests": {"cpu": _CORES, "memory": f"{-(-plan.host_bytes // GIB)}Gi"},
                    "limits": {"memory": f"{-(-plan.most_host_bytes // GIB)}Gi"},
                },
                "settings": {"capacityBlocks": plan.capacity_blocks},
            }
        },
    }  # fmt: skip


def _show(console: Console, model: ModelSize, kind: DeviceKind, plan: ModelPlan, options: PlanOptions) -> None:
    num_servers = len(plan.servers)
    console.print()
    console.print(f"[bold]{kind.name}[/]: {num_servers} server{'' if num_servers == 1 else 's'} for one copy")
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, header_style="dim")
    for heading in ("blocks", "weights", "ends", "steps", "left for keys, values", "one session"):
        table.add_column(heading, justify="right", no_wrap=True)
    for server in plan.servers:
        table.add_row(str(server.span), *(f"{getattr(server, name) / GIB:.2f} GiB" for name in _SIZES))
    console.print(table)
    demand = options.demand
    console.print(f"room for {plan.max_sessions} sessions of {demand.session_tokens} tokens on each copy")
    if kind.bandwidth is None:
        console.print("--bandwidth GB/S, or --gpu NAME, shows how fast tokens can come")
    else:
        speeds = (f"{count}: {plan.tokens_per_second(count, kind.bandwidth):.0f}" for count in _STREAMS)
        console.print(f"at most, by {kind.bandwidth / 1e9:.0f} GB/s, tokens/s of streams: {', '.join(speeds)}")
    console.print(f"values of the chart, {options.replicas} for each block:\n")
    # Every JSON text is YAML.
    for name, values in values_of(options.model, plan, options).items():
        console.print(f"{name}: {json.dumps(values)}", soft_wrap=True, markup=False)


def _facts(model: ModelSize, kind: DeviceKind, plan: ModelPlan, options: PlanOptions) -> dict[str, Any]:
    bandwidth = kind.bandwidth
    return {
        "model": model.name,
        "device": kind.name,
        "memory_bytes": kind.memory_bytes,
        "read_bytes": model.read_bytes,
        "servers": [
            {"blocks": [each.span.start, each.span.end], **{name: getattr(each, name) for name in _SIZES}}
            for each in plan.servers
        ],
        "max_sessions": plan.max_sessions,
        "tokens_per_second": {str(count): plan.tokens_per_second(count, bandwidth) for count in _STREAMS}
        if bandwidth
        else None,
        "values": values_of(options.model, plan, options),
    }
