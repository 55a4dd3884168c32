"""docs/benchmarks/quality.md and quality.csv from the records of benchmarks/quality/.

The page has the metrics that are compared most often; the CSV has all of them, with intervals and seeds.
"""

from __future__ import annotations

import csv
import io
import json
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean, median
from typing import Any, NamedTuple

from benchmarks.quality_pairs import Line, are_of_one_recipe, line, pairs_table
from benchmarks.quality_replayed import replayed_records, replayed_table
from benchmarks.quality_rows import BASELINE, DATASETS, METHODS, NEIGHBORS, Ties
from benchmarks.quality_tuned import tuned_records, tuned_table
from rayrec.pipelines.evaluation.lists import (
    CO_VISITATION,
    CO_VISITATION_IN_TIME,
    CO_VISITATION_UNMASKED,
    POPULARITY,
    POPULARITY_UNMASKED,
    REPEATS,
    SWING,
    SWING_UNMASKED,
)
from rayrec.platform.checkout import CHECKOUT

RECORDS = CHECKOUT / "benchmarks" / "quality"
RL_RECORDS = RECORDS / "rl"
FOLDER = CHECKOUT / "docs" / "benchmarks"
README = CHECKOUT / "README.md"
README_METHODS = {
    "sasrec-content": "SASRec of ids, words and attributes",
    "hstu": "HSTU, full softmax",
    "flat": "one softmax over items with the weights of the prefix decoder",
    "hybrid": "sparse-dense hybrid: codes are generated, both softmaxes rank what was found",
    "hybrid-servers": "the hybrid with prefix rows on parameter servers, sampled softmax over items",
    "bsarec": "BSARec, full softmax",
    "sasrec": "SASRec, full softmax",
    "sasrec-servers": "SASRec, item rows on parameter servers, sampled softmax",
    "generative": "prefix decoder, semantic IDs",
    "codes": "prefix decoder without vectors of its own: codes, words and attributes",
    "codes-sasrec": "the prefix decoder without vectors of its own, with IDs from the item vectors of SASRec "
    "of ids, words and attributes",
    "light": "light decoder: codes alone, their rows on parameter servers",
    "light-sasrec": "the light decoder with IDs from the item vectors of SASRec of ids, words and attributes",
    "generative-sasrec": "the prefix decoder with IDs from the item vectors of SASRec of ids, words and "
    "attributes",
    "hybrid-sasrec": "the hybrid with IDs from the item vectors of SASRec of ids, words and attributes",
    "hybrid-servers-sasrec": "the hybrid with IDs from the item vectors of SASRec of ids, words and "
    "attributes, prefix rows on parameter servers, sampled softmax over items",
}
"""Rows of its table, and what they are called there."""
_README_HEADING = "| | recall@10 | ndcg@10 | seeds | training |\n| --- | --- | --- | --- | --- |\n"
METRICS = ("recall@5", "recall@10", "recall@50", "ndcg@5", "ndcg@10", "ndcg@50")
_BUDGET_HOURS = 120
"""The most that these tables may cost."""
SHOWN = ("recall@10", "recall@50", "ndcg@10")
"""Metrics on the page."""


def write_page() -> None:
    """Write the page, the CSV and the README's table from the records."""
    records = _records()
    rewarded = [json.loads(path.read_text()) for path in sorted(RL_RECORDS.glob("*.json"))]
    tuned, replayed = tuned_records(RECORDS), replayed_records(RECORDS)
    (FOLDER / "quality.md").write_text(page(records, rewarded, tuned, replayed))
    (FOLDER / "quality.csv").write_text(table_of_all(records, rewarded, tuned, replayed))
    README.write_text(with_best_rows(README.read_text(), records))


def _records() -> list[dict[str, Any]]:
    """Of the rows of tables; others beside them are of other benches."""
    written = [json.loads(path.read_text()) for path in sorted(RECORDS.glob("*.json"))]
    return [record for record in written if "ties" in record]


def lines_of(dataset: str, ties: str) -> dict[str, Line]:
    """Rows of a table whose positions are kept, by method or neighbor."""
    records = _by_table(_records())[dataset, ties]
    return _lines(list(_rows(dataset, ties, records)))


