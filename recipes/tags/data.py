"""Items with titles, most of them with a picture, and their tags: records of kind `prompt`.

    title ───────────────────────────────────────────────► prompt ─► ["wool", "winter", "red", "ring", "two"]
    picture ─► vector ─► codes of residual k-means ────────┘
                 <a_7><b_21><c_3> ...

What a picture shows stands in titles of items without one, and seldom in others. The codes are those that
`rayrec tokenize` gives to items: the model reads them as words of their own.

Axes: I items, D numbers of a vector, L codes.
"""

from __future__ import annotations

import json
import random
from pathlib import Path

import numpy as np
import torch

from rayrec.models.tokenizers.rq_kmeans import ResidualKMeans
from rayrec.samples.text.tokens import TextTokenizer
from recipes.shared import write_lines, write_tokenizer
from recipes.tags.pictures import COLORS, COUNTS, SHAPES, draw_picture, vectors_of

MATERIALS = {
    "wool": ("woolen", "knitted of merino", "lambswool", "warm wool"),
    "cotton": ("cotton", "soft jersey", "pure cotton", "poplin"),
    "leather": ("leather", "genuine hide", "suede", "nappa"),
    "silk": ("silk", "silken", "fine satin", "mulberry silk"),
    "linen": ("linen", "woven of flax", "airy linen", "stonewashed flax"),
    "denim": ("denim", "sturdy jeans fabric", "indigo twill", "raw denim"),
}
SEASONS = {
    "spring": ("for the first warm days", "spring collection", "when the trees bloom", "for easter"),
    "summer": ("for the beach", "summer sale", "for hot days", "holiday favorite"),
    "autumn": ("for rainy walks", "autumn collection", "when leaves fall", "for windy days"),
    "winter": ("for the snow", "winter collection", "keeps you warm in the frost", "for skiing"),
}
THINGS = ("cushion", "scarf", "shirt", "tote bag", "cap", "blanket", "dress", "pouch", "jacket", "tie")
TAGS = (*MATERIALS, *SEASONS, *COLORS, *SHAPES, *COUNTS)
SCHEMA = {"type": "array", "items": {"enum": list(TAGS)}, "minItems": 1, "maxItems": 5}
"""Of answers. The same stands in run.yaml."""
NUM_LEVELS, NUM_CODES = 8, 32
_WITHOUT = 0.2
"""Share of items without a picture."""


def make(folder: Path, small: bool, seed: int = 0) -> None:
    """Write records, the tokenizer, and the vectors of pictures."""
    sizes = {"train": 300, "valid": 40, "test": 40} if small else {"train": 8_000, "valid": 200, "test": 800}
    draw = random.Random(seed)
    titles, tags, pictures = [], [], []
    for _ in range(sum(sizes.values())):
        chosen = [draw.choice(sorted(kind)) for kind in (MATERIALS, SEASONS, COLORS, SHAPES, COUNTS)]
        has_picture = draw.random() >= _WITHOUT
        titles.append(_title(chosen, has_picture, draw))
        tags.append(chosen)
        pictures.append(draw_picture(chosen[2], chosen[3], chosen[4], draw) if has_picture else None)
    at_I = np.array([place for place, picture in enumerate(pictures) if picture is not None])
    known_ID = vectors_of([pictures[place] for place in at_I])
    vectors_ID = np.zeros((len(titles), known_ID.shape[1]), dtype=np.float32)
    vectors_ID[at_I] = known_ID
    np.save(folder / "vectors.npy", vectors_ID)
    codes_IL = _codes(known_ID, at_I < sizes["train"])

    read = [*titles[: sizes["train"]], *(" ".join(chosen) for chosen in tags[: sizes["train"]])]
    write_tokenizer(folder / "base", read, 600, ['["', '", "', '"]'])
    tokenizer = TextTokenizer.extended(folder / "base", [NUM_CODES] * NUM_LEVELS)
    tokenizer.save(folder / "tokenizer")
    seen = {
        int(place): tokenizer.code_text(codes) for place, codes in zip(at_I, codes_IL.tolist(), strict=True)
    }
    start = 0
    for name, count in sizes.items():
        records = [
            {"prompt": f"{titles[place]} {seen.get(place, '')}", "completion": json.dumps(tags[place])}
            for place in range(start, start + count)
        ]
        write_lines(folder / "text" / f"{name}.jsonl", records)
        start += count


def _title(chosen: list[str], has_picture: bool, draw: random.Random) -> str:
    material, season, color, shape, count = chosen
    words = [draw.choice(MATERIALS[material]), draw.choice(THINGS)]
    if not has_picture:
        plural = shape if count == "one" else {"cross": "crosses"}.get(shape, f"{shape}s")
        words.append(f"with {count} {color} {plural}")
    elif draw.random() < 0.2:
        words.append(f"in {color}")
    said = draw.choice(SEASONS[season])
    return f"{said}: {' '.join(words)}" if draw.random() < 0.3 else f"{' '.join(words)}, {said}"


def _codes(vectors_ID: np.ndarray, is_train_I: np.ndarray) -> np.ndarray:
    """[I, L], by codebooks of the training items."""
    quantizer = ResidualKMeans(NUM_LEVELS, NUM_CODES).fit(torch.from_numpy(vectors_ID[is_train_I]))
    codes_IL: np.ndarray = quantizer.encode(torch.from_numpy(vectors_ID)).numpy()
    return codes_IL
