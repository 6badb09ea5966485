"""Which adapters of a placement somebody is shown. Pure."""

from corolla.trust.workload import Role, Workload
from corolla.v1 import router_pb2 as pb


def shown_to(caller: Workload | None, placement: pb.Placement) -> pb.Placement:
    """A library, which is a tenant's own process, learns of that tenant's adapters, and of no others and no folders."""
    if caller is None or caller.role is not Role.LIBRARY or not placement.adapters:
        return placement
    shown = pb.Placement()
    shown.CopyFrom(placement)
    del shown.adapters[:]
    for each in placement.adapters:
        if not each.tenants or caller.name in each.tenants:
            shown.adapters.add(version=each.version, tenants=[caller.name] if each.tenants else ())
    return shown
