"""Quantized runs: made, loaded everywhere, compared, and refused."""

import json
import shutil
from types import SimpleNamespace

import numpy as np
import pytest
import safetensors.numpy
import torch
import yaml

from rayrec.models.compiled_ranking.compiler_process import NeverCompiledError, compile_package
from rayrec.models.quantization.network import QuantizationPlan
from rayrec.models.quantization.observers import InputObserver
from rayrec.pipelines.config.run import RunConfig
from rayrec.pipelines.evaluation.evaluate import evaluate
from rayrec.pipelines.evaluation.lists import MODEL, MODEL_UNMASKED
from rayrec.pipelines.inference.answers import Query
from rayrec.pipelines.inference.recommender import Recommender
from rayrec.pipelines.quantization.comparison import Pair, divergence, shared
from rayrec.pipelines.quantization.quantize import QuantizationRequest, quantize_run
from rayrec.pipelines.runs.run_folder import RunFolder
from rayrec.pipelines.runs.run_list import list_runs
from rayrec.pipelines.runs.snapshots import WEIGHTS, read_snapshot
from rayrec.pipelines.training.train import train
from rayrec.pipelines.versions.loading import load_version
from rayrec.pipelines.versions.publisher import Publisher
from rayrec.pipelines.versions.store import VersionStore
from rayrec.platform.errors import InputError
from tests.helpers.data import small_dataset
from tests.helpers.examples import cases
from tests.helpers.later_data import NUM_NEW, grown_dataset
from tests.helpers.runs import NUM_ITEMS, make_run

WIDE = {"backbone": {"dim": 32, "num_layers": 1, "num_heads": 2, "feedforward_dim": 64, "max_length": 8}}
MODELS = {
    "sasrec": WIDE | {"item_matrix": "sparse"},
    "bsarec": WIDE,
    "hstu": {"backbone": {k: v for k, v in WIDE["backbone"].items() if k != "feedforward_dim"}},
    "prefix": WIDE,
    "hybrid": WIDE | {"softmax": "hybrid"},
    "generative": WIDE | {"decoder_dim": 32},
    "lazy": WIDE,
    "encoder": WIDE,
}


SCHEMES = ("w8a8", "w8a8_static", "w8a16", "w4a16", "fp8")


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return make_run(tmp_path_factory.mktemp("run"), "prefix", **WIDE)


@pytest.fixture(scope="module")
def quantized(run):
    """The same in w8a8."""
    quantize_run(run, run.parent / "quantized", asked())
    return run.parent / "quantized"


def asked(scheme="w8a8", **more):
    plan = {name: more.pop(name) for name in ("group_size", "scales", "weight_bits") if name in more}
    return QuantizationRequest(QuantizationPlan(scheme, **plan), calibrate=20, **more)


def answers(run):
    recommender = Recommender.load(run)
    queries = [recommender.query_of_user(f"u{user}") for user in range(10)]
    return [[(item.item_key, item.score) for item in items] for items in recommender.recommend(queries, 5)]


@pytest.mark.parametrize("scheme", cases(SCHEMES, ["w8a8", "w4a16"]))
def test_a_quantized_run_of_every_scheme_answers_like_its_source(run, tmp_path, scheme):
    check_answers_alike(run, tmp_path / "quantized", scheme)


@pytest.mark.parametrize("model", cases(MODELS, ["sasrec"]))
def test_a_quantized_run_of_every_model_answers_like_its_source(tmp_path, model):
    kind = "prefix" if model == "hybrid" else model
    check_answers_alike(make_run(tmp_path, kind, **MODELS[model]), tmp_path / "quantized", "w8a8")


def check_answers_alike(run, out, scheme):
    report = quantize_run(run, out, asked(scheme))

    found = evaluate(out, baselines=False).results["model"]
    for name, pair in report.comparison.metrics.items():
        assert found[name].value == pytest.approx(pair.after.value)
    assert report.comparison.overlap.value > (0.7 if scheme == "w4a16" else 0.85)
    assert report.comparison.kl.value < 0.05


def test_the_report_is_in_the_folder_and_says_what_was_compared(run, tmp_path):
    report = quantize_run(run, tmp_path / "q", asked("w4a16"))

    written = json.loads((tmp_path / "q" / "quantization.json").read_text())
    assert written == json.loads(json.dumps(report.to_json()))
    assert written["run"] == "run"
    assert written["calibrated"] == 20
    assert written["quantization"]["scheme"] == "w4a16"
    assert written["quantization"]["group_size"] == 32
    sizes = written["bytes"]["quantized_layers"]
    assert sizes["after"] < 0.2 * sizes["before"]
    assert set(written["ms_per_batch"]) == {"before", "after"}
    before, after = (written["metrics"]["recall@10"][name]["value"] for name in ("before", "after"))
    assert written["metrics"]["recall@10"]["difference"]["value"] == pytest.approx(after - before)


