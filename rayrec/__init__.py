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

__version__ = "0.2.0"

_HOMES = {
    "InputError": "rayrec.platform.errors",
    "PrepareConfig": "rayrec.samples.base.config",
    "prepare": "rayrec.samples.prepare.prepare",
    "Dataset": "rayrec.samples.dataset.dataset",
    "TokenizeConfig": "rayrec.pipelines.semantic_ids.tokenization",
    "tokenize": "rayrec.pipelines.semantic_ids.tokenization",
    "RunConfig": "rayrec.pipelines.config.run",
    "train": "rayrec.pipelines.training.train",
    "in_process": "rayrec.pipelines.training.placements",
    "on_ray": "rayrec.pipelines.training.placements",
    "evaluate": "rayrec.pipelines.evaluation.evaluate",
    "Recommender": "rayrec.pipelines.inference.recommender",
    "Query": "rayrec.pipelines.inference.recommender",
    "ServeConfig": "rayrec.serve.config.serve",
    "serving": "rayrec.serve.launch.launch",
}
"""Public name -> module that defines it."""

__all__ = ["__version__", *_HOMES]

if TYPE_CHECKING:
    from rayrec.pipelines.config.run import RunConfig as RunConfig
    from rayrec.pipelines.evaluation.evaluate import evaluate as evaluate
    from rayrec.pipelines.inference.recommender import Query as Query
    from rayrec.pipelines.inference.recommender import Recommender as Recommender
    from rayrec.pipelines.semantic_ids.tokenization import TokenizeConfig as TokenizeConfig
    from rayrec.pipelines.semantic_ids.tokenization import tokenize as tokenize
    from rayrec.pipelines.training.placements import in_process as in_process
    from rayrec.pipelines.training.placements import on_ray as on_ray
    from rayrec.pipelines.training.train import train as train
    from rayrec.platform.errors import InputError as InputError
    from rayrec.samples.base.config import PrepareConfig as PrepareConfig
    from rayrec.samples.dataset.dataset import Dataset as Dataset
    from rayrec.samples.prepare.prepare import prepare as prepare
    from rayrec.serve.config.serve import ServeConfig as ServeConfig
    from rayrec.serve.launch.launch import serving as serving


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'rayrec' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
