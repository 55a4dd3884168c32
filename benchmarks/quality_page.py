"""benchmarks/QUALITY.md from the records of benchmarks/quality/: what was measured and what was published."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any, Literal

from rayrec.pipelines.evaluation.evaluate_recommender import (
    MODEL,
    MODEL_UNMASKED,
    POPULARITY,
    POPULARITY_UNMASKED,
)
from rayrec.platform.checkout import CHECKOUT

RECORDS = CHECKOUT / "benchmarks" / "quality"
RL_RECORDS = RECORDS / "rl"
PAGE = CHECKOUT / "benchmarks" / "QUALITY.md"
METRICS = ("recall@5", "recall@10", "recall@50", "ndcg@5", "ndcg@10", "ndcg@50")


@dataclass(frozen=True)
class DataSet:
    """A published log."""

    title: str
    source: str
    """Its folder among the sources."""
    prepare: Mapping[str, Any] = field(default_factory=dict)
    """Settings of `rayrec prepare` besides the order of ties."""


@dataclass(frozen=True)
class Published:
    """A figure of somebody else: events of a day in file order, a split of their own making."""

    dataset: str
    recall_at_10: float
    where: str


@dataclass(frozen=True)
class Method:
    """One recipe, the same for every data set."""

    title: str
    config: str
    vectors: Literal["interactions", "text", "both"] | None = None
    """What the semantic IDs are made of, where there are any."""
    max_codebook_size: int = 256
    published: tuple[Published, ...] = ()


DATASETS = {
    "beauty": DataSet("Amazon Beauty (2014, 5-core): 22,363 users, 12,101 items", "amazon14-beauty"),
    "sports": DataSet("Amazon Sports (2014, 5-core): 35,598 users, 18,357 items", "amazon14-sports"),
    "movielens": DataSet("MovieLens 100K: 943 users, 1,682 items", "movielens-100k"),
}
_TIGER_TABLE = "TIGER, arXiv:2305.05065, table 1"
METHODS = {
    "sasrec-bce": Method(
        "SASRec, BCE with one negative",
        "beauty-sasrec-bce",
        published=(
            Published("beauty", 0.0605, _TIGER_TABLE),
            Published("sports", 0.0350, _TIGER_TABLE),
        ),
    ),
    "sasrec": Method("SASRec, full softmax", "beauty-sasrec"),
    "hstu": Method(
        "HSTU, full softmax",
        "beauty-hstu",
        published=(Published("beauty", 0.0708, "documentation of github.com/phonism/genrec"),),
    ),
    "tiger": Method(
        "encoder-decoder over codes (TIGER)",
        "beauty-tiger",
        "both",
        published=(
            Published("beauty", 0.0648, _TIGER_TABLE),
            Published("sports", 0.0400, _TIGER_TABLE),
        ),
    ),
    "lazy": Method("lazy decoder, IDs from interactions", "beauty-lazy", "interactions"),
    "lazy-text": Method("lazy decoder, IDs from text and interactions", "beauty-lazy", "both"),
    "generative": Method(
        "prefix decoder, IDs from text and interactions", "beauty-generative", "both", max_codebook_size=512
    ),
}


def write_page() -> None:
    """The table anew."""
    records = [json.loads(path.read_text()) for path in sorted(RECORDS.glob("*.json"))]
    rewarded = [json.loads(path.read_text()) for path in sorted(RL_RECORDS.glob("*.json"))]
    PAGE.write_text(page(records, rewarded))


def page(records: Sequence[dict[str, Any]], rewarded: Sequence[dict[str, Any]] = ()) -> str:
    """The whole page.

    Args:
        rewarded: records of reinforcement learning.
    """
    by_table: dict[tuple[str, str], list[dict[str, Any]]] = defaultdict(list)
    for record in records:
        by_table[record["dataset"], record["ties"]].append(record)
    parts = [_HEAD]
    for name, dataset in DATASETS.items():
        parts.append(f"## {dataset.title}\n")
        for ties in ("shuffled", "file order"):
            parts.append(f"### Events of one time {_TIES[ties]}\n")
            parts.append(_table(name, by_table[name, ties]))
    if rewarded:
        parts += [_RL_HEAD, _rl_table(rewarded)]
    return "\n".join(parts).rstrip() + "\n"


def _rl_table(records: Sequence[dict[str, Any]]) -> str:
    """Changes against the supervised policy, method by method."""
    titles = [f"{name}, {who}" for who in _RL_USERS.values() for name in RL_METRICS]
    lines = [
        "| | " + " | ".join([*titles, "distance of lists", "coverage"]) + " |",
        "| --- |" + " --- |" * (len(titles) + 2),
    ]
    for method, title in RL_METHODS.items():
        seeds = [record for record in records if record["method"] == method]
        if not seeds:
            continue
        cells = [f"{title} ({len(seeds)} {'seed' if len(seeds) == 1 else 'seeds'})"]
        cells += [
            _change([seed[who]["change"][metric] for seed in seeds])
            for who in _RL_USERS
            for metric in RL_METRICS
        ]
        cells += [_diversity(seeds, name) for name in ("distance", "coverage")]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def _change(seeds: Sequence[Mapping[str, float]]) -> str:
    """Mean over the seeds of the change; the lowest and the highest bound of any seed's interval."""
    mean = sum(seed["value"] for seed in seeds) / len(seeds)
    low, high = min(seed["low"] for seed in seeds), max(seed["high"] for seed in seeds)
    return f"{mean:+.1%} ({low:+.1%} to {high:+.1%})"


