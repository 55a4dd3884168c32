"""Texts by a schema or an expression: always valid, always complete, or refused in a sentence."""

import ipaddress
import json
import re

import pytest

from benchmarks.json_schemas import random_schema
from rayrec.models.generation.json_schema import check_expression, check_schema
from rayrec.platform.errors import InputError
from tests.helpers.examples import cases

jsonschema = pytest.importorskip("jsonschema")
LINKED = {
    "$ref": "#/$defs/node",
    "$defs": {
        "node": {
            "type": "object",
            "properties": {"next": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/node"}]}},
            "required": ["next"],
            "additionalProperties": False,
        }
    },
}
ENDLESS = {
    "$ref": "#/$defs/node",
    "$defs": {
        "node": {
            "type": "object",
            "properties": {"next": {"$ref": "#/$defs/node"}},
            "required": ["next"],
            "additionalProperties": False,
        }
    },
}


def both(compilers):
    if "llguidance" not in compilers:
        pytest.skip("llguidance is not installed")
    return compilers.values()


@pytest.mark.parametrize("seed", cases(range(24), [0, 3]))
def test_whatever_a_model_prefers_what_it_writes_satisfies_the_schema(compilers, write, seed):
    schema = random_schema(seed)
    compiled = compilers["xgrammar"].compile("json_schema", schema)

    for more in (0, 1, 7, 150):
        text = write(compiled.begin(), compiled.least_tokens + more, seed)
        jsonschema.validate(json.loads(text), schema, format_checker=jsonschema.FormatChecker())


@pytest.mark.parametrize("schema", [LINKED, {"type": "object"}, random_schema(1), random_schema(5)])
def test_both_packages_hold_a_schema(compilers, write, schema):
    for compiler in both(compilers):
        compiled = compiler.compile("json_schema", schema)
        for more in (0, 2, 60):
            text = write(compiled.begin(), compiled.least_tokens + more)
            jsonschema.validate(json.loads(text), schema)


def test_both_packages_hold_an_expression(compilers, write):
    for compiler in both(compilers):
        compiled = compiler.compile("regex", r"(ab|c)+[^x]\d{2,}")
        for more in (0, 3, 40):
            text = write(compiled.begin(), compiled.least_tokens + more)
            assert re.fullmatch(r"(ab|c)+[^x]\d{2,}", text, re.DOTALL)


@pytest.mark.parametrize("expression", [r"^\x41b$", r"^[\x61-\x63d]{2}$", r"^\\x41b$", r"^\x4a\x4a$"])
def test_two_digits_of_an_escape_are_two(expression, compilers, write):
    for compiler in both(compilers):
        compiled = compiler.compile("regex", expression)
        for seed in range(6):
            assert re.fullmatch(expression, write(compiled.begin(), compiled.least_tokens + 3, seed))
        if "\\\\" in expression:  # which JSON escapes
            continue
        compiled = compiler.compile("json_schema", {"type": "string", "pattern": expression})
        for seed in range(6):
            said = json.loads(write(compiled.begin(), compiled.least_tokens + 3, seed))
            assert re.fullmatch(expression, said)


def test_the_shortest_text_is_told_and_can_be_written(compilers, write):
    compiled = compilers["xgrammar"].compile("json_schema", LINKED)

    assert write(compiled.begin(), compiled.least_tokens) == '{"next": null}'


def test_a_character_of_several_tokens_is_ended_before_the_text_is(compilers, tokenizer):
    grammar = compilers["xgrammar"].compile("json_schema", {"type": "string"}).begin()
    quote, first = tokenizer.encode('"')[0], tokenizer.convert_tokens_to_ids("ç")
    assert compilers["xgrammar"].tokens.bytes_V[first] == b"\xe7"  # of a character of three bytes
    grammar.advance(quote)
    grammar.advance(first)

    assert not grammar.is_complete
    assert len(grammar.ending) == 3
    assert not grammar.fits(tokenizer.convert_tokens_to_ids("Ī"), 1)


def test_blanks_and_control_characters_do_not_come(compilers, tokenizer):
    schema = {"type": "string", "maxLength": 5}  # whose characters xgrammar lets be control characters
    grammar = compilers["xgrammar"].compile("json_schema", schema).begin()
    grammar.advance(tokenizer.encode('"')[0])
    allowed_V = grammar.allowed_V()

    assert allowed_V[tokenizer.encode("a")[0]]
    assert not any(
        allowed_V[token] for token in (tokenizer.convert_tokens_to_ids("ĉ"), tokenizer.eos_token_id)
    )


@pytest.mark.parametrize(
    ("schema", "said"),
    [
        ({"not": {"type": "string"}}, r"schema\.not: answers are not held"),
        ({"type": "object", "properties": {"a": {"multipleOf": 2}}}, r"properties\.a\.multipleOf"),
        (
            {"type": "integer", "minimum": 5, "maximum": 2},
            "schema: minimum is 5 and maximum 2, so that nothing",
        ),
        (
            {"type": "array", "items": {"type": "number", "exclusiveMinimum": 5, "maximum": 5}},
            r"schema\.items: exclusiveMinimum is 5 and maximum 5",
        ),
        ({"type": "number", "maximum": "a"}, r"schema\.maximum: expected a number"),
        (
            {"type": "integer", "minimum": 1.5},
            r"schema\.minimum: expected a whole number beside type integer",
        ),
        ({"type": "string", "minLength": -2}, r"schema\.minLength: expected a whole number from 0"),
        ({"type": "array", "minItems": 3, "maxItems": 2}, "minItems is 3 and maxItems 2"),
        (
            {"type": "object", "properties": {"a": {"$ref": "#/$defs/X"}}},
            r"properties\.a\.\$ref: .* is nowhere",
        ),
        ({"$ref": "other.json"}, r"schema\.\$ref: expected a schema of this one.*nothing is fetched"),
        ({"$ref": "#/$defs/a~1b", "$defs": {"a/b": {"type": "null"}}}, "is nowhere in the schema"),
        (
            {"type": "array", "items": {"type": "string", "pattern": "("}},
            r"schema\.items\.pattern: '\(' does not",
        ),
        (
            {"type": "object", "patternProperties": {"[a": {}}},
            r"schema\.patternProperties: '\[a' does not compile",
        ),
        ({"type": "string", "minLength": 5, "maxLength": 2}, "nothing satisfies both"),
        ({"oneOf": [{"type": "string"}, {"type": "string", "maxLength": 3}]}, "anyOf"),
        *(
            (
                {"oneOf": [{"properties": {"a": {"const": each}}, "required": ["a"]} for each in equal]},
                "anyOf",
            )
            for equal in ((1, 1.0), ({"b": [1], "c": 2}, {"c": 2, "b": [1.0]}))
        ),
        (
            {
                "oneOf": [
                    {"type": ["object", "string"], "properties": {"a": {"const": each}}, "required": ["a"]}
                    for each in (1, 2)
                ]
            },
            r"schema\.oneOf: schemas may both be satisfied",  # by any text
        ),
        (
            {
                "oneOf": [
                    {"properties": {"a": {"const": 1}}, "required": ["a"]},
                    {"type": ["object", "string"], "properties": {"a": {"const": 2}}, "required": ["a"]},
                ]
            },
            r"schema\.oneOf: schemas may both be satisfied",  # the first says nothing of texts
        ),
        ({"type": "string", "pattern": 'a"b'}, "escape"),
        ({"type": "string", "format": "color"}, "'color' is none of"),
        ({"type": "colour"}, r"schema\.type: expected one of array"),
        ({"type": [{}]}, r"schema\.type: expected one of array"),
        ({"type": "string", "format": ["x"]}, r"schema\.format: expected a text"),
        ({"type": "object", "required": 5}, r"schema\.required: expected a list"),
        ({"minimum": 3}, r"schema\.minimum: holds only beside one type"),
        ({"type": "string", "pattern": "a+", "maxLength": 3}, "one holds"),
        ({"enum": [1, "a"], "type": "string"}, "not of the type beside it"),
        ({"type": "string", "enum": ["a"], "minLength": 2}, "minLength does not hold beside enum"),
        ({"const": 5, "maximum": 3}, "maximum does not hold beside const"),
        ({"$defs": {"A": {"type": "integer"}}, "$ref": "#/$defs/A", "minimum": 5}, "does not hold beside"),
        ({"anyOf": [{"type": "object"}], "required": ["a"]}, "does not hold beside anyOf"),
        ({"type": "object", "minProperties": 2}, "require them"),
        ({"$ref": "#/default", "default": {"type": "array", "uniqueItems": True}}, "is no schema"),
        ({"$ref": "#/$defs", "$defs": {"A": {"type": "null"}}}, "is no schema"),
        ({"$ref": "#/title", "title": "a"}, "is no schema"),
        ({"type": "integer", "exclusiveMinimum": 3, "exclusiveMaximum": 4}, "nothing satisfies both"),
        ({"type": "integer", "minimum": 10**400, "maximum": 3}, "nothing satisfies both"),
        ({"type": "object", "required": ["a"]}, r"schema\.required: names 'a'"),
        ({"type": "object", "properties": {"a": {}}, "required": ["b"]}, r"\.required: names 'b'"),
        ({"required": ["a"]}, r"schema\.required: holds only beside a type"),
        ({"minItems": 2}, r"schema\.minItems: .* it is 'array'"),
        ({"anyOf": [{"type": "null"}, {"maxProperties": 1}]}, r"anyOf\.1\.maxProperties: .* 'object'"),
        ({"patternProperties": {"^a$": {"type": "null"}}}, r"patternProperties: holds only beside"),
        (
            {"type": "object", "properties": {"ab": {}}, "patternProperties": {"^a": {"type": "null"}}},
            r"schema\.patternProperties: '\^a' matches 'ab'",
        ),
        (
            {
                "type": "object",
                "properties": {"a": {}},
                "patternProperties": {"^b": {"type": "null"}},
                "additionalProperties": {"type": "boolean"},
            },
            r"schema\.additionalProperties: .* set it to false",
        ),
        *(
            (
                {"type": "object", "properties": {name: {"type": "null"}}, "additionalProperties": True},
                rf"schema\.additionalProperties: may come under the name '{name}' of properties",
            )
            for name in ('a"', "é")
        ),
        (
            {"type": "object", "patternProperties": {"^a": {"type": "null"}, "b$": {"type": "boolean"}}},
            "may match the same name",
        ),
        (
            {"type": "object", "patternProperties": {"^ab*": {"type": "null"}, "^ac": {"const": 1}}},
            "may match the same name",
        ),
        (
            {"type": "array", "items": {"type": "number", "minimum": 1e-9, "maximum": 1e-7}},
            r"schema\.items: no number of six decimals",
        ),
        (
            {"type": "number", "exclusiveMinimum": 1.0000001, "exclusiveMaximum": 1.0000002},
            "schema: no number of six decimals is within its bounds",
        ),
        (ENDLESS, "no output satisfies it"),
        (False, "does not compile"),
        (["string"], "expected a JSON schema"),
    ],
)
def test_a_schema_that_cannot_be_promised_is_refused_in_a_sentence(compilers, schema, said):
    with pytest.raises(InputError, match=said) as refused:
        compilers["xgrammar"].compile("json_schema", schema)
    assert "\n" not in str(refused.value)
    assert ".cc" not in str(refused.value)


@pytest.mark.parametrize(
    ("pattern", "said"),
    [
        *(
            (pattern, "anchor elsewhere than at its ends")
            for pattern in (
                "a$b", "a^b", "x(^a)", "(a$)b", "(a|b$)c", "(^a)+b", "a(^|x)", "^*a", "a(b|(c$))d", r"a\\$b"
            )
        ),
        (r"\Aab\Z", r"\\A, which is not known"),
        (r"[\p{L}]", r"\\p, which is not known"),
        (r"a\h", r"\\h, which is not known"),
        (r"^[\^a]$", "all other characters; put"),
        (r"^[\u005ea]$", "all other characters; put"),
    ],
)  # fmt: skip
def test_an_anchor_or_escape_that_packages_pass_over_is_refused(pattern, said, compilers):
    with pytest.raises(InputError, match=f"the regular expression: .*{said}"):
        compilers["xgrammar"].compile("regex", pattern)
    if "\\\\" not in pattern:  # which JSON escapes
        for schema in (
            {"type": "string", "pattern": pattern},
            {"type": "object", "patternProperties": {pattern: {"type": "null"}}},
        ):
            with pytest.raises(InputError, match=rf"schema\.pattern.*{said}"):
                compilers["xgrammar"].compile("json_schema", schema)


@pytest.mark.parametrize(
    "pattern", ["^a|b$", "(^a|b)c", "a(b$|c)", "(^|x)a", "a($|b)", "((^a))", "a$|b$|^c$", r"[$^]", r"a\$b"]
)
def test_anchors_at_the_ends_of_alternatives_are_held(pattern, compilers, write):
    compiled = compilers["xgrammar"].compile("json_schema", {"type": "string", "pattern": pattern})
    for seed in range(4):
        said = json.loads(write(compiled.begin(), compiled.least_tokens + seed, seed))
        assert re.search(pattern, said)


def test_patterns_and_names_of_a_caller_keep_nobody_busy():
    for endless in ("(", "[", "{", "[a", "(?<a"):
        check_expression(endless * 10_000, "pattern")
    check_schema({"type": "object", "properties": {"a" * 60 + "!": {}}, "patternProperties": {"^(a+)+$": {}}})
    many = {f"^p{number}_": {"const": number} for number in range(3000)}
    check_schema({"type": "object", "patternProperties": many})


@pytest.mark.parametrize(
    "pattern",
    [r"^\x22$", r"^\u0022a$", r"^a\tb$", r"^\r$", r"^\x5c$", r"^\cA$", r"^[\b]$", r"^\f\v$", r"^\x0a$"],
)
def test_a_pattern_of_what_json_escapes_is_refused_however_it_is_written(pattern, compilers):
    for schema in (
        {"type": "string", "pattern": pattern},
        {"type": "object", "patternProperties": {pattern: {"type": "null"}}},
    ):
        with pytest.raises(InputError, match=r"schema\.pattern.*escape; leave it out of patterns"):
            compilers["xgrammar"].compile("json_schema", schema)


@pytest.mark.parametrize("pattern", [r"^[^\t]{3}$", r"^[ -~]{4}$", r"^[\x20-\x24]+$", r"^\s$", r"^.$"])
def test_sets_of_characters_leave_out_what_json_escapes(pattern, compilers, write):
    compiled = compilers["xgrammar"].compile("json_schema", {"type": "string", "pattern": pattern})
    for seed in range(6):
        said = json.loads(write(compiled.begin(), compiled.least_tokens + 5, seed))
        assert re.search(pattern, said)


@pytest.mark.parametrize("pattern", ["^(é|..)$", "^[^à-ü][!-_]{2}$", "^[^😀]$", r"^\\é?.$", r"^\é?.$"])
def test_a_pattern_with_characters_beyond_ascii_does_not_end_its_string_early(pattern, compilers, write):
    compiler = compilers["xgrammar"]
    if "\\\\" in pattern:  # which JSON escapes
        compiled = compiler.compile("regex", pattern)
        assert re.fullmatch(pattern, write(compiled.begin(), 9))
        return
    named = {"type": "object", "patternProperties": {pattern: {"type": "null"}}}
    for schema, before in (({"type": "string", "pattern": pattern}, '"'), (named, '{"')):
        compiled = compiler.compile("json_schema", schema)
        for seed in range(4):
            text = write(compiled.begin(), compiled.least_tokens + 8, seed)
            jsonschema.validate(json.loads(text), schema)
        for character in b'"\\':
            grammar = compiled.begin()
            for token in compiler.tokens.tokens_of(before.encode()):
                grammar.advance(token)
            (token,) = compiler.tokens.tokens_of(bytes([character]))
            assert not grammar.fits(token, left=99)


@pytest.mark.parametrize(
    ("pattern", "held", "others"),
    [
        ("[À-ÿa-z]", "Àÿaz", "-0\u0ffa"),
        (r"[\u00c0\d]", "À09", "a"),
        (r"[^\xc0a-f]", "gE", "Àaf"),
        (r"[\u{c0}a]", "Àa", "\u0c0a"),
        ("[A-Z\u0080À0-9]", "AZÀ09", "-a"),
    ],
)
@pytest.mark.parametrize("kind", ["regex", "json_schema"])
def test_characters_beyond_ascii_stand_beside_others_in_sets(kind, pattern, held, others, compilers):
    source = pattern if kind == "regex" else {"type": "string", "pattern": f"^{pattern}$"}
    for compiler in compilers.values():
        compiled = compiler.compile(kind, source)
        for character in held + others:
            text = character if kind == "regex" else f'"{character}"'
            tokens = compiler.tokens.tokens_of(text.encode())
            assert _is_held(compiled.begin(), tokens) == (character in held)


def _is_held(grammar, tokens):
    try:
        for token in tokens:
            grammar.advance(token)
    except ValueError:
        return False
    return grammar.is_complete


def test_addresses_have_no_leading_zeros(compilers, write):
    for compiler in both(compilers):
        compiled = compiler.compile("json_schema", {"type": "string", "format": "ipv4"})
        for seed in range(60):
            ipaddress.IPv4Address(json.loads(write(compiled.begin(), compiled.least_tokens + 8, seed)))


def test_a_text_is_complete_only_where_both_packages_say_so(compilers):
    """llguidance takes -0 for a number below 0."""
    for compiler in both(compilers):
        schema = {"type": "number", "minimum": -0.5, "exclusiveMaximum": 0}
        grammar = compiler.compile("json_schema", schema).begin()
        said = []
        for token in compiler.tokens.tokens_of(b"-0") + compiler.tokens.tokens_of(b".4"):
            grammar.advance(token)
            said.append(grammar.is_complete)
        assert said == [False, False, False, True]


def test_names_that_cannot_be_confused_are_held(compilers, write):
    schema = {
        "type": "object",
        "properties": {"name": {"type": "null"}},
        "patternProperties": {"^S_": {"type": "null"}, "^N_": {"type": "boolean"}},
        "additionalProperties": False,
        "required": ["name"],
    }
    for compiler in both(compilers):
        compiled = compiler.compile("json_schema", schema)
        for seed in range(4):
            text = write(compiled.begin(), compiled.least_tokens + 40, seed)
            jsonschema.validate(json.loads(text), schema)


@pytest.mark.parametrize(
    ("text", "is_held"),
    [
        (r'{"ab": 1, "ac": "x"}', True),
        (r'{"ab": 1, "b\u0061": "x"}', True),
        (r'{"ab": 1, "ab": "x"}', False),
        (r'{"ab": 1, "\u0061b": "x"}', False),
        (r'{"ab": 1, "a\u0062": "x"}', False),
    ],
)
def test_an_additional_property_does_not_take_a_known_name_by_an_escape(compilers, text, is_held):
    schema = {
        "type": "object",
        "properties": {"ab": {"type": "integer"}},
        "required": ["ab"],
        "additionalProperties": {"type": "string"},
    }
    tokens = compilers["xgrammar"].tokens
    for compiler in compilers.values():
        grammar = compiler.compile("json_schema", schema).begin()
        try:
            for token in tokens.tokens_of(text.encode()):
                grammar.advance(token)
            found = grammar.is_complete
        except ValueError:
            found = False
        assert found == is_held


def test_alternatives_that_exclude_each_other_are_held(compilers, write):
    def kind(name):
        return {
            "type": "object",
            "properties": {"kind": {"const": name}, name: {"type": "boolean"}},
            "required": ["kind", name],
            "additionalProperties": False,
        }

    for types in ("object", ["object", "null"]):  # null satisfies the first alone
        schema = {"oneOf": [kind("on") | {"type": types}, kind("off")]}
        for compiler in both(compilers):
            compiled = compiler.compile("json_schema", schema)
            for seed in range(4):
                jsonschema.validate(json.loads(write(compiled.begin(), 60, seed)), schema)


def test_an_expression_that_does_not_compile_is_refused(compilers):
    with pytest.raises(InputError, match="regular expression does not compile"):
        compilers["xgrammar"].compile("regex", "(a")


def test_a_schema_is_compiled_once(compilers):
    compiler = compilers["xgrammar"]
    first = compiler.compile("json_schema", random_schema(40))
    count = compiler.num_compiled

    assert compiler.compile("json_schema", random_schema(40)) is first
    assert compiler.num_compiled == count


def test_days_and_times_exist(compilers, write):
    import datetime

    for compiler in both(compilers):
        for seed in range(12):
            for kind, read in (
                ("date", datetime.date.fromisoformat),
                ("date-time", datetime.datetime.fromisoformat),
            ):
                compiled = compiler.compile("json_schema", {"type": "string", "format": kind})
                read(json.loads(write(compiled.begin(), 40, seed)))


@pytest.mark.parametrize(
    ("date", "exists"),
    [("2021-02-28", True), ("2021-02-29", False), ("2024-02-29", True), ("1900-02-29", False),
     ("2000-02-29", True), ("2021-02-31", False), ("2021-04-31", False), ("2021-13-01", False)],
)  # fmt: skip
def test_a_date_is_allowed_if_its_day_is_in_its_month(compilers, date, exists):
    tokens = compilers["xgrammar"].tokens
    for compiler in both(compilers):
        grammar = compiler.compile("json_schema", {"type": "string", "format": "date"}).begin()
        try:
            for token in tokens.tokens_of(json.dumps(date).encode()):
                grammar.advance(token)
            found = grammar.is_complete
        except ValueError:
            found = False
        assert found == exists


@pytest.mark.parametrize(
    ("expression", "character"),
    [
        ("((a|a)*(a|a)*)*", "a"),
        ("(a*)*b", "a"),
        (r"(\w+\s?)+", "a"),
        ("(x+x+)+y", "x"),
        ("([a-c]|[b-d])*", "c"),
    ],
)
def test_an_expression_that_can_be_read_in_many_ways_is_read_in_one(compilers, expression, character):
    compiled = compilers["xgrammar"].compile("regex", expression)
    grammar = compiled.begin()
    (token,) = compilers["xgrammar"].tokens.tokens_of(character.encode())
    sizes = []
    for _ in range(300):
        grammar.advance(token)
        sizes.append(len(grammar._chart._sets[-1].items))

    assert max(sizes) < 4


@pytest.mark.parametrize(
    "expression", ["(a|b)*c|ab?", "((a|ab)(c|bcd)?)*", "(a*)*b", "([^b]|a)+", "a{2,4}(a|b)*"]
)
def test_one_way_to_read_an_expression_keeps_its_language(compilers, write, expression):
    for compiler in both(compilers):
        compiled = compiler.compile("regex", expression)
        for seed in range(6):
            text = write(compiled.begin(), compiled.least_tokens + 5 * seed, seed)
            assert re.fullmatch(expression, text)
    for text in ("ab", "abc", "abcd", "aab", "b", "aaaab", "ca"):
        grammar = compilers["xgrammar"].compile("regex", expression).begin()
        try:
            for token in compilers["xgrammar"].tokens.tokens_of(text.encode()):
                grammar.advance(token)
            found = grammar.is_complete
        except ValueError:
            found = False
        assert found == bool(re.fullmatch(expression, text))


def test_a_pattern_that_takes_more_and_more_time_ends_its_answer_in_a_sentence(compilers):
    from rayrec.models.generation.endings import TooAmbiguousError

    schema = {"type": "string", "pattern": "((a|a)*(a|a)*)*b"}
    grammar = compilers["xgrammar"].compile("json_schema", schema).begin()
    (quote, letter) = compilers["xgrammar"].tokens.tokens_of(b'"') + compilers["xgrammar"].tokens.tokens_of(
        b"a"
    )
    grammar.advance(quote)

    def go_on():
        for _ in range(2000):
            grammar.advance(letter)

    with pytest.raises(TooAmbiguousError, match="too many ways"):
        go_on()
    assert len(grammar._chart) < 600
