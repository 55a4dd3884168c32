"""Trained models as a service.

    from rayrec.serve import ServeConfig, serving

`engine.service.RecommendationService` answers. May import `pipelines` and what is below it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rayrec.platform.lazy_names import lazy_names

if TYPE_CHECKING:
    from rayrec.serve.config.serve import ServeConfig as ServeConfig
    from rayrec.serve.launch.launch import serving as serving

__all__, __getattr__ = lazy_names(__name__, __file__)
