"""Which adapters of a placement somebody is shown. Pure."""

from corolla.trust.workload import Role, Workload
from corolla.v1 import router_pb2 as pb


def shown_to(caller: Workload | None, placement: pb.Placement) -> pb.Placement:
    """What a caller may know of the adapters in a placement; None: nobody is asked who they are.

    Where files are is for block servers and operators. A library, which is a tenant's own process, learns of that
    tenant's adapters and of no others.
    """
    has_any = placement.adapters or placement.removed_adapters
    if caller is None or caller.role not in (Role.CLIENT, Role.LIBRARY) or not has_any:
        return placement
    shown = pb.Placement()
    shown.CopyFrom(placement)
    del shown.adapters[:]
    for each in placement.adapters:
        if caller.role is Role.CLIENT:
            shown.adapters.add(version=each.version, tenants=each.tenants)
        elif not each.tenants or caller.name in each.tenants:
            shown.adapters.add(version=each.version)
    if caller.role is Role.LIBRARY:
        # Whose they were is not known any more; hops refuse what was taken out.
        del shown.removed_adapters[:]
    return shown
