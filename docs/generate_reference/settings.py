"""Pages of all settings, from the pydantic models: key, type, default and documentation of each."""

from __future__ import annotations

import importlib
import inspect
import types
import typing
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import annotated_types
import yaml
from markdown import cell, prose, slug, table
from pydantic import ByteSize
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined, to_jsonable_python

from rayrec.platform.config import Config

_PAGES = {
    "config-run": (
        "Run settings",
        "What a YAML file of `rayrec train`, `rayrec plan` and `rayrec online` holds. Any key can be set on "
        "the command line: `--set training.epochs=5`. Unknown keys are refused with the nearest known name.",
        ["rayrec.pipelines.config.run:RunConfig"],
    ),
    "config-rl": (
        "Reinforcement learning settings",
        "What a YAML file of `rayrec rl` holds.",
        ["rayrec.rl.config:RlConfig"],
    ),
    "config-tuning": (
        "Search settings",
        "What a YAML file of `rayrec tune` holds.",
        ["rayrec.pipelines.tuning.config:TuningConfig"],
    ),
    "config-data": (
        "Data settings",
        "Settings of the functions behind `rayrec prepare`, `rayrec impressions`, `rayrec tokenize`, "
        "`rayrec data store` and `rayrec text prepare`; the commands take them as options, the last one as a "
        "YAML file, too.",
        [
            "rayrec.samples.base.config:PrepareConfig",
            "rayrec.samples.impressions.config:ImpressionsConfig",
            "rayrec.pipelines.semantic_ids.tokenization:TokenizeConfig",
            "rayrec.samples.stores.build:StoreBuildConfig",
            "rayrec.samples.text.prepare:TextPrepareConfig",
        ],
    ),
    "config-serving": (
        "Serving settings",
        "Settings of the service. `rayrec serve` takes most of them as options, and larger sections as YAML "
        "files: admission, `events`, `models`, `request_log`, `scaling` and `services`.",
        ["rayrec.serve.config.serve:ServeConfig", "rayrec.serve.config.models:ModelsFile"],
    ),
    "config-language": (
        "Settings of models",
        "What the YAML file of `rayrec maas up` and `rayrec maas plan` holds.",
        ["rayrec.serve.language.config:ModelsConfig"],
    ),
    "config-cluster": (
        "Settings of a shared cluster",
        "What the YAML files of `rayrec queue run --settings` and `rayrec queue manifests --settings` hold.",
        ["rayrec.jobs.loop:QueueRunConfig", "rayrec.jobs.kubernetes:KubernetesConfig"],
    ),
    "config-planned-cluster": (
        "Clusters to plan for",
        "What a YAML file of `rayrec plan --cluster` holds. Every number is text with a unit and a mark, as "
        "in `50 GB/s, data sheet: ConnectX-7`; marks are `measured`, `data sheet` and `assumed`.",
        ["rayrec.pipelines.capacity.cluster_spec:ClusterSpec"],
    ),
}
_UNIONS = (Union, types.UnionType)


def pages() -> dict[str, str]:
    return {name: _page(*page) for name, page in _PAGES.items()}


def _page(title: str, head: str, roots: list[str]) -> str:
    parts = [f"# {title}\n", head + "\n"]
    sections: dict[type[Config], str] = {}
    several = len(roots) > 1
    for root in roots:
        module, _, name = root.partition(":")
        model = getattr(importlib.import_module(module), name)
        _collect(model, name if several else "", sections)
        if not several:
            sections[model] = "Top level"
    for model, heading in sections.items():
        parts.append(_section(model, heading, sections))
    return "\n".join(parts)


def _collect(model: type[Config], path: str, sections: dict[type[Config], str]) -> None:
    """Name the sections of the page: a setting's dotted key, with the value that chooses it from several."""
    sections.setdefault(model, path)
    for key, field in model.model_fields.items():
        for below in _models_in(field.annotation):
            if below in sections:
                continue
            heading = f"{path}.{key}" if path else key
            choice = _choice(below)
            _collect(below, f"{heading} ({choice})" if choice else heading, sections)


