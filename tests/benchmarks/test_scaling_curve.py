"""The scaling curve: nested samples, a fit that finds a law, and a cell that is trained and judged."""

from itertools import product
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from benchmarks import scaling_curve
from benchmarks.scaling_curve import Cell, Log, fit, measure_cell, write_share
from benchmarks.synthetic_log import CODES_FILE, Law, LawSettings, write_log
from rayrec.pipelines.semantic_ids.tokenization import import_published
from rayrec.samples.base.config import PrepareConfig
from rayrec.samples.dataset.dataset import Dataset
from rayrec.samples.prepare.prepare import prepare


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Log:
    folder = tmp_path_factory.mktemp("scaling")
    law = Law(LawSettings(num_users=400, num_items=100, mean_length=8.0, num_types=2))
    write_log(law, folder / "log")
    prepare(folder / "log", folder / "data", PrepareConfig(clean=True))
    import_published(folder / "data", folder / "log" / CODES_FILE, folder / "ids")
    return Log(folder / "data", folder / "ids", law, keeps_seen=True)


def _cell(width: int, share: float, num_weights: int, num_events: int, loss: float) -> Cell:
    return Cell(width, share, num_weights, num_events, loss, {}, None, 0.0)


def test_fit_finds_the_law_of_its_cells():
    cells = [
        _cell(width, share, weights, events, 5.0 + 40 / weights**0.4 + 300 / events**0.5)
        for (width, weights), (share, events) in product(
            ((16, 10_000), (32, 40_000), (64, 160_000), (128, 640_000)),
            ((0.125, 50_000), (0.25, 100_000), (0.5, 200_000), (1.0, 400_000)),
        )
    ]
    found = fit(cells)
    assert found is not None
    assert (found.floor, found.alpha, found.beta) == pytest.approx((5.0, 0.4, 0.5), rel=1e-3)
    assert found.worst < 1e-6
    assert not found.at_bound
    expected = 5.0 + 40 / 1e6**0.4 + 300 / 1e6**0.5
    assert found(np.array([1e6]), np.array([1e6])) == pytest.approx([expected], rel=1e-4)


@pytest.mark.slow
def test_losses_that_do_not_tell_a_floor_have_no_fit_to_print():
    cells = [
        _cell(width, share, weights, events, 9.0 - 0.1 * np.log(weights) - 0.1 * np.log(events))
        for (width, weights), (share, events) in product(
            ((16, 10_000), (32, 40_000), (64, 160_000)), ((0.25, 100_000), (0.5, 200_000), (1.0, 400_000))
        )
    ]
    found = fit(cells)
    assert found is not None
    assert found.at_bound


def test_too_few_cells_are_not_fitted():
    assert fit([_cell(16, share, 10_000, 1_000, 5.0) for share in (0.25, 0.5, 1.0)]) is None


def test_a_smaller_share_is_a_part_of_a_larger_one(made: Log, tmp_path: Path):
    counts = [write_share(made.data, share, tmp_path / str(share)) for share in (0.25, 0.5, 1.0)]
    users = [set(pq.read_table(tmp_path / str(share))["user_id"].to_pylist()) for share in (0.25, 0.5, 1.0)]
    assert users[0] < users[1] < users[2]
    assert len(users[2]) == 400
    assert counts[0] < counts[1] < counts[2] == Dataset.open(made.data).items.train_counts_I.sum()


@pytest.mark.slow
def test_a_cell_is_trained_and_judged(made: Log, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(scaling_curve, "EPOCHS", 2)
    cell = measure_cell(made, width=8, share=0.5)
    assert made.law is not None
    floor = scaling_curve._loss_of_law(made.law, Dataset.open(made.data))
    assert floor < cell.loss < np.log(100) * 1.2
    assert 0 < cell.metrics["recall@10"] <= cell.metrics["recall@50"] <= 1
