"""A caller's request for answers to one prompt, in the form that all parts of the client service use."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, Literal, TypeVar

from corolla.chain.prompt_readout import PromptReadout
from corolla.chassis.tenant_limits import StandbyMode
from corolla.client.generation.admission import Caller
from corolla.client.generation.resumption import Resumption
from corolla.client.output_parsing.parser_choice import OutputParsing
from corolla.client.reply_sizes import ANY_ROOM, ReplyRoom
from corolla.client.text.formats import AnswerFormat
from corolla.decoding.parameters import SamplingParams
from corolla.v1 import generation_pb2 as pb

Prompt = TypeVar("Prompt")

MakeReadout = Callable[[Sequence[int]], PromptReadout]
"""Takes all tokens of a prompt, and returns what hops report about them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerRequest(Generic[Prompt]):
    """A caller, its prompt, and the rules for generating and ending the answers.

    Attributes:
        num_bytes: the size of the request's message.
        operation: the kind of request, by its name in OpenTelemetry's conventions.
        session_id: the session that the answer continues; empty: no session.
        adapter: the adapter's name; empty: the session's adapter, or none.
        max_tokens: the most tokens of an answer; None: the service chooses.
        cache_salt: only requests with the same salt share computed prefixes.
        standby: whether the answers have standbys.
        output_parsing: how chats separate reasoning and calls from text; None if an answer is only text.
        form: the form that an answer must have; None allows any text.
        grammar: the grammar of the form, once it is admitted.
        reply: the room for the reply.
        echoed_from: returns the index of the prompt's first token that the reply has; None: it has none of them.
        reply_logprobs: the number of alternatives with each token of the reply; None: it has no log probabilities.
        readout: makes the readout of the prompt from its tokens; None: nothing is asked about the prompt.
    """

    caller: Caller
    prompt: Prompt
    num_bytes: int
    operation: Literal["chat", "text_completion", "embeddings"] = "text_completion"
    session_id: str = ""
    adapter: str = ""
    num_completions: int = 1
    sampling: SamplingParams
    max_tokens: int | None
    stop_sequences: tuple[str, ...] = ()
    ignore_eos: bool
    time_limit_s: float | None = None
    speculation: pb.SpeculationParameters = field(default_factory=pb.SpeculationParameters)
    resumption: Resumption = field(default_factory=Resumption)
    cache_salt: bytes = b""
    standby: StandbyMode = "auto"
    output_parsing: OutputParsing | None = None
    form: AnswerFormat | None = None
    grammar: str = ""
    reply: ReplyRoom = ANY_ROOM
    echoed_from: Callable[[], int] | None = None
    reply_logprobs: int | None = None
    readout: MakeReadout | None = None

    def num_echoed(self, num_prompt_tokens: int) -> int:
        """How many tokens of the prompt the reply has."""
        return 0 if self.echoed_from is None else num_prompt_tokens - self.echoed_from()

    @property
    def is_reading(self) -> bool:
        """The request has no answer: only its prompt is read."""
        return self.readout is not None and self.max_tokens == 0

    @property
    def turn_name(self) -> str:
        """The name of the request's turn; see `Resumption.turn_name`."""
        return self.resumption.turn_name(self.caller.tenant)


AnyRequest = AnswerRequest[Any]
