"""The cache for `generate` of transformers. It holds no tensors, only a session whose keys and values the hops keep."""

from typing import Any, NoReturn, cast

import torch
from torch import Tensor
from transformers import Cache, DynamicCache

from corolla.chassis.errors import UnsupportedFamily
from corolla.hf.session import InferenceSession

FOREIGN_CACHE = "`past_key_values` must be an empty `DynamicCache` or the cache of a remote session of this library."
NO_CROP = "This model has a recurrent state, from which tokens cannot be taken back; generate without drafts."


def is_empty(cache: object) -> bool:
    """The cache is a `DynamicCache` of transformers that holds nothing."""
    if type(cache) is not DynamicCache:
        return False
    # Layers of either kind say in their own way whether they hold something.
    has_keys = any(getattr(layer, "is_initialized", False) for layer in cache.layers)
    return not has_keys and not any(any(getattr(layer, "has_previous_state", {}).values()) for layer in cache.layers)


class RemotePastKeyValues(Cache):
    """Presents a session as a cache of transformers.

    Cropping and reordering send nothing; the next step tells the hops which positions remain, and which row's tokens a
    replaced row continues.

    Args:
        is_croppable: whether hops can remove tokens; False for a model with a recurrent state.

    Attributes:
        session: the session that the cache presents.
        is_primed: whether transformers passes the whole text in the next call although the cache holds a part of it.
    """

    def __init__(self, session: InferenceSession, *, is_croppable: bool = True) -> None:
        super().__init__(layers=[])
        self._is_croppable = is_croppable
        self.session = session
        self.is_primed = False

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.session!r})"

    def __deepcopy__(self, memo: dict[int, Any]) -> "RemotePastKeyValues":
        return RemotePastKeyValues(self.session.copy(), is_croppable=self._is_croppable)

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise TypeError("the keys and values lie on the block servers, so the cache cannot be pickled")

    def __copy__(self) -> "RemotePastKeyValues":
        twin = object.__new__(type(self))
        twin.__dict__.update(self.__dict__)
        return twin

    def __len__(self) -> int:
        """The number of blocks, once the cache holds something, as of a `DynamicCache`."""
        return self.session.num_blocks if self.is_initialized else 0

    @classmethod
    def adopt(cls, cache: DynamicCache, session: InferenceSession, *, is_croppable: bool) -> "RemotePastKeyValues":
        """Makes an empty `DynamicCache` of a caller one of this class, since the caller goes on with that object."""
        adopted = cast(RemotePastKeyValues, cache)
        adopted.__class__ = cls
        adopted.__init__(session, is_croppable=is_croppable)  # type: ignore[misc]
        return adopted

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """The number of processed tokens of the text, padding included; it is the same for every layer."""
        return self.session.position - self.session.num_prefix

    def get_max_length(self, layer_idx: int | None = None) -> int:
        """The most positions of the session, or -1 if it grows."""
        return -1 if self.session.max_length is None else self.session.max_length

    def crop(self, tokens_to_remove: int) -> None:
        """Forgets the last `-tokens_to_remove` tokens.

        Raises:
            UnsupportedFamily: the model has a recurrent state.
            ValueError: the number is positive, or the cache has fewer tokens.
        """
        if tokens_to_remove and not self._is_croppable:
            raise UnsupportedFamily(NO_CROP)
        if not -self.get_seq_length() <= tokens_to_remove <= 0:
            raise ValueError(
                f"`crop` takes the number of tokens to remove as a negative number, down to {-self.get_seq_length()}, "
                f"not {tokens_to_remove}."
            )
        if tokens_to_remove:
            self.session.position += tokens_to_remove

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Replaces row `i` by what row `beam_idx[i]` was; `beam_idx` is int64 `[R]`, on any device."""
        self.session.select_rows(beam_idx.tolist())

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeats each row `repeats` times."""
        self.session.select_rows([row for row in range(self.batch_size) for _ in range(repeats)])

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keeps the rows that `indices` selects, int64 or bool `[R]`, on any device."""
        chosen = indices.nonzero().flatten() if indices.dtype == torch.bool else indices
        self.session.select_rows(chosen.tolist())

    def reset(self) -> None:
        self.session.position = self.session.num_prefix

    def activate_past_recording(self) -> None:
        """Does nothing: hops can undo a whole step in layers with windows, too, and a draft is part of one step."""

    def update(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise ValueError("Keys and values are written by the block servers; nothing can be added here.")

    @property
    def batch_size(self) -> int:
        return self.session.batch_size or -1

    @property
    def is_initialized(self) -> bool:
        return self.session.position > 0

    @property
    def is_croppable(self) -> bool:
        return self._is_croppable
