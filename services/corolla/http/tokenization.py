"""`/tokenize` and `/detokenize`, in the form of vLLM."""

from collections.abc import AsyncGenerator
from typing import Any, Final

from pydantic import BaseModel, Field

from corolla.chassis.errors import InvalidRequest
from corolla.http.answers import list_texts
from corolla.http.chat import Messages, Tools, allowed_places, message_of, struct_of, tools_of
from corolla.http.field_paths import Paths
from corolla.http.fields import Body, Flag, ModelName, TokenIds
from corolla.http.foreign_fields import OF_READINGS
from corolla.v1 import generation_pb2 as pb

_PIECE_VALUES: Final = 1 << 14


class TokenizeRequest(Body):
    """A text or a conversation to split into tokens."""

    refused_fields = OF_READINGS

    model: ModelName = ""
    prompt: str | None = Field(None, description="One of prompt and messages must be set.")
    messages: Messages | None = Field(None, description="They go through the model's chat template.")
    tools: Tools | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    continue_final_message: Flag = False
    add_special_tokens: bool | None = Field(
        None, description="Unset: true. For a prompt: also the tokens that the tokenizer adds."
    )
    return_token_strs: Flag = False

    def as_protocol(self) -> pb.TokenizeRequest:
        """The request in the protocol of gRPC. Raises InvalidRequest."""
        if (self.prompt is None) == (self.messages is None):
            raise InvalidRequest("prompt", "one of prompt and messages must be set")
        if self.messages is None:
            return pb.TokenizeRequest(
                model=self.model, text=self.prompt or "", without_special_tokens=self.add_special_tokens is False
            )
        conversation = pb.Conversation(
            messages=[message_of(each, f"messages[{index}]") for index, each in enumerate(self.messages)],
            tools=tools_of(self.tools),
            continue_last_message=self.continue_final_message,
            template_arguments=struct_of(self.chat_template_kwargs or {}),
        )
        return pb.TokenizeRequest(model=self.model, chat=conversation)

    def paths(self, number: int = 0) -> Paths:
        text = "prompt" if self.messages is None else "messages"
        found = {"adapter": "model", "text": text, "prompt": text, "continue_last_message": "continue_final_message"}
        found["template_arguments"] = "chat_template_kwargs"
        for index, message in enumerate(self.messages or ()):
            found |= message.paths(f"messages[{index}]")
        for index, place in enumerate(allowed_places(self.tools)):
            found[f"tools[{index}]"] = f"tools[{place}].function"
        return found


class Tokenized(BaseModel):
    tokens: list[int]
    count: int
    max_model_len: int
    token_strs: list[str] | None = None


async def reply(found: pb.TokenizeResponse, context_length: int, *, has_texts: bool) -> AsyncGenerator[str, None]:
    """The pieces of a `Tokenized`."""
    yield '{"tokens":['
    async for piece in list_texts(found.token_ids, _PIECE_VALUES):
        yield piece
    yield f'],"count":{len(found.token_ids)},"max_model_len":{context_length},"token_strs":'
    if not has_texts:
        yield "null}"
        return
    yield "["
    async for piece in list_texts(found.tokens, _PIECE_VALUES):
        yield piece
    yield "]}"


class TokenizerFacts(BaseModel):
    """The tokenizer, by the names of transformers' tokenizer files."""

    tokenizer_class: str
    bos_token: str | None
    eos_token: str | None
    unk_token: str | None
    pad_token: str | None
    chat_template: str | None
    vocab_size: int


class DetokenizeRequest(Body):
    """Tokens to join to a text."""

    model: ModelName = ""
    tokens: TokenIds
    skip_special_tokens: Flag = False

    def as_protocol(self) -> pb.DetokenizeRequest:
        return pb.DetokenizeRequest(
            model=self.model, token_ids=self.tokens, without_special_tokens=self.skip_special_tokens
        )

    def paths(self, number: int = 0) -> Paths:
        return {"adapter": "model", "token_ids": "tokens"}


class Detokenized(BaseModel):
    prompt: str
