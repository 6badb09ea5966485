"""The scenario of a seed: a model and its servers, the callers, and the faults with their times. Pure."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Final

from corolla.block_server.hop_session import SessionEvent
from corolla.decoding.parameters import SamplingParams
from corolla.wire.span import Span, gaps
from tests.simulation.toy_model import ToyModel

MARGIN_S: Final = 9.0
"""So long after a fault its server may still be of no use: it registers again, or is left out by those it failed."""

GRACE_S: Final = 6.0
"""How long a server that leaves serves the sessions that no other server takes."""

_SERVER_FAULTS: Final = ("kill", "kill", "freeze", "freeze", "cut", "cut", "cut peer", "reset", "bad numbers", "drain")
_CONTROL_FAULTS: Final = ("router kill", "redis gone", "redis frozen", "redis flush", "redis rollback", "redis full")
_HARMLESS_FAULTS: Final = ("slow", "repeat")
_CALLER_FAULTS: Final = ("client kill", "client freeze", "cancel")

_SHARE_OF_FORKS: Final = 0.2
_SHARE_WITHOUT_LIMIT: Final = 0.3

MOST_NEW_TOKENS: Final = 24
"""The client services' limit for answers that have none of their own."""

GROWTH_TOKENS: Final = 4
"""The new tokens for which such an answer reserves pages at first, and the fewest that it asks for later."""

LEAVER: Final = "leaver"
"""The server that hands a session over."""

HEIR: Final = "heir"
"""The server that takes it over; which one, the leaver decides."""

CLIENT: Final = "client"
"""The client service whose session it is."""

