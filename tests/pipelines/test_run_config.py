from pathlib import Path

import pytest

from rayrec.models.base.compute import PLAIN, ComputeSettings
from rayrec.models.generative.light_decoder_config import LightDecoderConfig
from rayrec.models.sequence.config import SasRecConfig
from rayrec.pipelines.config.run import RunConfig
from rayrec.platform.config import differing_keys
from rayrec.platform.devices import KINDS
from rayrec.platform.errors import InputError
from rayrec.platform.schedule import RateSchedule
from tests.helpers.runs import SPARSE_SASREC

SMALLEST = {"data": {"path": "data"}, "model": {"name": "sasrec"}}


def complaint(values: dict) -> str:
    with pytest.raises(InputError) as raised:
        RunConfig.parse(values)
    return str(raised.value)


def test_data_and_a_model_are_all_a_run_needs():
    config = RunConfig.parse(SMALLEST)

    assert isinstance(config.model, SasRecConfig)
    assert config.device == "cpu"


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        (
            {"model": {"name": "light_decoder", "backbone": {"num_layer": 2}}},
            "'model.backbone.num_layer'; did you mean 'num_layers'?",
        ),
        (
            {"evaluation": {"form": {"kind": "regex", "regex": "yes|no"}}},
            "evaluation.form is set, and the answers of 'sasrec' are no texts",
        ),
        ({"model": {"name": "sasrec", "beam_width": 2}}, "there is no setting 'model.beam_width'"),
        (
            {"model": {"name": "gru"}},
            "model.name: expected one of 'sasrec', 'bsarec', 'hstu', 'gnn', 'prefix_decoder', ",
        ),
        ({"training": {"batchsize": 2}}, "'training.batchsize'; did you mean 'batch_size'?"),
        (
            {"sparse": {"optimizer": {"lr": 0.1}}},
            "'sparse.optimizer.kind' is missing; expected one of 'rowwise_adagrad', 'adagrad', 'sgd', 'adam'",
        ),
        (
            {"sparse": {"tables": {"itm": {"weight_dtype": "float16"}}}},
            "table 'itm'; tables are item, user, code",
        ),
        (
            {"pipeline": {"queue_depth": 1}},
            "pipeline.queue_depth: input should be greater than or equal to 2",
        ),
        ({"pipeline": {"mode": "async"}}, "pipeline.mode: input should be 'sync', 'exact_prefetch' or "),
        (
            {"sparse": {"cache_rows": 10}, "pipeline": {"mode": "sync"}},
            "sparse.cache_rows is 10 and pipeline.mode 'sync': a cache needs the mode 'exact_prefetch'",
        ),
        (
            {"sparse": {"cache_rows": 10, "wire": "int8_row"}},
            "sparse.cache_rows is 10 and sparse.wire 'int8_row': a cache holds rows with the state of their ",
        ),
        ({"sparse": {"wire": "int8"}}, "sparse.wire: input should be 'float32', 'bfloat16' or 'int8_row'"),
        (
            {"sparse": {"eviction": {"every_steps": 10}}},
            "an eviction needs one of max_age_steps, ttl_hours, max_rows_per_bucket",
        ),
        ({"model": {"name": "sasrec", "backbone": {"dim": 9}}}, "backbone.dim must be a multiple"),
        (
            {"model": {"name": "sasrec", "attention": "triton"}},
            "model.attention is 'triton' and device 'cpu', for which it has no kernels to train with; take ",
        ),
        (
            {
                "data": {"path": "data", "samples": "s3://rows", "follow": {}},
                "evaluation": {"every_steps": 5},
                "training": {"min_steps_per_epoch": 2},
            },
            "training.min_steps_per_epoch is set, and data.follow too: a folder that grows has no epochs",
        ),
        (
            {"model": {"name": "causal_lm"}, "training": {"compile": True}},
            "training.compile is set and the model 'causal_lm', of whose layers, ",
        ),
        (
            {"model": {"name": "sasrec", "attention": "flex"}},
            "model.attention is 'flex' and device 'cpu', for which it has no kernels to train with",
        ),
        (
            {"model": {"name": "hstu", "attention": "sdpa"}},
            "model.attention is 'sdpa', which has no scoring but the softmax, and HSTU's is not one; take ",
        ),
        (
            {"data": {"path": "data", "redraw_ties": True}, "model": {"name": "deepfm"}},
            "data.redraw_ties is about histories that the next item is predicted of, and model 'deepfm'",
        ),
        (
            {"sparse": {"eviction": {"ttl_hours": 24}}, "model": {"name": "deepfm"}},
            "eviction.ttl_hours goes by the times of a history's events, and model 'deepfm' reads",
        ),
        (
            {"sparse": {"eviction": {"max_bytes": "1 MiB"}}, "model": {"name": "deepfm"}},
            "sparse: table 'feature': eviction.max_bytes is 1.0 MiB, less than a row of",
        ),
        (
            {"training": {"parallel": "fsdp2"}},
            "training.parallel is 'fsdp2' and pipeline.num_trainers 1: one trainer has nobody to share",
        ),
        (
            {"pipeline": {"num_trainers": 2, "trainers_per_group": 2}, "sparse": {"cache_rows": 9}},
            "pipeline.trainers_per_group is 2 and sparse.cache_rows 9: rows in a cache have one trainer",
        ),
        (
            {"training": {"micro_batches": 300}},
            "training.micro_batches is 300 and training.batch_size 256: a batch cannot have more pieces",
        ),
        (
            {"training": {"precision": "float16"}},
            "training.precision: input should be 'float32' or 'bfloat16'",
        ),
        (
            {"model": {"name": "hstu", "item_matrix": "sparse", "loss": "cross_entropy"}},
            "model.loss is 'cross_entropy' and model.item_matrix 'sparse': a softmax over the catalog",
        ),
        ({"device": "tpu"}, "device: there is no device 'tpu'; expected one of cpu, "),
        ({"training": {"epochs": "many"}}, "training.epochs: input should be a valid integer"),
    ],
)
def test_mistakes_name_their_key(values, expected):
    assert expected in complaint(SMALLEST | values)


