"""The page of the HTTP interface, from the application's OpenAPI description."""

from __future__ import annotations

from typing import Any
from unittest.mock import MagicMock

from markdown import cell, prose, slug, table

from rayrec.serve.language.api import build_language_api
from rayrec.serve.web.api import ANSWERING_ROUTES, build_api
from rayrec.serve.web.metrics import PrometheusMeter
from rayrec.serve.web.pages import RecentActivity

_HEAD = """# HTTP interface

The routes of a service. A running service shows the same description at `/docs`, and as JSON at
`/openapi.json`; neither needs a network. Bodies are JSON unless a route says otherwise, of at most 1 MiB.
"""

_LANGUAGE_HEAD = """# HTTP interface of language models

The routes of `rayrec maas up`. Bodies are those of OpenAI's API and of Triton's;
[the guide](../guides/serve-a-language-model.md) says what is taken of them.
"""


def page() -> str:
    # Only the routes are described: nothing is asked of the model, so a stand-in for it will do.
    meters = [PrometheusMeter(), RecentActivity(ANSWERING_ROUTES)]
    described = build_api(MagicMock(), MagicMock(), 10.0, meters=meters, intake=MagicMock()).openapi()
    parts = [_HEAD]
    for path, methods in described["paths"].items():
        parts += [_route(path, method, operation) for method, operation in methods.items()]
    parts.append("## Schemas\n")
    for name, schema in described.get("components", {}).get("schemas", {}).items():
        parts.append(_schema(name, schema))
    parts.append(_LANGUAGE_HEAD)
    for path, methods in build_language_api([]).openapi()["paths"].items():
        parts += [_route(path, method, operation) for method, operation in methods.items()]
    return "\n".join(parts)


def _route(path: str, method: str, operation: dict[str, Any]) -> str:
    parts = [f"## `{method.upper()} {path}`\n"]
    if operation.get("description"):
        parts.append(prose(operation["description"]))
    if parameters := operation.get("parameters"):
        rows = [
            [f"`{p['name']}`", p["in"], _kind(p.get("schema", {})), cell(p.get("description", ""))]
            for p in parameters
        ]
        parts.append(table(["parameter", "in", "type", "meaning"], rows))
    if body := operation.get("requestBody"):
        for media, content in body["content"].items():
            parts.append(f"Body, `{media}`: {_kind(content.get('schema', {}))}\n")
    rows = []
    for status, answer in operation["responses"].items():
        kinds = [_kind(content.get("schema", {})) for content in answer.get("content", {}).values()]
        rows.append([status, cell(answer.get("description", "")), ", ".join(filter(None, kinds))])
    parts.append(table(["status", "meaning", "body"], rows))
    return "\n".join(parts)


def _schema(name: str, schema: dict[str, Any]) -> str:
    parts = [f"### {name}\n"]
    if schema.get("description"):
        parts.append(prose(schema["description"]))
    required = schema.get("required", ())
    rows = [
        [
            f"`{key}`",
            _kind(value),
            "required" if key in required else f"`{value['default']}`" if "default" in value else "",
            cell(value.get("description", "")),
        ]
        for key, value in schema.get("properties", {}).items()
    ]
    if rows:
        parts.append(table(["field", "type", "default", "meaning"], rows))
    elif "properties" not in schema:
        parts.append(f"{_kind(schema)}\n")
    return "\n".join(parts)


def _kind(schema: dict[str, Any]) -> str:
    if reference := schema.get("$ref"):
        name = reference.rpartition("/")[2]
        return f"[{name}](#{slug(name)})"
    for key in ("anyOf", "oneOf"):
        if key in schema:
            return " or ".join(dict.fromkeys(_kind(one) for one in schema[key]))
    if "enum" in schema:
        return ", ".join(f"`{value}`" for value in schema["enum"])
    if schema.get("type") == "array":
        return f"list of {_kind(schema.get('items', {})) or 'any'}"
    if "const" in schema:
        return f"`{schema['const']}`"
    return str(schema.get("type", ""))