_MOMENTS: Final = (
    SessionEvent.OFFERED, SessionEvent.LAST_PART_READ, SessionEvent.LAST_PART_READ, SessionEvent.ARRIVED,
    SessionEvent.ARRIVED, SessionEvent.OPENED,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Mishap:
    """What goes wrong while a server hands a session over.

    Attributes:
        kind: as of a fault, or "damage": parts arrive changed.
        who: leaver, heir or client.
        other: the second one, where it lies between two.
        moment: the event on whose occurrence to a session that is handed over it comes.
        num_skipped: so many such events come before.
        delay_s: from that event.
        seconds: how long it lasts.
        directions: of a cut: 1 to `who`, 2 from it, 3 both.
    """

    kind: str
    who: str
    other: str
    moment: SessionEvent
    num_skipped: int
    delay_s: float
    seconds: float
    directions: int

    def __str__(self) -> str:
        return (
            f"{self.kind} {self.who}/{self.other} for {self.seconds:.2f} s ({self.directions}) "
            f"{self.delay_s:.4f} s after {self.moment.value} {self.num_skipped}"
        )

    @property
    def fault_kind(self) -> str:
        """The kind of fault that it is like."""
        return f"client {self.kind}" if self.who == CLIENT and self.kind in ("kill", "freeze") else self.kind

    @property
    def hits_heir(self) -> bool:
        """Whether it makes the heir useless for others than the leaver for a while."""
        return HEIR in (self.who, self.other) and LEAVER not in (self.who, self.other) and self.kind != "damage"


@dataclass(frozen=True, slots=True)
class Fault:
    """Something that goes wrong.

    Attributes:
        at_s: from the start of the run.
        target: number of the server, client or request that it hits.
        other: number of a second one, where it lies between two.
        seconds: how long it lasts.
        directions: of a cut: 1 to the target, 2 from it, 3 both.
        mishaps: of a drain.
    """

    kind: str
    at_s: float
    target: int = 0
    other: int = 0
    seconds: float = 0.0
    directions: int = 3
    mishaps: tuple[Mishap, ...] = ()

    def __str__(self) -> str:
        what = f"{self.kind} {self.target}/{self.other} for {self.seconds:.2f} s ({self.directions})"
        return "; ".join((f"{self.at_s:6.2f} s  {what}", *map(str, self.mishaps)))

    @property
    def kinds(self) -> frozenset[str]:
        return frozenset((self.kind, *(mishap.fault_kind for mishap in self.mishaps)))

    @property
    def lasts_s(self) -> float:
        """How long it and its mishaps last at most."""
        return max(self.seconds, *(GRACE_S + mishap.delay_s + mishap.seconds for mishap in self.mishaps), 0.0)


@dataclass(frozen=True, slots=True)
class Turn:
    """One request: the first one of a conversation, or a further one.

    Attributes:
        max_tokens: what its answer has at most.
        has_limit: whether the request says so; otherwise pages are reserved as the answer grows.
    """

    client: int
    at_s: float
    new_ids: tuple[int, ...]
    max_tokens: int
    params: SamplingParams
    draft_tokens: int
    ignores_eos: bool
    num_completions: int = 1
    has_limit: bool = True


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
    boundary_activation_bytes: int
    max_step_tokens: int
    max_batch_tokens: int
    prefill_chunk_tokens: int
    follows_numerics: bool
    max_tokens_ahead: int
    compute_s: tuple[float, ...]
    conversations: tuple[Conversation, ...]
    faults: tuple[Fault, ...]

    @property
    def keeps_coverage(self) -> bool:
        """Whether at each moment servers that nothing happens to hold all blocks; then no answer may fail."""
        return covers(self.spans, self.faults, self.model.num_blocks)

    @property
    def has_standbys(self) -> bool:
        """Whether hops copy sessions to standbys."""
        return self.seed % 4 > 1

    @property
    def of_release_before(self) -> str:
        """The process that knows no frame and no field that came without another protocol version; empty: none."""
        if self.seed % 8 != 6:
            return ""
        number = self.seed // 8 % (len(self.spans) + 1)
        return f"server{number}" if number < len(self.spans) else "client0"

    @property
    def is_tight(self) -> bool:
        """Whether sessions may not fit the servers."""
        return self.num_pages * self.page_tokens < 1000

    def has(self, *kinds: str) -> bool:
        return any(not fault.kinds.isdisjoint(kinds) for fault in self.faults)


def hit_servers(fault: Fault) -> frozenset[int]:
    """The servers that a fault makes useless for a while."""
    if fault.kind == "cut peer":
        return frozenset((fault.target, fault.other))
    return frozenset([fault.target]) if fault.kind in _SERVER_FAULTS else frozenset()


def possible_heirs(fault: Fault, spans: Sequence[Span]) -> frozenset[int]:
    """The servers that a mishap of the fault may hit: any that could take over what its target holds."""
    if not any(mishap.hits_heir for mishap in fault.mishaps):
        return frozenset()
    mine = spans[fault.target]
    return frozenset(
        number for number, span in enumerate(spans)
        if number != fault.target and span.start < mine.end and mine.start < span.end
    )  # fmt: skip


def covers(spans: Sequence[Span], faults: Sequence[Fault], num_blocks: int) -> bool:
    """Whether the servers that are well hold all blocks at any time, whichever of them takes another one's place."""
    heirs = [sorted(possible_heirs(fault, spans)) or [fault.target] for fault in faults]
    return all(_covers(spans, faults, each, num_blocks) for each in product(*heirs))


def _covers(spans: Sequence[Span], faults: Sequence[Fault], heirs: Sequence[int], num_blocks: int) -> bool:
    for moment in faults:
        hit: set[int] = set()
        for fault, heir in zip(faults, heirs, strict=True):
            if fault.at_s <= moment.at_s <= fault.at_s + fault.lasts_s + MARGIN_S:
                hit |= hit_servers(fault) | ({heir} if fault.mishaps else set())
        well = [span for number, span in enumerate(spans) if number not in hit]
        if gaps(well, Span(0, num_blocks)):
            return False
    return True


def draw(seed: int) -> Scenario:
    """The scenario of a seed, always the same."""
    return _with_whole_servers(_without_limits(_with_completions(_with_mishaps(_plain(seed)))))


def _plain(seed: int) -> Scenario:
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
        seed=seed, model=model, spans=spans, num_clients=num_clients, num_routers=num_routers,
        num_pages=(160 if is_tight else 2000) // page_tokens, page_tokens=page_tokens,
        has_prefix_cache=dice.random() < 0.7, boundary_activation_bytes=dice.choice((1 << 20, 1 << 20, 400, 0)),
        max_step_tokens=dice.choice((16, 24, 64)), max_batch_tokens=dice.choice((8, 32)),
        prefill_chunk_tokens=dice.choice((3, 5, 8, 16)), follows_numerics=dice.random() < 0.7,
        max_tokens_ahead=dice.choice((1, 2, 4, 32)), compute_s=tuple(dice.uniform(0.02, 0.08) for _ in spans),
        conversations=conversations, faults=_faults(dice, spans, num_blocks, num_clients, len(conversations)),
    )  # fmt: skip


def _with_whole_servers(scenario: Scenario) -> Scenario:
    """In one seed of seven each server holds the whole model."""
    if scenario.seed % 7 != 5:
        return scenario
    whole = Span(0, scenario.model.num_blocks)
    return replace(scenario, spans=(whole,) * len(scenario.spans))


