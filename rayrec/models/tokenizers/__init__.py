"""Semantic IDs: from item vectors to tuples of codes, and the registry that keeps them."""

from rayrec.models.tokenizers.collisions import COLLISION_POLICIES
from rayrec.models.tokenizers.fit import fit_registry
from rayrec.models.tokenizers.registry import SemanticIdRegistry
from rayrec.models.tokenizers.rq_kmeans import ResidualKMeans

__all__ = ["COLLISION_POLICIES", "ResidualKMeans", "SemanticIdRegistry", "fit_registry"]