def test_int8_layers_take_a_quarter_of_the_bytes_and_a_scale(quantized):
    sizes = json.loads((quantized / "quantization.json").read_text())["bytes"]["quantized_layers"]

    assert sizes["after"] < 0.35 * sizes["before"]
    weights = safetensors.numpy.load_file(RunFolder.open(quantized).chosen_snapshot("best") / WEIGHTS)
    assert weights["backbone.backbone.blocks.0.qkv.weight"].dtype == np.int8
    assert weights["backbone.backbone.blocks.0.qkv.weight_scale"].shape == (96, 1)


def test_a_quantized_run_is_published_and_loaded_as_a_version(quantized, tmp_path):
    folder = RunFolder.open(quantized)

    store = VersionStore(str(tmp_path / "store"))
    version = Publisher(folder, store).publish(read_snapshot(folder.chosen_snapshot("best")))

    served = Recommender(load_version(store, version).model)
    queries = [served.query_of_user(f"u{user}") for user in range(10)]
    found = [[(item.item_key, item.score) for item in items] for items in served.recommend(queries, 5)]
    assert found == answers(quantized)


def test_rows_of_increments_are_put_together(tmp_path):
    run = make_run(tmp_path, "sasrec", item_matrix="sparse", snapshots_after=(0,), **WIDE)
    source = read_snapshot(RunFolder.open(run).chosen_snapshot("best"))
    assert len(source.chain) == 2

    quantize_run(run, tmp_path / "q", asked())

    made = read_snapshot(RunFolder.open(tmp_path / "q").chosen_snapshot("best"))
    assert len(made.chain) == 1
    plain, quantized = Recommender.load(run), Recommender.load(tmp_path / "q")
    ids_M = plain.dataset.items.ids_I
    np.testing.assert_array_equal(
        *(each._tables.read({"item": ids_M})["item"] for each in (plain, quantized))
    )


def test_runs_are_listed_with_quantized_ones(quantized):
    found = {summary.name: summary.condition for summary in list_runs(quantized.parent)}

    assert found["quantized"] == "finished"


def test_a_run_that_is_validated_with_seen_items_is_compared_with_them(run, tmp_path):
    source = tmp_path / "run"
    shutil.copytree(run, source)
    config = RunFolder.open(source).config
    evaluation = config.evaluation.model_copy(update={"exclude_seen": False})
    (source / "config.yaml").write_text(config.model_copy(update={"evaluation": evaluation}).to_yaml())

    report = quantize_run(source, tmp_path / "q", asked())

    results = evaluate(source, baselines=False).results
    kept, left_out = (results[name]["ndcg@10"].value for name in (MODEL_UNMASKED, MODEL))
    assert report.comparison.metrics["ndcg@10"].before.value == pytest.approx(kept)
    assert kept != left_out


def test_what_loses_too_much_is_not_written(run, tmp_path, monkeypatch):
    from rayrec.pipelines.quantization import quantize as module

    def halved(*arguments, **options):
        made = compare(*arguments, **options)
        before_U = np.array([1.0, 1.0, 1.0, 0.0])
        worse = Pair.of(before_U, np.array([1.0, 1.0, 0.0, 0.0]))
        return type(made)(**{**vars(made), "metrics": {"recall@10": worse, "ndcg@10": worse}})

    compare = module.compare
    monkeypatch.setattr(module, "compare", halved)

    with pytest.raises(
        InputError, match=r"not written: ndcg@10 goes .* a loss of 33.33%, and .* allows 1.00%"
    ):
        quantize_run(run, tmp_path / "q", asked(most_loss=0.01))

    assert not list(tmp_path.iterdir())


def test_a_run_is_quantized_once(quantized, tmp_path):
    with pytest.raises(
        InputError, match=r"is quantized already \(w8a8\); quantize the run that it was made of, /"
    ):
        quantize_run(quantized, tmp_path / "again", asked())


def test_a_folder_that_is_there_is_not_replaced(run, tmp_path):
    with pytest.raises(InputError, match="is there already"):
        quantize_run(run, tmp_path, asked())


def test_data_of_another_catalog_is_refused(tmp_path):
    run = make_run(tmp_path, "sasrec", **WIDE)
    other = small_dataset(tmp_path / "other", num_items=50)

    with pytest.raises(InputError, match="was trained on another data set than"):
        quantize_run(run, tmp_path / "q", asked(), data=other.root)

    assert not (tmp_path / "q").exists()


def test_a_model_of_words_is_quantized_on_its_own_data_and_serves_items_that_came_later(tmp_path):
    run = make_run(tmp_path, "sasrec", content={"min_items": 2}, **WIDE)
    grown = grown_dataset(tmp_path)
    with pytest.raises(
        InputError, match=r"trained on an earlier data set than .*grown; quantize it with that"
    ):
        quantize_run(run, tmp_path / "refused", asked(), data=grown.root)

    quantize_run(run, tmp_path / "q", asked())

    (answer,) = Recommender.load(tmp_path / "q", data=grown.root).recommend(
        [Query(grown.items.ids_I[:4])], k=NUM_ITEMS + NUM_NEW, exclude_seen=False
    )
    assert len(answer) == NUM_ITEMS + NUM_NEW


