"""Finds the adapter that a request names, and checks that its tenant may use it."""

from collections.abc import Sequence
from typing import Final

from corolla.chain.placement import PlacementWatch
from corolla.chassis.errors import AdapterNotFound, InvalidRequest, ModelNotFound
from corolla.v1 import generation_pb2 as pb
from corolla.v1 import router_pb2
from corolla.wire.adapter_version import AdapterVersion

_NUM_SAID: Final = 8
"""The most names that an error says."""


class ModelNames:
    """Names that requests may give as their model: the model's own ones, or `<model>:<adapter>`.

    Args:
        names: the names that are listed, of which the first one stands in answers.
        placement: the placement, which has the registered adapters.
        others: further names that requests may use.

    Attributes:
        model: the name of the model in answers.
        listed_names: the names that are listed.
        all_names: all names of the model.
    """

    def __init__(self, names: Sequence[str], placement: PlacementWatch, others: Sequence[str] = ()) -> None:
        self.model = names[0]
        self.listed_names = tuple(names)
        self.all_names = tuple(dict.fromkeys((*names, *others)))
        self._placement = placement

    def adapter_of(self, given: str, adapter: str = "") -> str:
        """The name of the adapter that a request means; empty: the session's adapter, or no adapter.

        Args:
            given: the request's model.
            adapter: the request's adapter.

        Raises:
            ModelNotFound: this service does not serve the request's model.
            InvalidRequest: `given` and `adapter` name different adapters.
        """
        named = next((given[len(name) + 1 :] for name in self.all_names if given.startswith(f"{name}:")), "")
        if not named and given not in ("", *self.all_names):
            known = ", ".join(self.listed_names[:_NUM_SAID])
            raise ModelNotFound(f"this service does not have that model; it has {known}", given[:256])
        if named and adapter and named != adapter:
            raise InvalidRequest("adapter", "contradicts the adapter in the model's name")
        return adapter or named

    def with_adapter(self, adapter: str) -> str:
        """The name `<model>:<adapter>`; the model's own name if `adapter` is empty."""
        return f"{self.model}:{adapter}" if adapter else self.model

    def with_adapter_each(self, adapter: str) -> Sequence[str]:
        """The names `<model>:<adapter>` by all names of the model; those alone if `adapter` is empty."""
        return tuple(f"{name}:{adapter}" if adapter else name for name in self.all_names)

    async def resolve(self, name: str, tenant: str) -> AdapterVersion | None:
        """The version that is registered under an adapter's name; None for the empty name.

        Raises:
            AdapterNotFound: no adapter has this name.
            AdapterDenied: the adapter is registered for other tenants only.
        """
        return await self._placement.adapter(name, tenant) if name else None

    async def of_session(self, record: router_pb2.SessionRecord, name: str, tenant: str) -> AdapterVersion | None:
        """The adapter with which a session's turns are computed, if any.

        Args:
            name: the adapter's name in the turn's request; empty if it has none.

        Raises:
            InvalidRequest: the session has another adapter.
            AdapterNotFound: no adapter has this name, or it was registered anew with other weights.
            AdapterDenied: the adapter is registered for other tenants only.
        """
        if not record.HasField("adapter"):
            if name:
                raise InvalidRequest("adapter", "must be empty, because the session was created without an adapter")
            return None
        version = AdapterVersion.from_proto(record.adapter)
        if name not in ("", version.name):
            raise InvalidRequest("adapter", "must be the adapter that the session was created with")
        if await self.resolve(version.name, tenant) != version:
            raise AdapterNotFound("the session's adapter was registered anew, with other weights", version.name)
        return version

    def listed(self, tenant: str) -> Sequence[str]:
        """The names of the adapters that a tenant may use."""
        return self._placement.adapters_for(tenant)

    def described(self, model: pb.Model, adapter: str = "", name: str = "") -> pb.Model:
        """The description of the model with an adapter, or by another name, as the API shows it."""
        described = pb.Model(adapter=adapter)
        described.MergeFrom(model)
        described.name = name or self.with_adapter(adapter)
        return described
