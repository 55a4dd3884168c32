"""Vectors to quantize: as item vectors are, of length one, in clusters, with directions of unequal weight."""

import numpy as np
import torch


def item_like_vectors(num_items=600, dim=16, seed=0, scale=1.0, num_clusters=12):
    generator = torch.Generator().manual_seed(seed)
    noise_ID = torch.randn(num_items, dim, generator=generator) / torch.arange(1, dim + 1).sqrt()
    centers = torch.randn(num_clusters, dim, generator=generator)
    cluster_I = torch.randint(num_clusters, (num_items,), generator=generator)
    return torch.nn.functional.normalize(noise_ID + centers[cluster_I], dim=1) * scale


def perplexity(codes_I):
    counts = np.bincount(codes_I)
    share = counts[counts > 0] / counts.sum()
    return float(np.exp(-(share * np.log(share)).sum()))
