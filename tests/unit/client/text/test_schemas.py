"""A JSON Schema means the same wherever it stands: each schema of a table, by each way to send it."""

import json
from collections.abc import Callable
from typing import Any

import jsonschema
import pytest
from llguidance import LLMatcher, LLTokenizer
from llguidance.hf import from_tokenizer

from corolla.chain.cache_salts import CacheSalts
from corolla.chassis.errors import InvalidRequest
from corolla.client.api.requests import RequestParser
from corolla.client.generation.admission import Caller
from corolla.client.generation.request import AnyRequest
from corolla.client.output_parsing.formats import HERMES
from corolla.client.output_parsing.parser_choice import OutputFormat
from corolla.client.reply_sizes import ANY_ROOM
from corolla.client.text import formats, schemas
from corolla.client.text.formats import AnswerFormat, grammar_of
from corolla.http.chat import ChatCompletionRequest
from corolla.http.completions import CompletionRequest
from corolla.http.messages import MessageRequest
from corolla.http.responses import ResponseRequest
from corolla.sdk.requests import chat_request
from corolla.v1 import generation_pb2 as pb
from tests.checkpoints import make_tokenizer

TEXT, NUMBER, NULL = {"type": "string"}, {"type": "integer"}, {"type": "null"}
USER: dict[str, Any] = {"type": "object", "properties": {"name": TEXT}, "required": ["name"]}
NODE: dict[str, Any] = {"type": "object", "properties": {"of": NUMBER, "next": {"$ref": "#/$defs/N"}}}
CAT = {"type": "object", "properties": {"kind": {"const": "cat"}, "lives": NUMBER}, "required": ["kind"]}
DOG = {"type": "object", "properties": {"kind": {"const": "dog"}}, "required": ["kind"]}
KEYS = {"enum": ["a", "b"]}
EVE, MORE = {"name": "Eve"}, {"name": "Eve", "age": 3}


def of(schema: Any, **more: Any) -> dict[str, Any]:
    return {"type": "object", "properties": {"v": schema}, "required": ["v"], **more}


def either(*values: Any) -> list[Any]:
    return [{"v": value} for value in values]


