"""Calls of tools in what a model says: alone, marked, several, with text around them, in pieces."""

import json

import pytest

from rayrec.models.generation.json_schema import check_schema
from rayrec.serve.language.requests import Tool
from rayrec.serve.language.tools import CallReader, call_format

TOOLS = [
    Tool.model_validate({"type": "function", "function": {"name": name}}) for name in ("weather", "time")
]


def call(name, **arguments):
    return json.dumps({"name": name, "arguments": arguments})


def marked(name, **arguments):
    return f"<tool_call>\n{call(name, **arguments)}\n</tool_call>"


WEATHER, TIME = ("weather", {"city": "Paris"}), ("time", {})
ANSWERS = [
    ("Rain, all day.", "Rain, all day.", []),
    (" \n ", " \n ", []),
    (call("weather", city="Paris"), "", [WEATHER]),
    (marked("weather", city="Paris"), "", [WEATHER]),
    ("Let me look. \n" + marked("weather", city="Paris"), "Let me look.", [WEATHER]),
    (marked("weather", city="Paris") + "\n" + marked("time"), "", [WEATHER, TIME]),
    (call("weather", city="Paris") + "\n" + call("time"), "", [WEATHER, TIME]),
    ("A " + marked("time") + "\nB " + marked("weather", city="Paris") + " C", "A\nB C", [TIME, WEATHER]),
    ("<tool_call>" + call("time"), "", [TIME]),  # a mark that was not closed
    ("<tool_call>" + call("paint") + "</tool_call>", "<tool_call>" + call("paint") + "</tool_call>", []),
    ('<tool_call>{"name": "ti', '<tool_call>{"name": "ti', []),
    (call("paint"), call("paint"), []),
    (call(["time"]), call(["time"]), []),
    ('{"a": 1}', '{"a": 1}', []),
    ("a < b, and <tool is no mark", "a < b, and <tool is no mark", []),
]


@pytest.mark.parametrize(("answer", "text", "calls"), ANSWERS)
@pytest.mark.parametrize("step", [1, 3, 7, 1000])
def test_calls_are_told_from_text_however_it_comes(answer, text, calls, step):
    reader, said, found = CallReader(TOOLS), "", []
    parts = [answer[place : place + step] for place in range(0, len(answer), step)]
    for part in parts:
        more, complete = reader.add(part, False)
        said, found = said + more, found + complete
    more, complete = reader.add("", True)
    said, found = said + more, found + complete

    assert said == text
    assert [(one["function"]["name"], json.loads(one["function"]["arguments"])) for one in found] == calls
    assert reader.num_calls == len(calls)
    assert len({one["id"] for one in found}) == len(calls)


def test_text_before_a_call_is_said_before_the_call_is_there():
    reader = CallReader(TOOLS)

    assert reader.add("Let me look. <tool", False) == ("Let me look.", [])
    assert reader.add("_call>" + call("time"), False) == ("", [])
    said, calls = reader.add("</tool_call>", False)
    assert not said
    assert calls[0]["function"]["name"] == "time"


def test_one_call_is_all_where_several_are_not_wanted():
    text, calls = CallReader(TOOLS, many=False).whole(marked("time") + marked("weather", city="Paris"))

    assert not text
    assert [one["function"]["name"] for one in calls] == ["time"]


def test_references_of_a_tool_stay_within_its_own_schema():
    def tool(name, **parameters):
        function = {"name": name, "parameters": {"type": "object", **parameters}}
        return Tool.model_validate({"type": "function", "function": function})

    tree = tool("tree", properties={"size": {"type": "integer"}, "child": {"$ref": "#"}})
    pair = tool(
        "pair",
        properties={"left": {"$ref": "#/$defs/side"}, "right": {"$ref": "#/properties/left"}},
        **{"$defs": {"side": {"type": "array", "items": {"$ref": "#"}}}},
    )
    schema = call_format([tree, pair]).json_schema.schema_
    check_schema(schema)

    (first, second), definitions = (
        [each["properties"]["arguments"] for each in schema["anyOf"]],
        schema["$defs"],
    )
    assert first["properties"]["child"] == {"$ref": "#/$defs/tool0"}
    assert definitions["tool0"] == first
    assert second["properties"] == {
        "left": {"$ref": "#/$defs/tool1_side"},
        "right": {"$ref": "#/$defs/tool1/properties/left"},
    }
    assert definitions["tool1"] == second
    assert definitions["tool1_side"] == {"type": "array", "items": {"$ref": "#/$defs/tool1"}}
    assert "$defs" not in call_format([tool("plain")]).json_schema.schema_


def test_without_tools_everything_is_text():
    assert CallReader([]).whole(marked("time")) == (marked("time"), [])