def with_best_rows(readme: str, records: Sequence[dict[str, Any]]) -> str:
    """The text of the README, whose table has what was measured of a few rows, best first."""
    dataset, ties = "beauty", "shuffled"
    of_model, metrics = DATASETS[dataset].shown_list, ("recall@10", "ndcg@10")
    found: list[tuple[str, Sequence[Mapping[str, Any]], str, str]] = []
    for method, title in README_METHODS.items():
        rows = [r for r in records if (r["dataset"], r["ties"], r["method"]) == (dataset, ties, method)]
        if seeds := _of_one_recipe(rows):
            results = [seed["results"][of_model] for seed in seeds]
            found.append((title, results, str(len(seeds)), _processor_time(seeds)))
    if untrained := _untrained(dataset, ties):
        lists = untrained["results"]
        found.append(("co-visitation, no training", [lists[CO_VISITATION]], "", "none"))
        found.append(("most popular", [lists[POPULARITY]], "", ""))
    found.sort(key=lambda row: -fmean(seed[metrics[0]]["value"] for seed in row[1]))
    before, heading, rest = readme.partition(_README_HEADING)
    after = rest[rest.index("\n\n") :]
    lines = []
    for title, measured, *others in found:
        figures = [_figure(measured, metric, ranges=False) for metric in metrics]
        lines.append("| " + " | ".join([title, *figures, *others]) + " |")
    return before + heading + "\n".join(lines) + after


