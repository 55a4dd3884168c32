"""The pipeline of actors against one plain loop, and its modes and sizes against each other."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

from examples import one_file_trainer
from rayrec.models.base.compute import PLAIN
from rayrec.models.tokenizers.fit import fit_registry
from rayrec.pipelines.config.run import RunConfig
from rayrec.pipelines.runs.run_folder import RunFolder
from rayrec.pipelines.runs.snapshots import read_snapshot
from rayrec.pipelines.training.placements import Placement, in_process, on_ray
from rayrec.pipelines.training.progress import TrainingResult
from rayrec.pipelines.training.train import train
from rayrec.samples.dataset.dataset import Dataset
from tests.helpers.data import small_dataset

BATCH_SIZE = 24
STEPS_PER_EPOCH = 10  # of 230 users
EPOCHS, EPOCHS_OF_PAIRS = 3, 2
"""Against the one loop; of a run that is held against another."""
BACKBONE = {
    "dim": 16,
    "num_layers": 2,
    "num_heads": 2,
    "feedforward_dim": 32,
    "max_length": 6,
    "dropout": 0.2,
}

# Between them the two use every setting that changes the numbers.
SASREC = {
    "seed": 3,
    "model": {"name": "sasrec", "backbone": BACKBONE},
    "training": {
        "optimizer": {"learning_rate": 0.003, "weight_decay": 0.01},
        "schedule": {"warmup_steps": 8, "decay": "none"},
    },
}
GENERATIVE = {
    "seed": 4,
    "model": {"name": "light_decoder", "backbone": BACKBONE, "decoder_dim": 32, "label_smoothing": 0.1},
    "sparse": {
        "optimizer": {
            "kind": "rowwise_adagrad",
            "lr": 0.03,
            "initial_accumulator": 0.001,
            "weight_decay": 0.01,
        },
        "tables": {"code": {"optimizer": {"kind": "adam", "lr": 0.002}}},
    },
    "training": {"optimizer": {"max_grad_norm": 1.0}, "schedule": {"warmup_steps": 10, "decay": "cosine"}},
}

FORGETFUL = {
    "seed": 5,
    "model": {"name": "sasrec", "item_matrix": "sparse", "num_negatives": 8, "backbone": BACKBONE},
    "sparse": {
        "weight_dtype": "bfloat16",
        "admission": {"min_sightings": 3},
        "tables": {"item": {"eviction": {"max_age_steps": 3, "every_steps": 5}}},
    },
    "training": {},
}

RunPipeline = Callable[..., "Trained"]


@dataclass(frozen=True)
class Trained:
    """What a run ends with; each table is its rows by id."""

    steps: int
    final_loss: float
    dense: dict[str, np.ndarray]
    optimizer: dict[str, np.ndarray]
    tables: dict[str, dict[int, np.ndarray]]
    """Weights and optimizer state of every row, one after the other."""
    stages: dict[str, float] = field(default_factory=dict)


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    """230 users, so that the last batch of an epoch is short, with semantic IDs of random vectors."""
    dataset = small_dataset(tmp_path_factory.mktemp("oracle"), 230, 60, rows_per_group=8, rows_per_file=64)
    ids_I = dataset.items.ids_I
    vectors_ID = np.random.default_rng(0).normal(size=(len(ids_I), 4)).astype(np.float32)
    registry, _ = fit_registry(vectors_ID, ids_I, dataset.fingerprint, num_levels=2, codebook_size=8)
    registry.save(dataset.root / "semantic_ids")
    return dataset


@pytest.fixture
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def run_pipeline(dataset: Dataset, tmp_path_factory: pytest.TempPathFactory) -> RunPipeline:
    """Trains through the actors, in this process unless told otherwise; each settings once."""
    done: dict[tuple[Placement, str], Trained] = {}

    def run(
        settings: dict[str, Any],
        epochs: int = EPOCHS_OF_PAIRS,
        again: bool = False,
        cache_rows: int = 0,
        cluster: Placement = in_process,
        **pipeline: Any,
    ) -> Trained:
        sparse = settings.get("sparse", {}) | {"cache_rows": cache_rows}
        config = run_config(dataset, settings | {"sparse": sparse}, epochs, **pipeline)
        key = cluster, config.to_yaml()
        if again or key not in done:
            folder = tmp_path_factory.mktemp("runs") / "run"
            result = train(config, folder, cluster=cluster)
            done[key] = read_run(folder, result)
        return done[key]

    return run


def run_config(dataset: Dataset, settings: dict[str, Any], epochs: int, **pipeline: Any) -> RunConfig:
    return RunConfig.parse(
        settings
        | {
            # Several windows of several row groups each.
            "data": {"path": str(dataset.root), "window_rows": 50},
            "training": settings["training"] | {"batch_size": BATCH_SIZE, "epochs": epochs},
            "pipeline": {"trainer_threads": 1, "mode": "sync"} | pipeline,
            "evaluation": {"every_epochs": epochs, "max_users": 8},
        }
    )


def read_run(folder: Path, result: TrainingResult) -> Trained:
    snapshot = read_snapshot(RunFolder.open(folder).chosen_snapshot("last"))
    tables: dict[str, dict[int, np.ndarray]] = {}
    (files,) = snapshot.sparse_chain
    for path in files:
        if ".evicted." in path.name or ".sighted." in path.name:
            table, content = path.name.split("-")[0], path.name.split(".")[1]
            ids = pq.read_table(path)["id"].to_pylist()
            tables.setdefault(f"{table}, {content}", {}).update({i: np.zeros(0) for i in ids})
            continue
        rows = pq.read_table(path).to_pydict()
        table = tables.setdefault(path.name.split("-")[0], {})
        for row_id, weights, state in zip(rows["id"], rows["weights"], rows["state"], strict=True):
            table[row_id] = np.frombuffer(weights + state, dtype=np.float32)
    weights, state = snapshot.weights, snapshot.optimizer_state
    return Trained(result.steps, result.final_loss, weights, state, tables, result.stages)


def oracle(config: RunConfig, num_steps: int) -> Trained:
    model, losses, _ = one_file_trainer.start(config.model_dump(mode="json"))
    first = {name: table.weight_VD.detach().clone() for name, table in model.tables.items()}
    *_, final_loss = islice(losses, num_steps)
    tables: dict[str, dict[int, np.ndarray]] = {}
    for name, table in model.tables.items():
        records = torch.cat([table.weight_VD.detach(), table.state_VS], dim=1).numpy()
        touched_V = (table.weight_VD != first[name]).any(1).numpy()
        ids_M = table.ids_V.numpy()[touched_V]
        tables[name] = dict(zip(ids_M.tolist(), records[touched_V], strict=True))
    generative = hasattr(model, "chosen_KD")
    dense = {
        snapshot_name(name, generative): weight.detach().numpy() for name, weight in model.named_parameters()
    }
    return Trained(num_steps, final_loss, dense, {}, tables)


def snapshot_name(name: str, generative: bool) -> str:
    """The one file has no module for what generates, nor one for its decoder."""
    if not generative:
        return name
    return f"backbone.{name}" if name.startswith("backbone.") else f"backbone.decoder.{name}"


def largest_difference(first: dict[Any, np.ndarray], second: dict[Any, np.ndarray]) -> float:
    assert first.keys() == second.keys()
    return max((float(np.abs(first[key] - second[key]).max()) for key in first), default=0.0)


def assert_same_bits(first: Trained, second: Trained) -> None:
    assert first.final_loss == second.final_loss
    pairs = [(first.dense, second.dense), (first.optimizer, second.optimizer)]
    assert first.tables.keys() == second.tables.keys()
    pairs += [(first.tables[name], second.tables[name]) for name in first.tables]
    for ours, theirs in pairs:
        assert ours.keys() == theirs.keys()
        assert all(np.array_equal(ours[key], theirs[key]) for key in ours)


def assert_close(first: Trained, second: Trained, tolerance: float = 1e-4) -> None:
    assert first.steps == second.steps
    assert first.final_loss == pytest.approx(second.final_loss, abs=tolerance)
    assert largest_difference(first.dense, second.dense) <= tolerance
    assert first.tables.keys() == second.tables.keys()
    for name in first.tables:
        assert largest_difference(first.tables[name], second.tables[name]) <= tolerance


@pytest.mark.parametrize("model", ["sasrec", "light_decoder"])
def test_defaults_of_the_one_file_trainer_are_those_of_a_run(model: str):
    given = {"data": {"path": "data"}, "model": {"name": model}}
    of_a_run = RunConfig.parse(given).model_dump(mode="json")

    completed = one_file_trainer.with_defaults(given)

    assert common(completed, of_a_run) == common(of_a_run, completed)
    # It has one way to do things.
    not_its_own = ("batch_tokens", "length_of", "min_steps_per_epoch", "windows", "init_from", *asdict(PLAIN))
    training = {key: value for key, value in of_a_run["training"].items() if key not in not_its_own}
    assert training["optimizer"].pop("decayed") == "all"
    assert completed["training"] == training
    assert completed["model"]["backbone"] == of_a_run["model"]["backbone"]


def test_the_one_file_trainer_refuses_a_softmax_that_it_has_not(dataset: Dataset):
    settings = {
        "model": {"name": "light_decoder", "backbone": BACKBONE, "softmax": "children"},
        "training": {},
    }
    config = run_config(dataset, settings, EPOCHS)
    with pytest.raises(SystemExit, match="no softmax over children in here"):
        one_file_trainer.start(config.model_dump(mode="json"))


def common(values: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """What is in `values` under keys that `other` has, too, section by section."""
    return {
        key: common(value, other[key]) if isinstance(value, dict) and isinstance(other[key], dict) else value
        for key, value in values.items()
        if key in other
    }


@pytest.mark.parametrize("settings", [SASREC, GENERATIVE], ids=["sasrec", "generative"])
def test_sync_reaches_the_weights_of_the_one_file_trainer(
    settings: dict[str, Any], dataset: Dataset, run_pipeline: RunPipeline, one_thread: None
):
    trained = run_pipeline(settings, EPOCHS)
    assert trained.steps == EPOCHS * STEPS_PER_EPOCH

    assert_close(trained, oracle(run_config(dataset, settings, EPOCHS), trained.steps))


@pytest.mark.slow
def test_two_sync_runs_with_one_seed_end_with_the_same_bits(run_pipeline: RunPipeline):
    first, second = (run_pipeline(GENERATIVE, again=again) for again in (False, True))

    assert_same_bits(first, second)


@pytest.mark.ray
@pytest.mark.contract
@pytest.mark.parametrize(
    ("num_trainers", "cache_rows", "group"),
    [
        pytest.param(1, 0, 1, id="one"),
        pytest.param(2, 0, 1, id="two", marks=pytest.mark.slow),
        pytest.param(2, 12, 1, id="two with caches", marks=pytest.mark.slow),
        pytest.param(2, 0, 2, id="two in a group", marks=pytest.mark.slow),
    ],
)
def test_actors_on_ray_end_with_the_bits_of_actors_in_one_process(
    num_trainers: int, cache_rows: int, group: int, run_pipeline: RunPipeline, ray_cluster: None
):
    pipeline = {"num_trainers": num_trainers, "trainers_per_group": group, "mode": "exact_prefetch"}
    on_a_cluster, here = (
        run_pipeline(GENERATIVE, cache_rows=cache_rows, cluster=cluster, **pipeline)
        for cluster in (on_ray, in_process)
    )

    assert_same_bits(on_a_cluster, here)


def test_exact_prefetch_ends_with_the_bits_of_sync(run_pipeline: RunPipeline):
    ahead = run_pipeline(GENERATIVE, mode="exact_prefetch", queue_depth=6)

    assert_same_bits(ahead, run_pipeline(GENERATIVE))


@pytest.mark.parametrize(
    ("settings", "num_trainers"),
    [(GENERATIVE, 1), pytest.param(FORGETFUL, 2, marks=pytest.mark.slow)],
    ids=["generative", "forgetful"],
)
def test_rows_that_trainers_hold_end_with_the_bits_of_the_servers(
    settings: dict[str, Any], num_trainers: int, run_pipeline: RunPipeline
):
    cached = run_pipeline(settings, num_trainers=num_trainers, mode="exact_prefetch", cache_rows=12)

    assert_same_bits(cached, run_pipeline(settings, num_trainers=num_trainers))
    assert cached.stages["cache_hits"] > 100
    assert cached.stages["cache_misses"] > 100
    if settings is FORGETFUL:
        assert cached.stages["sparse_rows_evicted"] > 0


@pytest.mark.slow
def test_a_disk_below_the_tables_changes_no_bit(run_pipeline: RunPipeline):
    tables = GENERATIVE["sparse"]["tables"]
    on_disk = {
        name: tables.get(name, {}) | {"disk": {"memory": "32 MiB", "may_be_memory": True}}
        for name in ("item", "code")
    }
    settings = GENERATIVE | {"sparse": GENERATIVE["sparse"] | {"tables": on_disk}}

    assert_same_bits(run_pipeline(settings, mode="exact_prefetch"), run_pipeline(GENERATIVE))


def test_bounded_staleness_trains_with_rows_that_lack_the_last_update(run_pipeline: RunPipeline):
    stale = run_pipeline(GENERATIVE, mode="bounded_stale", max_staleness=1)

    exact = run_pipeline(GENERATIVE)
    assert stale.stages["max_staleness"] == 1
    assert stale.final_loss == pytest.approx(exact.final_loss, rel=0.1)
    assert stale.final_loss != exact.final_loss


@pytest.mark.slow
def test_two_trainers_end_where_one_does_up_to_rounding(run_pipeline: RunPipeline):
    two = run_pipeline(GENERATIVE, num_trainers=2, mode="exact_prefetch")

    assert_close(two, run_pipeline(GENERATIVE))


@pytest.mark.slow
def test_trainers_of_one_group_end_with_the_bits_of_trainers_that_call_for_themselves(
    run_pipeline: RunPipeline,
):
    alone, together = (
        run_pipeline(GENERATIVE, num_trainers=2, mode="exact_prefetch", trainers_per_group=group)
        for group in (1, 2)
    )

    assert_same_bits(together, alone)


@pytest.mark.slow
def test_groups_end_where_one_trainer_does_up_to_rounding(run_pipeline: RunPipeline):
    three = run_pipeline(GENERATIVE, num_trainers=3, mode="exact_prefetch", trainers_per_group=2)

    assert_close(three, run_pipeline(GENERATIVE))


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.contract
def test_groups_on_ray_end_where_those_of_one_process_do_up_to_rounding(
    run_pipeline: RunPipeline, ray_cluster: None
):
    pipeline = {"num_trainers": 3, "trainers_per_group": 2, "mode": "exact_prefetch"}
    on_a_cluster, here = (
        run_pipeline(GENERATIVE, cluster=cluster, **pipeline) for cluster in (on_ray, in_process)
    )

    assert_close(on_a_cluster, here)


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.contract
def test_two_trainers_that_hold_a_part_of_the_weights_each_end_where_one_does(
    run_pipeline: RunPipeline, ray_cluster: None
):
    """Validation and snapshots included, which need the weights whole."""
    training = GENERATIVE["training"] | {"parallel": "fsdp2", "micro_batches": 2}
    split = run_pipeline(
        GENERATIVE | {"training": training}, num_trainers=2, mode="exact_prefetch", cluster=on_ray
    )

    assert_close(split, run_pipeline(GENERATIVE))
