"""Joins the text of a session with the input of a further call of `generate`.

Results are on the device of the session's text; the input of the call may be on another device.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Continuation:
    """The text that a call continues, and how much of it the caller did not give.

    Attributes:
        token_ids: int64 `[B, T]`, the whole text.
        mask: int64 `[B, T]`, or None if no mask was given.
        num_omitted: the number of leading columns that the caller did not give; the answer leaves them out, too.
    """

    token_ids: Tensor
    mask: Tensor | None
    num_omitted: int


def continuation_of(text: Tensor, text_mask: Tensor | None, given: Tensor | None, mask: Tensor | None) -> Continuation:
    """Joins a session's text with the input of a call: the whole text and more, only new text, or nothing.

    Input that begins with the session's whole text counts as the whole text, never as new text that repeats it.

    Args:
        text: int64 `[B, L]`, the token log.
        text_mask: int64 `[B, L]`; None is all ones.
        given: int64 `[B, T]`, or None to continue the session's text.
        mask: int64, with the shape of `given` or of the whole text.

    Raises:
        ValueError: the batch has another size, or the mask another length.
    """
    if given is None:
        token_ids, num_omitted = text, text.shape[1]
    else:
        if given.dim() != 2 or given.shape[0] != text.shape[0]:
            raise ValueError(
                f"The session holds {text.shape[0]} sequences, so `inputs` must have the shape [{text.shape[0]}, "
                f"tokens], not {list(given.shape)}."
            )
        given = given.to(device=text.device, dtype=text.dtype)
        num_held = text.shape[1]
        if given.shape[1] >= num_held and torch.equal(given[:, :num_held], text):
            token_ids, num_omitted = given, 0
        else:
            token_ids, num_omitted = torch.cat([text, given], dim=1), num_held
    num_given = 0 if given is None else given.shape[1]
    return Continuation(token_ids, _mask_of(token_ids, num_given, text_mask, mask), num_omitted)


def _mask_of(token_ids: Tensor, num_given: int, text_mask: Tensor | None, mask: Tensor | None) -> Tensor | None:
    if mask is None and text_mask is None:
        return None
    num_tokens = token_ids.shape[1]
    whole = torch.ones_like(token_ids)
    if text_mask is not None:
        whole[:, : text_mask.shape[1]] = text_mask
    if mask is not None:
        if mask.dim() != 2 or mask.shape[0] != token_ids.shape[0] or mask.shape[1] not in (num_given, num_tokens):
            raise ValueError(
                f"`attention_mask` must have the shape [{token_ids.shape[0]}, {num_given}], for what is given, or "
                f"[{token_ids.shape[0]}, {num_tokens}], for the whole text; not {list(mask.shape)}."
            )
        whole[:, num_tokens - mask.shape[1] :] = mask.to(device=whole.device, dtype=whole.dtype)
    return whole
