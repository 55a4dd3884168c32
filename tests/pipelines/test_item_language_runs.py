"""A model of words and semantic IDs is trained, evaluated, asked, served and improved as every other one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fastapi.testclient import TestClient

from rayrec.models.base.cache_sizes import CacheSizes
from rayrec.models.generative.item_language import ItemLanguageRecommender
from rayrec.pipelines.config.run import RunConfig
from rayrec.pipelines.evaluation.evaluate import evaluate
from rayrec.pipelines.inference.answers import Budget, Query
from rayrec.pipelines.inference.export import export_run
from rayrec.pipelines.inference.item_ranker import UnloadedRanker, item_ranker_of
from rayrec.pipelines.inference.loading import TrainedModel, local_tables
from rayrec.pipelines.inference.recommender import Recommender
from rayrec.pipelines.runs.run_folder import RunFolder
from rayrec.pipelines.runs.snapshots import read_snapshot
from rayrec.pipelines.tasks.assembly import assemble
from rayrec.pipelines.tasks.item_prompts import item_tokenizer
from rayrec.pipelines.training.placements import in_process
from rayrec.pipelines.training.train import train
from rayrec.pipelines.versions.loading import load_version
from rayrec.pipelines.versions.publisher import Publisher
from rayrec.pipelines.versions.store import VersionStore
from rayrec.platform.errors import InputError
from rayrec.rl.config import RlConfig
from rayrec.rl.run import train_policy
from rayrec.samples.base.config import PrepareConfig
from rayrec.samples.dataset.dataset import Dataset
from rayrec.samples.prepare.prepare import prepare
from rayrec.samples.reading.reader import SampleReader
from rayrec.samples.text.tokens import TextTokenizer
from rayrec.serve.app.loading import load_api
from rayrec.serve.config.serve import ServeConfig
from rayrec.serve.on_ray.dense import DensePart, RemoteRanker
from rayrec.serve.web.metrics import PrometheusMeter
from tests.helpers.data import write_source
from tests.helpers.optional import skip_without
from tests.helpers.runs import NUM_ITEMS, dataset_of, make_semantic_ids
from tests.helpers.text_tokenizers import tokenizer_folder

skip_without("peft")

pytest.importorskip("transformers")

LLAMA = {
    "model_type": "llama",
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "intermediate_size": 48,
}
MODEL: dict[str, Any] = {
    "name": "item_language",
    "base": {"kind": "settings", "settings": LLAMA},
    "lora": {"rank": 4},
    "prompt": "{table:user} had {history}",
    "event": "{codes}{table:item}",
    "table_dim": 8,
    "max_events": 6,
    "max_tokens": 96,
    "beam_width": 30,
    "alignment": [
        {"prompt": "{title} is ", "completion": "{codes}"},
        {"prompt": "{codes} is ", "completion": "{title}", "weight": 0.5},
        {"prompt": "{history.codes} then ", "completion": "{title}", "weight": 0.5},
    ],
}


@pytest.fixture(scope="module")
def shop(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("shop")
    make_semantic_ids(dataset_of(folder))
    tokenizer_folder(folder / "base")
    return folder


def settings(shop: Path, epochs: int = 4, num_trainers: int = 1, **model: Any) -> RunConfig:
    return RunConfig.parse(
        {
            "data": {"path": str(shop / "data")},
            "model": {**MODEL, "tokenizer": str(shop / "base"), **model},
            "pipeline": {"trainer_threads": 1, "num_trainers": num_trainers},
            "training": {
                "batch_size": 16,
                "epochs": epochs,
                "optimizer": {"learning_rate": 0.03},
                "schedule": {"warmup_steps": 2},
            },
            "sparse": {"optimizer": {"kind": "rowwise_adagrad", "lr": 0.1}},
        }
    )


def trained(config: RunConfig, run: Path, **options: Any) -> list[float]:
    losses: list[float] = []
    train(config, run, on_step=lambda done, total, loss: losses.append(loss), cluster=in_process, **options)
    return losses


@pytest.fixture(scope="module")
def run(shop, tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("runs") / "run"
    losses = trained(settings(shop), path)
    assert losses[-1] < 0.95 * losses[0]
    return path


def state_of(run: Path) -> dict[str, np.ndarray]:
    snapshot = read_snapshot(RunFolder.open(run).chosen_snapshot("last"))
    return {**snapshot.weights, **snapshot.optimizer_state}


@pytest.mark.slow
def test_a_run_is_evaluated_as_every_other(run):
    report = evaluate(run, which="last")

    recall = report.results["model"]["recall@50"].value
    assert recall == 1.0  # of thirty items, all are found
    assert 0 < report.results["model"]["ndcg@10"].value < 1


def test_rows_of_users_and_items_are_trained_and_the_base_is_not(run, shop):
    model = TrainedModel.load(run, "last")
    fresh = assemble(settings(shop)).task
    users = fresh.ids_of("user")

    rows_MD = model.tables.read({"user": users, "item": fresh.ids_of("item")})
    untrained_MD = local_tables(model.assembly, None).read({"user": users, "item": fresh.ids_of("item")})

    assert (rows_MD["user"] != untrained_MD["user"]).any(axis=1).mean() > 0.6  # others have one event
    assert (rows_MD["item"] != untrained_MD["item"]).any(axis=1).mean() > 0.8
    assert "base" in model.weights
    assert any("lora" in name for name in model.weights)
    assert not any(name.endswith("q_proj.base_layer.weight") for name in model.weights)


def test_answers_are_exact_log_probabilities_by_the_trie(run):
    recommender = Recommender.load(run, "last")
    query = recommender.query_of_user("u1")

    (found,) = recommender.recommend([query], NUM_ITEMS, exclude_seen=False)

    assert len(found) == NUM_ITEMS
    scores = np.array([item.score for item in found])
    assert np.exp(scores).sum() == pytest.approx(1.0, abs=1e-4)
    positions = np.array([[recommender.dataset.position_by_key(item.item_key) for item in found]])
    np.testing.assert_allclose(recommender.item_log_probs([query], positions)[0], scores, atol=1e-4)


def test_users_are_told_apart_by_their_rows_and_unknown_ones_are_answered(run):
    recommender = Recommender.load(run, "last")
    history = recommender.query_of_user("u1").history_ids
    ids = [recommender.dataset.user_by_key(name) for name in ("u1", "u2")]

    answers = recommender.recommend([Query(history, user) for user in (*ids, None)], 5)

    first, second, nobody = ([item.score for item in answer] for answer in answers)
    assert first != second
    assert len(nobody) == 5


def test_a_history_too_long_for_the_prompt_is_said_to_be_unread(run):
    recommender = Recommender.load(run, "last")
    ids = recommender.dataset.items.ids_I

    (answer,) = recommender.answer([Query(ids[:20], None)], 3)

    assert (answer.num_read, answer.num_unread) == (6, 14)


def test_it_is_served(run):
    recommender = Recommender.load(run, "last")
    (expected,) = recommender.recommend([recommender.query_of_user("u3")], 5)
    config = ServeConfig(page=False, snapshot="last")

    with TestClient(load_api(run, config, PrometheusMeter())) as client:
        answer = client.post("/v1/recommend", json={"user_id": "u3", "k": 5})

    assert answer.status_code == 200, answer.text
    found = answer.json()["items"]
    assert [item["item_id"] for item in found] == [item.item_key for item in expected]
    assert [item["score"] for item in found] == pytest.approx([item.score for item in expected], abs=1e-5)


def test_a_network_elsewhere_answers_to_the_bit_like_one_at_hand(run):
    whole, part = Recommender.load(run), DensePart.open(run, ServeConfig())
    split = Recommender(TrainedModel.load(run), RemoteRanker(part.recommend, None, part.beam_width()))
    queries = [whole.query_of_user(f"u{user}") for user in (1, 2, 17)]
    queries.append(Query(np.zeros(0, dtype=np.int64)))

    assert split.answer(queries, 5) == whole.answer(queries, 5)
    few = Budget(max_beams=6, max_events=2)
    assert split.answer(queries, 5, budget=few) == whole.answer(queries, 5, budget=few)


def test_it_is_published_and_what_cannot_be_kept_or_compiled_is_not(run, tmp_path):
    folder = RunFolder.open(run)
    store = VersionStore(tmp_path / "store")
    version = Publisher(folder, store).publish(read_snapshot(folder.chosen_snapshot("last")))
    published = Recommender(load_version(store, version).model)
    recommender = Recommender.load(run, "last")
    query = recommender.query_of_user("u3")

    assert published.recommend([query], 5) == recommender.recommend([query], 5)
    with pytest.raises(InputError, match="reads each history as a whole"):
        recommender.use_prefix_cache(CacheSizes(1 << 20))
    unloaded = TrainedModel.load(run, "last", with_rows=False, with_weights=False)
    assert UnloadedRanker.of(unloaded).model is not None


def test_words_can_be_learned_before_histories(shop, run, tmp_path):
    config = settings(shop, epochs=1, alignment=[], dropout=0.1)
    training = config.training.model_copy(update={"init_from": str(run)})
    losses = trained(config.model_copy(update={"training": training}), tmp_path / "next")
    assert np.isfinite(losses).all()

    more = settings(shop, prompt="{history.codes}", alignment=[])
    with pytest.raises(InputError, match=r"differs from this one in model\.prompt"):
        trained(more.model_copy(update={"training": training}), tmp_path / "other")


@pytest.mark.slow
def test_it_learns_from_rewards(run, tmp_path):
    config = RlConfig.parse(
        {
            "init_from": str(run),
            "snapshot": "last",
            "steps": 2,
            "algorithm": {"name": "grpo"},
            "prompts": {"users_per_step": 8, "held_out_share": 0.2},
            "rollout": {"group_size": 4, "chunk_users": 4},
            "rewards": {"parts": [{"kind": "hit"}, {"kind": "novelty"}]},
            "learner": {"learning_rate": 0.003, "micro_batches": 2},
            "evaluation": {"every_steps": 2, "temperatures": [1.0], "list_size": 3},
        }
    )

    train_policy(config, tmp_path / "rl", cluster=in_process)

    before, after = state_of(run), state_of(tmp_path / "rl")
    changed = [name for name in after if name in before and not np.array_equal(before[name], after[name])]
    assert any("lora_B" in name for name in changed)
    assert np.array_equal(before["base"], after["base"])
    lines = [json.loads(line) for line in (tmp_path / "rl" / "metrics.jsonl").read_text().splitlines()]
    assert all(np.isfinite(line["loss"]) for line in lines if "loss" in line)
    assert len(Recommender.load(tmp_path / "rl", "last").recommend([Query(np.array([1]))], 5)[0]) >= 0


@pytest.mark.parametrize("aligned", ["trained", "catalog"])
def test_what_is_held_out_is_in_no_prompt_unless_the_catalog_is_asked_for(tmp_path, aligned):
    """Item "new" is the newest event of some users, and "ghost" of none."""
    events = [(f"u{user}", f"i{(user + place) % 9}", place) for user in range(12) for place in range(6)]
    events += [(f"u{user}", "new", 9) for user in range(4)]
    names = [*(f"i{item}" for item in range(9)), "new", "ghost"]
    source = write_source(
        tmp_path / "source",
        events,
        items={
            "item_id": names,
            "title": [f"called {name}" for name in names],
            "category": ["odd", "even"] * 5 + [None],
        },
    )
    prepare(source, tmp_path / "data", PrepareConfig(allow=frozenset({"cold-items", "short-users"})))
    dataset = Dataset.open(tmp_path / "data")
    make_semantic_ids(dataset)
    tokenizer_folder(tmp_path / "base")
    kinds = {"prompt": "{codes} is of the kind ", "completion": "{category}"}
    assembly = assemble(settings(tmp_path, aligned_items=aligned, alignment=[*MODEL["alignment"], kinds]))
    reader, task = SampleReader(assembly.plan.spec), assembly.task
    tokenizer = item_tokenizer(task.model, task.registry)

    prompts, read = [], set()
    for step in range(40):
        (batch,) = assembly.features.training(step, reader.read_batch(assembly.plan.batch(step)))
        prompts.append(tokenizer.decode(batch.prompts.tokens_N))
        read |= set(batch.lookups["item"].ids_M.tolist())

    said = " ".join(prompts)
    assert all(f"called i{item}" in said for item in range(9))
    assert all(f"of the kind {kind}<|im_end|>" in said for kind in ("odd", "even"))
    assert ("called new" in said, "called ghost" in said) == (aligned == "catalog",) * 2
    keys = dataset.items.keys.to_pylist()
    assert {keys[position] for position in dataset.item_positions(np.array(sorted(read)))} == set(names[:9])


@pytest.mark.slow
def test_a_run_that_was_stopped_ends_with_the_same_bits(shop, run, tmp_path):
    config = settings(shop)

    class StoppedError(Exception):
        pass

    def stop(done: int, total: int | None, loss: float) -> None:
        if done == 4:
            raise StoppedError

    with pytest.raises(StoppedError):
        train(config, tmp_path / "run", on_step=stop, cluster=in_process)
    trained(config, tmp_path / "run", resume=True)

    ours, theirs = state_of(tmp_path / "run"), state_of(run)
    assert ours.keys() == theirs.keys()
    for name, array in ours.items():
        np.testing.assert_array_equal(array, theirs[name], err_msg=name)


@pytest.mark.slow
def test_two_trainers_learn_what_one_does(shop, tmp_path):
    one = trained(settings(shop, epochs=1), tmp_path / "one")
    two = trained(settings(shop, epochs=1, num_trainers=2), tmp_path / "two")

    np.testing.assert_allclose(one, two, rtol=1e-4)
    for name, value in state_of(tmp_path / "one").items():
        np.testing.assert_allclose(value, state_of(tmp_path / "two")[name], atol=2e-3, err_msg=name)


def test_the_network_is_the_one_that_was_trained(run):
    program = item_ranker_of(TrainedModel.load(run, "last"))

    assert isinstance(program.model, ItemLanguageRecommender)
    assert isinstance(program.model.backbone.network, torch.nn.Module)


@pytest.mark.slow
def test_a_run_of_text_and_codes_is_exported_and_is_a_base_again(shop, run, tmp_path):
    transformers = pytest.importorskip("transformers")
    plain = {"prompt": "had {history.codes}", "alignment": [], "lora": {"rank": 2}}
    trained(settings(shop, epochs=1, **plain), tmp_path / "run")

    exported = export_run(tmp_path / "run", tmp_path / "folder", "last")

    assert exported.layout == "Hugging Face"
    recommender = Recommender.load(tmp_path / "run", "last")
    query = recommender.query_of_user("u3")
    items = np.arange(NUM_ITEMS)[None]
    expected = recommender.item_log_probs([query], items)
    network = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "folder")
    tokenizer = TextTokenizer.load(tmp_path / "folder")
    registry, sizes = recommender.semantic_ids, recommender.semantic_ids.learned_level_sizes
    events = registry.learned_codes_IL[recommender.dataset.item_positions(query.history_ids)[-6:]]
    ids = tokenizer.encode("had ") + tokenizer.code_ids(events).flatten().tolist()
    first = tokenizer.info.first_new
    logits = network(torch.tensor([ids])).logits[0, -1, first : first + sizes[0]]
    reachable = np.unique(registry.codes_IL[:, 0])
    by_hand = logits[reachable].log_softmax(0).detach().numpy()
    of_first = [np.logaddexp.reduce(expected[0][registry.codes_IL[:, 0] == code]) for code in reachable]
    np.testing.assert_allclose(of_first, by_hand, atol=1e-4)
    # As the base of a run of its own, it is loaded with its codes.
    again = settings(
        shop,
        **plain,
        tokenizer=str(tmp_path / "folder"),
        base={"kind": "folder", "folder": str(tmp_path / "folder")},
    )
    assert assemble(again).task.catalog.vocabulary.first_new == first
    with pytest.raises(InputError, match="rows lie on parameter"):
        export_run(run, tmp_path / "other")
    assert not (tmp_path / "other").exists()


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"prompt": "no history"}, "has no history"),
        ({"prompt": "{codes} {history}"}, "the item that is to be said"),
        ({"alignment": [{"prompt": "{titel}", "completion": "{codes}"}]}, "did you mean {title}"),
        ({"alignment": [{"prompt": "{title}", "completion": ""}]}, "has no completion"),
        ({"event": "{title} {codes}"}, "says {title} of an item before its codes"),
        ({"max_tokens": 4}, "even without a history"),
        ({"tokenizer": None}, "name the folder of a tokenizer"),
        ({"alignment": [{"prompt": "{category}", "completion": "{codes}"}]}, "name one"),
    ],
)
def test_settings_that_do_not_fit_end_in_one_sentence(shop, changed, message):
    with pytest.raises(InputError, match=message.replace("{", r"\{")):
        assemble(settings(shop, **changed))
