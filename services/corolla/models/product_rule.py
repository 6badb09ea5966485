"""How a CPU multiplies by the weights of a linear layer: a rule of processor, dtype and shape, without a clock. Pure.

Servers that share a machine, and machines of one kind, have to choose alike whatever else they do, since kernels round
in different ways. So nothing is timed when a model is loaded. Times on an EPYC of the Zen 5 generation, 2026-11-28, one
thread, weights beyond the caches, the best of calls in turn: how many times as fast as torch's own function a way is
over 1, 8 and 64 rows, first for `[3072, 576]`, then for `[11008, 4096]`:

| dtype, instructions              | panels                   | oneDNN's layout          | oneDNN, weights as they are |
| -------------------------------- | ------------------------ | ------------------------ | --------------------------- |
| float32, AVX-512                 | 2.1 2.4 2.4, 1.8 3.7 3.0 | 1.9 2.2 2.2, 1.7 2.9 3.2 | 1.7 1.6 2.0, 1.3 1.7 2.6    |
| float32, AVX2                    | 2.0 1.6 1.7, 1.7 2.2 3.3 | 1.1 1.4 1.2, 1.1 1.7 2.2 | 1.3 1.1 1.1, 1.1 1.2 1.8    |
| bfloat16, AVX-512 with its pairs | 2.0 1.4 1.1, 2.1 1.7 1.2 | 1.9 1.6 1.2, 1.7 1.3 1.1 | 1.0 1.0 1.0, 1.0 1.0 1.0    |
| bfloat16, AVX-512 without them   | 1.1 2.5 2.5, 1.5 6.0 3.3 | 1.0 1.0 1.0, 1.2 1.0 1.0 | 1.0 1.0 1.0, 1.0 1.2 1.0    |
| bfloat16, AVX2                   | 1.2 3.0 6.5, 1.4 3.5 5.2 | has no kernel            | has no kernel               |
| bfloat16, matrices (AMX)         | never measured           | never measured           | never measured              |
| float16                          | has no kernel            | never measured           | never measured              |

With panels, one call can run whole blocks, too, which gains more than a product. Instructions for matrices should make
oneDNN several times as fast as panels; in float16, its layout should gain what it gains in bfloat16. Small weights
lose by the cost of a call: for `[192, 64]` in float32, panels have 0.3 to 1.1 of the speed of torch's function, and for
`[256, 256]` 1.1 to 2.0; oneDNN has 0.2 to 0.9, and 0.8 to 1.8.
"""

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

# A call costs more than the layout saves where there are fewer weights.
_LEAST_WEIGHTS: Final = {"panels": 1 << 14, "onednn": 1 << 17}
MAX_COPIED_BYTES: Final = 256 << 20
"""If other code reads a layer's plain weights, too, weights above this size are not copied to another layout."""


class Way(enum.StrEnum):
    """A way to multiply by weights.

    Attributes:
        PANELS: compiled functions, by panels (see `kernels/layouts`).
        ONEDNN: oneDNN, by weights in its own layout.
        LIBRARY: torch's function for `nn.Linear`.
    """

    PANELS = "panels"
    ONEDNN = "onednn"
    LIBRARY = "library"


AUTO: Final = "auto"
"""What asks for the way of the rule."""


@dataclass(frozen=True, slots=True)
class Processor:
    """What a CPU and the libraries on it can do. Dtypes have their names, such as `float32`.

    Attributes:
        panels: for each dtype that compiled functions multiply, the number of inputs has to be a multiple of this.
        onednn: the dtypes that oneDNN has kernels for.
        matrices: the dtypes that the processor has instructions for whole matrices for (AMX).
    """

    panels: Mapping[str, int]
    onednn: frozenset[str]
    matrices: frozenset[str] = frozenset()


def way_of(
    processor: Processor,
    dtype: str,
    shape: tuple[int, int],
    num_bytes: int,
    *,
    is_shared: bool = False,
    asked_for: str = AUTO,
) -> Way:
    """The way to multiply by weights.

    Args:
        shape: their outputs and inputs.
        is_shared: whether other code reads them, too.
        asked_for: `AUTO`, or a way that is taken wherever it is possible.
    """
    takes_panels = not is_shared and dtype in processor.panels and shape[1] % processor.panels[dtype] == 0
    # Weights that stay as they are gain nothing where torch uses oneDNN itself.
    takes_onednn = dtype in processor.onednn and not (is_shared and num_bytes > MAX_COPIED_BYTES and dtype != "float32")
    possible = {Way.PANELS: takes_panels, Way.ONEDNN: takes_onednn, Way.LIBRARY: True}
    if asked_for != AUTO:
        return Way(asked_for) if possible[Way(asked_for)] else Way.LIBRARY
    order = (Way.ONEDNN, Way.PANELS) if dtype in processor.matrices else (Way.PANELS, Way.ONEDNN)
    num_weights = shape[0] * shape[1]
    return next((way for way in order if possible[way] and num_weights >= _LEAST_WEIGHTS[way]), Way.LIBRARY)
