"""Pictures that are drawn with known tags, and a vector of each: filters with random weights, pooled.

The vectors stand for those of a vision model that a catalog would have; nothing of them is trained.

Axes: I pictures, D numbers of a vector.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch.nn import functional

from rayrec.platform.arrays import Float32Array

COLORS = {
    "red": (205, 40, 40), "orange": (240, 140, 30), "yellow": (240, 220, 60), "green": (50, 150, 60),
    "blue": (50, 90, 200), "purple": (130, 50, 160), "black": (25, 25, 25), "white": (250, 250, 250),
}  # fmt: skip
SHAPES = ("circle", "square", "triangle", "cross", "ring")
COUNTS = ("one", "two", "three", "four")
SIZE = 32


def draw_picture(color: str, shape: str, count: str, draw: random.Random) -> np.ndarray:
    """[SIZE, SIZE, 3] uint8: so many shapes of a color on a gray ground, somewhere in its quarters."""
    from PIL import Image, ImageDraw

    ground = draw.randint(120, 170)
    picture = Image.new("RGB", (SIZE, SIZE), (ground, ground, ground + draw.randint(-10, 10)))
    canvas = ImageDraw.Draw(picture)
    fill = tuple(min(max(one + draw.randint(-18, 18), 0), 255) for one in COLORS[color])
    quarters = draw.sample([(0, 0), (0, 1), (1, 0), (1, 1)], 1 + COUNTS.index(count))
    for row, column in quarters:
        radius = draw.randint(5, 6)
        x, y = (16 * place + 8 + draw.randint(-1, 1) for place in (column, row))
        _draw_shape(canvas, shape, (x, y), radius, fill)
    return np.asarray(picture)


def _draw_shape(canvas: Any, shape: str, at: tuple[int, int], radius: int, fill: tuple[int, ...]) -> None:
    x, y = at
    box = (x - radius, y - radius, x + radius, y + radius)
    if shape == "circle":
        canvas.ellipse(box, fill=fill)
    elif shape == "square":
        canvas.rectangle(box, fill=fill)
    elif shape == "triangle":
        corners = [(x, y - radius), (x - radius, y + radius), (x + radius, y + radius)]
        canvas.polygon(corners, fill=fill)
    elif shape == "cross":
        for wide, high in ((radius, 2), (2, radius)):
            canvas.rectangle((x - wide, y - high, x + wide, y + high), fill=fill)
    else:
        canvas.ellipse(box, outline=fill, width=2)


def vectors_of(pictures: Sequence[np.ndarray], num_filters: int = 96) -> Float32Array:
    """[I, D] means and spreads of what random filters say, standardized over the pictures."""
    generator = torch.Generator().manual_seed(0)
    filters = [torch.randn(num_filters, 3, size, size, generator=generator) for size in (3, 5)]
    found = []
    for start in range(0, len(pictures), 256):
        part = (
            torch.from_numpy(np.stack(pictures[start : start + 256])).float().permute(0, 3, 1, 2) / 255 - 0.5
        )
        said = [functional.conv2d(part, each / each.shape[-1]).relu() for each in filters]
        found.append(
            torch.cat([pooled for each in said for pooled in (each.mean((2, 3)), each.std((2, 3)))], 1)
        )
    vectors_ID = torch.cat(found)
    spread_D = vectors_ID.std(0).clamp(min=1e-6)
    standardized: Float32Array = ((vectors_ID - vectors_ID.mean(0)) / spread_D).numpy()
    return standardized
