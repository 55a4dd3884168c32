"""RayRec: generative recommendation on Ray.

    import rayrec
    rayrec.prepare(source, "data/mine")
    rayrec.tokenize("data/mine")
    rayrec.train(rayrec.RunConfig.load("configs/run.yaml"), "runs/mine")
    rayrec.evaluate("runs/mine")
    rayrec.Recommender.load("runs/mine")

Names are imported when they are first used: `rayrec.models` alone needs torch and numpy, nothing else.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_HOMES = {
    "InputError": "rayrec.platform.errors",
    "PrepareConfig": "rayrec.samples.config",
    "prepare": "rayrec.samples.prepare",
    "Dataset": "rayrec.samples.dataset",
    "TokenizeConfig": "rayrec.pipelines.tokenize",
    "tokenize": "rayrec.pipelines.tokenize",
    "RunConfig": "rayrec.pipelines.config",
    "train": "rayrec.pipelines.train",
    "evaluate": "rayrec.pipelines.evaluate",
    "Recommender": "rayrec.pipelines.recommender",
    "Query": "rayrec.pipelines.recommender",
    "ServeConfig": "rayrec.serve.config",
    "serving": "rayrec.serve.launch",
}
"""Public name -> module that defines it."""

__all__ = ["__version__", *_HOMES]

if TYPE_CHECKING:
    from rayrec.pipelines.config import RunConfig as RunConfig
    from rayrec.pipelines.evaluate import evaluate as evaluate
    from rayrec.pipelines.recommender import Query as Query
    from rayrec.pipelines.recommender import Recommender as Recommender
    from rayrec.pipelines.tokenize import TokenizeConfig as TokenizeConfig
    from rayrec.pipelines.tokenize import tokenize as tokenize
    from rayrec.pipelines.train import train as train
    from rayrec.platform.errors import InputError as InputError
    from rayrec.samples.config import PrepareConfig as PrepareConfig
    from rayrec.samples.dataset import Dataset as Dataset
    from rayrec.samples.prepare import prepare as prepare
    from rayrec.serve.config import ServeConfig as ServeConfig
    from rayrec.serve.launch import serving as serving


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'rayrec' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
