"""`/v1/embeddings`, `/v1/score` and `/v1/rerank`: requests that read texts and answer with numbers."""

import base64
import math
import struct
from collections.abc import AsyncGenerator, Iterable, Iterator, Sequence
from typing import Annotated, Any, Final, Literal

from annotated_types import MaxLen
from pydantic import BaseModel, Field

from corolla.chassis.errors import InvalidRequest
from corolla.http.answers import compact, new_id, now_s
from corolla.http.field_paths import Paths
from corolla.http.fields import (
    Body,
    Count,
    Fields,
    Flag,
    ListOf,
    ModelName,
    Text,
    TokenIds,
    Tolerated,
    are_several,
    as_input,
    inputs_of,
)
from corolla.http.foreign_fields import OF_READINGS
from corolla.v1 import generation_pb2 as pb

MAX_INPUTS: Final = 2048
MAX_DOCUMENTS: Final = 1024
Documents = Annotated[ListOf[str], MaxLen(MAX_DOCUMENTS)]
_NUMBER_BYTES, _BASE64_BYTES, _EMBEDDING_BYTES = 26, 6, 64
"""The most bytes of a number in JSON with its comma, of one in base64, and of a vector without its numbers."""
_PROMPT: Final = "Passage: {document}\nPlease write a question based on this passage.\nQuestion:"
"""The prompt of Sachan et al. 2022, "Improving Passage Retrieval with Zero-Shot Question Generation"."""


class ReadingUsage(BaseModel):
    """What a request cost."""

    prompt_tokens: int
    total_tokens: int


def _usage(counted: Iterable[pb.Usage]) -> ReadingUsage:
    prompt_tokens = sum(each.prompt_tokens for each in counted)
    return ReadingUsage(prompt_tokens=prompt_tokens, total_tokens=prompt_tokens)


class EmbeddingRequest(Body):
    """Texts to embed."""

    refused_fields = OF_READINGS

    model: ModelName = ""
    input: (
        str | Annotated[ListOf[str], MaxLen(MAX_INPUTS)] | TokenIds | Annotated[ListOf[TokenIds], MaxLen(MAX_INPUTS)]
    ) = Field(description=f"A text or token ids, or up to {MAX_INPUTS} of them.")
    encoding_format: Literal["float", "base64"] | None = Field(None, description="Unset: float.")
    dimensions: Count | None = Field(None, description="How many of the first numbers are kept.")
    pooling: Literal["mean", "last"] | None = Field(None, description="Unset: the mean over all tokens.")
    normalize: bool | None = Field(None, description="Unset: true. Vectors have the length 1.")
    user: Any = Tolerated
    cache_salt: Text = ""

    def as_protocol(self) -> Iterator[pb.EmbedRequest]:
        """A request in the protocol of gRPC for each text, made when it is asked for. Raises InvalidRequest."""
        inputs = inputs_of(self.input)
        if not 1 <= len(inputs) <= MAX_INPUTS:
            raise InvalidRequest("input", f"must be 1 to {MAX_INPUTS} texts")
        pooling = pb.EmbedRequest.POOLING_LAST if self.pooling == "last" else pb.EmbedRequest.POOLING_MEAN
        return (
            pb.EmbedRequest(
                model=self.model,
                pooling=pooling,
                dimensions=self.dimensions,
                without_normalisation=self.normalize is False,
                cache_salt=self.cache_salt,
                **as_input(each),
            )
            for each in inputs
        )

    def most_reply_bytes(self, hidden_size: int) -> int:
        """How large the reply can become. `hidden_size`: the most numbers of a vector."""
        dimensions = hidden_size if self.dimensions is None else min(hidden_size, self.dimensions)
        of_number = _BASE64_BYTES if self.encoding_format == "base64" else _NUMBER_BYTES
        return len(inputs_of(self.input)) * (_EMBEDDING_BYTES + dimensions * of_number)

    def paths(self, number: int = 0) -> Paths:
        place = f"input[{number}]" if are_several(self.input) else "input"
        return {"adapter": "model", "text": place, "tokens.ids": place, "tokens": place, "prompt": place}


class EmbeddingFacts(BaseModel):
    object: Literal["embedding"] = "embedding"
    index: int
    embedding: list[float] | str = Field(description="Numbers, or their little-endian float32 bytes in base64.")


class EmbeddingList(BaseModel):
    """The embeddings of all texts, in their order."""

    object: Literal["list"] = "list"
    data: list[EmbeddingFacts]
    model: str
    usage: ReadingUsage


async def embeddings(body: EmbeddingRequest, found: Sequence[pb.EmbedResponse]) -> AsyncGenerator[str, None]:
    """The pieces of an `EmbeddingList`."""
    yield '{"object":"list","data":['
    for index, each in enumerate(found):
        vector: Sequence[float] | str = each.embedding
        if body.encoding_format == "base64":
            vector = base64.b64encode(struct.pack(f"<{len(vector)}f", *vector)).decode()
        facts = EmbeddingFacts(index=index, embedding=vector if isinstance(vector, str) else list(vector))
        yield ("," if index else "") + facts.model_dump_json()
    usage = _usage([each.usage for each in found]).model_dump_json()
    yield f'],"model":{compact(found[0].model)},"usage":{usage}}}'


