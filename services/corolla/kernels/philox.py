"""The constants of Philox4x32-10 (Salmon et al. 2011), and of the logarithm that makes exponential numbers. Pure.

Every device computes both by the same operations in the same order, each rounded once, so all bits are equal.
"""

from typing import Final

ROUNDS: Final = 10
MULTIPLIERS: Final = 0xD2511F53, 0xCD9E8D57
KEY_STEPS: Final = 0x9E3779B9, 0xBB67AE85

NUMBER_BITS: Final = 52
"""The bits of an evenly drawn number: the upper ones of two words."""

PROBABILITY_BITS: Final = 52
"""Probabilities are integers of so many bits, of which float64 holds every sum exactly."""

# The logarithm of fdlibm's `e_log.c` (Sun Microsystems 1993): of a number between the square root of 1/2 and that of 2,
# times a power of two.
SQUARE_ROOT_OF_HALF: Final = 0x3FE6A09E00000000
ONE: Final = 0x3FF0000000000000
FRACTION: Final = 0x000FFFFFFFFFFFFF
LN2_HIGH: Final = 6.93147180369123816490e-01
LN2_LOW: Final = 1.90821492927058770002e-10
ODD_TERMS: Final = (
    6.666666666666735130e-01,
    2.857142874366239149e-01,
    1.818357216161805012e-01,
    1.479819860510658591e-01,
)
EVEN_TERMS: Final = 3.999999999940941908e-01, 2.222219843214978396e-01, 1.531383769920937332e-01
