"""What a seed stands for: a model and its servers, the callers, and what goes wrong when. Pure."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from corolla.client.generation.sampling import SamplingParams
from corolla.wire.span import Span, gaps
from tests.simulation.toy_model import ToyModel

MARGIN_S: Final = 9.0
"""So long after a fault its server may still be of no use: it registers again, or is left out by those it failed."""

GRACE_S: Final = 6.0
"""How long a server that leaves serves those whom nobody takes."""

_SERVER_FAULTS: Final = ("kill", "kill", "freeze", "freeze", "cut", "cut", "cut peer", "reset", "bad numbers", "drain")
_CONTROL_FAULTS: Final = ("router kill", "redis gone", "redis frozen", "redis flush", "redis rollback", "redis full")
_HARMLESS_FAULTS: Final = ("slow", "repeat")
_CALLER_FAULTS: Final = ("client kill", "client freeze", "cancel")


@dataclass(frozen=True, slots=True)
class Fault:
    """Something that goes wrong.

    Attributes:
        at_s: from the start of the run.
        target: number of the server, client or request that it hits.
        other: number of a second one, where it lies between two.
        seconds: how long it lasts.
        directions: of a cut: 1 to the target, 2 from it, 3 both.
    """

    kind: str
    at_s: float
    target: int = 0
    other: int = 0
    seconds: float = 0.0
    directions: int = 3

    def __str__(self) -> str:
        return (
            f"{self.at_s:6.2f} s  {self.kind} {self.target}/{self.other} for {self.seconds:.2f} s ({self.directions})"
        )


@dataclass(frozen=True, slots=True)
class Turn:
    """One request: the first one of a conversation, or a further one."""

    client: int
    at_s: float
    new_ids: tuple[int, ...]
    max_tokens: int
    params: SamplingParams
    guesses: int
    ignores_eos: bool


@dataclass(frozen=True, slots=True)
class Conversation:
    """Requests of one caller that follow each other. One that is not a chat has one request, and leaves nothing."""

    tenant: str
    is_chat: bool
    turns: tuple[Turn, ...]


@dataclass(frozen=True, slots=True)
class Scenario:
    """All that is drawn from a seed."""

    seed: int
    model: ToyModel
    spans: tuple[Span, ...]
    num_clients: int
    num_routers: int
    num_pages: int
    page_tokens: int
    has_prefix_cache: bool
    kept_output_bytes: int
    max_step_tokens: int
    max_batch_tokens: int
    prefill_chunk_tokens: int
    merges_replayed_steps: bool
    is_lookup: bool
    compute_s: tuple[float, ...]
    conversations: tuple[Conversation, ...]
    faults: tuple[Fault, ...]

    @property
    def keeps_coverage(self) -> bool:
        """Whether at each moment servers that nothing happens to hold all blocks; then no answer may fail."""
        return covers(self.spans, self.faults, self.model.num_blocks)

    @property
    def is_tight(self) -> bool:
        """Whether sessions may not fit the servers."""
        return self.num_pages * self.page_tokens < 1000

    def has(self, *kinds: str) -> bool:
        return any(fault.kind in kinds for fault in self.faults)


def hit_servers(fault: Fault) -> frozenset[int]:
    """The servers that a fault makes useless for a while."""
    if fault.kind == "cut peer":
        return frozenset((fault.target, fault.other))
    return frozenset([fault.target]) if fault.kind in _SERVER_FAULTS else frozenset()


def covers(spans: Sequence[Span], faults: Sequence[Fault], num_blocks: int) -> bool:
    """Whether the servers that are well hold all blocks at any time."""
    for moment in faults:
        hit: set[int] = set()
        for fault in faults:
            if fault.at_s <= moment.at_s <= fault.at_s + fault.seconds + MARGIN_S:
                hit |= hit_servers(fault)
        well = [span for number, span in enumerate(spans) if number not in hit]
        if gaps(well, Span(0, num_blocks)):
            return False
    return True


def draw(seed: int) -> Scenario:
    """The scenario of a seed, always the same."""
    dice = random.Random(seed)
    num_blocks = dice.randint(3, 6)
    window = dice.choice((None, None, None, 6, 9))
    model = ToyModel(tuple(window if block % 2 else None for block in range(num_blocks)))
    spans = _spans(dice, num_blocks)
    num_clients, num_routers = dice.choice((1, 1, 2)), dice.choice((1, 2))
    is_tight = dice.random() < 0.15
    page_tokens = dice.choice((2, 3, 4, 8))
    conversations = tuple(_conversation(dice, model, num_clients) for _ in range(dice.randint(2, 5)))
    return Scenario(
        seed=seed,
        model=model,
        spans=spans,
        num_clients=num_clients,
        num_routers=num_routers,
        num_pages=(160 if is_tight else 2000) // page_tokens,
        page_tokens=page_tokens,
        has_prefix_cache=dice.random() < 0.7,
        kept_output_bytes=dice.choice((1 << 20, 1 << 20, 400, 0)),
        max_step_tokens=dice.choice((16, 24, 64)),
        max_batch_tokens=dice.choice((8, 32)),
        prefill_chunk_tokens=dice.choice((3, 5, 8, 16)),
        merges_replayed_steps=dice.random() < 0.7,
        is_lookup=dice.random() < 0.5,
        compute_s=tuple(dice.uniform(0.02, 0.08) for _ in spans),
        conversations=conversations,
        faults=_faults(dice, spans, num_blocks, num_clients, len(conversations)),
    )


def _spans(dice: random.Random, num_blocks: int) -> tuple[Span, ...]:
    """Two or three covers of the model, which are not always cut alike."""

    def cover() -> list[Span]:
        edges = sorted(dice.sample(range(1, num_blocks), dice.randint(1, 2)))
        return [Span(start, end) for start, end in zip([0, *edges], [*edges, num_blocks], strict=True)]

    first = cover()
    others = [first if dice.random() < 0.5 else cover() for _ in range(dice.choice((1, 1, 1, 2)))]
    return tuple(span for spans in (first, *others) for span in spans)


def _conversation(dice: random.Random, model: ToyModel, num_clients: int) -> Conversation:
    is_chat = dice.random() < 0.4
    at_s = dice.uniform(0.0, 4.0)
    turns: list[Turn] = []
    for _ in range(dice.randint(2, 3) if is_chat else 1):
        turns.append(
            Turn(
                client=dice.randrange(num_clients),
                at_s=at_s,
                new_ids=_prompt(dice, model),
                max_tokens=dice.randint(3, 22),
                params=SamplingParams() if dice.random() < 0.6 else _sampling(dice),
                guesses=dice.choice((0, 0, 3)),
                ignores_eos=dice.random() < 0.8,
            )
        )
        at_s += dice.uniform(1.0, 6.0)
    return Conversation(dice.choice(("red", "blue")), is_chat, tuple(turns))


def _prompt(dice: random.Random, model: ToyModel) -> tuple[int, ...]:
    """Prompts that begin alike more often than not."""
    shared = [(7 * place + 3) % model.vocab_size for place in range(dice.choice((0, 4, 12, 16)))]
    return (*shared, *(dice.randrange(model.vocab_size) for _ in range(dice.randint(1, 14))))


def _sampling(dice: random.Random) -> SamplingParams:
    return SamplingParams(temperature=dice.choice((0.7, 1.0)), seed=dice.randrange(1000))


def _faults(
    dice: random.Random, spans: Sequence[Span], num_blocks: int, num_clients: int, num_conversations: int
) -> tuple[Fault, ...]:
    """Up to five; those that would leave blocks without a server are mostly left out."""
    may_uncover = dice.random() < 0.1
    faults: list[Fault] = []
    for _ in range(dice.choice((0, 1, 2, 3, 4, 5))):
        kinds = dice.choices((_SERVER_FAULTS, _CONTROL_FAULTS, _HARMLESS_FAULTS, _CALLER_FAULTS), (6, 2, 2, 1))[0]
        fault = _fault(dice, dice.choice(kinds), len(spans), num_clients, num_conversations)
        if may_uncover or covers(spans, [*faults, fault], num_blocks):
            faults.append(fault)
    return tuple(sorted(faults, key=lambda fault: fault.at_s))


def _fault(dice: random.Random, kind: str, num_servers: int, num_clients: int, num_conversations: int) -> Fault:
    at_s = dice.uniform(0.2, 9.0)
    server = dice.randrange(num_servers)
    client = dice.randrange(num_clients)
    directions = dice.choice((1, 2, 3))
    match kind:
        case "kill":
            return Fault(kind, at_s, server, seconds=dice.choice((0.5, 2.0, 60.0)))
        case "drain":
            return Fault(kind, at_s, server, seconds=dice.choice((GRACE_S + 3.0, 60.0)))
        case "freeze":
            return Fault(kind, at_s, server, seconds=dice.choice((0.4, 1.5, 2.5, 5.0, 10.0)))
        case "cut" | "slow" | "repeat":
            return Fault(kind, at_s, server, client, dice.choice((0.5, 1.5, 2.8, 6.0)), directions)
        case "cut peer":
            other = (server + dice.randrange(1, num_servers)) % num_servers
            return Fault(kind, at_s, server, other, dice.choice((0.5, 1.5, 2.8, 6.0)), directions)
        case "reset":
            return Fault(kind, at_s, server, dice.randrange(num_servers + num_clients))
        case "bad numbers":
            return Fault(kind, at_s, server)
        case "cancel":
            return Fault(kind, at_s, dice.randrange(num_conversations))
        case "client kill" | "client freeze":
            return Fault(kind, at_s, client, seconds=dice.choice((0.5, 2.0, 5.0)))
        case "redis full":
            return Fault(kind, at_s, seconds=dice.choice((1.0, 4.0)))
    return Fault(kind, at_s, seconds=dice.choice((0.3, 2.0, 8.0)))
