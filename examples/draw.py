"""Plots a generative recommender's predictions for one user.

    python examples/draw.py RUN [--user USER] [--out PICTURE]

RUN is the folder of a trained run (`make demo` leaves one in runs/demo). The picture shows the map of its
semantic IDs, the user's history on it, and how the probability of the next item splits code by code down to
the recommended titles. Cells between `# %%` run one by one in an editor that supports notebooks.

Needs matplotlib: pip install 'rayrec[bench]'.
"""

# %% Every item has a probability; a prefix of codes has the sum of all items below it.
from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import matplotlib.colors
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import PathPatch
from matplotlib.path import Path as Curve

import rayrec
from rayrec.models import ItemTokenizer, SemanticIdRegistry
from rayrec.pipelines import Query, registry_folder
from rayrec.platform import InputError

NUM_RECOMMENDED, NUM_SHOWN, NUM_LABELS = 12, 10, 14
INK, QUIET, PAPER, ACCENT = "#22262e", "#9aa1ad", "#fbfaf7", "#c2410c"


@dataclass(frozen=True)
class Scene:
    """One user, a catalog and what the model says."""

    title: str
    codes_IL: np.ndarray
    place_I2: np.ndarray
    """Where each item is on the map."""
    titles_I: Sequence[str]
    counts_I: np.ndarray
    history: list[int]
    """Catalog positions, oldest first."""
    probability_I: np.ndarray
    """Of each item to be the next one; those of the history left out."""


# %% From a run to a scene: the public interface of the recommender, and the registry beside it.
def load(run: Path, user: str | None) -> Scene:
    """A user of the test split and the probabilities of all items."""
    recommender = rayrec.Recommender.load(run)
    items = recommender.dataset.items
    folder = Path(registry_folder(rayrec.RunConfig.load(run / "config.yaml")))
    registry = SemanticIdRegistry.load(folder)
    users = recommender.dataset.users.to_pydict()
    if user is not None and user not in users["user_key"]:
        raise SystemExit(f"{run}: its data set has no user {user!r}")
    history_of = dict(zip(*_histories(recommender.dataset), strict=True))
    # Without a wish: somebody with a history that fits the picture.
    ids = users["user_id"] if user is None else [users["user_id"][users["user_key"].index(user)]]
    user_id = max(ids, key=lambda who: -abs(len(history_of.get(who, ())) - 25))
    history_ids = np.array(history_of[user_id])
    ranked = recommender.recommend([Query(history_ids, user_id)], k=len(items))[0]
    position_of = {key: position for position, key in enumerate(items.keys.to_pylist())}
    probability_I = np.zeros(len(items))
    for recommendation in ranked:
        probability_I[position_of[recommendation.item_key]] = np.exp(recommendation.score)
    return Scene(
        title=f"user {users['user_key'][users['user_id'].index(user_id)]}",
        codes_IL=registry.codes_IL.astype(np.int64),
        place_I2=_map(folder, registry),
        titles_I=[title or key for title, key in zip(items.titles.to_pylist(), position_of, strict=True)],
        counts_I=items.train_counts_I,
        history=recommender.dataset.item_positions(history_ids).tolist(),
        probability_I=probability_I / probability_I.sum(),
    )


def _histories(dataset: rayrec.Dataset) -> tuple[list[int], list[list[int]]]:
    import pyarrow.parquet as pq

    table = pq.read_table(dataset.root / "history.parquet", columns=["user_id", "item_ids"])
    return table["user_id"].to_pylist(), table["item_ids"].to_pylist()


def _map(folder: Path, registry: SemanticIdRegistry) -> np.ndarray:
    """[I, 2] principal components of what the codes keep of each item."""
    codes_IL = registry.codes_IL[:, : registry.num_codebooks]
    if (folder / "tokenizer.json").exists():
        vectors_ID = ItemTokenizer.load(folder).decode(codes_IL)
    else:  # IDs of somebody else say no more than which codes are the same
        same_L = [
            np.eye(size)[codes_I] for size, codes_I in zip(registry.level_sizes, codes_IL.T, strict=False)
        ]
        vectors_ID = np.concatenate([same / 2**level for level, same in enumerate(same_L)], axis=1)
    centered_ID = vectors_ID - np.mean(vectors_ID, axis=0)
    _, _, directions_DD = np.linalg.svd(centered_ID, full_matrices=False)
    # Ranks spread what would be a crowd in the middle.
    ranks_I2 = (centered_ID @ directions_DD[:2].T).argsort(axis=0).argsort(axis=0)
    jitter_I2 = np.random.default_rng(0).normal(scale=0.004, size=ranks_I2.shape)
    place_I2: np.ndarray = ranks_I2 / len(ranks_I2) + jitter_I2
    return place_I2


