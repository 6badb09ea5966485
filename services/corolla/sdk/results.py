"""The service's answers as plain values."""

from dataclasses import dataclass

from corolla.decoding.stopping import FinishReason as FinishReason


@dataclass(frozen=True, slots=True)
class Usage:
    """What an answer cost.

    Attributes:
        prompt_tokens: tokens of the prompt; in a session, all tokens before the answer.
        completion_tokens: tokens of the answer.
        cached_tokens: prompt tokens whose keys and values were still on the servers.
        recoveries: how often the service recovered from the loss of a hop during the answer.
        stall_s: seconds that the answer waited for these recoveries.
        time_to_first_token_s: seconds from the request's arrival to the first token.
        total_s: seconds from the request's arrival to the last token.
        drafted_tokens: tokens drafted by speculation.
        accepted_tokens: drafted tokens that were right; each saved a pass through the chain.
        may_differ_from_token: how many first tokens of an answer surely equal an undisturbed answer's, if a hop was
            replaced after them by a server that computes in another way; None: all tokens are.
    """

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    recoveries: int
    stall_s: float
    time_to_first_token_s: float
    total_s: float
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    may_differ_from_token: int | None = None

    @property
    def tokens_per_s(self) -> float:
        """Decoding speed: the tokens after the first, divided by the seconds that they took.

        It is 0.0 for fewer than two tokens.
        """
        decode_s = self.total_s - self.time_to_first_token_s
        return (self.completion_tokens - 1) / decode_s if self.completion_tokens > 1 and decode_s > 0 else 0.0


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """One token's log-probability under the model's own distribution, before temperature, penalties and filters.

    Attributes:
        token_id: the token's id in the model's vocabulary.
        text: the token's own text; U+FFFD stands for bytes that do not form a whole character.
        logprob: the natural logarithm of the probability.
        top: as many of the most likely tokens at this place as were asked for, most likely first.
        bytes: the token's own bytes as numbers; they may be a part of a character.
    """

    token_id: int
    text: str
    logprob: float
    top: tuple["TokenLogprob", ...] = ()
    bytes: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call of a tool. `arguments` is an object in JSON, unless the answer was cut off within it."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """A part of a tool call. The first part has the call's id and name. `index` numbers the calls of one answer."""

    index: int
    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class Message:
    """One message of a conversation.

    Attributes:
        role: "system", "developer", "user", "assistant" or "tool".
        content: one text, or several parts of text.
        tool_calls: an assistant's calls of tools.
        tool_call_id: in a tool's message, the id of the call that it answers.
        name: the name of a tool or of a participant.
        reasoning: an assistant's thoughts before its answer.
    """

    role: str
    content: str | tuple[str, ...] = ""
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str = ""
    name: str = ""
    reasoning: str = ""


@dataclass(frozen=True, slots=True)
class Completion:
    """One completion of a prompt, or one answer in a chat, which may reason and call tools."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None
    logprobs: tuple[TokenLogprob, ...] = ()
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()

    @property
    def message(self) -> Message:
        """The answer as the next message of a conversation."""
        return Message("assistant", self.text, self.tool_calls, reasoning=self.reasoning)

    def __str__(self) -> str:
        return self.text


class FirstCompletion:
    """The properties of several completions that describe the first one."""

    __slots__ = ()

    def completion(self, index: int) -> Completion:
        raise NotImplementedError

    @property
    def text(self) -> str:
        return self.completion(0).text

    @property
    def token_ids(self) -> tuple[int, ...]:
        return self.completion(0).token_ids

    @property
    def logprobs(self) -> tuple[TokenLogprob, ...]:
        return self.completion(0).logprobs

    @property
    def reasoning(self) -> str:
        return self.completion(0).reasoning

    @property
    def tool_calls(self) -> tuple[ToolCall, ...]:
        """The calls of tools; in a stream, the arguments of the last one may still be growing."""
        return self.completion(0).tool_calls

    @property
    def message(self) -> Message:
        """The answer as the next message of a conversation."""
        return self.completion(0).message

    @property
    def finish_reason(self) -> FinishReason | None:
        """The reason why the completion ended; None while it grows."""
        return self.completion(0).finish_reason

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True, slots=True)
class EchoedPrompt:
    """A prompt as the model has read it. `logprobs` has no entry for the first token, which nothing precedes."""

    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class Score:
    """How probable a continuation is after a prompt.

    Attributes:
        logprob: the log-probability of the whole continuation.
        is_greedy: whether each token is the most probable one, as a greedy answer would choose.
        logprobs: one for each token of the continuation.
    """

    model: str
    logprob: float
    is_greedy: bool
    logprobs: tuple[TokenLogprob, ...]
    usage: Usage


@dataclass(frozen=True, slots=True)
class Embedding:
    """A vector of a text, from the model's last hidden states."""

    model: str
    vector: tuple[float, ...]
    usage: Usage


