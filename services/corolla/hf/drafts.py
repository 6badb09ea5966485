"""Drafts of assisted decoding, cut to what the text has room for."""

from typing import Any

from transformers.generation.candidate_generator import CandidateGenerator


class DraftsWithinLength(CandidateGenerator):
    """Cuts drafts at the end of the text, so that no position beyond it is ever sent or reserved.

    Args:
        generator: of the drafts.
        max_length: of the text; the token after the last draft belongs to it, too.
    """

    def __init__(self, generator: CandidateGenerator, max_length: int) -> None:
        self._generator: Any = generator
        self._max_length = max_length
        self.requires_model_outputs = generator.requires_model_outputs

    def __getattr__(self, name: str) -> Any:
        return getattr(self._generator, name)

    def get_candidates(self, input_ids: Any, **options: Any) -> Any:
        candidates, logits = self._generator.get_candidates(input_ids, **options)
        num_kept = max(self._max_length - 1, input_ids.shape[1])
        if logits is not None:
            logits = logits[:, : num_kept - input_ids.shape[1]]
        return candidates[:, :num_kept], logits

    def update_candidate_strategy(self, input_ids: Any, scores: Any, num_matches: int) -> None:
        self._generator.update_candidate_strategy(input_ids, scores, num_matches)