def _with_mishaps(scenario: Scenario) -> Scenario:
    """In two seeds of five servers hand over, to others that hold the same blocks, while more goes wrong."""
    if scenario.seed % 5 < 3:
        return scenario
    dice = random.Random(f"mishaps of {scenario.seed}")
    num_blocks = scenario.model.num_blocks
    spans = tuple(_cover(dice, num_blocks, dice.choice((1, 1, 1, 2))) * dice.choice((2, 2, 3)))
    return replace(
        scenario,
        spans=spans,
        compute_s=tuple(dice.uniform(0.02, 0.08) for _ in spans),
        conversations=tuple(map(_early, scenario.conversations)),
        faults=_drains(dice, spans, num_blocks, scenario.num_clients, len(scenario.conversations)),
    )


def _early(conversation: Conversation) -> Conversation:
    """It begins before servers leave, and is not over soon."""
    earlier_s = conversation.turns[0].at_s * 0.7
    turns = (
        replace(turn, at_s=turn.at_s - earlier_s, max_tokens=max(turn.max_tokens, 12)) for turn in conversation.turns
    )
    return replace(conversation, turns=tuple(turns))


def _with_completions(scenario: Scenario) -> Scenario:
    """Some callers ask for several completions of one prompt."""
    dice = random.Random(f"completions of {scenario.seed}")
    conversations = [
        each if each.is_chat or dice.random() > _SHARE_OF_FORKS
        else replace(each, turns=tuple(_forked(dice, turn) for turn in each.turns))
        for each in scenario.conversations
    ]  # fmt: skip
    forks_s = [turn.at_s for each in conversations for turn in each.turns if turn.num_completions > 1]
    faults = _moved(dice, scenario, dice.choice(forks_s)) if forks_s and dice.random() < 0.7 else scenario.faults
    return replace(scenario, conversations=tuple(conversations), faults=faults)


def _without_limits(scenario: Scenario) -> Scenario:
    """Some callers set no limit. Where pages are scarce, chats do, since their further turns need the whole answer."""
    dice = random.Random(f"limits of {scenario.seed}")

    def free(turn: Turn) -> Turn:
        return replace(turn, max_tokens=MOST_NEW_TOKENS, has_limit=False)

    conversations = [
        each if dice.random() > _SHARE_WITHOUT_LIMIT or (each.is_chat and scenario.is_tight)
        else replace(each, turns=tuple(map(free, each.turns)))
        for each in scenario.conversations
    ]  # fmt: skip
    return replace(scenario, conversations=tuple(conversations))


def _moved(dice: random.Random, scenario: Scenario, fork_s: float) -> tuple[Fault, ...]:
    """One of the faults comes about the moment of a fork."""
    others = [*scenario.faults]
    if not others:
        return scenario.faults
    fault = others.pop(dice.randrange(len(others)))
    faults = (*others, replace(fault, at_s=fork_s + dice.uniform(0.05, 0.6)))
    if scenario.keeps_coverage and not covers(scenario.spans, faults, scenario.model.num_blocks):
        return scenario.faults
    return tuple(sorted(faults, key=lambda fault: fault.at_s))