def _diversity(seeds: Sequence[dict[str, Any]], name: str) -> str:
    before, after = (
        sum(seed["all"]["diversity"][when][name] for seed in seeds) / len(seeds)
        for when in ("before", "after")
    )
    return f"{before:.3f} → {after:.3f}"


def _table(dataset: str, records: Sequence[dict[str, Any]]) -> str:
    if not records:
        return "Not measured yet.\n"
    lines = [
        "| | "
        + " | ".join(METRICS)
        + " | recall@10, seen kept | parameters | training | published recall@10 |",
        "| --- |" + " --- |" * (len(METRICS) + len(_COLUMNS)),
    ]
    first = records[0]["results"]
    lines.append(_line("most popular", [first[POPULARITY]], [first[POPULARITY_UNMASKED]], "", "", ""))
    for name, method in METHODS.items():
        seeds = [record for record in records if record["method"] == name]
        if not seeds:
            lines.append(f"| {method.title} | not measured yet |" + " |" * (len(METRICS) + 3))
            continue
        title = method.title + (f" ({len(seeds)} seeds)" if len(seeds) > 1 else "")
        lines.append(
            _line(
                title,
                [record["results"][MODEL] for record in seeds],
                [record["results"][MODEL_UNMASKED] for record in seeds],
                f"{seeds[0]['num_parameters'] / 1e6:.2f} M",
                _training(seeds),
                "; ".join(f"{p.recall_at_10} ({p.where})" for p in method.published if p.dataset == dataset),
            )
        )
    return "\n".join(lines) + "\n"


def _training(seeds: Sequence[Mapping[str, Any]]) -> str:
    """Medians over the seeds: minutes, and those of processors where records have them."""
    text = f"{median(seed['training_minutes'] for seed in seeds):.1f} min"
    processors = [seed["processor_minutes"] for seed in seeds if "processor_minutes" in seed]
    return f"{text} ({median(processors):.1f} of processors)" if processors else text


def _line(
    title: str,
    masked: Sequence[Mapping[str, Mapping[str, float]]],
    unmasked: Sequence[Mapping[str, Mapping[str, float]]],
    *rest: str,
) -> str:
    cells = [title, *(_figure(masked, metric) for metric in METRICS), _figure(unmasked, "recall@10"), *rest]
    return "| " + " | ".join(cells) + " |"


def _figure(seeds: Sequence[Mapping[str, Mapping[str, float]]], metric: str) -> str:
    """Mean over the seeds, and half the interval over users; with several seeds, their range too."""
    values = [seed[metric]["value"] for seed in seeds]
    half = sum(seed[metric]["high"] - seed[metric]["low"] for seed in seeds) / len(seeds) / 2
    text = f"{sum(values) / len(values):.4f} ± {half:.4f}"
    return text if len(values) == 1 else f"{text} [{min(values):.4f}, {max(values):.4f}]"


