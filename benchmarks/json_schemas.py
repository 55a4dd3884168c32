"""Random JSON schemas, of the kinds that callers send: objects in objects, lists, choices, bounds,
formats."""

from __future__ import annotations

import random
from typing import Any

_WORDS = ["name", "city", "age", "price", "active", "tags", "color", "size", "note", "code", "when", "street"]


def random_schema(seed: int) -> dict[str, Any]:
    """An object's schema; equal seeds give equal ones."""
    rng = random.Random(seed)
    return _object(rng, depth=rng.randint(0, 2))


def _object(rng: random.Random, depth: int) -> dict[str, Any]:
    names = rng.sample(_WORDS, rng.randint(1, 4))
    return {
        "type": "object",
        "properties": {name: _value(rng, depth) for name in names},
        "required": [name for name in names if rng.random() < 0.7],
        "additionalProperties": False,
    }


def _value(rng: random.Random, depth: int) -> dict[str, Any]:
    kinds = ["text", "bounded", "choice", "integer", "range", "number", "boolean", "null", "date", "pattern"]
    kind = rng.choice([*kinds, "object", "list", "either"] if depth else kinds)
    low = rng.randint(-50, 50)
    if kind == "bounded":
        least = rng.randint(0, 4)
        return {"type": "string", "minLength": least, "maxLength": least + rng.randint(0, 30)}
    if kind == "range":
        return {"type": "integer", "minimum": low, "maximum": low + rng.randint(0, 500)}
    if kind == "object":
        return _object(rng, depth - 1)
    if kind == "list":
        least = rng.randint(0, 2)
        return {"type": "array", "items": _value(rng, depth - 1), "minItems": least, "maxItems": least + 3}
    if kind == "either":
        return {"anyOf": [{"type": "null"}, _value(rng, depth - 1)]}
    plain = {
        "text": {"type": "string"},
        "choice": {"enum": rng.sample(["red", "green", "gruß", 'a "b"', 7, None, True], 3)},
        "integer": {"type": "integer"},
        "number": {"type": "number"},
        "boolean": {"type": "boolean"},
        "null": {"type": "null"},
        "date": {"type": "string", "format": "date"},
        "pattern": {
            "type": "string",
            "pattern": rng.choice(["^[A-Z]{2}-[0-9]{3}$", "^(yes|no|maybe)$", "^[^0-9]+$"]),
        },
    }
    return plain[kind]
