"""Does a model that is told which behavior is wanted find the items of that behavior?

    python -m benchmarks.instructions SOURCE [--seeds 1]

SOURCE is the folder of CI&T Deskdrop's log (five behaviors, VIEW and four strong ones). Two data sets are
made of it: the log as it is, in which a strong event nearly always follows a view of its item; and one with
a single event of each user and item, the first strong one, or the first view where there is none, in which
items are met once. On each are trained, with one seed or several,

* `configs/deskdrop-instructions.yaml`: instructions and weights of behaviors,
* the same without either.

Users' last events are ranked for, once with no instruction and once with each of two. What comes out is
recall@10 of the targets that are strong and of those that are views; in the first data set with the items of
the history in the list, in the second without.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd
import torch

from rayrec.models.sequence.sequence_program import SequenceProgram, build_model
from rayrec.pipelines.config.run import RunConfig
from rayrec.pipelines.metrics.ranking_metrics import target_places
from rayrec.pipelines.semantic_ids.tokenization import tokenize
from rayrec.pipelines.tasks.assembly import Assembly, assemble
from rayrec.pipelines.tasks.instructions import instruction_of
from rayrec.platform.checkout import CHECKOUT
from rayrec.platform.console import log
from rayrec.platform.event_labels import Part
from rayrec.samples.base.config import PrepareConfig
from rayrec.samples.dataset.dataset import Dataset
from rayrec.samples.prepare.prepare import prepare
from rayrec.samples.reading.reader import SampleReader, evaluation_batches

CONFIG = CHECKOUT / "configs" / "deskdrop-instructions.yaml"
LOG = "users_interactions.csv.gz"
WEAK, WANTED = "VIEW", "LIKE"
K = 10
MODELS: dict[str, tuple[str, ...]] = {
    "instructions, weights": (),
    "neither": ("model.behavior_weights={}", "model.instruction=null"),
}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.instructions")
    parser.add_argument("source", type=Path)
    parser.add_argument("--seeds", type=int, default=1)
    given = parser.parse_args(arguments)
    # More threads wait for each other on a machine that does other things as well.
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="instructions-") as folder:
        for name, events in {"once per item": once_per_item(given.source / LOG), "as it is": None}.items():
            data = Path(folder) / name.replace(" ", "-")
            source = given.source / LOG
            if events is not None:
                source = data.with_suffix(".csv")
                events.to_csv(source, index=False)
            allow = frozenset({"duplicates", "short-users"})
            prepare(source, data, PrepareConfig(allow=allow))
            tokenize(data)
            measure(name, data, given.seeds, exclude_seen=events is not None)


def once_per_item(path: Path) -> pd.DataFrame:
    """The log with one event of each user and item: the first strong one, else the first."""
    events = pd.read_csv(path)
    is_weak_E = events["eventType"] == WEAK
    order = np.lexsort((events["timestamp"], is_weak_E))
    return events.iloc[order].drop_duplicates(["personId", "contentId"]).sort_values("timestamp")


def measure(name: str, data: Path, seeds: int, exclude_seen: bool) -> None:
    dataset = Dataset.open(data)
    labels = dataset.evaluation_rows("test", labels=("behavior",)).target_labels
    is_strong_U = labels["behavior"] != dataset.manifest.behaviors.index(WEAK)
    log.print(f"{name}: {is_strong_U.sum()} strong targets, {(~is_strong_U).sum()} views")
    for model, overrides in MODELS.items():
        found: dict[str, list[np.ndarray]] = {}
        for seed in range(seeds):
            assembly = assemble(RunConfig.load(CONFIG, (f"data.path={data}", f"seed={seed}", *overrides)))
            program = trained(assembly)
            told = (None, WANTED, WEAK) if assembly.config.model.needs_labels else (None,)
            for behavior in told:
                wanted = instruction_of(assembly.config.model, dataset, {"behavior": behavior}, "told")
                hits_U = hits(assembly, program, wanted, exclude_seen)
                found.setdefault(behavior or "nothing", []).append(hits_U)
        for behavior, hits_SU in found.items():
            shown = ", ".join(
                f"{what} {mean_and_spread(np.array(hits_SU)[:, chosen_U])}"
                for what, chosen_U in (("strong", is_strong_U), ("views", ~is_strong_U))
            )
            log.print(f"  {model}; told {behavior}: recall@{K} of {shown}", soft_wrap=True)


def trained(assembly: Assembly) -> SequenceProgram:
    """The model after all epochs, trained in this process: it has no rows on servers."""
    config, plan = assembly.config, assembly.plan
    assert not assembly.tables, "a model of dense weights alone"
    model = build_model(config.model, assembly.task.catalog, config.seed)
    program = SequenceProgram(model, assembly.dense_optimizer(), torch.device("cpu"), config.seed)
    reader = SampleReader(plan.spec)
    for step in range(assembly.total_steps or 0):
        (features,) = assembly.features.training(step, reader.read_batch(plan.batch(step)))
        program.backward(features, {})
        program.update()
    return program


def hits(
    assembly: Assembly, program: SequenceProgram, instruction: dict[Part, int], exclude_seen: bool
) -> np.ndarray:
    """[U] whether each user's test target is among the K best."""
    found = []
    labels = assembly.features.history_labels
    for samples in evaluation_batches(assembly.task.dataset, "test", 512, labels=labels):
        features = assembly.features.ranking(samples.instructed(instruction))
        seen_BE = assembly.features.seen(samples) if exclude_seen else None
        ranked = program.recommend(features, {}, K, seen_BE)
        assert samples.targets_B is not None
        found.append(target_places(ranked.items_BK, assembly.task.dataset.item_positions(samples.targets_B)))
    return np.concatenate(found) < K


def mean_and_spread(hits_SU: np.ndarray) -> str:
    """Mean over users and seeds; half the width of a 95 % interval of bootstrap samples of users."""
    mean_U = hits_SU.mean(0)
    random = np.random.default_rng(0)
    samples = random.choice(mean_U, (1000, len(mean_U))).mean(1)
    low, high = np.quantile(samples, [0.025, 0.975])
    return f"{mean_U.mean():.3f} ± {(high - low) / 2:.3f}"


if __name__ == "__main__":
    main()
