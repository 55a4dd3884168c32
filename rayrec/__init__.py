"""RayRec: generative recommendation on Ray.

    import rayrec
    rayrec.prepare(source, "data/mine")
    rayrec.tokenize("data/mine")
    rayrec.train(rayrec.RunConfig.load("configs/run.yaml"), "runs/mine")
    rayrec.evaluate("runs/mine")
    rayrec.Recommender.load("runs/mine")

Each room has a public API of its own: `rayrec.samples`, `rayrec.embeddings`, `rayrec.models`,
`rayrec.pipelines`, `rayrec.rl`, `rayrec.serve`. Names are imported when they are first used.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from rayrec.platform.kernel_cache import choose_kernel_cache
from rayrec.platform.lazy_names import lazy_names
from rayrec.platform.processors import let_idle_threads_sleep

choose_kernel_cache(Path(__file__).parent)  # before anything imports numba, which reads it then
let_idle_threads_sleep()  # before anything imports torch

__version__ = "0.2.0"

if TYPE_CHECKING:
    from rayrec.pipelines.config.run import RunConfig as RunConfig
    from rayrec.pipelines.evaluation.evaluate import evaluate as evaluate
    from rayrec.pipelines.inference.answers import Query as Query
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

_ROOMS = ("adapters", "embeddings", "models", "pipelines", "platform", "rl", "samples", "serve")
_names, __getattr__ = lazy_names(__name__, __file__, _ROOMS)
__all__ = ["__version__", *_names]