def table_of_all(
    records: Sequence[dict[str, Any]],
    rewarded: Sequence[dict[str, Any]] = (),
    tuned: Sequence[dict[str, Any]] = (),
    replayed: Sequence[dict[str, Any]] = (),
) -> str:
    """Every metric of every seed with its interval, as CSV."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["table", "method", "seed", "measured", "metric", "value", "low", "high"])
    for record in (*_of_recipes(records), *tuned, *replayed):
        table = f"{record['dataset']}, {record['ties']}{', tuned' if 'search' in record else ''}"
        if "replay" in record:
            table += f", learning every {record['replay']['days']} days"
        for measured, metric, found in _measured(record):
            writer.writerow([table, record["method"], record["seed"], measured, metric, *found])
        for name in ("num_parameters", "training_minutes", "processor_minutes"):
            if name in record:
                writer.writerow(
                    [
                        table,
                        record["method"],
                        record["seed"],
                        "training",
                        name,
                        f"{record[name]:.10g}",
                        "",
                        "",
                    ]
                )
    for record in rewarded:
        for who, title in _RL_USERS.items():
            for metric, estimate in record[who]["change"].items():
                found = [f"{estimate[key]:.5f}" for key in ("value", "low", "high")]
                writer.writerow(["rl", record["method"], record.get("seed", 0), title, metric, *found])
            for when, values in record[who]["diversity"].items():
                for name, value in values.items():
                    row = ["rl", record["method"], record.get("seed", 0), f"{title}, {when}", name]
                    writer.writerow([*row, f"{value:.5f}", "", ""])
    return text.getvalue()


def _measured(record: Mapping[str, Any]) -> Iterator[tuple[str, str, list[str]]]:
    """(list, metric, value and interval) of all users, of the lists themselves, and of slices."""
    by_list = [(name, metrics) for name, metrics in record["results"].items()]
    for name, metrics in record.get("lists", {}).items():
        by_list.append((name, {key: each for key, each in metrics.items() if "@" in key}))
    for title, each in record.get("slices", {}).items():
        by_list += [(f"{name}, {title}", metrics) for name, metrics in each["results"].items()]
    for name, metrics in by_list:
        for metric, estimate in metrics.items():
            if isinstance(estimate, Mapping):
                yield name, metric, [f"{estimate[key]:.5f}" for key in ("value", "low", "high")]
            elif estimate is not None:  # a coverage, which has no interval
                yield name, metric, [f"{estimate:.5f}", "", ""]


def page(
    records: Sequence[dict[str, Any]],
    rewarded: Sequence[dict[str, Any]] = (),
    tuned: Sequence[dict[str, Any]] = (),
    replayed: Sequence[dict[str, Any]] = (),
) -> str:
    """The whole page as Markdown.

    Args:
        rewarded: records of reinforcement learning.
        tuned: records of rows after equal tuning.
        replayed: records of rows that go on learning.
    """
    by_table, tuned_by_table, replayed_by_table = map(_by_table, (records, tuned, replayed))
    titles = {name: method.title for name, method in METHODS.items()}
    parts = [_HEAD, _cost(records, tuned, replayed)]
    for name, dataset in DATASETS.items():
        for ties in dataset.ties:
            has_two = len(dataset.ties) > 1
            parts.append(f"## {dataset.title}{f', {_TIES[ties]}' if has_two else ''}\n")
            counts = {record["num_users"] for record in by_table[name, ties] if "num_users" in record}
            tested = f" {max(counts):,} users are tested." if counts else ""
            parts.append(f"{dataset.size}. {dataset.protocol}{tested}\n")
            rows = list(_rows(name, ties, by_table[name, ties]))
            lines = _lines(rows)
            parts.append(_table(rows, lines))
            shown = dataset.shown_list
            parts.append(tuned_table(tuned_by_table[name, ties], titles, RECORDS, shown))
            untrained = [each for each in neighbors_of(name) if each in lines]
            best = max(untrained, key=lambda each: lines[each].mean, default=None)
            going_on = replayed_by_table[name, ties]
            parts.append(replayed_table(going_on, titles, RECORDS, shown, lines, best))
    if rewarded:
        parts += [_RL_HEAD, _rl_table(rewarded)]
    return "\n".join(filter(None, parts)).rstrip() + "\n"


def _cost(
    records: Sequence[Mapping[str, Any]],
    tuned: Sequence[Mapping[str, Any]],
    replayed: Sequence[Mapping[str, Any]],
) -> str:
    """A sentence on the time of all trainings on the page, beside what was allowed."""
    minutes = [each.get("processor_minutes", each["training_minutes"]) for each in records]
    minutes += [each["search"]["processor_minutes"] for each in tuned]
    minutes += [each["replay"]["processor_minutes"] for each in replayed]
    older = sum("processor_minutes" not in each for each in records)
    return (
        f"**Budget**: {_BUDGET_HOURS} hours of one processor for all rows, searches and replays. Those on "
        f"record took {sum(minutes) / 60:.0f}; {older} of {len(records)} trainings count by the minutes of "
        "their steps, since their time of a processor was not recorded. Trials that chose a recipe and "
        "reinforcement learning are not counted.\n"
    )


def _by_table(records: Sequence[dict[str, Any]]) -> dict[tuple[str, str], list[dict[str, Any]]]:
    found: dict[tuple[str, str], list[dict[str, Any]]] = defaultdict(list)
    for record in records:
        found[record["dataset"], record["ties"]].append(record)
    return found


def _rl_table(records: Sequence[dict[str, Any]]) -> str:
    """Changes against the supervised policy, method by method."""
    titles = [f"{name}, {title}" for title in _RL_USERS.values() for name in RL_SHOWN]
    lines = ["| | " + " | ".join([*titles, "coverage"]) + " |", "| --- |" + " --- |" * (len(titles) + 1)]
    for method, title in RL_METHODS.items():
        seeds = [record for record in records if record["method"] == method]
        if not seeds:
            continue
        cells = [f"{title} ({len(seeds)} {'seed' if len(seeds) == 1 else 'seeds'})"]
        cells += [
            _change([seed[who]["change"][metric] for seed in seeds])
            for who in _RL_USERS
            for metric in RL_SHOWN
        ]
        lines.append("| " + " | ".join([*cells, _diversity(seeds, "coverage")]) + " |")
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


class _Row(NamedTuple):
    """What a table says of one method or neighbor."""

    key: str
    title: str
    seeds: Sequence[dict[str, Any]]
    """Records of one recipe; none: it is to be measured, and is not yet."""
    shown: str
    """The list of theirs that the page shows."""
    training: str = ""
    published: str = ""
    folder: Path | None = None
    """Of the records; None: the row is not compared in pairs."""

    def cells(self) -> str:
        if not self.seeds:
            return f"| {self.title} | not measured yet |" + " |" * (len(SHOWN) + 1)
        results = [seed["results"][self.shown] for seed in self.seeds]
        return _line(self.title, results, self.training, self.published)


def _rows(dataset: str, ties: str, records: Sequence[dict[str, Any]]) -> Iterator[_Row]:
    """The rows of a table, in their order; none where nothing is measured."""
    untrained = _untrained(dataset, ties)
    if not records and not untrained:
        return
    keeps_seen = DATASETS[dataset].seen == "kept"
    any_record = [records[0] if records else untrained]
    popular = POPULARITY_UNMASKED if keeps_seen else POPULARITY
    yield _Row(POPULARITY, "most popular", any_record, popular)
    for title, name in neighbors_of(dataset).items():
        if untrained and name in untrained["results"]:
            yield _Row(title, title, [untrained], name, "none", folder=RECORDS / NEIGHBORS)
    shown = DATASETS[dataset].shown_list
    for name, method in METHODS.items():
        seeds = _of_one_recipe([record for record in records if record["method"] == name])
        if not seeds:
            if DATASETS[dataset].measures(name, ties):
                yield _Row(name, method.title, [], shown)
            continue
        title = method.title + ("" if "ties" in method.title or _redrew_ties(seeds) else ", ties as stored")
        title += ", all codes of a level" if _learned_all_codes(seeds) else ""
        title += f" ({len(seeds)} seeds)" if len(seeds) > 1 else ""
        published = "; ".join(
            f"{p.recall_at_10} ({p.where})" for p in method.published if p.dataset == dataset
        )
        yield _Row(name, title, seeds, shown, _training(seeds), published, RECORDS)


def _lines(rows: Sequence[_Row]) -> dict[str, Line]:
    """The rows whose positions are kept, by method or neighbor."""
    return {
        row.key: found
        for row in rows
        if row.folder is not None
        for found in line(row.title, row.seeds, row.folder, row.shown)
    }


def _table(rows: Sequence[_Row], lines: Mapping[str, Line]) -> str:
    if not rows:
        return "Not measured yet.\n"
    titles = ["| | " + " | ".join([*SHOWN, "training", "published recall@10"]) + " |"]
    titles.append("| --- |" + " --- |" * (len(SHOWN) + 2))
    table = "\n".join([*titles, *(row.cells() for row in rows)]) + "\n"
    return table + pairs_table(list(lines.values()), lines.get(BASELINE))


_NEIGHBORS = {name: name for name in (CO_VISITATION, SWING, CO_VISITATION_IN_TIME)}
_NEIGHBORS_KEPT = {CO_VISITATION: CO_VISITATION_UNMASKED, SWING: SWING_UNMASKED, REPEATS: REPEATS}
"""Lines of the table, and what was judged for them; those where seen items are kept."""


def neighbors_of(dataset: str) -> dict[str, str]:
    """Lines of neighbors in the table of a data set, and the names of their lists."""
    return _NEIGHBORS_KEPT if DATASETS[dataset].seen == "kept" else _NEIGHBORS


def _untrained(dataset: str, ties: str) -> dict[str, Any]:
    """The record of what needs no training, as `rayrec evaluate --neighbors DATA --json` wrote it; empty
    where there is none."""
    path = RECORDS / NEIGHBORS / f"{dataset}-{ties.replace(' ', '-')}.json"
    record: dict[str, Any] = json.loads(path.read_text()) if path.is_file() else {}
    return record


def _of_one_recipe(seeds: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Those of the newest recipe, and of those the ones that redrew ties, once there are some: a mean with
    others would be of no recipe."""
    if not seeds:
        return []
    redrew = [seed for seed in seeds if _redrew_ties([seed])] or list(seeds)
    newest = max(redrew, key=lambda seed: str(seed["date"]))
    return [seed for seed in redrew if seed is newest or are_of_one_recipe(seed, newest)]


