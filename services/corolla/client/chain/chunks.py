"""How a prompt is cut, so that the hops of a chain work on it at the same time. Pure."""

from typing import Final

MIN_CHUNK_TOKENS: Final = 64
"""Fewer rows than this multiply a matrix at a clearly higher price each."""

_CHUNKS_PER_HOP: Final = 4


def chunk_tokens(num_tokens: int, num_hops: int, max_tokens: int) -> int:
    """Tokens of each chunk of a prompt; the last one may have fewer.

    With `k` chunks, `s` hops are busy together but for `s - 1` of `k + s - 1` turns, so that a prompt wants several
    chunks for each hop. Chunks that are too small cost more than they hide; so do those of a single hop, which has
    nobody to work beside.

    Args:
        num_tokens: of the prompt.
        num_hops: of the chain.
        max_tokens: of a chunk.
    """
    if num_hops == 1:
        return max_tokens
    even = -(-num_tokens // (_CHUNKS_PER_HOP * num_hops))
    return min(max(even, MIN_CHUNK_TOKENS), max_tokens)
