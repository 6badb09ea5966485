"""`corolla adapters`: the adapters of a model that a router has registered."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

if TYPE_CHECKING:
    from corolla.v1.router_pb2 import Placement, RegisteredAdapter
    from corolla.v1.router_pb2_grpc import RouterServiceStub

_TIMEOUT_S: Final = 5.0

adapters = typer.Typer(
    name="adapters", help="Registers, lists and removes adapters (LoRA) of a model.", no_args_is_help=True
)

Name = Annotated[str, typer.Argument(help="Name for requests, as `adapter` or `<model>:<name>`.")]
Router = Annotated[str, typer.Option(help="host:port of the router.", envvar="COROLLA_ROUTER")]
ModelName = Annotated[str, typer.Option(help="The model; needed only if there are several.")]


@adapters.command()
def add(
    name: Name,
    source: Annotated[str, typer.Argument(help="Folder that PEFT wrote; with --revision, a hub id.")],
    source_as: Annotated[
        str, typer.Option(help="The folder's path on the block servers, if it differs from the path here.")
    ] = "",
    revision: Annotated[str, typer.Option(help="Branch, tag or commit on the hub; its commit is registered.")] = "",
    tenant: Annotated[
        list[str] | None,
        typer.Option(help="Only this tenant may use it; may be given several times. Without it, all may."),
    ] = None,
    digest: Annotated[
        str,
        typer.Option(
            help="Digest of the files, as `adapters list` shows it; needed if the folder cannot be read here."
        ),
    ] = "",
    router: Router = "127.0.0.1:50050",
    model: ModelName = "",
) -> int:
    """Registers an adapter, or replaces the one of that name. Block servers load it once a session asks for it."""
    from corolla.cli.control_channel import router_stub
    from corolla.v1 import common_pb2, router_pb2

    if source_as and revision:
        raise typer.BadParameter("is for folders only, not for adapters on the hub", param_hint="--source-as")
    if not digest:
        source, revision, digest = _read(source, revision)
    registered = router_pb2.RegisteredAdapter(
        version=common_pb2.AdapterVersion(name=name, digest=digest),
        source=source_as or source,
        revision=revision,
        tenants=tenant,
    )
    with router_stub(router) as stub:
        request = router_pb2.AddAdapterRequest(model=_placement(stub, model).model, adapter=registered)
        stub.AddAdapter(request, timeout=_TIMEOUT_S)
    sys.stdout.write(f"registered {name}  {digest}\n")
    return 0


@adapters.command("list")
def list_adapters(router: Router = "127.0.0.1:50050", model: ModelName = "") -> int:
    """Lists the adapters that are registered: the name of each, and below it digest, source and tenants."""
    from corolla.cli.control_channel import router_stub

    with router_stub(router) as stub:
        placement = _placement(stub, model)
    if not placement.adapters:
        sys.stderr.write("no adapter is registered; add one with corolla adapters add\n")
    for each in placement.adapters:
        sys.stdout.write("\n".join(adapter_lines(each)) + "\n")
    return 0


@adapters.command()
def remove(name: Name, router: Router = "127.0.0.1:50050", model: ModelName = "") -> int:
    """Takes an adapter out. Answers that are made with it end with NOT_FOUND within seconds."""
    from corolla.cli.control_channel import router_stub
    from corolla.v1 import router_pb2

    with router_stub(router) as stub:
        request = router_pb2.RemoveAdapterRequest(model=_placement(stub, model).model, name=name)
        stub.RemoveAdapter(request, timeout=_TIMEOUT_S)
    sys.stdout.write(f"removed {name}\n")
    return 0


def adapter_lines(adapter: "RegisteredAdapter") -> list[str]:
    """The lines that describe an adapter: its name, then a line for each fact, since a digest fills most of a line."""
    facts = {
        "digest": adapter.version.digest,
        "source": adapter.source,
        "revision": adapter.revision,
        "tenants": ", ".join(adapter.tenants),
    }
    return [adapter.version.name, *(f"    {name:<8}  {value}" for name, value in facts.items() if value)]


def _read(source: str, revision: str) -> tuple[str, str, str]:
    """Returns source, commit and digest of an adapter's files; fetches them from the hub first if `revision` is set."""
    from corolla.models.adapters.file import adapter_folder, digest_of

    folder = adapter_folder(source, revision)
    digest = digest_of(folder)
    # The folder of fetched files has the commit as its name.
    return (source, folder.name, digest) if revision else (str(Path(source).expanduser().resolve()), "", digest)


def _placement(stub: "RouterServiceStub", model: str) -> "Placement":
    from corolla.chassis.errors import ModelNotFound
    from corolla.v1 import router_pb2

    placement = stub.GetPlacement(router_pb2.GetPlacementRequest(model=model), timeout=_TIMEOUT_S)
    if not placement.model:
        raise ModelNotFound("no block server has registered yet; name the model with --model")
    return placement