def test_groups_that_do_not_fit_are_refused(run, tmp_path):
    with pytest.raises(InputError, match="which groups of 128 do not divide; take groups of 32"):
        quantize_run(run, tmp_path / "q", asked("w4a16", group_size=128))

    assert not (tmp_path / "q").exists()


def test_scales_that_were_damaged_are_refused_by_name(quantized):
    model = Recommender.load(quantized)._model
    broken = {name: each.copy() for name, each in model.weights.items()}
    broken["backbone.backbone.blocks.0.up.weight_scale"][0] = np.nan

    with pytest.raises(
        InputError, match=r"blocks\.0\.up: weight scales of the quantized layer are not finite"
    ):
        Recommender(type(model)(**{**vars(model), "weights": broken}))


def test_nothing_trains_on_a_quantized_run(run, quantized, tmp_path):
    config = RunFolder.open(run).config

    with pytest.raises(InputError, match="quantized weights cannot be trained"):
        train(RunFolder.open(quantized).config, tmp_path / "new")
    with pytest.raises(InputError, match="holds a quantized run, which cannot be trained"):
        RunFolder.resume(quantized, config)
    begun = config.model_copy(
        update={"training": config.training.model_copy(update={"init_from": str(quantized)})}
    )
    with pytest.raises(InputError, match="is quantized, and no training begins with its weights"):
        train(begun, tmp_path / "new")


def test_a_quantized_run_is_never_compiled(quantized, tmp_path):
    """Before a compiler is looked for: with one, nothing would be different."""
    model = SimpleNamespace(config=RunFolder.open(quantized).config.model)

    with pytest.raises(NeverCompiledError, match="the run is quantized: programs take weights as they are"):
        compile_package(SimpleNamespace(model=model), tmp_path / "package.pt2")


@pytest.mark.parametrize("model", ["dlrm", "keras"])
def test_a_run_that_ranks_what_is_shown_is_refused_by_name(run, tmp_path, model):
    ranker = tmp_path / "ranker"
    shutil.copytree(run, ranker)
    settings = {"dlrm": {"name": "dlrm"}, "keras": {"name": "keras", "builder": "models:build"}}[model]
    config = {"data": {"path": "data"}, "model": settings}
    (ranker / "config.yaml").write_text(yaml.safe_dump(config))

    with pytest.raises(InputError, match=f"'{model}' ranks what is shown; recommenders and language models"):
        quantize_run(ranker, tmp_path / "q", asked())

    assert not (tmp_path / "q").exists()


def test_a_scheme_without_kernels_here_is_computed_as_it_means(run, tmp_path):
    """A CPU has no products of float8: the numbers are float8 all the same, held as float32."""
    report = quantize_run(run, tmp_path / "q", asked("fp8"))

    assert set(report.kernels) == {"float32"}


def test_a_kernel_that_the_device_lacks_is_refused_when_the_run_is_made(run, tmp_path):
    request = QuantizationRequest(QuantizationPlan("fp8", kernel="torch_fp8"), calibrate=8)

    with pytest.raises(InputError, match=r"'torch_fp8', which cannot compute .*: device 'cpu' has fbgemm"):
        quantize_run(run, tmp_path / "q", request)

    assert not (tmp_path / "q").exists()


def test_inputs_that_are_no_numbers_are_refused_by_the_layer(run, tmp_path, monkeypatch):
    def broken(self, x):
        see(self, x * torch.nan)

    see = InputObserver.see
    monkeypatch.setattr(InputObserver, "see", broken)

    with pytest.raises(InputError, match="its inputs on the calibration data are not finite"):
        quantize_run(run, tmp_path / "q", asked())

    assert not (tmp_path / "q").exists()


def test_ranking_models_have_no_such_setting():
    with pytest.raises(
        InputError, match=r"model\.quantization is of runs that recommend, and 'dlrm' does not"
    ):
        RunConfig.parse(
            {
                "data": {"path": "data"},
                "model": {"name": "dlrm", "quantization": {"scheme": "w8a8", "modules": ["head"]}},
            }
        )


def test_divergence_is_that_of_a_worked_example():
    first = np.log(np.array([[0.5, 0.5], [1.0, 1e-300]]))
    second = np.log(np.array([[0.25, 0.75], [1.0, 1e-300]]))

    found = divergence(first, second)

    assert found[0] == pytest.approx(0.5 * np.log(2) + 0.5 * np.log(0.5 / 0.75))
    assert found[1] == pytest.approx(0.0)
    impossible = np.array([[0.0, -np.inf]])
    assert divergence(impossible, impossible).tolist() == [0.0]


def test_lists_share_what_both_have():
    first, second = np.array([[1, 2, -1], [-1, -1, -1]]), np.array([[2, 3, 4], [-1, -1, -1]])

    assert shared(first, second).tolist() == [pytest.approx(1 / 3), 1.0]