# %% The map: items of one first code share a color; the user's way over it ends at the recommendations.
def draw_map(axes: Axes, scene: Scene) -> None:
    first_I = scene.codes_IL[:, 0]
    sizes_K = np.bincount(first_I)
    center_K2 = np.stack([np.bincount(first_I, weights=xs) for xs in scene.place_I2.T], axis=1)
    center_K2 = center_K2 / np.maximum(sizes_K, 1)[:, None]
    color = _colors(center_K2)
    axes.scatter(*scene.place_I2.T, s=6 + 1.5 * np.sqrt(scene.counts_I), c=color[first_I], alpha=0.45, lw=0)
    labeled: list[np.ndarray] = []
    for code in np.argsort(-sizes_K):
        apart = all(abs(center_K2[code] - other) @ (1.0, 4.0) > 0.3 for other in labeled)
        if len(labeled) < NUM_LABELS and apart:
            labeled.append(center_K2[code])
            members = np.flatnonzero(first_I == code)
            best = members[scene.counts_I[members].argmax()]
            axes.text(
                *center_K2[code],
                _short(scene.titles_I[best], 24),
                fontsize=6.5,
                ha="center",
                color=INK,
                bbox={"facecolor": PAPER, "alpha": 0.8, "lw": 0, "pad": 1.2},
            )
    way = scene.place_I2[scene.history[-NUM_SHOWN:]]
    axes.plot(*way.T, color=INK, lw=0.8, alpha=0.6, zorder=3)
    axes.scatter(*way.T, s=62, color=INK, zorder=4)
    for number, (x, y) in enumerate(way, start=1):
        axes.text(x, y, str(number), color=PAPER, fontsize=6.5, ha="center", va="center", zorder=5)
    recommended = np.argsort(-scene.probability_I)[:NUM_RECOMMENDED]
    stars = scene.place_I2[recommended]
    axes.scatter(*stars.T, s=110, marker="*", color=ACCENT, edgecolors=PAPER, lw=0.6, zorder=6)
    axes.set_title("The map of codes", loc="left", fontsize=11, color=INK)
    axes.text(
        0.0, -0.03, "numbers: the user's last items;  stars: what is recommended", fontsize=7, color=QUIET
    )
    axes.axis("off")


def _colors(center_K2: np.ndarray) -> np.ndarray:
    """[K, 3] a color for each code: neighbors on the map look alike."""
    x_K, y_K = (center_K2 - np.median(center_K2, axis=0)).T
    hue_K = np.arctan2(y_K, x_K) / (2 * np.pi) % 1.0
    radius_K = np.hypot(x_K, y_K)
    strength_K = 0.35 + 0.6 * radius_K / radius_K.max()
    colors: np.ndarray = matplotlib.colors.hsv_to_rgb(
        np.stack([hue_K, strength_K, 0.95 - 0.25 * strength_K], axis=1)
    )
    return colors


def draw_history(axes: Axes, scene: Scene) -> None:
    axes.set_title(f"What {scene.title} had", loc="left", fontsize=11, color=INK)
    shown = scene.history[-NUM_SHOWN:]
    for number, item in enumerate(shown, start=1):
        y = 1.0 - (number - 0.5) / NUM_SHOWN
        axes.text(0.0, y, f"{number}", fontsize=8, color=QUIET, va="center")
        axes.text(0.06, y, _short(scene.titles_I[item], 44), fontsize=8.5, color=INK, va="center")
        axes.text(1.0, y, _tuple(scene.codes_IL[item]), fontsize=7.5, color=QUIET, va="center", ha="right")
    axes.set_xlim(0, 1)
    axes.set_ylim(0, 1)
    axes.axis("off")