def _pair(model: str, query: str, document: str, cache_salt: str) -> pb.ScoreRequest:
    """The request for the probability of a query after a document."""
    prompt = _PROMPT.format_map({"document": document})
    return pb.ScoreRequest(model=model, text=prompt, continuation_text=f" {query}", cache_salt=cache_salt)


def _paths_of_pair(query: str, document: str) -> Paths:
    """Maps the fields of a pair in the protocol to the paths of a query and a document."""
    return {"adapter": "model", "continuation": query, "continuation_text": query, "text": document, "prompt": document}


def _relevance(found: pb.ScoreResponse) -> float:
    """The geometric mean of the probabilities of a query's tokens, from 0 to 1."""
    return math.exp(found.logprob / len(found.logprobs)) if found.logprobs else 0.0


class ScoreRequest(Body):
    """Pairs of texts to compare: one text with several, or each with its counterpart."""

    refused_fields = OF_READINGS

    model: ModelName = ""
    text_1: str | Documents = Field(description="Queries.")
    text_2: str | Documents = Field(description="Documents.")
    cache_salt: Text = ""

    def as_protocol(self) -> Iterator[pb.ScoreRequest]:
        """A request in the protocol of gRPC for each pair, made when it is asked for. Raises InvalidRequest."""
        queries = [self.text_1] if isinstance(self.text_1, str) else self.text_1
        documents = [self.text_2] if isinstance(self.text_2, str) else self.text_2
        if not 1 <= len(documents) <= MAX_DOCUMENTS:
            raise InvalidRequest("text_2", f"must be 1 to {MAX_DOCUMENTS} texts")
        if len(queries) not in (1, len(documents)):
            raise InvalidRequest("text_1", "must be one text, or as many as text_2")
        if len(queries) == 1:
            queries = queries * len(documents)
        return (_pair(self.model, *each, self.cache_salt) for each in zip(queries, documents, strict=True))

    def paths(self, number: int = 0) -> Paths:
        query = "text_1" if isinstance(self.text_1, str) else f"text_1[{number if len(self.text_1) > 1 else 0}]"
        return _paths_of_pair(query, "text_2" if isinstance(self.text_2, str) else f"text_2[{number}]")


class ScoreFacts(BaseModel):
    index: int
    object: Literal["score"] = "score"
    score: float


class ScoreList(BaseModel):
    """The scores of all pairs, in their order: how probable the model finds the query after the document, 0 to 1."""

    id: str
    object: Literal["list"] = "list"
    created: int
    model: str
    data: list[ScoreFacts]
    usage: ReadingUsage

    @classmethod
    def from_replies(cls, found: Sequence[pb.ScoreResponse]) -> "ScoreList":
        facts = [ScoreFacts(index=index, score=_relevance(each)) for index, each in enumerate(found)]
        usage = _usage([each.usage for each in found])
        return cls(id=new_id("score-"), created=now_s(), model=found[0].model, data=facts, usage=usage)


class DocumentText(Fields):
    text: str


class RerankRequest(Body):
    """Documents to order by how well they fit a query."""

    refused_fields = OF_READINGS

    model: ModelName = ""
    query: str
    documents: Annotated[ListOf[str | DocumentText], MaxLen(MAX_DOCUMENTS)]
    top_n: Count | None = Field(None, description="Unset or 0: all documents are returned.")
    return_documents: Flag = True
    cache_salt: Text = ""

    @property
    def texts(self) -> list[str]:
        return [each if isinstance(each, str) else each.text for each in self.documents]

    def as_protocol(self) -> Iterator[pb.ScoreRequest]:
        """A request in the protocol of gRPC for each document, made when it is asked for. Raises InvalidRequest."""
        if not self.query:
            raise InvalidRequest("query", "must not be empty")
        if not 1 <= len(self.documents) <= MAX_DOCUMENTS:
            raise InvalidRequest("documents", f"must be 1 to {MAX_DOCUMENTS} texts")
        return (_pair(self.model, self.query, each, self.cache_salt) for each in self.texts)

    def paths(self, number: int = 0) -> Paths:
        of_text = "" if isinstance(self.documents[number], str) else ".text"
        return _paths_of_pair("query", f"documents[{number}]{of_text}")


class RankedDocument(BaseModel):
    index: int = Field(description="The place of the document in the request.")
    relevance_score: float = Field(description="How probable the model finds the query after the document, 0 to 1.")
    document: DocumentText | None = None


class Ranking(BaseModel):
    """The documents, the best one first."""

    id: str
    model: str
    results: list[RankedDocument]
    usage: ReadingUsage

    @classmethod
    def from_replies(cls, body: RerankRequest, found: Sequence[pb.ScoreResponse]) -> "Ranking":
        scores, texts = [_relevance(each) for each in found], body.texts
        order = sorted(range(len(scores)), key=lambda index: -scores[index])[: body.top_n or None]
        results = [
            RankedDocument(
                index=index,
                relevance_score=scores[index],
                document=DocumentText(text=texts[index]) if body.return_documents else None,
            )
            for index in order
        ]
        usage = _usage([each.usage for each in found])
        return cls(id=new_id("rerank-"), model=found[0].model, results=results, usage=usage)