def _forked(dice: random.Random, turn: Turn) -> Turn:
    """Shorter ones, since together they cost as much as one."""
    num_completions = dice.choice((2, 2, 3))
    return replace(turn, num_completions=num_completions, max_tokens=max(3, turn.max_tokens // num_completions))


def _spans(dice: random.Random, num_blocks: int) -> tuple[Span, ...]:
    """Two or three covers of the model, which are not always cut alike."""

    def cover() -> list[Span]:
        return _cover(dice, num_blocks, dice.randint(1, 2))

    first = cover()
    others = [first if dice.random() < 0.5 else cover() for _ in range(dice.choice((1, 1, 1, 2)))]
    return tuple(span for spans in (first, *others) for span in spans)


def _cover(dice: random.Random, num_blocks: int, num_cuts: int) -> list[Span]:
    edges = sorted(dice.sample(range(1, num_blocks), num_cuts))
    return [Span(start, end) for start, end in zip([0, *edges], [*edges, num_blocks], strict=True)]


def _conversation(dice: random.Random, model: ToyModel, num_clients: int) -> Conversation:
    is_chat = dice.random() < 0.4
    at_s = dice.uniform(0.0, 4.0)
    turns: list[Turn] = []
    for _ in range(dice.randint(2, 3) if is_chat else 1):
        turns.append(
            Turn(
                client=dice.randrange(num_clients), at_s=at_s, new_ids=_prompt(dice, model),
                max_tokens=dice.randint(3, 22), params=SamplingParams() if dice.random() < 0.6 else _sampling(dice),
                draft_tokens=dice.choice((0, 0, 3)), ignores_eos=dice.random() < 0.8,
            )
        )  # fmt: skip
        at_s += dice.uniform(1.0, 6.0)
    return Conversation(dice.choice(("red", "blue")), is_chat, tuple(turns))


def _prompt(dice: random.Random, model: ToyModel) -> tuple[int, ...]:
    """Prompts that begin alike more often than not."""
    shared = [(7 * place + 3) % model.vocab_size for place in range(dice.choice((0, 4, 12, 16)))]
    return (*shared, *(dice.randrange(model.vocab_size) for _ in range(dice.randint(1, 14))))


def _sampling(dice: random.Random) -> SamplingParams:
    temperature, seed = dice.choice((0.7, 1.0)), dice.randrange(1000)
    # Penalties follow from the seed, so that they need no further number.
    return SamplingParams(
        temperature=temperature,
        seed=seed,
        repetition_penalty=1.3 if seed % 2 else 1.0,
        frequency_penalty=0.5 if seed % 3 == 0 else 0.0,
    )


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


def _drains(
    dice: random.Random, spans: Sequence[Span], num_blocks: int, num_clients: int, num_conversations: int
) -> tuple[Fault, ...]:
    """One or two with mishaps; something may have happened to a sibling of the server before, and elsewhere."""
    may_uncover = dice.random() < 0.4
    faults: list[Fault] = []

    def add(fault: Fault) -> None:
        if may_uncover or covers(spans, [*faults, fault], num_blocks):
            faults.append(fault)

    for _ in range(dice.choice((1, 1, 2))):
        leaver, at_s = dice.randrange(len(spans)), dice.uniform(0.7, 4.0)
        mishaps = [_mishap(dice)]
        if dice.random() < 0.4:
            mishaps += [other for other in [_mishap(dice)] if not other.hits_heir]
        if dice.random() < 0.5:
            siblings = [number for number, span in enumerate(spans) if span == spans[leaver] and number != leaver]
            add(_before_drain(dice, at_s, dice.choice(siblings), len(spans), dice.randrange(num_clients)))
        add(Fault("drain", at_s, leaver, seconds=dice.choice((GRACE_S + 3.0, 60.0)), mishaps=tuple(mishaps)))
    for _ in range(dice.choice((0, 0, 1))):
        kinds = dice.choices((_CONTROL_FAULTS, _HARMLESS_FAULTS, _CALLER_FAULTS), (2, 2, 1))[0]
        add(_fault(dice, dice.choice(kinds), len(spans), num_clients, num_conversations))
    return tuple(sorted(faults, key=lambda fault: fault.at_s))


def _before_drain(dice: random.Random, drain_s: float, sibling: int, num_servers: int, client: int) -> Fault:
    """So that sessions went from the sibling to the server that leaves, and it may still hold what they left there."""
    kind = dice.choice(("reset", "cut", "freeze"))
    at_s = max(0.1, drain_s - dice.uniform(0.3, 3.0))
    if kind == "reset":
        return Fault(kind, at_s, sibling, num_servers + client)
    return Fault(kind, at_s, sibling, client, dice.choice((1.5, 2.8, 2.8)), dice.choice((1, 1, 2, 3)))


def _mishap(dice: random.Random) -> Mishap:
    kind = dice.choice(("kill", "freeze", "cut", "cut", "reset", "damage", "drain", "cancel"))
    who, other, seconds, moment = "", "", 0.0, dice.choice(_MOMENTS)
    delay_s = dice.choice((0.0, dice.uniform(0.0, 0.004), dice.uniform(0.0, 0.1), dice.uniform(0.0, 1.0)))
    match kind:
        case "kill":
            who, seconds = dice.choice((LEAVER, HEIR, CLIENT)), dice.choice((0.5, 2.0))
        case "freeze":
            who, seconds = dice.choice((LEAVER, HEIR, CLIENT)), dice.choice((0.4, 1.5, 2.5, 5.0))
        case "cut" | "reset":
            who, other = dice.choice(((LEAVER, HEIR), (LEAVER, CLIENT), (HEIR, CLIENT)))
            seconds = dice.choice((0.5, 1.5, 2.8, 6.0)) if kind == "cut" else 0.0
        case "damage":
            who, moment, delay_s = HEIR, SessionEvent.OFFERED, 0.0
        case "drain":
            who, seconds = HEIR, GRACE_S + 3.0
        case "cancel":
            who = CLIENT
    num_skipped, directions = dice.choice((0, 0, 0, 1, 2)), dice.choice((1, 2, 3))
    return Mishap(kind, who, other, moment, num_skipped, delay_s, seconds, directions)


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