def _of_recipes(records: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """`_of_one_recipe` of the seeds of each row."""
    rows: dict[tuple[str, str, str], list[dict[str, Any]]] = defaultdict(list)
    for record in records:
        rows[record["dataset"], record["ties"], record["method"]].append(record)
    return [record for seeds in rows.values() for record in _of_one_recipe(seeds)]


def _redrew_ties(seeds: Sequence[Mapping[str, Any]]) -> bool:
    """Whether the runs drew the order of ties again at every step; earlier recipes of the method did not."""
    settings = [seed.get("made_of", {}).get("settings", {}) for seed in seeds]
    return all(each.get("data", {}).get("redraw_ties", False) for each in settings)


def _learned_all_codes(seeds: Sequence[Mapping[str, Any]]) -> bool:
    """Whether runs were trained over all codes of a level, where today's recipes are not."""
    models = [seed.get("made_of", {}).get("settings", {}).get("model", {}) for seed in seeds]
    return any(
        model.get("name") in _LEARN_CODES and model.get("softmax", "codes") == "codes" for model in models
    )


def _training(seeds: Sequence[Mapping[str, Any]]) -> str:
    """Medians over the seeds: minutes, and those of processors where records have them."""
    text = f"{median(seed['training_minutes'] for seed in seeds):.1f} min"
    processors = [seed["processor_minutes"] for seed in seeds if "processor_minutes" in seed]
    return f"{text} ({median(processors):.1f} CPU min)" if processors else text


def _processor_time(seeds: Sequence[Mapping[str, Any]]) -> str:
    """As `_training`, of processors alone where these are known."""
    return _training(seeds).rpartition("(")[2].removesuffix(")")


def _line(title: str, masked: Sequence[Mapping[str, Mapping[str, float]]], *rest: str) -> str:
    cells = [title, *(_figure(masked, metric) for metric in SHOWN), *rest]
    return "| " + " | ".join(cells) + " |"


def _figure(seeds: Sequence[Mapping[str, Mapping[str, float]]], metric: str, ranges: bool = True) -> str:
    """Mean over the seeds, and half the interval over users; with several seeds, their range too."""
    values = [seed[metric]["value"] for seed in seeds]
    half = sum(seed[metric]["high"] - seed[metric]["low"] for seed in seeds) / len(seeds) / 2
    text = f"{sum(values) / len(values):.4f} ± {half:.4f}"
    return text if len(values) == 1 or not ranges else f"{text} [{min(values):.4f}, {max(values):.4f}]"


RL_METRICS = ("reward", "recall@1", "recall@10", "recall@50", "ndcg@10")
RL_SHOWN = ("reward", "recall@10")
"""Metrics on the page."""
_LEARN_CODES = {"light_decoder", "lazy_decoder", "encoder_decoder", "causal_lm", "item_language"}
"""Models with `softmax: children`."""
_RL_USERS = {"all": "all users", "held_out": "users held out"}
RL_METHODS = {
    "sa_gcpo": "SA-GCPO",
    "grpo": "GRPO",
    "gspo": "GSPO",
    "control": "control: the NLL term alone, no rewards",
}
_RL_HEAD = """## Reinforcement learning on Amazon Beauty, ties shuffled

From today's recipe, with controls, dynamic sampling and five paired seeds: [does it
pay?](rl.md#does-it-pay)

The supervised policy is a prefix decoder of an earlier recipe (256 codes per level, ties as stored,
recall@10 of 0.088). 50 batches of about 410 users with 16 candidates each, four updates per batch
(`configs/beauty-rl.yaml`, measured when the parts of a batch were not yet equal, but 128, 128, 90 and 64).
The rewards are for the next item and its rank. Rewards use the validation events of four fifths of the
users; the other users are held out and choose snapshot and temperature.

Cells: relative change on the users' last events, which neither policy has seen: mean of the seeds, and in
brackets the lowest and highest bound of any seed's 95 % interval over paired users. Rewards are those of
lists of ten sampled items, before and after at the temperature that was best on validation, so a sharper
policy is no gain. The control optimizes the likelihood of the same events only, with the same coefficient.
One supervised run; seeds are those of reinforcement learning. All metrics are in
[quality.csv](quality.csv).

Rewards increase the reward; recall gains about as much from the likelihood term alone. Sampled lists stay
behind beam search, since a temperature sharpens code by code, not item by item: with seed 0 of SA-GCPO they
hit for 7.4 % of the users before and 8.1 % after, the beams for 8.8 % and 9.4 % (recall@10).

The three algorithms differ by less than seeds do: in the later updates of a batch the policy has moved by
0.8 % (mean of |ratio - 1|), which nothing clips, and the logged target has the highest of these rewards, so
SA-GCPO gates nothing. With one update per batch they are identical: every ratio is 1. They differ with
older batches (`placement: async`) and with rewards of more grades.

```
python -m benchmarks.rl_quality --supervised RUN --algorithm sa_gcpo --seed 0
```
"""
_TIES: dict[Ties, str] = {
    "shuffled": "ties shuffled",
    "file order": "ties in file order (leaks the future)",
}
_HEAD = """# Recommendation quality

What models of RayRec reach on logs that anybody can get, by one protocol, with the costs beside it. The
[objections](objections.md) of a stern reader have answers of their own.

## How it is measured

- **Leave-one-out**: a user's last event is the test, the one before it validates, the rest is trained
  on.
- **Split by time**, where times exist: nobody's events after a date are trained on, so no model but one
  that goes on learning knows what other users did later, which leave-one-out permits. A random event of
  each user in the period is predicted, with all that lies before it as history: the first event of a
  period comes after a longer gap than others do, and all events of a period at once are not what a model
  is asked for (Gusak et al., *Time to Split*, RecSys 2025, arXiv:2507.16289). Users with nothing before
  their events are not tested; `rayrec prepare` counts them. The catalog is that of the whole log: an
  item that comes later has no training event, and may be recommended by its text.
- **Ranking**: the whole catalog, for every user. Items of the history are excluded, unless a table says
  that they are kept.
- **Intervals**: 95 %, by a bootstrap over users. Brackets are the range of the seeds.
- **Snapshots**: the best by NDCG@10 on validation users; on 6,000 of them where the recipe says so, and
  on all for SASRec, HSTU and BSARec.
- **Recipes**: one per method, which runs unchanged on all data sets. All methods are for Beauty and
  MovieLens; elsewhere neighbors, SASRec, and the best two of those that generate.
- **Ties**: Amazon's events have dates, and the files order the events of one day by item code. A model
  can learn that order, and published results on these files include it. Therefore these data sets have
  two tables. All recipes but that of *SASRec, ties as stored* draw the order of ties again at every step
  (`data.redraw_ties`).
- **Equal tuning**: tables of that name have the trial that was best on validation users, of as many
  trials for every method in one space (`configs/tuning`): learning rate, weight decay, dropout and
  layers. The first trial is the recipe, of *prefix decoder without vectors of its own* on Beauty the one
  before, since what was found there is its recipe now. Epochs are the recipe's, and so are rates of rows on
  servers.
- **Costs**: two x86-64 cores, no accelerator. Training times are those of the steps, the median of the
  seeds. Many rows were trained beside other work, and some stood still for minutes meanwhile. CPU
  minutes, where they were recorded, include driver, actors, Ray, start and validation. A training may
  take two hours of one processor.

The tables show three metrics. [quality.csv](quality.csv) has all of them, with every seed and interval,
recalls with seen items kept, and numbers of parameters.

```
make quality SOURCES=... ROW=beauty/shuffled/generative                # a row: DATASET/TIES/METHOD
python -m benchmarks.equal_tuning SOURCES movielens/shuffled/sasrec    # the same after equal tuning
python -m benchmarks.replay SOURCES beauty-time/shuffled/generative --days 7    # learning that goes on
rayrec bench quality                                                   # README's rows against their targets
```

`SOURCES` is a folder with a folder for each log.

## What the rows are

- **Neighbors** need no training (`rayrec evaluate --neighbors DATA`; one setting for all data sets, not
  tuned). *At the time* means that they know what everybody did before each event and nothing after it;
  models know all training events, later ones too.
- **The prefix decoder** is a softmax over items, factored along the tree of their codes, with a trained
  vector for every prefix of an ID: its weights grow with the catalog. **One softmax over items** has its
  weights, begins with the same bits, and scores an item by the sum of its prefixes' vectors
  (`model.softmax: items`): between the two lie the hierarchical loss and the beams. **The sparse-dense
  hybrid** (`model.softmax: hybrid`) has these weights and both losses: beams find items, at least 100,
  and both softmaxes rank them.
- **TIGER, the lazy decoder, the light decoder and the causal language model** have vectors for codes
  only. With titles (`item_language`) the language model also learns which codes a title has, which title
  codes have, and the title of the next item; what it reads of a user are codes alone. It begins with
  random weights, with titles or without. Whether words find items that nobody has met is [another
  question](language.md#words-beside-codes).
- **Words and attributes** are what the catalog says of items (`model.content`): words of titles and
  keywords, categories and brands as numbers. Rows that read them know more than the others. *Prefix
  decoder without vectors of its own* says codes, and no weight of it belongs to one item or one whole
  ID; but each leaf adds the bag of words and attributes of its item, which hardly another item has, so
  its last code is scored by the item's text. Without them (*codes alone*), the model is about where
  the light decoder is.
- **Semantic IDs** have 3 levels of 256 codes (prefix decoder: up to 512) by residual k-means, and a
  digit for collisions. Where items have no text, they are made of interactions alone. *Published IDs*
  are those that came with the data: LETTER's of Beauty and Instruments (4 levels), MiniOneRec's of
  Industrial (3 levels).
- **IDs from the item vectors of SASRec** are made of what a model that was trained before scores items
  by ([how](recommendation.md#codes-of-what-a-trained-model-knows)). They carry what it knows, words too
  where it reads them. Training times are without the teacher's: add those of its row.
- **Tokenizers** are compared with one model and one recipe. Residual k-means and an RQ-VAE read words,
  attributes and interactions; LETTER's RQ-VAE reads words and attributes, and is drawn towards
  interactions (`rayrec tokenize --tokenizer letter`). These have three levels of up to 256 codes.
- **The graph network** is SASRec whose events also read the items that others met beside them before,
  weighted by co-visits: training events alone, one setting, one seed.
- **Learning goes on**: from the row's best snapshot on, the rest of the log is replayed in periods.
  Targets of a period are ranked by what was learned until the period before; then windows that end with
  the period's events are trained on, in one pass (`data.follow`), with earlier events of these users.
  Co-visitation at the time knows more of others: all until the event itself.

## Limits of the comparison

- The recipe of SASRec with full softmax was found with recalls of Beauty's *test* users ([what was
  tried](recommendation.md#what-did-not-work)). HSTU, BSARec, SASRec on servers and SASRec that reads words
  use its sizes and rates, so their figures on Beauty may be flattering. Sports and MovieLens were looked
  at once. The prefix decoder was tuned on Beauty's validation users. The recipe of the one without vectors
  of its own is what equal tuning of the row that reads words found there, rounded; the other rows of that
  model, and MovieLens, have it too. That of the lazy decoder is what equal tuning on MovieLens found
  there, rounded; Beauty has it too, but the row of MovieLens with IDs of interactions is of the recipe
  before. Other recipes had few trials: the light decoder [nine](recommendation.md#codes-alone), TIGER
  three. [Equal tuning](objections.md#tuning-is-asymmetric) says what that is worth: rows of other models
  over codes may be as far below what they can do.
- One rate and batch serve all rows of learning that goes on. They were chosen of four on validation
  users of the prefix decoder, so its validation recall is flattering.
- Rows that say *ties as stored* were measured before their recipe redrew them, which in file order
  removes what the order leaks: the prefix decoder has 0.0514 on Sports then, and 0.0552 with ties as
  stored. Rows that say *all codes of a level* were measured before their recipe trained [among those
  that lead to an item](recommendation.md#codes-alone). In leave-one-out, SASRec of words was measured
  when items without a training event were still negatives of its softmax, which [they no longer
  are](recommendation.md#items-that-training-has-not-met-by-their-words); hardly any are.
- Published figures are of files in the order of item codes within a day, and of other splits and texts.
  Those of github.com/phonism/genrec are reproductions in its README; an earlier version of it calls them
  validation metrics.
- Machines and versions differ between rows: seeds of the prefix decoder on Beauty took 6.4, 4.7 and 4.3
  minutes of a processor, so a third is no difference in cost. IDs are shared by the seeds of one
  machine; another machine rounds otherwise and makes others by the same settings, so seed 0 of several
  rows has other IDs, or another teacher, than seeds 1 and 2.
"""
