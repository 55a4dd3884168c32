"""Pages of the public Python API: what `rayrec` and its rooms export, from signatures and docstrings."""

from __future__ import annotations

import importlib
import inspect
import logging
from collections.abc import Callable
from typing import Any

import griffe
from markdown import cell, escaped, prose, table

from rayrec.platform.config import Config

_MODULES = (
    "rayrec",
    "rayrec.samples",
    "rayrec.embeddings",
    "rayrec.models",
    "rayrec.pipelines",
    "rayrec.rl",
    "rayrec.serve",
    "rayrec.adapters.torchrec",
    "rayrec.platform",
)
_WIDTH = 88
logging.getLogger("griffe").setLevel(logging.ERROR)


def pages() -> dict[str, str]:
    found = {}
    for name in _MODULES:
        module = importlib.import_module(name)
        names = [public for public in getattr(module, "__all__", ()) if public != "__version__"]
        if names:
            found["python-" + name.replace(".", "-")] = _page(name, module, names)
    return found


def _page(name: str, module: Any, names: list[str]) -> str:
    parts = [f"# Python: {name}\n", prose(inspect.getdoc(module) or "")]
    for public in names:
        value = getattr(module, public)
        if inspect.ismodule(value):
            parts.append(f"## {public}\n\n{prose(inspect.getdoc(value) or '')}")
        elif inspect.isclass(value):
            parts.append(_class(public, value))
        elif callable(value):
            parts.append(_function(public, value, "##"))
        else:
            parts.append(f"## {public}\n\nA `{type(value).__name__}`.\n")
    return "\n".join(parts)


def _class(name: str, value: type) -> str:
    is_config = issubclass(value, Config)
    parts = [f"## {name}\n"]
    if not is_config and not issubclass(value, BaseException):
        parts.append(f"```python\n{_signature(name, value)}\n```\n")
    parts.append(_documentation(inspect.getdoc(value) or ""))
    if is_config:
        rows = [[f"`{key}`", cell(field.description or "")] for key, field in value.model_fields.items()]
        parts.append(table(["setting", "meaning"], rows))
        return "\n".join(parts)
    constructor = vars(value).get("__init__")
    if constructor is not None and constructor.__doc__:
        parts.append(_documentation(inspect.getdoc(constructor) or ""))
    for method_name, method in vars(value).items():
        if method_name.startswith("_"):
            continue
        plain = getattr(method, "__func__", method)
        if isinstance(plain, property):
            if documentation := inspect.getdoc(plain):
                parts.append(f"### {name}.{method_name}\n\nA property. {_documentation(documentation)}")
        elif inspect.isfunction(plain) and inspect.getdoc(plain):
            parts.append(_function(f"{name}.{method_name}", plain, "###"))
    return "\n".join(parts)


def _function(name: str, value: Callable[..., Any], heading: str) -> str:
    signature = f"```python\n{_signature(name, value)}\n```\n"
    return "\n".join([f"{heading} {name}\n", signature, _documentation(inspect.getdoc(value) or "")])


def _signature(name: str, value: Callable[..., Any]) -> str:
    try:
        signature = inspect.signature(value)
    except (TypeError, ValueError):
        return f"{name}(...)"
    parameters, seen_star = [], False
    for parameter in signature.parameters.values():
        if parameter.name in ("self", "cls"):  # vars() gives functions that are not bound
            continue
        if parameter.kind is parameter.KEYWORD_ONLY and not seen_star:
            parameters.append("*")
            seen_star = True
        seen_star |= parameter.kind is parameter.VAR_POSITIONAL
        parameters.append(_parameter(parameter))
    returned = signature.return_annotation
    end = "" if returned is signature.empty or inspect.isclass(value) else f" -> {_annotation(returned)}"
    line = f"{name}({', '.join(parameters)}){end}"
    if len(line) <= _WIDTH:
        return line
    return f"{name}(\n" + "".join(f"    {parameter},\n" for parameter in parameters) + f"){end}"


def _parameter(parameter: inspect.Parameter) -> str:
    stars = {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**"}.get(parameter.kind, "")
    text = stars + parameter.name
    annotated = parameter.annotation is not parameter.empty
    if annotated:
        text += f": {_annotation(parameter.annotation)}"
    if parameter.default is not parameter.empty:
        default = parameter.default
        shown = default.__name__ if callable(default) and hasattr(default, "__name__") else repr(default)
        if len(shown) > 40 or " at 0x" in shown:
            shown = "..."
        text += f" = {shown}" if annotated else f"={shown}"
    return text


def _annotation(annotation: Any) -> str:
    return annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)


def _documentation(text: str) -> str:
    """A docstring in Google's style as Markdown: arguments, results and errors become lists."""
    parts = []
    for section in griffe.Docstring(text, lineno=1).parse("google", warnings=False):
        kind = section.kind.value
        if kind == "text":
            parts.append(prose(section.value))
        elif kind in ("parameters", "attributes", "other parameters"):
            parts.append("\n".join(f"- `{p.name}`: {_line(p.description)}" for p in section.value) + "\n")
        elif kind == "raises":
            lines = [f"- `{error.annotation}`: {_line(error.description)}" for error in section.value]
            parts.append("Raises:\n\n" + "\n".join(lines) + "\n")
        elif kind in ("returns", "yields"):
            lines = " ".join(_line(result.description) for result in section.value)
            parts.append(f"{kind.capitalize()}: {lines}\n")
        elif kind == "admonition":
            parts.append(f"{escaped(section.title or '')}: {_line(section.value.description)}\n")
    return "\n".join(parts)


def _line(text: str) -> str:
    return cell(text)
