"""Which JSON schemas can be promised: all that a schema says has to hold for what comes out.

Keywords that a grammar does not hold are refused by name. To pass them over would give answers that look as
if they had been checked.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rayrec.platform.errors import InputError

MOST_DEPTH = 64

_ANNOTATIONS = frozenset(
    {
        "$schema",
        "$id",
        "$comment",
        "title",
        "description",
        "default",
        "examples",
        "deprecated",
        "readOnly",
        "writeOnly",
    }
)
_HELD = frozenset(
    {
        "type",
        "enum",
        "const",
        "properties",
        "required",
        "additionalProperties",
        "patternProperties",
        "minProperties",
        "maxProperties",
        "items",
        "prefixItems",
        "minItems",
        "maxItems",
        "anyOf",
        "oneOf",
        "allOf",
        "$ref",
        "$defs",
        "definitions",
        "minLength",
        "maxLength",
        "pattern",
        "format",
        "minimum",
        "maximum",
        "exclusiveMinimum",
        "exclusiveMaximum",
    }
)
_TYPES = frozenset(["null", "boolean", "integer", "number", "string", "array", "object"])
_ALONE = ("enum", "const", "$ref", "anyOf", "oneOf", "allOf")
"""What is said beside one of these does not hold."""
_LEAST, _MOST = ("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")
_OF_TYPE = {
    **dict.fromkeys(["minLength", "maxLength", "pattern", "format"], ("string",)),
    **dict.fromkeys([*_LEAST, *_MOST], ("integer", "number")),
}
"""Keywords that hold only beside their type."""
_OF_ANY_TYPE = (
    "required",
    "patternProperties",
    "minProperties",
    "maxProperties",
    "minItems",
    "maxItems",
)
"""Keywords that hold only where something says that there is an object or an array."""
_SAY_TYPES = ("type", "properties", "additionalProperties", "items", "prefixItems")
_COUNTS = (("minLength", "maxLength"), ("minItems", "maxItems"), ("minProperties", "maxProperties"))
_FORMATS = frozenset(["date", "time", "date-time", "email", "ipv4", "ipv6", "uuid", "hostname", "uri"])
_YEAR = "([0-9]{3}[1-9]|[0-9]{2}[1-9][0-9]|[0-9][1-9][0-9]{2}|[1-9][0-9]{3})"
_LEAP_YEAR = "([0-9]{2}(0[48]|[2468][048]|[13579][26])|(0[48]|[2468][048]|[13579][26])00)"  # no year 0
_DATE = (
    f"({_YEAR}-((0[13578]|1[02])-(0[1-9]|[12][0-9]|3[01])|(0[469]|11)-(0[1-9]|[12][0-9]|30)"
    f"|02-(0[1-9]|1[0-9]|2[0-8]))|{_LEAP_YEAR}-02-29)"
)
_HOUR = "([01][0-9]|2[0-3])"
_TIME = f"{_HOUR}:[0-5][0-9]:[0-5][0-9]([.][0-9]{{1,9}})?(Z|[+-]{_HOUR}:[0-5][0-9])"
_BYTE = "(25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9]?[0-9])"
_PATTERNS = {
    "date": _DATE,
    "time": _TIME,
    "date-time": f"{_DATE}T{_TIME}",
    "ipv4": f"({_BYTE}[.]){{3}}{_BYTE}",
}
"""Of formats that packages hold loosely: their dates have a 31st of every month, their addresses a 027,
which is an octal number to some programs."""
_SCHEMAS = ("additionalProperties", "items")
_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
_MAPS = ("properties", "patternProperties", "$defs", "definitions")
_ESCAPE = re.compile(r"\\x([0-9A-Fa-f]{2})|\\?([^\0-\x7f])|\\.", re.DOTALL)
_POINT = re.compile(
    r"\\x([0-9A-Fa-f]{2})|\\u([0-9A-Fa-f]{4})|\\u\{([0-9A-Fa-f]{1,6})\}|\\([^\0-\x7f])|\\.", re.DOTALL
)
_PARTS = re.compile(r"\((?:\?:|\?<\w*>)?|\{[^{}]*\}|\[\^?(?:\\.|[^\]\\])*\]?|\\.|.", re.DOTALL)
"""Of an expression: the beginning of a group, a repetition, a set, an escape, or a character."""
_BEGINS_WITH_HAT = re.compile(r"\[\\(?:\^|x5[Ee]|u005[Ee]|u\{0*5[Ee]\})")
_LETTER_ESCAPES = re.compile(r"\\(?:[^A-Za-z]|([A-Za-z]))", re.DOTALL)
_IN_SETS = frozenset(["", *"abcdDefnrsStuvwWx"])
_OUTSIDE_SETS = _IN_SETS | {*"BkpP"}
"""Letters that packages know behind a backslash, those that they refuse included."""
_LETTERS = re.compile(r"[A-Za-z0-9_ -]*")
_ESCAPED = '"\n\r\t\f\v\0'


def check_schema(schema: Any) -> None:
    """Check that a grammar holds all that a schema says.

    Raises:
        InputError: a keyword is not held, or a part is no schema, or nothing satisfies it; names its path.
    """
    _check_part(schema, "schema", 0)
    parts = list(_parts(schema, "schema"))
    for where, part in parts:
        if "$ref" in part:
            _check_reference(part["$ref"], schema, [each for _, each in parts], f"{where}.$ref")


def patterns(schema: Any) -> Iterator[tuple[str, str]]:
    """The regular expressions of a checked schema, and their paths."""
    for where, part in _parts(schema, "schema"):
        if "pattern" in part:
            yield f"{where}.pattern", part["pattern"]
        for key in part.get("patternProperties", ()):
            yield f"{where}.patternProperties", key


def bounded(schema: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    """The numbers of a checked schema that have bounds, as schemas of their own, and their paths."""
    for where, part in _parts(schema, "schema"):
        if any(name in part for name in (*_LEAST, *_MOST)):
            yield where, {name: part[name] for name in ("type", *_LEAST, *_MOST) if name in part}


def _parts(schema: Any, where: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """All schemas of a checked one that are objects, itself included, and their paths."""
    if not isinstance(schema, Mapping):
        return
    yield where, schema
    for name, value in schema.items():
        if name in _SCHEMAS:
            yield from _parts(value, f"{where}.{name}")
        elif name in _LISTS:
            for number, part in enumerate(value):
                yield from _parts(part, f"{where}.{name}.{number}")
        elif name in _MAPS:
            for key, part in value.items():
                yield from _parts(part, f"{where}.{name}.{key}")


def _check_part(schema: Any, where: str, depth: int) -> None:
    if depth > MOST_DEPTH:
        raise InputError(f"{where}: is nested more than {MOST_DEPTH} deep")
    if isinstance(schema, bool):
        return
    if not isinstance(schema, Mapping):
        raise InputError(f"{where}: expected a JSON schema, which is an object, got {type(schema).__name__}")
    for name, value in schema.items():
        if name in _ANNOTATIONS or name.startswith("x-"):
            continue
        if name not in _HELD:
            raise InputError(
                f"{where}.{name}: answers are not held to this keyword; leave it out, and check it yourself"
            )
        if name in _SCHEMAS:
            _check_part(value, f"{where}.{name}", depth + 1)
        elif name in _LISTS:
            _check_list(name, value, where, depth)
        elif name in _MAPS:
            if not isinstance(value, Mapping):
                raise InputError(f"{where}.{name}: expected an object of schemas")
            for key, part in value.items():
                if name == "patternProperties":
                    _check_pattern(key, f"{where}.{name}")
                _check_part(part, f"{where}.{name}.{key}", depth + 1)
    _check_combination(schema, where)
    if "pattern" in schema:
        _check_pattern(schema["pattern"], f"{where}.pattern")
    if (given := schema.get("format")) is not None and given not in _FORMATS:
        raise InputError(f"{where}.format: {given!r} is none of {', '.join(sorted(_FORMATS))}")
    _check_counts(schema, where)
    _check_bounds(schema, where)


def _check_counts(schema: Mapping[str, Any], where: str) -> None:
    """Check lengths and numbers of items and properties."""
    for least, most in _COUNTS:
        for name in (least, most):
            value = schema.get(name, 0)
            if type(value) is not int or value < 0:
                raise InputError(f"{where}.{name}: expected a whole number from 0, got {value!r}")
        if most in schema and schema.get(least, 0) > schema[most]:
            raise InputError(
                f"{where}: {least} is {schema[least]} and {most} {schema[most]}, so that nothing satisfies "
                "both"
            )


def _check_bounds(schema: Mapping[str, Any], where: str) -> None:
    """Check that a number lies between those that are named."""
    for name in (*_LEAST, *_MOST):
        value = schema.get(name, 0)
        if type(value) is not int and (type(value) is not float or not math.isfinite(value)):
            raise InputError(f"{where}.{name}: expected a number, got {value!r}")
        if schema.get("type") == "integer" and value != int(value):
            raise InputError(f"{where}.{name}: expected a whole number beside type integer, got {value!r}")
    is_whole = schema.get("type") == "integer"
    for least in _LEAST:
        for most in _MOST:
            if least not in schema or most not in schema:
                continue
            low, high = schema[least], schema[most]
            # Between 3 and 4, both left out, there is no whole number.
            first = low + (is_whole and least != "minimum")
            last = high - (is_whole and most != "maximum")
            if first > last or (first == last and not is_whole and (least, most) != ("minimum", "maximum")):
                raise InputError(
                    f"{where}: {least} is {low} and {most} {high}, so that nothing satisfies both"
                )


def _check_reference(reference: Any, root: Any, parts: Sequence[Mapping[str, Any]], where: str) -> None:
    """Check that a reference is to a schema of the same document, as a grammar finds it: key by key.

    Args:
        parts: the schemas that were checked; what lies elsewhere, such as in a default, was not.
    """
    if not isinstance(reference, str) or not (reference == "#" or reference.startswith("#/")):
        raise InputError(
            f"{where}: expected a schema of this one, such as #/$defs/NAME, got {reference!r}; nothing is "
            "fetched"
        )
    found = root
    for key in reference.split("/")[1:]:
        if not isinstance(found, Mapping) or key not in found:
            raise InputError(f"{where}: {reference!r} is nowhere in the schema")
        found = found[key]
    if not isinstance(found, bool) and all(found is not part for part in parts):
        raise InputError(f"{where}: {reference!r} is no schema")


def check_expression(pattern: str, where: str) -> None:
    """Check that a grammar of an expression holds its anchors and escapes.

    Packages match a whole text and pass over anchors, which is right at its ends alone; an escape that they
    do not know is to them the letter behind it, and `[\\^` the same as `[^`.

    Raises:
        InputError: an anchor stands elsewhere, or there is such an escape.
    """
    # Of this alternative: whether nothing is before it, and whether it has a `$`. Of the group around it:
    # whether nothing is before that, whether an alternative ended with a `$`, and whether any has an anchor.
    is_first = is_outer_first = True
    has_end = has_end_before = has_anchor = False
    outside: list[tuple[bool, bool, bool, bool]] = []
    is_behind_anchor = False
    for part in _PARTS.findall(pattern):
        for escape in _LETTER_ESCAPES.findall(part):
            if escape not in (_IN_SETS if part.startswith("[") else _OUTSIDE_SETS):
                raise InputError(
                    f"{where}: {pattern!r:.100} has \\{escape}, which is not known; leave it out"
                )
        if _BEGINS_WITH_HAT.match(part):
            raise InputError(
                f"{where}: {pattern!r:.100} has {part:.20}, which packages read as all other characters; put "
                "\\^ behind another character of the set, or write it without one"
            )
        is_repeated = is_behind_anchor and part.startswith(("*", "+", "{"))
        is_behind_anchor = part in ("^", "$") or (part == ")" and has_anchor)
        if part == "|":
            is_first, has_end, has_end_before = is_outer_first, False, has_end_before or has_end
        elif part == ")" and outside:
            ends, had_anchor = has_end or has_end_before, has_anchor
            is_outer_first, has_end, has_end_before, has_anchor = outside.pop()
            is_first, has_end, has_anchor = False, has_end or ends, has_anchor or had_anchor
        elif is_repeated or (has_end and part not in ("$", "?")) or (part == "^" and not is_first):
            raise InputError(
                f"{where}: {pattern!r:.100} has an anchor elsewhere than at its ends, which is not held; "
                "leave it out"
            )
        elif part.startswith("("):
            outside.append((is_outer_first, has_end, has_end_before, has_anchor))
            is_outer_first, has_end_before, has_anchor = is_first, False, False
        elif part in ("^", "$"):
            has_end, has_anchor = part == "$", True
        else:
            is_first = False


def with_whole_escapes(pattern: str) -> str:
    """A pattern of a schema with `\\u0041` for `\\x41`, of which xgrammar takes further letters for digits,
    and for characters that are no ASCII: beside these, it lets quotation marks into strings of JSON."""

    def written(found: re.Match[str]) -> str:
        if found[1]:
            return f"\\u00{found[1]}"
        if found[2]:
            point = ord(found[2])
            return f"\\u{point:04x}" if point < 0x10000 else f"\\u{{{point:x}}}"
        return found[0]

    return _ESCAPE.sub(written, pattern)


def with_plain_characters(pattern: str) -> str:
    """An expression with characters that are no ASCII as themselves, and `\\u0041` for `\\x41`: behind an
    escape in a set, where no string of JSON is around it, xgrammar takes further letters for its digits."""

    def written(found: re.Match[str]) -> str:
        if found[4]:
            return found[4]
        point = int(found[1] or found[2] or found[3] or "0", 16)
        if point < 0x80:
            return f"\\u00{found[1]}" if found[1] else found[0]
        return found[0] if 0xD800 <= point < 0xE000 or point > 0x10FFFF else chr(point)

    return _POINT.sub(written, pattern)


def with_patterns(schema: Any) -> Any:
    """A checked schema as packages take it: with patterns for formats that they hold loosely, and
    patterns by `with_whole_escapes`."""
    if not isinstance(schema, Mapping):
        return schema
    found = {}
    for name, value in schema.items():
        if name == "format" and value in _PATTERNS:
            name, value = "pattern", f"^{_PATTERNS[value]}$"
        elif name == "pattern":
            value = with_whole_escapes(value)
        elif name in _SCHEMAS:
            value = with_patterns(value)
        elif name in _LISTS:
            value = [with_patterns(part) for part in value]
        elif name in _MAPS:
            is_of_patterns = name == "patternProperties"
            value = {
                with_whole_escapes(key) if is_of_patterns else key: with_patterns(part)
                for key, part in value.items()
            }
        found[name] = value
    return found


def _check_combination(schema: Mapping[str, Any], where: str) -> None:
    """Check what keywords say beside each other."""
    given = schema.get("type")
    types = [given] if isinstance(given, str) else given
    if types is not None and (
        not isinstance(types, list)
        or not types
        or not all(isinstance(one, str) and one in _TYPES for one in types)
    ):
        raise InputError(f"{where}.type: expected one of {', '.join(sorted(_TYPES))}, or a list of them")
    required = schema.get("required", [])
    if not isinstance(required, list) or not all(isinstance(one, str) for one in required):
        raise InputError(f"{where}.required: expected a list of names")
    if "enum" in schema and (not isinstance(schema["enum"], list) or not schema["enum"]):
        raise InputError(f"{where}.enum: expected a list of values")
    if "format" in schema and not isinstance(schema["format"], str):
        raise InputError(f"{where}.format: expected a text")
    said = [name for name in schema if name in _HELD and name not in ("$defs", "definitions")]
    for name in _ALONE:
        if name not in schema:
            continue
        values = schema["enum"] if name == "enum" else [schema[name]]
        beside = [other for other in said if other != name]
        if name in ("enum", "const") and types is not None:
            if not all(_type_of(value) & set(types) for value in values):
                raise InputError(f"{where}.{name}: has a value that is not of the type beside it")
            beside.remove("type")
        if beside:
            raise InputError(f"{where}: {beside[0]} does not hold beside {name}; say one of them")
    for name, wanted in _OF_TYPE.items():
        if name in schema and (types is None or len(types) != 1 or types[0] not in wanted):
            raise InputError(f"{where}.{name}: holds only beside one type, {' or '.join(wanted)}")
    lengths = {"minLength", "maxLength"} & schema.keys()
    forms = [name for name in ("pattern", "format") if name in schema]
    if len(forms) + bool(lengths) > 1:
        raise InputError(f"{where}: of pattern, format, and a length, one holds; leave the others out")
    if not any(name in schema for name in _SAY_TYPES):
        for name in _OF_ANY_TYPE:
            if schema.get(name):
                kind = "array" if name.endswith("Items") else "object"
                raise InputError(f"{where}.{name}: holds only beside a type; say that it is {kind!r}")
    if types is None or "object" in types:
        _check_names(schema, where)
    least = schema.get("minProperties", 0)
    if isinstance(least, int) and least > len(required):
        raise InputError(
            f"{where}.minProperties: is {least}, and {len(required)} properties are required, which alone "
            "are held to be different; require them"
        )


def _check_names(schema: Mapping[str, Any], where: str) -> None:
    """Check what is said of names of properties: a grammar has each name in one place."""
    known, by_pattern = schema.get("properties", {}), schema.get("patternProperties", {})
    for name in schema.get("required", ()):
        if name not in known:
            raise InputError(
                f"{where}.required: names {name!r}, and only what is in properties is held to be there; "
                "add it"
            )
    for pattern in by_pattern:
        if (name := _first_match(pattern, list(known))) is not None:
            raise InputError(
                f"{where}.patternProperties: {pattern!r} matches {name!r} of properties, and one of "
                "the two holds; leave it out"
            )
    if known and by_pattern and schema.get("additionalProperties", False) is not False:
        raise InputError(
            f"{where}.additionalProperties: holds of names that patternProperties match, too, where "
            "there are properties; set it to false"
        )
    if schema.get("additionalProperties", False) is not False:
        for name in known:
            # Packages tell other names from known ones by what is written, some of them byte by byte.
            if not name.isascii() or any(character in '"\\' or character < " " for character in name):
                raise InputError(
                    f"{where}.additionalProperties: may come under the name {name!r} of properties, which is "
                    "not of plain ASCII; set it to false, or rename the property"
                )
    # Beginnings that another one begins with come right behind it; those open here say the same of names.
    open_ones: list[tuple[str, str]] = []
    for begins, pattern in sorted((_beginning(pattern), pattern) for pattern in by_pattern):
        while open_ones and not begins.startswith(open_ones[-1][0]):
            open_ones.pop()
        if open_ones and by_pattern[open_ones[-1][1]] != by_pattern[pattern]:
            raise InputError(
                f"{where}.patternProperties: {open_ones[-1][1]!r} and {pattern!r} may match the same name, "
                "of which one holds; let each begin with ^ and letters with which no other one begins, or "
                "leave one out"
            )
        open_ones.append((begins, pattern))


def _first_match(pattern: str, names: Sequence[str]) -> str | None:
    """The first name that a pattern matches, or may match; None: it matches none."""
    import pyarrow as pa  # here, since models are imported without it
    import pyarrow.compute as pc

    try:
        # By RE2, in linear time: both come from who asks, and Python's own could be kept busy for hours.
        matches = pc.match_substring_regex(pa.array(names, pa.string()), pattern).to_pylist()
    except (pa.ArrowInvalid, UnicodeEncodeError):  # what RE2 does not have, or a half of a pair
        return names[0] if names else None
    return next((name for name, is_match in zip(names, matches, strict=True) if is_match), None)


def _beginning(pattern: str) -> str:
    """What each match begins with, as far as letters and digits tell."""
    if not pattern.startswith("^") or "|" in pattern:
        return ""
    letters = _LETTERS.match(pattern, 1)
    assert letters is not None, "there may be none"
    found = letters[0]
    return found[:-1] if pattern[1 + len(found) :].startswith(("*", "?", "{")) else found


def _type_of(value: Any) -> set[str]:
    """The names of a value's type."""
    if value is None:
        return {"null"}
    if isinstance(value, bool):
        return {"boolean"}
    if isinstance(value, int):
        return {"integer", "number"}
    if isinstance(value, float):
        return {"number", "integer"} if value.is_integer() else {"number"}
    if isinstance(value, str):
        return {"string"}
    return {"array"} if isinstance(value, list) else {"object"}