TABLE: dict[str, tuple[dict[str, Any], list[Any], list[Any]]] = {
    # what stands in it, what fits, and what does not
    "inline": (of(USER), either(EVE), [*either(MORE), {"v": EVE, "w": 1}]),
    "by reference": (of({"$ref": "#/$defs/U"}, **{"$defs": {"U": USER}}), either(EVE), either(MORE)),
    "an earlier draft": (of({"$ref": "#/definitions/U"}, definitions={"U": USER}), either(EVE), either(MORE)),
    "or null": (of({"anyOf": [USER, NULL]}), either(EVE, None), either(MORE)),
    "nullable": (of({**USER, "nullable": True}), either(EVE, None), either(MORE)),
    "nullable by reference": (
        of({"$ref": "#/$defs/U", "nullable": True}, **{"$defs": {"U": USER}}), either(EVE, None), either(MORE),
    ),
    "types": (of({**USER, "type": ["object", "null"]}), either(EVE, None), either(MORE, 1)),
    "list": (of({"type": "array", "items": USER}), either([], [EVE, EVE]), either([MORE])),
    "list of firsts": (of({"type": "array", "items": [USER], "additionalItems": False}), either([EVE]), either([MORE])),
    "one of all": (of({"allOf": [USER], "title": "User", "default": None}), either(EVE), either(MORE)),
    "all": (
        of({"allOf": [USER, {"properties": {"age": NUMBER}}]}),
        either(EVE, MORE), either({"name": "Eve", "city": "Rome"}, {"age": 3}),
    ),
    "references beside others": (
        of({"$ref": "#/$defs/U", "properties": {"age": NUMBER}}, **{"$defs": {"U": USER}}),
        either(EVE, MORE), either({"name": "Eve", "city": "Rome"}),
    ),
    "alternatives beside others": (
        {"properties": {"a": TEXT}, "anyOf": [{"required": ["a"]}, {"properties": {"b": TEXT}, "required": ["b"]}]},
        [{"a": "x"}, {"b": "x"}, {"a": "x", "b": "y"}], [{}, {"b": "x", "c": 1}, {"a": "x", "c": 1}],
    ),
    "one of kinds": (
        of({"oneOf": [CAT, DOG]}), either({"kind": "cat", "lives": 9}), either({"kind": "dog", "lives": 1}),
    ),
    "one of actions": (
        {"type": "object", "oneOf": [
            {"properties": {"do": {"const": "list"}}, "required": ["do"]},
            {"properties": {"do": {"const": "call"}, "to": TEXT}, "required": ["do", "to"]},
        ]},
        [{"do": "list"}, {"do": "call", "to": "a"}], [{"do": "list", "to": "a"}],
    ),
    "recursion": (
        {**NODE, "$defs": {"N": {"anyOf": [NODE, NULL]}}},
        [{"of": 1, "next": {"of": 2, "next": None}}], [{"of": 1, "next": {"x": 1}}],
    ),
    "the root": ({"properties": {"again": {"$ref": "#"}}}, [{"again": {"again": {}}}], [{"again": {"x": 1}}]),
    "a name with escapes": (
        of({"$ref": "#/$defs/a~1b%20~0"}, **{"$defs": {"a/b ~": {"properties": {'"\\é\n': NUMBER}}}}),
        either({'"\\é\n': 1}), either({"e": 1}),
    ),
    "an address": (
        of({"$ref": "u#/properties/name"}, **{"$id": "http://x.example/s", "$defs": {"U": {"$id": "u", **USER}}}),
        either("a"), either(1),
    ),
    "an address within another one": (
        of({"$ref": "u"}, **{"$defs": {"V": TEXT, "U": {"$id": "u", "$ref": "#/$defs/V", "$defs": {"V": NUMBER}}}}),
        either(1), either("a"),
    ),
    "names of a list": (
        of({"propertyNames": {"$ref": "#/$defs/K"}, "additionalProperties": NUMBER}, **{"$defs": {"K": KEYS}}),
        either({}, {"a": 1, "b": 2}), either({"c": 1}, {"a": "x"}),
    ),
    "open": (of({**USER, "additionalProperties": True}), either(MORE), either({"age": 3})),
    "open in other words": (of({**USER, "unevaluatedProperties": {}}), either(MORE), either({"age": 3})),
    "open to numbers": (of({**USER, "additionalProperties": NUMBER}), either(MORE), either({"name": "a", "b": "c"})),
    "closed over all": (
        of({"allOf": [USER, {"properties": {"age": NUMBER}}], "unevaluatedProperties": False}),
        either(MORE), either({"name": "Eve", "city": 1}),
    ),
    "closed in a part": (
        of({"allOf": [{**USER, "additionalProperties": False}, {"properties": {"a": TEXT}}]}),
        either(EVE), either(MORE),
    ),
    "no properties": (of({"type": "object"}), either({}, MORE), either(1)),
    "none of them": (of({"type": "object", "properties": {}}), either({}), either(EVE)),
    "required without a schema": (
        of({"properties": {"a": TEXT}, "required": ["b"]}),
        either({"a": "x", "b": [1]}), either({"a": "x"}),
    ),
    "patterns": (
        of({"properties": {"a": TEXT}, "patternProperties": {"^x-": NUMBER}}),
        either({"a": "b", "x-c": 1}), either({"b": 1}),
    ),
    "a number of properties": (
        of({"properties": {"a": TEXT, "b": TEXT}, "minProperties": 1}),
        either({"b": "c"}), either({}),
    ),
    "more than are named": (of({"properties": {"a": TEXT}, "minProperties": 2}), [], []),
    "anything": (of({}), either(1, None, [{"a": 1}]), []),
    "booleans": ({"properties": {"a": True, "b": False}}, [{"a": [1]}, {}], [{"b": 1}]),
    "values": (of({"enum": [1, "a", None, {"b": 1}]}), either(1, "a", None, {"b": 1}), either(2, {})),
    "bounds of draft 4": (of({"type": "integer", "minimum": 3, "exclusiveMinimum": True}), either(4), either(3)),
    "a count with a point": (of({"type": "string", "maxLength": 2.0}), either("ab"), either("abc")),
    "a dialect": (of(USER, **{"$schema": "http://json-schema.org/draft-07/schema#"}), either(EVE), either(MORE)),
    "annotations": (
        of({**TEXT, "deprecated": True, "examples": [1], "x-order": 2, "contentEncoding": "base64"}),
        either("a"), either(1),
    ),
    "formats of numbers": (of({"type": "integer", "format": "int32"}), either(1), either("a")),
}  # fmt: skip