@dataclass(frozen=True, slots=True)
class Generation(FirstCompletion):
    """All completions of a prompt.

    Attributes:
        prompt: set if it was to be echoed.
        ignored: the places in the request that had no effect, such as keywords of a schema.
    """

    model: str
    completions: tuple[Completion, ...]
    usage: Usage
    prompt: EchoedPrompt | None = None
    ignored: tuple[str, ...] = ()

    def completion(self, index: int) -> Completion:
        return self.completions[index]


@dataclass(frozen=True, slots=True)
class Reply:
    """The model's turn in a conversation.

    Attributes:
        others: the further answers, if several were asked for.
        ignored: the places in the request that had no effect, such as keywords of a schema.
    """

    model: str
    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None
    logprobs: tuple[TokenLogprob, ...]
    usage: Usage
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    others: tuple[Completion, ...] = ()
    ignored: tuple[str, ...] = ()

    @property
    def message(self) -> Message:
        """The reply as the next message of a conversation."""
        return Message("assistant", self.text, self.tool_calls, reasoning=self.reasoning)

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True, slots=True)
class Chunk:
    """The part of an answer that came since the last chunk.

    Attributes:
        index: the index of the completion that the chunk belongs to.
        text: the new text. It has whole characters only, and no part of a stop sequence, so it may lag behind
            `token_ids`.
        token_ids: new tokens.
        logprobs: the log-probabilities of the new tokens, where they were asked for.
        finish_reason: set on a completion's last chunk.
        usage: set on the last chunk of the stream.
        reasoning: in a chat, the model's thoughts before its answer.
        tool_calls: in a chat, parts of tool calls.
    """

    index: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...]
    finish_reason: FinishReason | None
    usage: Usage | None
    reasoning: str = ""
    tool_calls: tuple[ToolCallDelta, ...] = ()

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True, slots=True)
class Tokens:
    """A text's tokens: `pieces[i]` is the vocabulary's spelling of `token_ids[i]`."""

    token_ids: tuple[int, ...]
    pieces: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.token_ids)


@dataclass(frozen=True, slots=True)
class Model:
    """A model that the service has.

    Attributes:
        num_blocks: transformer blocks, spread over the block servers.
        context_length: the most tokens that prompt and answer may have together.
        fingerprint: identifies weights, dtype and protocol.
        ready: whether every block has a live server now.
        adapter: name of the adapter that is part of the model's name; empty: none.
    """

    name: str
    family: str
    num_blocks: int
    context_length: int
    vocab_size: int
    dtype: str
    fingerprint: str
    has_chat_template: bool
    ready: bool
    adapter: str = ""


@dataclass(frozen=True, slots=True)
class SessionInfo:
    """A session as the service knows it.

    Attributes:
        session_id: 128 random bits in hexadecimal. The session's owner continues it by this id.
        num_tokens: tokens of prompts and answers so far.
        num_turns: finished turns.
        busy: whether a turn is running.
        expires_in_s: seconds until the service forgets the session if it stays idle.
        adapter: name of the adapter with which its turns are computed; empty: none.
    """

    session_id: str
    model: str
    num_tokens: int
    num_turns: int
    busy: bool
    expires_in_s: float
    adapter: str = ""
