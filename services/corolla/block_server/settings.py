"""The settings of a block server, from `COROLLA_*` variables."""

import socket
from pathlib import Path
from typing import Any, ClassVar, Final, Literal

from pydantic import Field, field_validator

from corolla.chassis.processors import is_cpu
from corolla.chassis.settings import Dtype, ServiceSettings
from corolla.chassis.weight_formats import DtypeName, KVCacheDtypeName, QuantizationName, default_dtype
from corolla.wire.span import Span

MTP: Final = "mtp"
"""The draft model of servers that draft with the multi-token prediction block of the model itself."""
MAX_PART_TOKENS: Final = 512
"""The greatest number of tokens in one part of a handover. Every server accepts it, whatever its batch size is."""
_BATCH_TOKENS_OF_CPUS: Final = 256
_BATCH_TOKENS_OF_GPUS: Final = 2048
_PAGE_TOKENS_OF_CPUS: Final = 32
_PAGE_TOKENS_OF_GPUS: Final = 64


def _dtype_of_device(earlier: dict[str, Any]) -> DtypeName:
    # A bad value of COROLLA_DEVICE is missing here.
    return default_dtype(earlier.get("device", "cpu"))


class BlockServerSettings(ServiceSettings):
    """The settings of one block server."""

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
    manifest: Path | None = Field(
        None,
        description="Manifest of the model's files, which `corolla up --share` makes and names by its SHA-256. Servers "
        "of one manifest give each other the files; one whose COROLLA_MODEL is the folder next to the manifest, of the "
        "same name without `.json`, fetches what that lacks.",
    )
    hub_patience_s: float = Field(
        300.0,
        ge=0,
        description="Seconds for which requests are repeated while the hub cannot be reached or breaks transfers off.",
    )
    blocks: str = Field("auto", description="Blocks to hold: `auto`, or `start:end`.")
    capacity_blocks: int = Field(
        0,
        ge=0,
        description="The most blocks to hold when COROLLA_BLOCKS is `auto`; embedding and head do not count. 0: all.",
    )
    weights_mib: int = Field(
        0,
        ge=0,
        description="Memory for weights in MiB, embedding and head included. It bounds the number of blocks when "
        "COROLLA_BLOCKS is `auto`; 0: on a CPU only COROLLA_CAPACITY_BLOCKS bounds it, on a GPU also the memory that "
        "is free at start, of which keys and values get a fifth.",
    )
    device: str = Field("cpu", description="Torch device: `cpu`, `cuda`, `cuda:1`.")
    dtype: Dtype = Field(
        default_factory=_dtype_of_device,
        description="Type of weights, cache and wire; fp32, bf16, fp16 for short. Without it, float32 on a CPU, and "
        "bfloat16 on other devices. Client services must have the same type.",
    )
    quantization: QuantizationName = Field(
        "none",
        description="How linear layers store their weights: `none` (as `dtype`), `int8`, `int4`, or `packed`: as they "
        "are in the checkpoint, which is a GGUF file (embedding and head too), or has AWQ, GPTQ, FP8 or "
        "compressed-tensors.",
    )
    kv_cache_dtype: KVCacheDtypeName = Field(
        "auto",
        description="How keys and values are stored: `auto` (as `dtype`), or in fewer bytes as `fp8` "
        "(E4M3) or `int8`; client services must have the same setting.",
    )
    attention: Literal["auto", "compiled", "sdpa", "triton"] = Field(
        "auto", description="Attention kernel; `auto` takes the first that is correct on this device."
    )
    fused_blocks: bool = Field(
        True,
        description="Whether blocks of the usual shape run with fused projections, and on CPUs entirely in compiled "
        "functions. Otherwise they run with the code of their model family.",
    )
    products: Literal["auto", "panels", "onednn", "library"] = Field(
        "auto",
        description="How a CPU multiplies by weights that are not packed: `panels` (compiled functions), `onednn` or "
        "`library` (torch) wherever that is possible; `auto`: by a rule of processor, type and shape.",
    )
    draft_model: str | None = Field(
        None,
        description="Checkpoint of a small model with the same tokenizer. The server of the last block loads it on its "
        "device, and drafts tokens for requests that ask for it; its caches take a part of COROLLA_KV_CACHE_MIB. It "
        "drafts for one session at a time, and the others wait: on a GPU it pays with few sessions. Or `mtp`: "
        "the multi-token prediction block that comes with DeepSeek-V3 and GLM-4.5 drafts, for all sessions together.",
    )
    cuda_graphs: Literal["auto", "off"] = Field(
        "auto",
        description="On CUDA with blocks by Triton kernels, replay decode steps as CUDA graphs if a check at "
        "start finds them correct; `off`: launch single kernels.",
    )
    threads: int = Field(
        0,
        ge=0,
        le=1024,
        description="Torch threads of this process; 0: a power of two that follows from processors and block size.",
    )
    kv_cache_mib: int = Field(
        0,
        ge=0,
        description="Memory for keys and values in MiB; 0: 1024 on a CPU, and on a GPU what weights and steps leave. "
        "Servers that share a GPU must set it. Of models with recurrent states, an eighth is for states at the ends of "
        "pages.",
    )
    spare_mib: int = Field(
        0,
        ge=0,
        description="Memory of the machine in MiB for the weights of other servers' spans, those first that one server "
        "alone holds. If a span is lost, this server takes it over without reading, where others hold its own blocks. "
        "It needs COROLLA_BLOCKS=auto. On a CPU in float32 the weights are laid out; otherwise their files lie in the "
        "system's cache. 0: none.",
    )
    boundary_activations_mib: int | None = Field(
        None,
        ge=0,
        description="Memory of the machine in MiB for boundary activations: outputs that the server keeps, to send "
        "them to the server that replaces a lost next hop; 0: they are recomputed. Without it, 256 on a CPU, and on a "
        "GPU enough for the tokens of all pages, but at most an eighth of the memory that is available.",
    )
    prompt_mib: int = Field(
        256,
        ge=0,
        description="Memory in MiB for the trained prompts that sessions bring for the server's blocks; 0: the server "
        "accepts none.",
    )
    adapters_mib: int = Field(
        512,
        ge=0,
        description="Memory in MiB for the parts of adapters that belong to the server's blocks. While one batch has "
        "rows of several adapters, they may need as much again. The least recently used adapters are unloaded. "
        "0: the server accepts none.",
    )
    adapters_dir: Path | None = Field(
        None,
        description="Folder below which all registered adapters must lie that are not on the hub; without it, they may "
        "lie in any folder.",
    )
    page_tokens: int = Field(
        0,
        ge=0,
        le=4096,
        description="Tokens of one KV page; 0: 32 on a CPU, 64 on a GPU.",
    )
    prefix_cache: bool = Field(
        True,
        description="Whether sessions of one tenant share the KV pages of a common beginning of their texts. Without "
        "that, the server stands by for no session, and its own sessions have no standbys. Sessions with recurrent "
        "states continue from those that an eighth of COROLLA_KV_CACHE_MIB keeps.",
    )
    host_cache_mib: int = Field(
        0,
        ge=0,
        description="Memory of the machine in MiB for pages that the prefix cache evicts, in addition to "
        "COROLLA_KV_CACHE_MIB. They come back when their text does. 0: they are lost.",
    )
    max_batch_tokens: int = Field(
        0,
        ge=0,
        description="The most tokens of one iteration; 0: 256 on a CPU and 2048 on a GPU. While other sessions decode, "
        "prompts get a quarter of them. A small number makes answers steadier; a large one processes prompts sooner. "
        "Steps with more tokens than both this number and 512 are refused.",
    )
    max_microbatches: int = Field(
        0,
        ge=0,
        description="The most microbatches in flight at a time on a chain whose first hop is this server; 0: one for "
        "each device. Hops on one GPU are known as such; set fewer if hops share processors.",
    )
    admin_port: int = Field(0, ge=0, le=65535, description="Port of AdminService on 127.0.0.1; 0 serves none.")
    quotas_file: Path | None = Field(
        None,
        description="JSON file with the quotas of tenants: docs/security.md#quotas. The server keeps the guaranteed "
        "pages free; changes apply within five seconds. Without it there are no guarantees.",
    )
    grace_s: float = Field(
        25.0,
        ge=0,
        le=600,
        description="Seconds that a stopping server has to hand its sessions over, or to serve those that no other "
        "server takes.",
    )
    zone: str = Field("", description="Failure domain of the server; the planner prefers chains within one zone.")
    node: str = Field(
        "",
        description="Name of the machine, which is the same for all servers there, so that sessions have their "
        "standbys on others; empty: the host of the server's address.",
    )
    pod_uid: str = Field("", description="UID of the server's Kubernetes pod, if it runs in one.")

    @field_validator("blocks")
    @classmethod
    def _blocks_are_auto_or_a_span(cls, value: str) -> str:
        if value != "auto":
            Span.parse(value)
        return value

    @property
    def max_tokens_per_frame(self) -> int:
        """The most tokens of one step. It is large enough for a chunk of the default size and a part of a handover."""
        return max(MAX_PART_TOKENS, self.num_batch_tokens)

    @property
    def num_batch_tokens(self) -> int:
        """The most tokens of one iteration on the device."""
        return self.max_batch_tokens or (_BATCH_TOKENS_OF_CPUS if is_cpu(self.device) else _BATCH_TOKENS_OF_GPUS)

    @property
    def prefill_tokens_during_decode(self) -> int:
        """The most prompt tokens of one iteration while other sessions decode."""
        return max(1, self.num_batch_tokens // 4)

    @property
    def num_page_tokens(self) -> int:
        """The tokens of one KV page on the device."""
        return self.page_tokens or (_PAGE_TOKENS_OF_CPUS if is_cpu(self.device) else _PAGE_TOKENS_OF_GPUS)

    @property
    def span(self) -> Span | None:
        """The explicit span, or None for `auto`."""
        return None if self.blocks == "auto" else Span.parse(self.blocks)

    @property
    def reachable_host(self) -> str:
        """The host name or address at which other processes reach this server."""
        return self.advertised_host or socket.gethostname()