def _choice(model: type[Config]) -> str:
    """The setting that selects this model among several, such as `name: sasrec`."""
    for key in ("name", "op", "kind", "engine"):
        field = model.model_fields.get(key)
        if field is not None and get_origin(field.annotation) is Literal:
            return f"{key}: {' or '.join(map(str, get_args(field.annotation)))}"
    return ""


def _models_in(annotation: Any) -> Iterator[type[Config]]:
    if isinstance(annotation, type) and issubclass(annotation, Config):
        yield annotation
    for argument in get_args(annotation):
        yield from _models_in(argument)


def _section(model: type[Config], heading: str, sections: dict[type[Config], str]) -> str:
    rows = []
    for key, field in model.model_fields.items():
        meaning = field.description or _first_sentence(field)
        rows.append([f"`{key}`", _type(field, sections), _default(field, sections), cell(meaning)])
    documentation = prose(inspect.getdoc(model) or "") if "__doc__" in vars(model) else ""
    head = f"## {heading}\n\n{documentation}"
    return head + ("\n" + table(["key", "type", "default", "meaning"], rows) if rows else "")


def _first_sentence(field: FieldInfo) -> str:
    """What the documentation of a section begins with, for a setting that is one section."""
    models = list(_models_in(field.annotation))
    return (inspect.getdoc(models[0]) or "").partition("\n")[0] if len(models) == 1 else ""


def _type(field: FieldInfo, sections: dict[type[Config], str]) -> str:
    bounds = [_bound(constraint) for constraint in field.metadata]
    return " ".join([_type_name(field.annotation, sections), *filter(None, bounds)])


def _type_name(annotation: Any, sections: dict[type[Config], str]) -> str:
    origin, arguments = get_origin(annotation), get_args(annotation)
    if annotation is type(None):
        return "null"
    if isinstance(annotation, typing.TypeAliasType if hasattr(typing, "TypeAliasType") else ()):
        return _type_name(annotation.__value__, sections)
    if origin is Annotated:
        bounds = filter(None, map(_bound, arguments[1:]))
        return " ".join([_type_name(arguments[0], sections), *bounds])
    if origin in _UNIONS:
        return " or ".join(_type_name(argument, sections) for argument in arguments)
    if origin is Literal:
        return ", ".join(f"`{value}`" for value in arguments)
    if isinstance(annotation, type) and issubclass(annotation, Config):
        heading = sections[annotation]
        return f"[{cell(_short(annotation, heading))}](#{slug(heading)})"
    if isinstance(annotation, type) and issubclass(annotation, Enum):
        return ", ".join(f"`{value.value}`" for value in annotation)
    inner = [_type_name(argument, sections) for argument in arguments if argument is not Ellipsis]
    if origin is dict or (origin is not None and "Mapping" in str(origin)):
        return f"mapping of {inner[0]} to {inner[1]}"
    if origin in (tuple, list, set, frozenset):
        return f"list of {inner[0]}" if len(set(inner)) == 1 else "list of " + ", ".join(inner)
    names = {bool: "true or false", int: "integer", float: "number", str: "text", Path: "path", Any: "any"}
    return names.get(annotation, getattr(annotation, "__name__", str(annotation)))


def _short(model: type[Config], heading: str) -> str:
    return _choice(model).rpartition(": ")[2] or heading.rpartition(".")[2] or "section"


def _bound(constraint: Any) -> str:
    match constraint:
        case annotated_types.Ge(ge=bound):
            return f"≥ {bound}"
        case annotated_types.Gt(gt=bound):
            return f"\\> {bound}"
        case annotated_types.Le(le=bound):
            return f"≤ {bound}"
        case annotated_types.Lt(lt=bound):
            return f"\\< {bound}"
    return ""


def _default(field: FieldInfo, sections: dict[type[Config], str]) -> str:
    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=True)
    if value is PydanticUndefined:
        return ""
    if isinstance(value, Config):
        choice = _choice(type(value))
        return f"`{choice}`" if choice else "its defaults"
    if value is None:
        return "null"
    if isinstance(value, ByteSize):
        return f"`{value.human_readable(separator=' ')}`"
    value = to_jsonable_python(value)
    if isinstance(value, list | dict) and not value:
        return "none"
    text = yaml.safe_dump(value, default_flow_style=True, width=10_000).replace("\n...", "").strip()
    return f"`{text}`"
