"""What `rayrec nearline --function` calls: a language model reads the newest titles of users and writes for
each of them which scenario is wanted.

    rayrec nearline RUN --store PRODUCTS --products instructions \\
        --function recipes.nearline.instruct:instructions --once --single-process

Environment: `RECIPE_ENDPOINT`, the URL of any service with OpenAI's API that holds answers to a JSON schema;
`RECIPE_MODEL`, what it calls the model; `RECIPE_DATA`, the data set whose items have the titles.
"""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from rayrec.pipelines.inference.answers import Query
from rayrec.platform.errors import InputError
from rayrec.samples.dataset.dataset import Dataset
from recipes.nearline.data import SCHEMA, SEPARATOR

NEWEST = 2
"""Events whose titles are read."""
AT_ONCE = 8


def instructions(keys: Sequence[str], queries: Sequence[Query]) -> list[dict[str, str] | None]:
    """Of each user: the scenario, or None where nothing is known of the user.

    Raises:
        InputError: the endpoint is not named, or refuses.
    """
    with ThreadPoolExecutor(AT_ONCE) as threads:
        return list(threads.map(_instruction, queries))


def _instruction(query: Query) -> dict[str, str] | None:
    if not len(query.history_ids):
        return None
    dataset = _dataset(_environment("RECIPE_DATA"))
    newest = dataset.item_positions(query.history_ids[-NEWEST:])
    answer = _ask(SEPARATOR.join(dataset.items.label(int(place)) for place in newest))
    return {"scenario": answer["scenario"]}


def _ask(titles: str) -> dict[str, Any]:
    import openai

    schema = {"type": "json_schema", "json_schema": {"name": "instruction", "schema": SCHEMA}}
    try:
        found = _client(_environment("RECIPE_ENDPOINT")).completions.create(
            model=_environment("RECIPE_MODEL"),
            prompt=f"{titles}\n",
            temperature=0,
            max_tokens=64,
            extra_body={"response_format": schema},
        )
    except openai.OpenAIError as error:
        raise InputError(f"RECIPE_ENDPOINT: {error}") from error
    answer: dict[str, Any] = json.loads(found.choices[0].text)
    return answer


@functools.cache
def _client(url: str) -> Any:
    import openai

    return openai.OpenAI(base_url=url, api_key=os.environ.get("RECIPE_TOKEN", "none"))


@functools.cache
def _dataset(folder: str) -> Dataset:
    return Dataset.open(folder)


def _environment(name: str) -> str:
    if not (value := os.environ.get(name)):
        raise InputError(f"{name}: is not set in the environment; see recipes/nearline/README.md")
    return value