OF_OTHER_DRAFTS = {"nullable", "nullable by reference", "list of firsts", "bounds of draft 4"}

BEYOND: dict[str, tuple[dict[str, Any], list[Any], list[str]]] = {
    # what stands in it, what fits, and the places without effect
    "uniqueItems": (of({"type": "array", "uniqueItems": True}), either([1, 1]), ["properties.v.uniqueItems"]),
    "propertyNames": (
        of({"type": "object", "propertyNames": {"pattern": "^a"}}),
        either({"b": 1}), ["properties.v.propertyNames"],
    ),
    "contains": (of({"type": "array", "contains": {"const": 1}}), either([]), ["properties.v.contains"]),
    "not": (of({"not": TEXT}), either("a"), ["properties.v.not"]),
    "if": (
        of({"properties": {"a": TEXT}, "if": {"required": ["a"]}, "then": {"properties": {"b": TEXT}}}),
        either({"a": "x", "b": "y"}), ["properties.v.if"],
    ),
    "dependentRequired": (
        of({"properties": {"a": TEXT}, "dependentRequired": {"a": ["b"]}}),
        either({"a": "x"}), ["properties.v.dependentRequired"],
    ),
    **{
        name: (of({**TEXT, "format": name}), either("any"), ["properties.v.format"])
        for name in ("decimal", "password", "binary", "uri-reference")
    },
    "a reference elsewhere": (of({"$ref": "https://example.org/x"}), either(1), ["properties.v.$ref"]),
    "a reference that is no address": (of({"$ref": "http://["}), either(1), ["properties.v.$ref"]),
    "a reference to nothing": (of({"$ref": "#/$defs/missing"}), either(1), ["properties.v.$ref"]),
    "a type that is none": (of({"type": "float"}), either(1.5), ["properties.v.type"]),
    "required by itself": (of({**TEXT, "required": True}), either("a"), ["properties.v.required"]),
    "alternatives that overlap": (of({"oneOf": [NUMBER, {"type": "number"}]}), either(1, 1.5), ["properties.v.oneOf"]),
    "patterns that overlap": (
        of({"patternProperties": {"^a": TEXT, "b$": NUMBER}}),
        either({"ab": 1}), ["properties.v.patternProperties"],
    ),
    "patterns that might overlap": (
        of({"patternProperties": {"^ab*c": TEXT, "^ac": NUMBER}}),
        either({"ac": 1}), ["properties.v.patternProperties"],
    ),
    "a number of named ones": (
        of({"properties": {"a": TEXT, "b": TEXT}, "maxProperties": 0}),
        either({"a": "b"}), ["properties.v.maxProperties"],
    ),
    "behind a reference": (
        of({"$ref": "#/$defs/A"}, **{"$defs": {"A": {"items": {"not": {}}}}}),
        either([1]), ["$defs.A.items.not"],
    ),
}  # fmt: skip

PARSER = RequestParser(
    pb.Model(vocab_size=10, context_length=100, hidden_size=8),
    frozenset(),
    OutputFormat(HERMES, None, {}, {}),
    CacheSalts(""),
)
ASKED: dict[str, Any] = {"messages": [{"role": "user", "content": "a"}]}


def a_form(message: pb.ChatRequest | pb.GenerateRequest) -> AnswerFormat:
    caller = Caller("acme")
    chat = isinstance(message, pb.ChatRequest)
    parse: Any = PARSER.chat if chat else PARSER.text
    request: AnyRequest = parse(message, caller, "", ANY_ROOM)
    assert request.form is not None
    return request.form


def of_chat(**fields: Any) -> AnswerFormat:
    return a_form(ChatCompletionRequest.model_validate_json(json.dumps({**ASKED, **fields})).as_protocol())


def of_completion(**fields: Any) -> AnswerFormat:
    return a_form(next(CompletionRequest.model_validate_json(json.dumps({"prompt": "a", **fields})).as_protocol()))


def of_response(**fields: Any) -> AnswerFormat:
    return a_form(ResponseRequest.model_validate_json(json.dumps({"input": "a", **fields})).as_protocol(None))