def test_settings_survive_the_run_folder(tmp_path):
    config = RunConfig.parse(
        SMALLEST
        | {
            "model": {"name": "light_decoder", "backbone": {"dim": 32, "dropout": 0.15}},
            "sparse": {"tables": {"code": {"optimizer": {"kind": "adam", "betas": [0.8, 0.99]}}}},
            "evaluation": {"patience": 3},
        }
    )
    path = tmp_path / "config.yaml"
    path.write_text(config.to_yaml())

    assert RunConfig.load(path) == config
    changed = RunConfig.load(path, ["model.backbone.dim=64", "sparse.tables.code.optimizer.lr=1e-2"])
    assert differing_keys(config, changed) == ["model.backbone.dim", "sparse.tables.code.optimizer.lr"]


def test_tables_are_those_the_model_reads_each_with_its_own_seed_and_optimizer():
    config = RunConfig.parse(
        {
            "seed": 3,
            "data": {"path": "data"},
            "model": {"name": "light_decoder", "user_embedding": True, "backbone": {"dim": 16}},
            "sparse": {"tables": {"code": {"optimizer": {"kind": "adam"}}}},
        }
    )

    assert isinstance(config.model, LightDecoderConfig)
    assert {
        table.name: (table.seed, table.dim, table.optimizer.kind) for table in config.tables(RateSchedule())
    } == {
        "item": (3001, 16, "rowwise_adagrad"),
        "code": (3003, 16, "adam"),
        "user": (3002, 16, "rowwise_adagrad"),
    }


def test_a_table_larger_than_memory_has_a_disk_of_its_own():
    config = RunConfig.parse(
        {
            "data": {"path": "data"},
            "model": {"name": "light_decoder", "user_embedding": True},
            "sparse": {"tables": {"user": {"disk": {"memory": "8 GiB", "folder": "/local"}}}},
        }
    )
    disks = {table.name: table.disk for table in config.tables(RateSchedule()) if table.disk}

    assert {name: (int(disk.memory), disk.folder_path) for name, disk in disks.items()} == {
        "user": (8 * 2**30, Path("/local"))
    }
    assert int(disks["user"].times(3).memory) == 24 * 2**30


def test_a_small_catalog_needs_no_table():
    assert RunConfig.parse(SMALLEST).tables(RateSchedule()) == ()


def test_a_recipe_is_how_trainers_compute():
    recipe = {"precision": "bfloat16", "micro_batches": 4, "compile": True, "parallel": "fsdp2"}
    config = RunConfig.parse(SMALLEST | {"training": recipe, "pipeline": {"num_trainers": 2}})

    assert config.training.compute == ComputeSettings("bfloat16", 4, compile=True, parallel="fsdp2")
    assert RunConfig.parse(SMALLEST).training.compute == PLAIN