RL_METRICS = ("reward", "recall@1", "recall@10", "recall@50", "ndcg@10")
_RL_USERS = {"all": "all users", "held_out": "users held out"}
RL_METHODS = {
    "sa_gcpo": "SA-GCPO",
    "grpo": "GRPO",
    "gspo": "GSPO",
    "control": "control: the anchor alone, no rewards",
}
_RL_HEAD = """## Reinforcement learning on Amazon Beauty, ties shuffled

From a prefix decoder of an earlier recipe (256 codes a level, ties as they are stored; recall@10 of 0.088),
50 batches of about 410 users with 16 candidates each, and four updates of each
(`configs/beauty-rl.yaml`; measured when their shares of the users were not yet equal, but 128, 128, 90 and
64), rewarded for the item that came next and for its rank. Rewards are for the events that validate, of four
fifths of the users; the others are never asked for, and choose snapshot and temperature. Cells: the relative
change on the users' last events, which neither has learned from, the mean of the seeds; and how far the 95 %
intervals over users in pairs reach, from the lowest bound of any seed to the highest. Rewards are those of
lists of ten distinct items that are drawn; before and after, at the temperature that was best on validation
for either: sharpening the policy is no gain. The control learns from the likelihood of the same events, by
the same machinery and with the same weight of it. One supervised run; seeds are those of reinforcement
learning.

Rewards add to the reward; recall gains about as much by the anchor alone. Lists that are drawn stay behind
those of the beam search, since a temperature sharpens code by code, not item by item: with seed 0 of SA-GCPO
they hit for 7.4 % of the users before and 8.1 % after, the beams for 8.8 % and 9.4 % (recall@10).

The three are hardly apart here, less than seeds are: of four updates of a batch the later ones meet a policy
that has moved by 0.8 % (mean of |ratio - 1|), which nothing clips; and of these rewards the logged target's
is the highest, so SA-GCPO gates nothing. With one update of each batch they are the same to the digit: every
ratio is 1, and what is left of each is the mean over codes of advantage times gradient. They part where
batches are older (`placement: async`), and with rewards of more grades.

```
python -m benchmarks.rl_quality --supervised RUN --algorithm sa_gcpo --seed 0
```
"""
_COLUMNS = ("recall@10, seen kept", "parameters", "training", "published recall@10")
_TIES = {
    "shuffled": "in an order drawn from the seed",
    "file order": "in file order (leaks the future)",
}
_HEAD = """# Quality

Leave-one-out: a user's last event is the test, the one before it validates, the rest is trained on. Every
user, the whole catalog ranked, items of the history left out (nobody has an item twice) unless a column
says otherwise. Intervals: 95 %, bootstrap over users; [least, most] of several seeds. The snapshot is the
best by NDCG@10 on validation users. One recipe per method runs unchanged on all data sets. The recipe of
SASRec with full softmax was found by recalls of Beauty's *test* users ([RESULTS.md](RESULTS.md) lists them),
and HSTU's has its sizes and rates, so their figures on Beauty may flatter them; Sports and MovieLens were
looked at once. The prefix decoder's was tuned on Beauty's validation users; those of the others are first
guesses that nobody tuned. Semantic IDs: 3 levels of 256 codes (the prefix decoder: up to 512) by residual
k-means, and a digit for collisions; several seeds of a method share them. Two x86-64 cores, no accelerator;
training times are those of the steps, the median of several seeds; many rows were trained beside other work,
and would take a fraction of that alone. Minutes of processors, of rows measured since they are counted, are
those of the driver, its actors and Ray, start and validations included.

The prefix decoder generates code by code, and has no softmax over items. It does have a trained vector for
every prefix of an ID, whole ones included, so its weights grow with the catalog; TIGER and the lazy decoder
have vectors for codes alone. It alone is trained with ties redrawn in every step (`data.redraw_ties`). That
helps others, too: SASRec with full softmax, trained so, has a recall@10 of 0.1007 on Beauty, ties shuffled
([RESULTS.md](RESULTS.md)), so codes are not level with a softmax over items. In file order it takes away what
the order gives away: 0.0514 on Sports, where 0.0552 was reached with ties as they are.

```
make quality SOURCES=... ROW=beauty/shuffled/generative      # one row again; rows are DATASET/TIES/METHOD
```

Amazon's events have dates, and the files hold those of one day in the order of item codes: a model can learn
that order, and what is published on these files has it. So there are two tables for each data set.
"""
