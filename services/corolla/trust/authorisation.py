"""The roles that may call each method between services, and those that may send each kind of frame."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from google.protobuf.message import Message

from corolla.chassis.errors import RoleDenied
from corolla.trust.workload import Role, Workload
from corolla.v1 import blocks_pb2 as pb

_CLIENT, _BLOCK, _ROUTER, _LIBRARY, _OPERATOR = Role.CLIENT, Role.BLOCK, Role.ROUTER, Role.LIBRARY, Role.OPERATOR
# The roles that send steps through chains.
_STEPPERS: Final = frozenset({_CLIENT, _LIBRARY})

METHODS: Final[Mapping[str, frozenset[Role]]] = MappingProxyType(
    {
        "RouterService/RegisterServer": frozenset({_BLOCK}),
        "RouterService/Heartbeat": frozenset({_BLOCK}),
        "RouterService/DeregisterServer": frozenset({_BLOCK}),
        "RouterService/MoveSession": frozenset({_BLOCK}),
        "RouterService/PlanChain": _STEPPERS,
        "RouterService/WatchPlacement": _STEPPERS,
        "RouterService/ReportServer": frozenset({*_STEPPERS, _BLOCK}),
        "RouterService/GetPlacement": frozenset({*_STEPPERS, _BLOCK, _OPERATOR}),
        "RouterService/CreateSessionRecord": frozenset({_CLIENT}),
        "RouterService/GetSessionRecord": frozenset({_CLIENT}),
        "RouterService/BeginTurn": frozenset({_CLIENT}),
        "RouterService/RenewTurn": frozenset({_CLIENT}),
        "RouterService/EndTurn": frozenset({_CLIENT}),
        "RouterService/DeleteSessionRecord": frozenset({_CLIENT}),
        "RouterService/CountSessionRecords": frozenset({_CLIENT, _OPERATOR}),
        "RouterService/TakeQuotas": frozenset({_CLIENT}),
        "RouterService/AddAdapter": frozenset({_OPERATOR}),
        "RouterService/RemoveAdapter": frozenset({_OPERATOR}),
        "BlockService/GetStatus": frozenset({_CLIENT, _ROUTER, _OPERATOR}),
        "AdminService/Drain": frozenset({_OPERATOR}),
    }
)
"""The allowed roles by `Service/Method`. Every role may call health and reflection."""

FRAMES: Final[Mapping[type[Message], frozenset[Role]]] = MappingProxyType(
    {
        pb.Hello: frozenset({*_STEPPERS, _BLOCK}),
        pb.Open: _STEPPERS,
        pb.Step: frozenset({*_STEPPERS, _BLOCK}),
        pb.Resend: _STEPPERS,
        pb.Credit: _STEPPERS,
        pb.Holds: _STEPPERS,
        pb.Standby: _STEPPERS,
        # A server that has handed a session over forwards the frames that the session's client sent meanwhile.
        pb.Close: frozenset({*_STEPPERS, _BLOCK}),
        pb.Truncate: frozenset({*_STEPPERS, _BLOCK}),
        pb.Next: frozenset({_BLOCK}),
        pb.Handover: frozenset({_BLOCK}),
        pb.HandoverTokens: frozenset({_BLOCK}),
        pb.Meet: frozenset({_BLOCK}),
        pb.Fetch: frozenset({_BLOCK}),
    }
)
"""The allowed senders of each kind of frame that a block server accepts."""


AUDITED: Final = frozenset(
    {
        "RouterService/RegisterServer",
        "RouterService/DeregisterServer",
        "RouterService/ReportServer",
        "RouterService/MoveSession",
        "RouterService/CreateSessionRecord",
        "RouterService/DeleteSessionRecord",
        "RouterService/AddAdapter",
        "RouterService/RemoveAdapter",
        "AdminService/Drain",
    }
)
"""The methods whose calls all go into the audit log. Heartbeats and the calls of running answers do not."""


def check_method(method: str, caller: Workload | None) -> None:
    """Checks that the caller may call `Service/Method`; a caller without identity (None) may not. Raises RoleDenied."""
    if caller is None or caller.role not in METHODS[method]:
        raise RoleDenied(f"{_named(caller)} may not call {method}")


def check_doubt(caller: Workload | None) -> None:
    """Checks that the caller may call a server slow: only who sends steps sees it. Raises RoleDenied.

    One word is enough to turn traffic away from a server, so no server may say it of another one.

    Args:
        caller: The caller's workload; None: callers are not authenticated.
    """
    if caller is not None and caller.role not in _STEPPERS:
        raise RoleDenied(f"{_named(caller)} may not call a server slow")


def check_frame(kind: type[Message], caller: Workload) -> None:
    """Checks that the caller may send frames of `kind`, a key of `FRAMES`. Raises RoleDenied."""
    if caller.role not in FRAMES[kind]:
        raise RoleDenied(f"{_named(caller)} may not send {kind.DESCRIPTOR.name}")


def _named(caller: Workload | None) -> str:
    return "a caller without a role" if caller is None else f"the role {caller.role.value}"