def of_message(**fields: Any) -> AnswerFormat:
    return a_form(MessageRequest.model_validate_json(json.dumps({**ASKED, "max_tokens": 9, **fields})).as_protocol())


def of_sdk(**options: Any) -> AnswerFormat:
    return a_form(chat_request([{"role": "user", "content": "a"}], options))  # type: ignore[arg-type]


def named(schema: Any, strict: bool | None) -> dict[str, Any]:
    return {"name": "a", "schema": schema, "strict": strict}


def tool(schema: Any, strict: bool | None) -> dict[str, Any]:
    return {"name": "a", "parameters": schema, "strict": strict}


Door = Callable[[Any, bool | None], AnswerFormat]
DOORS: dict[str, Door] = {
    "response_format": lambda schema, strict: of_chat(
        response_format={"type": "json_schema", "json_schema": named(schema, strict)}
    ),
    "response_format of completions": lambda schema, strict: of_completion(
        response_format={"type": "json_schema", "json_schema": named(schema, strict)}
    ),
    "text.format": lambda schema, strict: of_response(
        text={"format": {"type": "json_schema", **named(schema, strict)}}
    ),
    "tool": lambda schema, strict: of_chat(
        tools=[{"type": "function", "function": tool(schema, strict)}], tool_choice="required"
    ),
    "tool of a response": lambda schema, strict: of_response(
        tools=[{"type": "function", **tool(schema, strict)}], tool_choice={"type": "function", "name": "a"}
    ),
    "output_config": lambda schema, strict: of_message(
        output_config={"format": {"type": "json_schema", "schema": schema, "strict": strict}}
    ),
    "tool of a message": lambda schema, strict: of_message(
        tools=[{"name": "a", "input_schema": schema, "strict": strict}], tool_choice={"type": "any"}
    ),
    "SDK's response_format": lambda schema, strict: of_sdk(
        response_format={"type": "json_schema", "json_schema": named(schema, strict)}
    ),
    "SDK's tool": lambda schema, strict: of_sdk(tools=[tool(schema, strict)], tool_choice="required"),
}
LOOSE_DOORS: dict[str, Callable[[Any], AnswerFormat]] = {
    "guided_json": lambda schema: of_completion(guided_json=schema),
    "guided_json as a text": lambda schema: of_chat(guided_json=json.dumps(schema)),
    "structured_outputs": lambda schema: of_chat(structured_outputs={"json": schema}),
    "json_object": lambda schema: of_chat(response_format={"type": "json_object", "schema": schema}),
    "tool that may be called": lambda schema: of_response(
        tools=[{"type": "function", "name": "a", "parameters": schema}]
    ),
}


@pytest.fixture(scope="module")
def hf_tokenizer() -> Any:
    return make_tokenizer()


@pytest.fixture(scope="module")
def fits(hf_tokenizer: Any) -> Callable[[AnswerFormat, Any], bool]:
    read_by: LLTokenizer = from_tokenizer(hf_tokenizer)

    def fits(form: AnswerFormat, value: Any) -> bool:
        matcher = LLMatcher(read_by, grammar_of(form).text, log_level=0)
        assert not matcher.is_error(), matcher.get_error()
        ids = hf_tokenizer.encode(json.dumps(value, ensure_ascii=False), add_special_tokens=False)
        return bool(matcher.consume_tokens(ids)) and matcher.is_accepting()

    return fits


def schema_alone(form: AnswerFormat) -> Any:
    """What llguidance reads of the schema, which has a type where arguments are asked for."""
    (text,) = (grammar_of(form).schemas or {}).values()
    (part,) = json.loads(text)["grammars"]
    return {"type": "object", **part["json_schema"]}


@pytest.mark.parametrize("name", TABLE)
def test_a_schema_allows_what_it_names(fits: Callable[[AnswerFormat, Any], bool], name: str) -> None:
    schema, fitting, others = TABLE[name]
    form = formats.json_schema(json.dumps(schema), "f")
    for value in fitting:
        assert fits(form, value), value
        if name not in OF_OTHER_DRAFTS:
            jsonschema.validate(value, schema)
    assert not [value for value in others if fits(form, value)]
    assert grammar_of(form).ignored == () or name == "more than are named"


