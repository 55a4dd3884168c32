"""Calls of tools: how a model is told of them, held to them, and understood.

    tool_choice     what the model may say
    none            a text
    auto            a text, or a call, as it likes
    required        a call of one of the tools, with arguments by its schema
    a named one     a call of this tool

A call is `{"name": ..., "arguments": {...}}`, alone or between <tool_call> and </tool_call>, which is how
most templates teach it; there may be several, and text before them. A template that does not know of tools
gets them in a system message.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from rayrec.samples.text.chat import ChatTemplate
from rayrec.serve.language.requests import ChatRequest, NamedTool, ResponseFormat, Tool
from rayrec.serve.wire.errors import RequestError

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_INTRODUCTION = (
    "You may call one of these functions. To call one, answer with nothing but "
    '{"name": its name, "arguments": its arguments as an object}.\n'
)


def wanted_tools(request: ChatRequest) -> list[Tool]:
    """Tools that may be called; none where `tool_choice` is none.

    Raises:
        RequestError: a tool is named that there is not, or required and there is none.
    """
    tools, choice = request.tools or [], request.tool_choice
    if isinstance(choice, NamedTool):
        found = [tool for tool in tools if tool.function.name == choice.function.name]
        if not found:
            raise RequestError(f"tool_choice: there is no tool {choice.function.name!r}", param="tool_choice")
        return found
    if choice == "required" and not tools:
        raise RequestError("tool_choice: is required, and there are no tools", param="tool_choice")
    return [] if choice == "none" else tools


def is_held(request: ChatRequest) -> bool:
    """Whether the answer has to be a call."""
    return request.tool_choice == "required" or isinstance(request.tool_choice, NamedTool)


def call_format(tools: Sequence[Tool]) -> ResponseFormat:
    """What an answer that has to be a call is held to."""
    definitions: dict[str, Any] = {}
    calls = []
    for number, tool in enumerate(tools):
        given = tool.function.parameters or {"type": "object"}
        parameters = _hoisted(given, f"tool{number}", definitions)
        calls.append(
            {
                "type": "object",
                "properties": {"name": {"const": tool.function.name}, "arguments": parameters},
                "required": ["name", "arguments"],
                "additionalProperties": False,
            }
        )
    schema: dict[str, Any] = calls[0] if len(calls) == 1 else {"anyOf": calls}
    if definitions:
        schema = {**schema, "$defs": definitions}
    return ResponseFormat.model_validate({"type": "json_schema", "json_schema": {"schema": schema}})


def _hoisted(parameters: Mapping[str, Any], name: str, definitions: dict[str, Any]) -> dict[str, Any]:
    """The schema of a tool as a part of another one: its definitions go to those of the whole, and
    itself as well where it refers to itself.

    Args:
        name: that its definitions begin with, and its own there.
    """
    is_meant = False

    def moved(reference: str) -> str:
        nonlocal is_meant
        for place in ("#/$defs/", "#/definitions/"):
            if reference.startswith(place):
                return f"#/$defs/{name}_{reference.removeprefix(place)}"
        if reference != "#" and not reference.startswith("#/"):
            return reference
        is_meant = True
        return f"#/$defs/{name}{reference.removeprefix('#')}"

    def renamed(part: Any) -> Any:
        if isinstance(part, list):
            return [renamed(one) for one in part]
        if not isinstance(part, Mapping):
            return part
        found = {key: renamed(value) for key, value in part.items()}
        if isinstance(reference := found.get("$ref"), str):
            found["$ref"] = moved(reference)
        return found

    found = dict(parameters)
    for place in ("$defs", "definitions"):
        if isinstance(own := found.pop(place, None), Mapping):
            definitions |= {f"{name}_{key}": renamed(value) for key, value in own.items()}
    whole: dict[str, Any] = renamed(found)
    if is_meant:
        definitions[name] = whole
    return whole


def messages_of(request: ChatRequest, tools: Sequence[Tool], template: ChatTemplate) -> list[dict[str, Any]]:
    """The conversation as a template takes it.

    Raises:
        RequestError: a message is none.
    """
    messages = [_message(number, one) for number, one in enumerate(request.messages)]
    if tools and "tools" not in template.template:
        told = _INTRODUCTION + "\n".join(
            json.dumps(tool.function.model_dump(exclude_none=True)) for tool in tools
        )
        if messages[0]["role"] == "system":
            messages[0] = {**messages[0], "content": f"{messages[0]['content']}\n\n{told}"}
        else:
            messages.insert(0, {"role": "system", "content": told})
    return messages


class CallReader:
    """Tells calls from text while an answer is written; not thread-safe.

    Text before, between and after calls is text, but for blanks around them. What looks like a call and is
    none of these tools is text, too.
    """

    def __init__(self, tools: Sequence[Tool], many: bool = True) -> None:
        """
        Args:
            many: whether an answer may have several calls; those behind the first one are left out otherwise.
        """
        self._names = {tool.function.name for tool in tools}
        self._many = many
        self._held = ""
        """Text of which it is not known whether it is a call, or stands before one."""
        self._has_text = False
        self.num_calls = 0

    def whole(self, text: str) -> tuple[str, list[dict[str, Any]]]:
        """(text, calls) of an answer."""
        return self.add(text, True)

    def add(self, text: str, is_last: bool) -> tuple[str, list[dict[str, Any]]]:
        """(text that can be said now, calls that are complete now)."""
        if not self._names:
            return text, []
        self._held += text
        said, calls = "", []
        while (begin := self._held.find(_OPEN)) >= 0 and not self._is_bare:
            end = self._held.find(_CLOSE, begin)
            if end < 0 and not is_last:
                break
            stop = len(self._held) if end < 0 else end + len(_CLOSE)
            found = self._calls(self._held[begin + len(_OPEN) : stop].removesuffix(_CLOSE))
            if found:
                said += self._text(self._held[:begin].rstrip())
                calls += self._counted(found)
            else:
                said += self._text(self._held[:stop])
            self._held = self._held[stop:]
        if is_last:
            if self._is_bare and (found := self._calls(self._held)):
                calls += self._counted(found)
            elif self._held.strip() or not self.num_calls:
                said += self._text(self._held)
            self._held = ""
        elif not self._is_bare:
            stop = self._held.find(_OPEN)
            stop = len(self._held) - self._suspected() if stop < 0 else stop
            stop = len(self._held[:stop].rstrip())
            said += self._text(self._held[:stop])
            self._held = self._held[stop:]
        return said, calls

    @property
    def _is_bare(self) -> bool:
        """Whether the answer begins with an object, which may be a call without marks."""
        return not self._has_text and not self.num_calls and self._held.lstrip().startswith("{")

    def _text(self, text: str) -> str:
        if self.num_calls and not self._has_text:
            text = text.lstrip()
        self._has_text = self._has_text or bool(text.strip())
        return text

    def _counted(self, calls: list[dict[str, Any]]) -> list[dict[str, Any]]:
        if not self._many:
            calls = calls[: 1 - self.num_calls]
        self.num_calls += len(calls)
        return calls

    def _calls(self, text: str) -> list[dict[str, Any]]:
        """What a text of objects calls; none where one of them is no call."""
        calls, text = [], text.strip()
        decoder = json.JSONDecoder()
        while text:
            try:
                found, stop = decoder.raw_decode(text)
            except (ValueError, RecursionError):
                return []
            call = self._call(found)
            if call is None:
                return []
            calls.append(call)
            text = text[stop:].lstrip()
        return calls

    def _call(self, found: Any) -> dict[str, Any] | None:
        if not isinstance(found, Mapping):
            return None
        name, arguments = found.get("name"), found.get("arguments", found.get("parameters"))
        if not isinstance(name, str) or name not in self._names or not isinstance(arguments, Mapping):
            return None
        return {
            "id": f"call_{uuid.uuid4().hex[:24]}",
            "type": "function",
            "function": {"name": name, "arguments": json.dumps(arguments, ensure_ascii=False)},
        }

    def _suspected(self) -> int:
        """Characters at the end that a mark may begin with."""
        for count in range(min(len(_OPEN) - 1, len(self._held)), 0, -1):
            if _OPEN.startswith(self._held[-count:]):
                return count
        return 0


def _message(number: int, one: Mapping[str, Any]) -> dict[str, Any]:
    role, content = one.get("role"), one.get("content")
    if role not in ("system", "developer", "user", "assistant", "tool"):
        raise RequestError(f"messages.{number}.role: {role!r} is not known", param="messages")
    if isinstance(content, list):
        parts = [
            part.get("text") if isinstance(part, Mapping) and part.get("type") == "text" else None
            for part in content
        ]
        if any(not isinstance(part, str) for part in parts):
            raise RequestError(f"messages.{number}.content: only parts of text are read", param="messages")
        content = "".join(str(part) for part in parts)
    calls = one.get("tool_calls")
    if not isinstance(content, str) and not (role == "assistant" and content is None and calls):
        raise RequestError(f"messages.{number}.content: expected a text", param="messages")
    message: dict[str, Any] = {"role": "system" if role == "developer" else role, "content": content or ""}
    if calls:
        message["tool_calls"] = [_call(number, each) for each in calls] if isinstance(calls, list) else None
        if message["tool_calls"] is None:
            raise RequestError(f"messages.{number}.tool_calls: expected a list", param="messages")
    for name in ("name", "tool_call_id"):
        if isinstance(one.get(name), str):
            message[name] = one[name]
    return message


def _call(number: int, call: Any) -> dict[str, Any]:
    """With arguments as an object, which is how templates write them."""
    try:
        function = call["function"]
        arguments = json.loads(function["arguments"])
        return {
            "id": call.get("id"),
            "type": "function",
            "function": {"name": function["name"], "arguments": arguments},
        }
    except (TypeError, KeyError, ValueError, RecursionError) as error:
        raise RequestError(
            f"messages.{number}.tool_calls: expected calls of functions with arguments as JSON",
            param="messages",
        ) from error
