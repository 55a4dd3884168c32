"""What may be searched: keys that exist, values that a run can have, trials that can be compared."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rayrec.pipelines.tuning.config import TuningConfig
from rayrec.pipelines.tuning.outcome import Outcome
from rayrec.pipelines.tuning.sampling import Sampler
from rayrec.pipelines.tuning.space import SearchSpace
from rayrec.platform.errors import InputError

RATE = "training.optimizer.learning_rate"
RATES = {"kind": "float", "low": 0.0001, "high": 0.01, "log": True}


@pytest.fixture
def run_file(tmp_path) -> Path:
    path = tmp_path / "run.yaml"
    path.write_text(
        "data: {path: data}\n"
        "model: {name: sasrec, backbone: {dim: 8, num_heads: 2, dropout: 0.1}}\n"
        "training: {batch_size: 32}\n"
    )
    return path


def tuning(run_file: Path, space: dict[str, Any], **more: Any) -> TuningConfig:
    return TuningConfig.parse({"config": str(run_file), "space": space, **more})


def test_a_trial_is_the_config_with_the_settings_of_all_and_its_own(run_file):
    space = SearchSpace.of(tuning(run_file, {RATE: RATES}, settings={"training.epochs": 2}))

    config = space.config_of({RATE: 0.005})

    assert config.training.optimizer.learning_rate == 0.005
    assert (config.training.epochs, config.training.batch_size) == (2, 32)
    assert space.values_of({RATE: 0.005})["training"] == {
        "batch_size": 32,
        "epochs": 2,
        "optimizer": {"learning_rate": 0.005},
    }
    assert "optimizer" not in space.values["training"]


BACKBONES = {
    "kind": "choice",
    "values": [{"dim": 8, "num_heads": 2, "dropout": 0.1}, {"dim": 16, "num_heads": 4}],
}
DROPOUTS = {"kind": "float", "low": 0, "high": 0.4}


@pytest.mark.parametrize("keys", [["", ".dropout"], [".dropout", ""]])
def test_a_section_and_what_is_in_it_are_searched_together_in_any_order(run_file, keys):
    kinds = {"model.backbone": BACKBONES, "model.backbone.dropout": DROPOUTS}
    search = tuning(run_file, {f"model.backbone{key}": kinds[f"model.backbone{key}"] for key in keys})
    space, sampler = SearchSpace.of(search), Sampler(search.space, 0, 9, True)

    for number in range(9):
        settings = sampler.ask()
        backbone = space.config_of(settings).model.backbone
        assert settings["model.backbone"] in BACKBONES["values"]
        assert backbone.dim == settings["model.backbone"]["dim"]
        assert backbone.dropout == settings["model.backbone.dropout"]
        sampler.tell(number, Outcome("complete", 0.5))


def test_a_setting_that_a_searched_section_would_replace_is_refused(run_file):
    search = tuning(run_file, {"model.backbone": BACKBONES}, settings={"model.backbone.dropout": 0.3})
    with pytest.raises(InputError, match=r"dropout is a part of model\.backbone, which is"):
        SearchSpace.of(search)


@pytest.mark.parametrize(
    ("key", "nearest"),
    [
        ("training.optimizer.learning_rat", RATE),
        ("training.learning_rate", RATE),
        ("model.backbone.dropuot", "model.backbone.dropout"),
        ("batch_size", "training.batch_size"),
        ("data.cache.max_byte", "data.cache.max_bytes"),
    ],
)
def test_a_key_that_does_not_exist_is_refused_with_the_nearest(run_file, key, nearest):
    with pytest.raises(InputError, match=f"no setting '{key}' .* did you mean '{nearest}'"):
        SearchSpace.of(tuning(run_file, {key: RATES}))


def test_settings_of_all_trials_are_checked_likewise(run_file):
    with pytest.raises(
        InputError, match=r"settings: there is no setting 'training.epoch' .* 'training.epochs'"
    ):
        SearchSpace.of(tuning(run_file, {RATE: RATES}, settings={"training.epoch": 2}))


def test_keys_below_a_mapping_and_of_sections_left_out_exist(run_file):
    space = {
        "sparse.tables.item.init_scale": {"kind": "float", "low": 0.01, "high": 0.1},
        "data.cache.folder": {"kind": "choice", "values": ["a", "b"]},
    }

    SearchSpace.of(tuning(run_file, space))


@pytest.mark.parametrize(
    ("key", "dimension", "reason"),
    [
        ("training.batch_size", {"kind": "int", "low": 0, "high": 64}, "batch_size=0.*greater than 0"),
        ("training.batch_size", {"kind": "float", "low": 16, "high": 64}, "batch_size=34.*integer"),
        ("model.backbone.dim", {"kind": "choice", "values": [8, 9]}, "dim=9: .*heads"),
        ("training.schedule.decay", {"kind": "choice", "values": ["none", "fast"]}, "decay=fast"),
        ("training.batch_size.low", {"kind": "int", "low": 1, "high": 2}, "no setting"),
    ],
)
def test_bounds_that_a_run_cannot_have_are_refused(run_file, key, dimension, reason):
    with pytest.raises(InputError, match=reason):
        SearchSpace.of(tuning(run_file, {key: dimension}))


@pytest.mark.parametrize(
    ("dimension", "reason"),
    [
        ({"kind": "float", "low": 1, "high": 1}, "learning_rate: there is nothing between"),
        ({"kind": "float", "low": 0, "high": 1, "log": True}, "begins above 0"),
        ({"kind": "float", "low": 0, "high": 1, "step": 0.3}, "do not meet high"),
        ({"kind": "int", "low": 1, "high": 9, "log": True, "step": 2}, "not both"),
        ({"kind": "choice", "values": [1, 2, 1]}, "learning_rate: the value 1 is there twice"),
        ({"kind": "choice", "values": [1]}, "at least 2 items"),
        ({"kind": "number", "low": 0, "high": 1}, "expected one of 'float', 'int', 'choice'"),
    ],
)
def test_a_dimension_has_something_to_search(run_file, dimension, reason):
    with pytest.raises(InputError, match=reason):
        tuning(run_file, {RATE: dimension})


@pytest.mark.parametrize(
    ("key", "reason"),
    [
        ("seed", "differ by chance"),
        ("evaluation.max_users", "decides what is validated"),
        ("data.path", "decides what is validated"),
        ("data", "decides what is validated"),
        ("evaluation", "decides what is validated"),
        ("evaluation.exclude_seen", "decides what is validated"),
        ("evaluation.instruction", "decides what is validated"),
        ("evaluation.instruction.scenario", "decides what is validated"),
        ("evaluation.form.kind", "decides what is validated"),
    ],
)
def test_what_would_make_trials_incomparable_is_refused(run_file, key, reason):
    values = [{"max_users": 5}, {"max_users": 6}] if key == "evaluation" else [1, 2]
    with pytest.raises(InputError, match=reason):
        SearchSpace.of(tuning(run_file, {key: {"kind": "choice", "values": values}}))


def test_when_and_in_which_batches_is_validated_may_be_searched(run_file):
    space = {
        "evaluation.every_epochs": {"kind": "int", "low": 1, "high": 3},
        "evaluation.patience": {"kind": "int", "low": 1, "high": 3},
        "evaluation.batch_size": {"kind": "choice", "values": [128, 512]},
    }

    SearchSpace.of(tuning(run_file, space))


def test_trials_end_early_only_where_they_are_equally_far(run_file):
    epochs = {"training.epochs": {"kind": "int", "low": 1, "high": 4}}

    SearchSpace.of(tuning(run_file, epochs))
    with pytest.raises(InputError, match="not equally far"):
        SearchSpace.of(tuning(run_file, epochs, prune={}))


def test_the_config_itself_lies_in_the_space_or_is_not_tried(run_file):
    dropouts = {"kind": "float", "low": 0, "high": 0.5, "step": 0.1}
    sizes = {
        "kind": "choice",
        "values": [{"dim": 8, "num_heads": 2, "dropout": 0.1}, {"dim": 16, "num_heads": 2}],
    }
    both = SearchSpace.of(tuning(run_file, {"model.backbone.dropout": dropouts, "model.backbone": sizes}))
    batches = SearchSpace.of(
        tuning(run_file, {"training.batch_size": {"kind": "int", "low": 40, "high": 64}})
    )

    assert both.settings_of_base() == {"model.backbone.dropout": 0.1, "model.backbone": sizes["values"][0]}
    with pytest.raises(InputError, match=r"training.batch_size of the config is 32, .* begin_with_config"):
        batches.settings_of_base()
