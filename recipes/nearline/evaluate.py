"""Figures of the near-line layer: what it covers, how fresh it is, and what recommendations gain.

python -m recipes.nearline.evaluate runs/recipes/nearline

language model behind OpenAI's API ◄── titles ── `rayrec nearline` ─► products ─► POST /v1/recommend
                                                   ▲ all users once, then the events that come
"""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from fastapi.testclient import TestClient

from rayrec.pipelines.metrics.text_metrics import mean
from rayrec.pipelines.nearline.config import NearlineConfig
from rayrec.platform.console import log
from rayrec.serve.app.loading import load_api
from rayrec.serve.config.events import EventsConfig
from rayrec.serve.config.nearline import NearlineReadConfig
from rayrec.serve.config.serve import ServeConfig
from rayrec.serve.language.config import ModelsConfig
from rayrec.serve.launch.language import serving_models
from rayrec.serve.launch.nearline import NearlineJob, NearlineLoop
from rayrec.serve.web.metrics import PrometheusMeter
from recipes.shared import Figures, better, rayrec, read_lines

FUNCTION = "recipes.nearline.instruct:instructions"
K, NUM_FRESH = 10, 40


def evaluate(folder: Path) -> None:
    """Write instructions of all users, judge them, print the figures and write them to `figures.json`."""
    users = read_lines(folder / "future.jsonl")
    with ExitStack() as stack:
        stack.enter_context(_language_model(folder))
        products = folder / "products"
        options = ("--products", "instructions", "--function", FUNCTION, "--once", "--single-process")
        rayrec("nearline", folder / "run", "--store", products, *options)
        plain = stack.enter_context(_service(folder, products, reads=False))
        near = stack.enter_context(_service(folder, products, reads=True))
        hits = {
            "without instructions": _hits(plain, users),
            "with those of the language model": _hits(near, users),
            "with the true ones": _hits(plain, users, is_told=True),
        }
        figures = Figures("Near-line instructions")
        for name, hits_U in hits.items():
            figures.add(name, {f"recall@{K}": mean(hits_U)})
        covered, fresh_s, right = _followed(folder, products, near, users[:NUM_FRESH])
        figures.add("users with an instruction", {"coverage": mean(covered)})
        figures.add(
            "after new events",
            {
                "seconds without debounce": mean(fresh_s),
                "lists of the new theme": mean(right),
            },
        )
        said = better(
            hits["with those of the language model"], hits["without instructions"], "with", "without"
        )
    figures.write(folder / "figures.json", said=[said])
    log.print(said, highlight=False)


@contextmanager
def _language_model(folder: Path) -> Iterator[None]:
    """It answers at the endpoint that `instruct` asks, as `rayrec maas up` would serve it."""
    model = {"name": "instructions", "run": str(folder / "language" / "run"), "context_length": 128}
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    config = ServeConfig.parse({"single_process": True, "port": port})
    with serving_models(ModelsConfig.parse({"models": [model]}), config) as url:
        os.environ["RECIPE_ENDPOINT"], os.environ["RECIPE_MODEL"] = f"{url}/v1", "instructions"
        os.environ["RECIPE_DATA"] = str((folder / "data").resolve())
        yield


@contextmanager
def _service(folder: Path, products: Path, reads: bool) -> Iterator[TestClient]:
    """The recommender's service, with an event store; with near-line products or without."""
    nearline = NearlineReadConfig(store=str(products), products=("instructions",)) if reads else None
    name = "events" if reads else "no-events"
    config = ServeConfig(
        page=False, events=EventsConfig(store=str(folder / name), by_item=True), nearline=nearline
    )
    with TestClient(load_api(folder / "run", config, PrometheusMeter())) as client:
        yield client


def _hits(client: TestClient, users: Sequence[dict[str, Any]], is_told: bool = False) -> np.ndarray:
    """[U] whether the next product of each user is among the best."""
    found = []
    for user in users:
        told = {"instruction": {"scenario": user["theme"]}} if is_told else {}
        answer = client.post("/v1/recommend", json={"user_id": user["user_id"], "k": K} | told).json()
        found.append(user["item_id"] in [item["item_id"] for item in answer["items"]])
    return np.array(found, dtype=np.float64)


def _followed(
    folder: Path, products: Path, client: TestClient, users: Sequence[dict[str, Any]]
) -> tuple[list[bool], list[float], list[bool]]:
    """(whether each user has an instruction, seconds from new events to the next one, whether most items of
    the list are of the new theme). More events of a user are not waited for (`debounce_s`).

    The events are notes of another user, who planned something else; their order is that of the file.
    """
    job = NearlineJob(
        str(folder / "run"),
        str(products),
        str(folder / "events"),
        NearlineConfig(products=("instructions",), function=FUNCTION, debounce_s=0),
    )
    loop = NearlineLoop(job)
    try:
        loop.finish()
        found = loop.worker.coverage()
        covered = [place < found.num_valid for place in range(found.num_users)]
        seconds, right = [], []
        for user, other in zip(users, [*users[1:], users[0]], strict=True):
            began = time.time()
            for item in _notes_of(folder, other["user_id"]):
                event = {"user_id": user["user_id"], "item_id": item, "timestamp": int(time.time())}
                client.post("/v1/events", json=event).raise_for_status()
            while not loop.step():
                pass
            seconds.append(time.time() - began)
            answer = client.post("/v1/recommend", json={"user_id": user["user_id"], "k": K}).json()
            themes = [item["item_id"].rpartition("-")[0] for item in answer["items"]]
            right.append(themes.count(other["theme"]) > K / 2)
        return covered, seconds, right
    finally:
        loop.close()


def _notes_of(folder: Path, user: str) -> list[str]:
    """The last two items of a user: notes."""
    import pandas as pd

    events = pd.read_parquet(folder / "log" / "interactions.parquet")
    return list(events[events["user_id"] == user].sort_values("timestamp")["item_id"].iloc[-2:])


if __name__ == "__main__":
    evaluate(Path(sys.argv[1]))