@pytest.mark.parametrize("name", [*TABLE, *BEYOND])
def test_a_schema_gives_the_same_grammar_by_every_door(name: str) -> None:
    schema = {**TABLE, **BEYOND}[name][0]
    expected = schema_alone(formats.json_schema(json.dumps({"type": "object", **schema}), "f"))
    for door, make in DOORS.items():
        for strict in (None, False) if grammar_of(make(schema, None)).ignored else (None, False, True):
            assert schema_alone(make({"type": "object", **schema}, strict)) == expected, (door, strict)
    for door, make_loose in LOOSE_DOORS.items():
        assert schema_alone(make_loose({"type": "object", **schema})) == expected, door


@pytest.mark.parametrize("name", BEYOND)
def test_a_keyword_without_effect_is_named_and_refused_only_where_it_is_strict(
    fits: Callable[[AnswerFormat, Any], bool], name: str
) -> None:
    schema, fitting, ignored = BEYOND[name]
    form = formats.json_schema(json.dumps(schema), "f")
    assert all(fits(form, value) for value in fitting)
    for door, make in DOORS.items():
        made = make(schema, False)
        (field,) = grammar_of(made).schemas or {}
        assert [*grammar_of(made).ignored] == [f"{field}.{each}" for each in ignored], door
        with pytest.raises(InvalidRequest) as refused:
            grammar_of(make(schema, True))
        assert refused.value.violations == ((field, f"is strict, and grammars cannot follow {', '.join(ignored)}"),)


def test_options_and_annotations_of_a_schema_do_not_reach_llguidance() -> None:
    plain = formats.json_schema(json.dumps(of(USER)), "f")
    said = {"x-guidance": {"lenient": True}, "title": "U", "description": "x" * 999, "default": {}, "$comment": "c"}
    dressed = formats.json_schema(json.dumps({**of({**USER, **said}), **said}), "f")
    assert grammar_of(dressed).text == grammar_of(plain).text


@pytest.mark.parametrize(
    "text", ["", "[]", '"a"', "{", '{"a": NaN}', '{"const": "\\ud800"}', '{"a":' * 65 + "{}" + "}" * 65]
)
def test_what_is_no_schema_is_refused(text: str) -> None:
    with pytest.raises(InvalidRequest):
        schemas.parsed(text, "f")


def _doubled(depth: int, join: Callable[[dict[str, Any]], dict[str, Any]]) -> dict[str, Any]:
    names: dict[str, Any] = {f"a{index}": join({"$ref": f"#/$defs/a{index + 1}"}) for index in range(depth)}
    return {"$ref": "#/$defs/a0", "$defs": {**names, f"a{depth}": USER}}


@pytest.mark.parametrize(
    "schema",
    [
        _doubled(300, lambda each: {"allOf": [each, each]}),
        _doubled(300, lambda each: {"anyOf": [each, {**each, "properties": {}}]}),
        {"properties": dict.fromkeys(map(str, range(1000)), True), "anyOf": [{}] * 9000},
        {"properties": {str(index): {"$ref": "#/$defs/a", "nullable": True} for index in range(900)},
         "$defs": {"a": {"properties": dict.fromkeys(map(str, range(900)), True)}}},
    ],
    ids=["all of twice", "any of twice", "names by alternatives", "names by references"],
)  # fmt: skip
def test_a_schema_that_multiplies_is_refused_before_it_has(schema: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest, match="complex"):
        grammar_of(formats.json_schema(json.dumps(schema), "f"))


@pytest.mark.parametrize("keyword", ["maxLength", "minItems", "maximum", "multipleOf", "maxProperties"])
def test_a_number_without_an_end_has_no_effect(keyword: str) -> None:
    assert grammar_of(formats.json_schema(f'{{"{keyword}": 1e999}}', "f")).ignored == (f"f.{keyword}",)


@pytest.mark.parametrize("keyword", ["allOf", "anyOf", "oneOf"])
def test_a_schema_that_refers_to_itself_in_its_own_place_is_read(keyword: str) -> None:
    """No grammar can follow it, but it costs no more than others."""
    schema = {keyword: [{"$ref": "#"}, {"$ref": "#", "properties": {"a": TEXT}}]}
    assert grammar_of(formats.json_schema(json.dumps(schema), "f")).text
