"""Settings of a block server, from `COROLLA_*` variables."""

import socket
from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar, Final, Literal

from pydantic import Field, field_validator

from corolla.chassis.settings import Dtype, ServiceSettings
from corolla.chassis.weight_formats import KVCacheDtypeName, QuantizationName
from corolla.wire.span import Span

MAX_PART_TOKENS: Final = 512
"""Of a part of a session that is handed over: every server takes so many, whatever its batches are."""
_PAGE_TOKENS_OF_CPUS: Final = 32
_PAGE_TOKENS_OF_GPUS: Final = 256


class BlockServerSettings(ServiceSettings):
    """One block server."""

    service_name: ClassVar[str] = "corolla-block-server"

    port: int = Field(50052, ge=0, le=65535, description="Port of the data plane; 0 takes a free one.")
    control_port: int = Field(
        50053, ge=0, le=65535, description="Port of gRPC, for health and status; 0 takes a free one."
    )
    advertised_host: str = Field(
        "", description="Name or address by which others reach this server; empty: the machine's own name."
    )
    router: str = Field("127.0.0.1:50050", description="host:port of the router.")
    model: str = Field("demo", description="Checkpoint folder, GGUF file, hub id, or `demo`.")
    revision: str | None = Field(None, description="Revision of a hub id.")
    offline: bool = Field(
        False, description="Never ask the hub: what its cache lacks is missing. HF_HUB_OFFLINE=1 means the same."
    )
    hub_patience_s: float = Field(
        300.0, ge=0, description="Seconds for which a hub that is away, or breaks off, is asked again."
    )
    blocks: str = Field("auto", description="Blocks to hold: `auto`, or `start:end`.")
    capacity_blocks: int = Field(
        0,
        ge=0,
        description="How many blocks fit when `auto`, embedding or head at the model's ends not counted; 0 means all.",
    )
    weights_mib: int = Field(
        0,
        ge=0,
        description="Memory for weights in MiB, embedding and head included: when `auto`, no more blocks than it holds "
        "there; 0: COROLLA_CAPACITY_BLOCKS alone counts.",
    )
    dtype: Dtype = Field("float32", description="Type of weights, cache and wire; fp32, bf16, fp16 for short.")
    quantization: QuantizationName = Field(
        "none",
        description="How linear layers keep their weights: `none` (as `dtype`), `int8`, `int4`, or `packed`: as a GGUF "
        "file has them, embedding and head too, and as AWQ, GPTQ and compressed-tensors have those of four bits.",
    )
    kv_cache_dtype: KVCacheDtypeName = Field(
        "auto",
        description="How keys and values are stored: `auto` (as `dtype`), or in fewer bytes as `fp8` "
        "(E4M3) or `int8`; client services need the same.",
    )
    device: str = Field("cpu", description="Torch device: `cpu`, `cuda`, `cuda:1`.")
    attention: Literal["auto", "compiled", "flash", "paged", "sdpa"] = Field(
        "auto", description="Attention kernel; `auto` takes the fastest one that is right on this device."
    )
    fused_blocks: bool = Field(
        True,
        description="Run blocks of the usual shape with fused projections, and on CPUs whole, by "
        "compiled functions; off, with the family's own code.",
    )
    tuning_budget_s: float = Field(
        2.0,
        ge=0,
        le=60,
        description="Seconds at start in which the server measures which kernels multiply fastest; 0 measures nothing.",
    )
    draft_model: str | None = Field(
        None,
        description="Checkpoint of a small model with the same tokenizer, loaded where the last block is, to draft "
        "tokens ahead for requests that ask for it.",
    )
    cuda_graphs: Literal["auto", "off"] = Field(
        "auto",
        description="On CUDA with fused blocks and paged attention, replay decode steps as CUDA graphs if a check at "
        "start finds them right; `off`: launch them kernel by kernel.",
    )
    threads: int = Field(
        0, ge=0, le=1024, description="Torch threads of this process; 0 measures how many of its cores pay."
    )
    kv_cache_mib: int = Field(1024, ge=1, description="Memory for keys and values in MiB.")
    boundary_activations_mib: int = Field(
        256, ge=0, description="Memory in MiB for outputs that rebuild a lost next hop; 0: they are computed again."
    )
    prompt_mib: int = Field(
        256,
        ge=0,
        description="Memory for the trained prompts that sessions bring for its blocks, in MiB; 0 takes none.",
    )
    adapters_mib: int = Field(
        512,
        ge=0,
        description="Memory for adapters that sessions use, in MiB, its blocks' part of each; and as much again, at "
        "most, while rows of several run in one batch. The least recently used ones are unloaded. 0 takes none.",
    )
    adapters_dir: Path | None = Field(
        None,
        description="Folder below which registered adapters lie that are not on the hub; without it, wherever they "
        "were registered.",
    )
    page_tokens: int = Field(
        0,
        ge=0,
        le=4096,
        description="Tokens of one KV page; 0 is 32 on a CPU, and 256 on a GPU, whose flash attention wants no fewer.",
    )
    prefix_cache: bool = Field(
        True, description="Whether sessions of one tenant whose texts begin alike share the KV pages of that beginning."
    )
    max_batch_tokens: int = Field(
        256,
        ge=1,
        description="Tokens of one iteration, and of prompts a quarter of them while others decode here: fewer keep "
        "answers flowing evenly, more process prompts sooner. Steps of more tokens, and more than 512, are refused. "
        "Fast GPUs want more.",
    )
    max_microbatches: int = Field(
        0,
        ge=0,
        description="Microbatches of a chain that begins here that are under way at a time; 0: one for each hop. Fewer "
        "where hops share processors.",
    )
    admin_host: str = Field("127.0.0.1", description="Address that AdminService is served on.")
    admin_port: int = Field(0, ge=0, le=65535, description="Port of AdminService; 0 serves none.")
    quotas_file: Path | None = Field(
        None,
        description="File with the quotas of tenants, in JSON: docs/security.md#quotas. The server keeps the pages "
        "free that it guarantees; changes are taken within five seconds. Without it there are no guarantees.",
    )
    grace_s: float = Field(
        25.0, ge=0, le=600, description="Seconds to hand sessions over, or to serve those nobody takes, before it ends."
    )
    zone: str = Field("", description="Failure domain; the planner prefers chains within one.")
    pod_uid: str = Field("", description="UID of the Kubernetes pod, where there is one.")

    @field_validator("blocks")
    @classmethod
    def _blocks_are_auto_or_a_span(cls, value: str) -> str:
        if value != "auto":
            Span.parse(value)
        return value

    @property
    def listening_hosts(self) -> Mapping[str, str]:
        """AdminService among them, if it is served."""
        return {**super().listening_hosts, **({"COROLLA_ADMIN_HOST": self.admin_host} if self.admin_port else {})}

    @property
    def max_tokens_per_frame(self) -> int:
        """The most tokens of one step. A chunk by the usual settings fits, and so does a part of a session."""
        return max(MAX_PART_TOKENS, self.max_batch_tokens)

    @property
    def prefill_tokens_during_decode(self) -> int:
        """Prompt tokens of one iteration while others decode."""
        return max(1, self.max_batch_tokens // 4)

    @property
    def num_page_tokens(self) -> int:
        """Tokens of one KV page on the device."""
        return self.page_tokens or (_PAGE_TOKENS_OF_CPUS if self.device == "cpu" else _PAGE_TOKENS_OF_GPUS)

    @property
    def span(self) -> Span | None:
        """The explicit span, or None for `auto`."""
        return None if self.blocks == "auto" else Span.parse(self.blocks)

    @property
    def reachable_host(self) -> str:
        """What the router tells others about where this server is."""
        return self.advertised_host or socket.gethostname()
