"""Plans of clusters and of replicas, as they are asked for on the command line."""

import json

import pytest

from rayrec.platform.checkout import CHECKOUT
from tests.cli.commands import answer, rayrec, refused
from tests.helpers.runs import make_run

CLUSTERS = CHECKOUT / "configs/clusters"


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    run = make_run(tmp_path_factory.mktemp("planning"))
    path = run.parent / "plan.yaml"
    path.write_text(f"data: {{path: {run.parent / 'data'}}}\nmodel: {{name: sasrec, item_matrix: sparse}}\n")
    return path


def test_a_plan_for_a_cluster_names_the_bottleneck_and_the_next_one(config):
    plan = answer("plan", config, "--cluster", CLUSTERS / "one-node.yaml")

    assert plan["bottleneck"] != plan["next_bottleneck"]
    assert plan["step_low_s"] < plan["step_s"] < plan["step_high_s"]
    assert plan["workload"]["num_servers"] == 2


def test_a_larger_run_is_planned_by_its_sizes(config):
    plan = answer(
        "plan",
        config,
        "--cluster",
        CLUSTERS / "h100-1000.yaml",
        *("--scale", "trainers=64", "--scale", "servers=64", "--scale", "sparse_bytes=1TB", "--days", "2"),
    )

    assert plan["workload"]["num_trainers"] == 64
    assert plan["simulated"]["seconds"] == 2 * 86_400
    assert plan["money_per_billion_rows"] > 0


def test_a_model_that_does_not_fit_is_refused_with_the_component(config):
    line = refused(
        "plan",
        config,
        *(
            "--cluster",
            CLUSTERS / "h100-1000.yaml",
            "--scale",
            "trainers=1000",
            "--scale",
            "dense_parameters=10B",
        ),
    )

    assert "most of it is the gradients of the dense weights" in line


def test_a_cluster_without_a_unit_is_refused_before_anything_is_read(tmp_path):
    spec = (CLUSTERS / "one-node.yaml").read_text().replace("2 cores, assumed", "2")
    (tmp_path / "cluster.yaml").write_text(spec)

    line = refused("plan", write_nothing(tmp_path), "--cluster", tmp_path / "cluster.yaml")

    assert "'2' has no unit" in line


def write_nothing(tmp_path):
    """A config whose data is not there."""
    path = tmp_path / "run.yaml"
    path.write_text(f"data: {{path: {tmp_path / 'nowhere'}}}\nmodel: {{name: sasrec}}\n")
    return path


@pytest.mark.parametrize(
    "option", [("--scale", "trainers=2"), ("--days", "3"), ("--pictures", "p"), ("--calibration", "c")]
)
def test_options_of_clusters_need_one(config, option):
    assert "name one with --cluster" in refused("plan", config, *option)


@pytest.mark.slow
def test_pictures_are_drawn_into_a_folder(config, tmp_path):
    pytest.importorskip("matplotlib")

    answer("plan", config, "--cluster", CLUSTERS / "one-node.yaml", "--pictures", tmp_path / "pictures")

    assert sorted(path.name for path in (tmp_path / "pictures").iterdir()) == [
        "scaling.svg",
        "sensitivity.svg",
        "stages.svg",
    ]


def test_replicas_are_planned_from_measured_batches(tmp_path):
    (tmp_path / "costs.json").write_text(json.dumps({"1": 0.004, "8": 0.011, "64": 0.075}))

    plan = answer(
        *("replicas", tmp_path, "--costs", tmp_path / "costs.json", "--rate", 2000, "--within-ms", 40)
    )

    assert plan["replicas"] > 1
    assert plan["p99_s"] <= 0.04


def test_replicas_of_a_run_are_planned_from_its_model(config):
    plan = answer(*("replicas", config.parent / "run", "--rate", 10, "--within-ms", 10_000, "--max-batch", 4))

    assert plan["replicas"] == 1
    assert sorted(plan["seconds_by_size"]) == ["1", "2", "4"]


@pytest.mark.parametrize("content", ["[1, 2]", "nothing", '{"one": 2}'])
def test_costs_that_are_none_are_refused(tmp_path, content):
    (tmp_path / "costs.json").write_text(content)

    line = refused(
        *("replicas", tmp_path, "--costs", tmp_path / "costs.json", "--rate", 10, "--within-ms", 40)
    )

    assert "expected a JSON file such as" in line


def test_what_is_no_run_has_no_replicas(tmp_path):
    code, _, _ = rayrec("replicas", tmp_path, "--rate", 10, "--within-ms", 40)

    assert code == 2