# %% The beams: a ribbon is as wide as the probability that flows through it.
def draw_beams(axes: Axes, scene: Scene) -> None:
    depth = scene.codes_IL.shape[1]
    best = np.argsort(-scene.probability_I)[:NUM_RECOMMENDED]
    best = best[np.lexsort(scene.codes_IL[best].T[::-1])]  # neighbors in the trie, so that nothing crosses
    mass: dict[tuple[int, ...], float] = defaultdict(float)
    for codes, probability in zip(scene.codes_IL.tolist(), scene.probability_I, strict=True):
        for length in range(depth + 1):
            mass[tuple(codes[:length])] += float(probability)
    leaf_y = {int(item): 1.0 - (row + 0.5) / len(best) for row, item in enumerate(best)}
    below: dict[tuple[int, ...], list[float]] = defaultdict(list)
    for item in best:
        for length in range(depth + 1):
            below[tuple(scene.codes_IL[item, :length].tolist())].append(leaf_y[int(item)])
    height = {prefix: float(np.mean(ys)) for prefix, ys in below.items()}
    widest = max(mass[prefix] for prefix in below if prefix)
    for prefix in sorted(below, key=len):
        if not prefix:
            continue
        start, end = (len(prefix) - 1, height[prefix[:-1]]), (len(prefix), height[prefix])
        width = 1.0 + 22.0 * mass[prefix] / widest
        _ribbon(axes, start, end, width)
    for prefix, y in height.items():
        if not prefix:
            axes.text(-0.05, y, "history", ha="right", va="center", fontsize=9, color=INK)
            continue
        axes.text(
            len(prefix),
            y,
            f"{prefix[-1]}",
            ha="center",
            va="center",
            fontsize=7.5,
            color=INK,
            bbox={"boxstyle": "round,pad=0.28", "facecolor": PAPER, "edgecolor": QUIET, "lw": 0.6},
            zorder=5,
        )
        if len(prefix) < depth:
            axes.text(
                len(prefix), y - 0.026, f"{mass[prefix]:.1%}", ha="center", va="center", fontsize=6.5,
                color=QUIET, zorder=5,
            )  # fmt: skip
    for item, y in leaf_y.items():
        axes.text(depth + 0.16, y, _short(scene.titles_I[item], 31), fontsize=9, color=INK, va="center")
        axes.text(
            depth + 2.3, y, f"{scene.probability_I[item]:.2%}", fontsize=9, color=ACCENT, va="center",
            ha="right",
        )  # fmt: skip
    total = sum(scene.probability_I[item] for item in best)
    axes.set_title("From code to code to the next item", loc="left", fontsize=11, color=INK)
    for length in range(1, depth + 1):
        axes.text(length, 1.02, f"code {length}", ha="center", fontsize=8, color=QUIET)
    axes.text(
        depth + 2.3, -0.02, f"{total:.1%} of the probability", fontsize=8, color=QUIET, ha="right", va="top"
    )
    axes.set_xlim(-0.6, depth + 2.35)
    axes.set_ylim(-0.05, 1.05)
    axes.axis("off")


def _ribbon(axes: Axes, start: tuple[float, float], end: tuple[float, float], width: float) -> None:
    (x0, y0), (x1, y1) = start, end
    middle = (x0 + x1) / 2
    curve = Curve(
        [(x0, y0), (middle, y0), (middle, y1), (x1, y1)],
        [Curve.MOVETO, Curve.CURVE4, Curve.CURVE4, Curve.CURVE4],
    )
    patch = PathPatch(curve, facecolor="none", edgecolor=ACCENT, lw=width, alpha=0.28, capstyle="round")
    axes.add_patch(patch)


def _short(text: str, length: int) -> str:
    return text if len(text) <= length else text[: length - 1].rstrip() + "…"


def _tuple(codes_L: np.ndarray) -> str:
    return " · ".join(str(code) for code in codes_L.tolist())


# %% All of it together.
def draw(scene: Scene, out: Path) -> None:
    """Write the picture."""
    figure = Figure(figsize=(17, 10), facecolor=PAPER)
    grid = figure.add_gridspec(
        2,
        2,
        width_ratios=(1.0, 1.35),
        height_ratios=(2.1, 1.0),
        left=0.02,
        right=0.985,
        top=0.93,
        bottom=0.03,
        wspace=0.04,
        hspace=0.12,
    )
    draw_map(figure.add_subplot(grid[0, 0]), scene)
    draw_history(figure.add_subplot(grid[1, 0]), scene)
    draw_beams(figure.add_subplot(grid[:, 1]), scene)
    figure.savefig(out, dpi=130, facecolor=PAPER)


def main() -> None:
    parser = argparse.ArgumentParser(description="Draw what a generative run recommends, and how.")
    parser.add_argument("run", type=Path)
    parser.add_argument("--user", help="as the source of the data writes it; without, one is chosen")
    parser.add_argument("--out", type=Path, help="picture to write; picture.png in RUN if not given")
    arguments = parser.parse_args()
    try:
        scene = load(arguments.run, arguments.user)
    except InputError as error:
        parser.exit(2, f"draw.py: {error}\n")
    picture = arguments.out or arguments.run / "picture.png"
    draw(scene, picture)
    print(f"wrote {picture}")


if __name__ == "__main__":
    main()
