"""Which kernels a server chose at start, as data; with dtype and device they decide how results round. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class KernelChoices:
    """The kernels of a span.

    Attributes:
        attention: the name of the attention backend.
        blocks: what runs the blocks: `compiled` (whole blocks on a CPU), `triton` (whole blocks on a GPU), `fused`
            (torch's operators, with fused projections), `states` (blocks with recurrent states on a CPU, see
            `state_blocks`), `family` (the family's own code in transformers) or `latents` (that code, except for
            multi-latent attention of short steps).
        products: how the server multiplies by weights of a shape, such as `4096x14336` (outputs, inputs): `library`,
            `onednn`, `panels`, or on a GPU by the rule `ladder` or `triton`; see `models/invariant`. Packed
            weights are missing here, unless a GPU's kernel failed for them: then they are `expanded`.
        adapters: how the server multiplies by adapters: by `torch` or `triton`.
    """

    attention: str
    blocks: str
    products: Mapping[str, str] = field(default_factory=dict)
    adapters: str = "torch"

    @property
    def cuts_are_equal(self) -> bool:
        """A token gets the same bits however its text is cut into steps, if no adapter is used.

        A GPU's kernels are taken only where a trial found that; see `kernels/kernel_trial`.
        """
        return self.attention == self.blocks == "triton" and {*self.products.values()} <= {"triton", "ladder"}

    def summary(self, recorded_rows: int) -> str:
        """The kernels in a few words, for people.

        Args:
            recorded_rows: the most rows of a decode step that is recorded; 0: none is.
        """
        steps = f", steps of up to {recorded_rows} rows recorded" if recorded_rows else ""
        return f"{self.blocks} blocks, {self.attention} attention{steps}"

    def choices(self) -> Mapping[str, str]:
        """All choices by name, as one mapping of strings."""
        products = {f"product {shape}": way for shape, way in sorted(self.products.items())}
        return {"attention": self.attention, "blocks": self.blocks, "adapters": self.adapters, **products}
