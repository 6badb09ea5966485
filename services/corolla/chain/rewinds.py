"""What the sequences of the library have taken back, so that it is known which tokens on a hop still count. Pure."""

from dataclasses import dataclass, field

from corolla.chain.identity import SessionIdentity
from corolla.v1 import blocks_pb2 as pb


@dataclass(slots=True)
class Rewinds:
    """The steps in which one sequence dropped tokens, or took those of another sequence.

    A hop may not have had such a step when it, or the hop that copied to it, held its tokens. So each rewind has the id
    of the newest step before it, and a hop says which step its tokens follow from.
    """

    # Ids and positions both rise: an earlier rewind to a later position changes nothing more.
    _marks: list[tuple[int, int]] = field(default_factory=list)

    def add(self, newest_step_id: int, position: int) -> None:
        """Notes that tokens from `position` on are taken back by the step after `newest_step_id`."""
        while self._marks and self._marks[-1][1] >= position:
            self._marks.pop()
        self._marks.append((newest_step_id, position))

    def num_kept(self, step_id: int) -> int | None:
        """How many tokens of what follows from a step have not been taken back since; None: all."""
        return next((position for newest_step_id, position in self._marks if step_id <= newest_step_id), None)


def without_taken_back(opened: pb.Opened, identity: SessionIdentity, rewinds: dict[bytes, Rewinds]) -> pb.Opened:
    """A hop's answer, without the tokens that the sequence has taken back since."""
    taken_back = rewinds.get(identity.session_id)
    num_kept = None if taken_back is None else taken_back.num_kept(opened.step_id)
    if num_kept is not None:
        opened.num_cached_tokens = min(opened.num_cached_tokens, num_kept)
        opened.kept_end = min(opened.kept_end, num_kept)
    return opened