def test_a_run_to_begin_from_is_found_from_any_working_directory(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    config = RunConfig.parse(SMALLEST | {"training": {"init_from": "runs/pretrain"}})

    assert config.with_absolute_paths().training.init_from == str(tmp_path / "runs/pretrain")


def test_folders_that_are_written_to_are_the_same_from_any_working_directory(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    tables = {"item": {"disk": {"memory": "1 GiB", "folder": "spill"}}, "user": {"init_scale": 0.1}}
    snapshots = {"copy_to": "s3://bucket/run", "publish": {"to": "versions"}}
    config = RunConfig.parse(SMALLEST | {"sparse": {"tables": tables}, "snapshots": snapshots})

    found = config.with_absolute_paths()

    assert found.sparse.tables["item"].disk.folder == str(tmp_path / "spill")
    assert found.sparse.tables["user"] == config.sparse.tables["user"]
    assert found.snapshots.copy_to == "s3://bucket/run"
    assert found.snapshots.publish.to == str(tmp_path / "versions")
    plain = RunConfig.parse(SMALLEST)
    assert plain.with_absolute_paths().sparse == plain.sparse


def test_cpus_are_counted_over_all_actors():
    config = RunConfig.parse(
        SMALLEST | {"pipeline": {"num_readers": 2, "num_trainers": 3}, "sparse": {"num_servers": 4}}
    )

    assert config.cpus_needed == (2 + 1) * 0.25 + 3 * 1.0  # the model has no tables
    with_tables = config.model_copy(
        update={"model": RunConfig.parse(SMALLEST | {"model": SPARSE_SASREC}).model}
    )
    assert with_tables.cpus_needed == (2 + 1 + 4) * 0.25 + 3 * 1.0


def test_the_cosine_ends_with_the_last_epoch():
    schedule = {"training": {"epochs": 5, "schedule": {"decay": "cosine"}}}

    assert RunConfig.parse(SMALLEST | schedule).rate_schedule(lambda: 35).cosine_steps == 35
    assert RunConfig.parse(SMALLEST).rate_schedule(lambda: 35).cosine_steps is None


def test_a_run_knows_a_device_that_this_machine_may_lack():
    for device in KINDS:
        assert RunConfig.parse(SMALLEST | {"device": device}).device == device


@pytest.mark.parametrize(
    ("semantic_ids", "expected"),
    [(None, None), ("old/data/codes/a", "new/place/codes/a"), ("elsewhere/codes", "elsewhere/codes")],
)
def test_semantic_ids_inside_the_data_set_move_with_it(semantic_ids, expected):
    config = RunConfig.parse(SMALLEST | {"data": {"path": "old/data", "semantic_ids": semantic_ids}})

    moved = config.with_data("new/place")

    assert moved.data.path == "new/place"
    assert moved.data.semantic_ids == expected


@pytest.mark.parametrize("setting", [{"num_siblings": 4}, {"held_prefixes": 9}])
def test_settings_of_prefixes_as_rows_are_refused_where_these_are_weights(setting):
    values = {"data": {"path": "data"}, "model": {"name": "prefix_decoder"} | setting}
    with pytest.raises(InputError, match=f"model.{next(iter(setting))} is of the prefix_matrix 'sparse'"):
        RunConfig.parse(values)
    values["model"]["prefix_matrix"] = "sparse"
    config = RunConfig.parse(values)
    assert RunConfig.parse(config.model_dump(mode="json")) == config


@pytest.mark.parametrize("name", ["light_decoder", "lazy_decoder", "encoder_decoder", "causal_lm"])
def test_label_smoothing_is_refused_where_the_softmax_is_over_children(name):
    values = {"data": {"path": "data"}, "model": {"name": name, "softmax": "children"}}
    config = RunConfig.parse(values)
    assert RunConfig.parse(config.model_dump(mode="json")) == config
    values["model"]["label_smoothing"] = 0.1
    with pytest.raises(InputError, match="label_smoothing is of the softmax 'codes'"):
        RunConfig.parse(values)


def test_a_prefix_decoder_is_read_back_with_all_its_settings():
    config = RunConfig.parse({"data": {"path": "data"}, "model": {"name": "prefix_decoder"}})
    assert RunConfig.parse(config.model_dump(mode="json")) == config
