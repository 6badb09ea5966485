"""Log probabilities as OpenAI writes them, whatever part of a character a token is."""

from corolla.http.log_probabilities import CompletionLogprobs, logprob_facts
from corolla.v1 import generation_pb2 as pb


def token(token_id: int, own: bytes, logprob: float = -1.0, *top: pb.TokenLogprob) -> pb.TokenLogprob:
    return pb.TokenLogprob(token_id=token_id, text=own.decode(errors="replace"), logprob=logprob, bytes=own, top=top)


def test_bytes_are_the_tokens_own_and_join_to_the_text() -> None:
    parts = [token(1, b"a\xf0"), token(2, b"\x9f\x98"), token(3, b"\x80b")]
    facts = logprob_facts(parts)
    assert bytes(each for fact in facts for each in fact["bytes"]).decode() == "a\U0001f600b"
    assert [fact["token"] for fact in facts] == [r"\x61\xf0", r"\x9f\x98", r"\x80\x62"]
    assert logprob_facts([token(4, " é".encode())])[0]["token"] == " é"


def test_the_chosen_token_is_among_the_alternatives() -> None:
    likely, other = token(1, b"a", -0.1), token(2, b"b", -0.5)
    (without,) = logprob_facts([token(3, b"c", -3.0, likely, other)])
    assert [each["token"] for each in without["top_logprobs"]] == ["a", "b", "c"]
    (with_it,) = logprob_facts([token(2, b"b", -0.5, likely, other)])
    assert [each["token"] for each in with_it["top_logprobs"]] == ["a", "b"]
    assert logprob_facts([token(3, b"c")])[0]["top_logprobs"] == []
    facts = CompletionLogprobs().facts([token(3, b"c", -3.0, likely), token(3, b"c", -2.0)])
    assert [list(each) for each in facts["top_logprobs"]] == [["a", "c"], ["c"]]


def test_alternatives_that_read_alike_are_all_there() -> None:
    alike = [token(5, b"\xf0", -1.0), token(6, b"\xf1", -2.0), token(7, b"x", -3.0), token(8, b"x", -4.0)]
    (found,) = CompletionLogprobs().facts([token(7, b"x", -3.0, *alike)])["top_logprobs"]
    assert list(found) == [r"bytes:\xf0", r"bytes:\xf1", "x", "token_id:8"]
    assert len(logprob_facts([token(7, b"x", -3.0, *alike)])[0]["top_logprobs"]) == 4


def test_offsets_count_characters_over_all_parts() -> None:
    builder = CompletionLogprobs()
    facts = builder.facts([token(2, b"bc"), token(3, b"\xc3")], token(1, b"a"))
    assert (facts["text_offset"], facts["token_logprobs"]) == ([0, 1, 3], [None, -1.0, -1.0])
    assert facts["top_logprobs"][0] is None
    assert builder.facts([token(4, b"\xa9"), token(5, b"d")])["text_offset"] == [3, 4]