def _check_list(name: str, value: Any, where: str, depth: int) -> None:
    if not isinstance(value, list) or not value:
        raise InputError(f"{where}.{name}: expected a list of schemas")
    for number, part in enumerate(value):
        _check_part(part, f"{where}.{name}.{number}", depth + 1)
    if name == "allOf" and len(value) > 1:
        raise InputError(f"{where}.allOf: is held for one schema, and there are {len(value)}; merge them")
    if name == "oneOf" and not _are_apart(value):
        raise InputError(
            f"{where}.oneOf: schemas may both be satisfied by a value, or it cannot be told; say anyOf, or "
            "give "
            "them different types, or a required property with different constants"
        )


def _check_pattern(pattern: Any, where: str) -> None:
    if not isinstance(pattern, str):
        raise InputError(f"{where}: expected a regular expression as a text")
    if any(character in pattern for character in _ESCAPED) or "\\\\" in pattern or "\\n" in pattern:
        raise InputError(
            f"{where}: {pattern!r} names a character that JSON writes with an escape; leave it out of "
            "patterns"
        )
    check_expression(pattern, where)


def _are_apart(schemas: list[Any]) -> bool:
    """Whether no value satisfies two of them, as far as types and constants tell."""
    if not all(isinstance(one, Mapping) for one in schemas):
        return False
    types = [_types_of(one) for one in schemas]
    if all(types) and sum(map(len, types)) == len(set().union(*types)):
        return True
    # A text, say, has none of the properties that tell them apart; without a type, it satisfies any of them.
    others = [each - {"object"} for each in types]
    if sum(map(len, others)) > len(set().union(*others)) or (any(others) and not all(types)):
        return False
    names = set.intersection(*(set(one.get("required", ())) for one in schemas))
    for name in names:
        constants = [one.get("properties", {}).get(name, {}) for one in schemas]
        if all(isinstance(one, Mapping) and ("const" in one or "enum" in one) for one in constants):
            values = [_told(value) for one in constants for value in one.get("enum", [one.get("const")])]
            if len(values) == len(set(values)):
                return True
    return False


def _told(value: Any) -> str:
    """Equal for values that are equal in JSON: 1 and 1.0 are, as are objects in another order."""
    if isinstance(value, Mapping):
        return repr(sorted((name, _told(each)) for name, each in value.items()))
    if isinstance(value, list):
        return repr([_told(each) for each in value])
    return repr(int(value) if isinstance(value, float) and value.is_integer() else value)


def _types_of(schema: Mapping[str, Any]) -> set[str]:
    given = schema.get("type")
    if isinstance(given, str):
        return {"number"} if given == "integer" else {given}
    if isinstance(given, list):
        return {"number" if one == "integer" else one for one in given}
    return set()
