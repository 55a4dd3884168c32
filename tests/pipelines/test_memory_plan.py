"""What a run is said to need, against what its objects hold."""

import logging
from dataclasses import replace

import numpy as np
import pytest

from rayrec.embeddings.base.routing import ShardMap
from rayrec.embeddings.shard.contributions import UpdateTag
from rayrec.embeddings.shard.shard import EmbeddingShard
from rayrec.models.sequence.sequence_program import SequenceProgram, build_model
from rayrec.pipelines.config.run import RunConfig
from rayrec.pipelines.semantic_ids.tokenization import TokenizeConfig, tokenize
from rayrec.pipelines.tasks.assembly import assemble
from rayrec.pipelines.training import memory_plan
from rayrec.pipelines.training.memory_plan import plan_memory
from rayrec.pipelines.training.placements import in_process
from rayrec.pipelines.training.train import train, unread_settings
from rayrec.platform import files
from rayrec.platform.devices import get_device
from rayrec.platform.errors import InputError
from rayrec.samples.base.batches import SampleBatch
from rayrec.samples.graph import graph_of_dataset
from rayrec.samples.reading.reader import SampleReader
from tests.helpers.data import small_dataset
from tests.helpers.runs import MODELS

SETTINGS = {
    "sasrec": {"item_matrix": "sparse", "num_negatives": 5, "user_embedding": True},
    "hstu": {"item_matrix": "sparse", "loss": "bce", "negatives_per_event": 3, "user_embedding": True},
    "gnn": {"item_matrix": "sparse", "num_negatives": 5, "user_embedding": True},
    "generative": {"user_embedding": True},
    "prefix": {"prefix_matrix": "sparse", "num_siblings": 2},
}


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    dataset = small_dataset(tmp_path_factory.mktemp("data"))
    tokenize(dataset.root, config=TokenizeConfig(num_levels=2, codebook_size=4))
    return dataset


def assembly_of(dataset, model="sasrec", sparse=None, device="cpu", settings=None, **pipeline):
    return assemble(
        RunConfig.parse(
            {
                "data": {"path": str(dataset.root)},
                "device": device,
                "model": MODELS[model] | SETTINGS[model] | (settings or {}),
                "sparse": {"num_servers": 2} | (sparse or {}),
                "pipeline": {"trainer_threads": 1} | pipeline,
                "training": {"batch_size": 16, "epochs": 1},
            }
        )
    )


@pytest.mark.parametrize("model", SETTINGS)
def test_servers_that_have_trained_every_id_hold_what_was_planned(dataset, model):
    assembly = assembly_of(dataset, model)
    ids = {table.name: assembly.task.ids_of(table.name) for table in assembly.tables}
    plan = plan_memory(assembly)
    for shard in range(2):
        server = EmbeddingShard(assembly.tables, shard, 1)
        mine = {name: ids_M[ShardMap(2).shard_of(ids_M) == shard] for name, ids_M in ids.items()}
        dim = assembly.tables[0].dim
        server.apply(
            UpdateTag(0, 0, 0),
            {name: (ids_M, np.zeros((len(ids_M), dim), np.float32)) for name, ids_M in mine.items()},
        )

        assert server.stats().num_bytes == plan.shards[shard].num_bytes
        assert sum(server.stats().num_rows.values()) == plan.shards[shard].num_rows


@pytest.mark.parametrize("model", SETTINGS)
@pytest.mark.parametrize("num_trainers", [1, 3])
def test_no_batch_has_more_ids_than_was_planned(dataset, model, num_trainers):
    assembly = assembly_of(dataset, model, num_trainers=num_trainers)
    ids = {table.name: assembly.task.ids_of(table.name) for table in assembly.tables}
    most = {name: min(assembly.task.most_batch_ids(name), len(ids_M)) for name, ids_M in ids.items()}
    plan = assembly.plan
    reader = SampleReader(plan.spec)
    seen = dict.fromkeys(most, 0)
    for step in range(assembly.total_steps):
        samples = SampleBatch.of(step, reader.read_batch(plan.batch(step)))
        for features in assembly.task.sequences(samples):
            for name, lookup in features.lookups.items():
                assert np.isin(lookup.ids_M, ids[name]).all()
                seen[name] = max(seen[name], len(lookup.ids_M))

    assert all(0 < seen[name] <= most[name] for name in most)


def test_prefixes_of_negatives_are_planned(dataset):
    few, many = (
        assembly_of(dataset, "prefix", settings={"softmax": "hybrid", "num_negatives": number})
        for number in (5, 12)
    )
    levels = few.task.sequences.paths.tree.depth

    more = many.task.most_batch_ids("prefix") - few.task.most_batch_ids("prefix")

    assert more == 7 * levels


@pytest.mark.parametrize("model", SETTINGS)
def test_dense_weights_and_state_are_those_of_the_program(dataset, model):
    assembly = assembly_of(dataset, model)
    program = SequenceProgram(
        build_model(assembly.config.model, assembly.task.catalog, 0),
        assembly.dense_optimizer(),
        get_device("cpu").torch,
        0,
    )
    for parameter in program.model.parameters():
        parameter.grad = parameter.detach().clone()
    program.update()
    state = {name: value for name, value in program.optimizer_state().items() if "exp_avg" in name}

    trainer = plan_memory(assembly).trainer

    assert trainer.dense.weights_bytes == sum(weight.nbytes for weight in program.weights().values())
    assert trainer.optimizer_bytes == sum(value.nbytes for value in state.values())


@pytest.mark.parametrize("model", MODELS)
def test_the_driver_counts_weights_that_it_does_not_hold(dataset, model):
    settings = {"data": {"path": str(dataset.root)}, "model": MODELS[model]}
    assembly = assemble(RunConfig.parse(settings))

    network = assembly.task.network()

    held = build_model(assembly.config.model, assembly.task.catalog, 0)
    assert all(weight.is_meta for weight in network.parameters())
    for ours, theirs in (
        (network.named_parameters(), held.named_parameters()),
        (network.named_buffers(), held.named_buffers()),
    ):
        assert {name: (part.shape, part.dtype) for name, part in ours} == {
            name: (part.shape, part.dtype) for name, part in theirs
        }
    assert dict(network.named_buffers()).keys() >= ({"codes_IL"} if assembly.task.registry else set())


def test_what_a_folders_generation_settings_say_in_vain_is_a_note_of_the_run(dataset, tmp_path):
    def notes(content):
        (tmp_path / "generation_config.json").write_text(content)
        network = {"kind": "folder", "folder": str(tmp_path)}
        model = {"name": "causal_lm", "backbone": {"network": network}}
        return assemble(RunConfig.parse({"data": {"path": str(dataset.root)}, "model": model})).task.notes()

    (note,) = notes('{"num_beams": 4, "eos_token_id": 2}')
    assert "generation_config.json: num_beams is ignored" in note
    assert notes("{}") == []
    with pytest.raises(InputError, match=r"generation_config\.json: expected an object"):
        notes("null")


def test_settings_that_a_loss_does_not_read_are_said(dataset):
    def notes(**model):
        data = {"path": str(dataset.root)}
        return assemble(RunConfig.parse({"data": data, "model": {"name": "sasrec", **model}})).task.notes()

    assert notes(num_negatives=7, negatives_per_event=2) == [
        "the loss 'cross_entropy' does not read model.num_negatives, model.negatives_per_event"
    ]
    assert notes(loss="bce", negatives_per_event=2) == []
    assert notes(num_negatives=1024) == []  # the default


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"model": {"name": "sasrec"}}, []),
        (
            {"model": {"name": "sasrec"}, "sparse": {"optimizer": {"kind": "adam"}, "init_scale": 0.1}},
            ["no rows on servers: sparse.optimizer, sparse.init_scale will have no effect"],
        ),
        (
            {
                "model": {"name": "sasrec", "item_matrix": "sparse"},
                "sparse": {"optimizer": {"kind": "adam"}, "tables": {"user": {}}},
            },
            ["does not read user"],
        ),
    ],
)
def test_settings_of_rows_that_a_model_has_not_are_said(dataset, settings, words):
    assembly = assemble(RunConfig.parse({"data": {"path": str(dataset.root)}} | settings))

    sentences = list(unread_settings(assembly))

    assert len(sentences) == len(words)
    assert all(word in sentence for word, sentence in zip(words, sentences, strict=True))


def test_a_cache_is_part_of_a_trainer(dataset):
    without, cached = (
        plan_memory(assembly_of(dataset, sparse={"cache_rows": rows})).trainer for rows in (0, 10)
    )

    assert without.cache_bytes == 0 < cached.cache_bytes
    less_held = without.batch_bytes - cached.batch_bytes  # a cache holds what batches share
    assert less_held > 0
    assert cached.peak_bytes >= without.peak_bytes + cached.cache_bytes - less_held


def test_callers_of_groups_are_a_part_of_the_plan_and_servers_are_called_by_them(dataset):
    alone, together = (
        plan_memory(assembly_of(dataset, num_trainers=8, trainers_per_group=size), is_here=True)
        for size in (1, 4)
    )
    assert (alone.num_callers, alone.caller_bytes, together.num_callers) == (0, 0, 2)
    servers = [sum(shard.peak_bytes for shard in plan.shards) for plan in (alone, together)]
    assert servers[1] < servers[0]  # two parts of a step wait there, not eight
    added = together.num_callers * (together.caller_bytes + memory_plan.PROCESS_BYTES)
    assert together.machine_bytes == alone.machine_bytes + added - (servers[0] - servers[1])
    assert together.to_json()["caller_bytes"] == together.caller_bytes > 0


def test_records_in_flight_are_counted_as_the_mode_has_them(dataset):
    def batch_bytes(mode: str, **pipeline) -> int:
        return plan_memory(assembly_of(dataset, mode=mode, **pipeline)).trainer.batch_bytes

    assert batch_bytes("sync") < batch_bytes("bounded_stale", max_staleness=1) < batch_bytes("exact_prefetch")
    assert batch_bytes("exact_prefetch", num_trainers=2) < batch_bytes("exact_prefetch") / 2 + 4096


def test_a_cache_on_an_accelerator_counts_there_and_is_refused_if_it_has_no_room(dataset, monkeypatch):
    """The accelerator is one that this machine may lack: what is known of it is all that is asked."""
    monkeypatch.setattr(memory_plan, "starts_cluster", lambda config: True)
    monkeypatch.setattr(memory_plan, "device_memory_bytes", lambda kind: 2**30 if kind == "cuda" else None)

    def plan_on(device: str, rows: int) -> memory_plan.MemoryPlan:
        return plan_memory(assembly_of(dataset, sparse={"cache_rows": rows}, device=device))

    host, cuda = (plan_on(device, 100_000).trainer for device in ("cpu", "cuda"))
    assert host.device_cache_bytes == host.device_batch_bytes == 0
    assert cuda.device_bytes > cuda.device_cache_bytes > 100_000 * 4 * 16
    assert cuda.cache_bytes < host.cache_bytes
    assert plan_on("cpu", 100_000).device_limit is None

    plan_on("cuda", 100_000).check()
    with pytest.raises(InputError, match=r"its device, which has 1\.0 GiB: .* cache of rows.*cache_rows"):
        plan_on("cuda", 100_000_000).check()


def test_a_server_that_cannot_hold_its_part_is_refused_by_name(dataset):
    plan = plan_memory(assembly_of(dataset, sparse={"server_memory": "16 KiB"}))

    with pytest.raises(InputError) as refused:
        plan.check()

    assert f"parameter server {plan.fullest.shard} (of 2) would need" in str(refused.value)
    assert "sparse.server_memory allows 16.0 KiB: raise it to" in str(refused.value)


def test_what_is_advised_is_enough(dataset):
    expected = {"item": 1_000_000}
    plan = plan_memory(assembly_of(dataset, sparse={"server_memory": "40 MiB", "expected_rows": expected}))
    with pytest.raises(InputError, match=r"set sparse\.num_servers to \d+") as refused:
        plan.check()
    num_servers = int(str(refused.value).split("sparse.num_servers to ")[1].split(",")[0])
    more = {"server_memory": "40 MiB", "expected_rows": expected, "num_servers": num_servers}

    plan_memory(assembly_of(dataset, sparse=more)).check()

    assert 2 < num_servers < 30


@pytest.mark.parametrize(("is_here", "may_be_memory"), [(True, False), (True, True), (False, False)])
def test_a_disk_that_is_memory_is_refused_before_the_run(
    dataset, tmp_path, monkeypatch, is_here, may_be_memory
):
    monkeypatch.setattr(memory_plan, "starts_cluster", lambda config: is_here)
    monkeypatch.setattr(files, "memory_file_system", lambda folder: "tmpfs")
    disk = {"memory": "1 GiB", "folder": str(tmp_path), "may_be_memory": may_be_memory}
    plan = plan_memory(assembly_of(dataset, sparse={"tables": {"user": {"disk": disk}}}))

    if is_here and not may_be_memory:
        with pytest.raises(InputError, match=r"table 'user': .* is in memory \(tmpfs\)"):
            plan.check()
    else:
        plan.check()


@pytest.mark.parametrize("may_be_memory", [False, True])
@pytest.mark.parametrize(
    ("folder", "expected"),
    [
        ("missing", r"table 'user': .*missing: there is no such folder"),
        (
            "/proc",
            r"table 'user': /proc: no file can be made in this folder \(.*\); let this user write there",
        ),
    ],
)
def test_a_disk_that_takes_no_rows_is_refused_before_anything_starts(
    dataset, tmp_path, folder, expected, may_be_memory
):
    disk = {"memory": "1 GiB", "folder": str(tmp_path / folder), "may_be_memory": may_be_memory}
    assembly = assembly_of(dataset, sparse={"tables": {"user": {"disk": disk}}})

    # In this process: another test may have left it in a cluster, whose disks nobody sees.
    with pytest.raises(InputError, match=expected):
        train(assembly.config, tmp_path / "run", cluster=in_process)
    assert not (tmp_path / "run").exists()


def test_a_server_that_has_room_to_train_has_room_to_load_a_snapshot(dataset):
    for num_rows in (10, 1_000_000):
        sparse = {"num_servers": 1, "expected_rows": {"item": num_rows}}
        (shard,) = plan_memory(assembly_of(dataset, sparse=sparse)).shards
        assert shard.num_bytes < shard.loading_bytes <= shard.peak_bytes


def test_more_than_the_machine_has_is_refused(dataset, monkeypatch):
    monkeypatch.setattr(memory_plan, "starts_cluster", lambda config: True)
    monkeypatch.setattr(memory_plan, "machine_bytes", lambda: 2 * 2**30)
    plan = plan_memory(assembly_of(dataset, sparse={"expected_rows": {"item": 100_000_000}}))

    with pytest.raises(InputError, match=r"this machine has 2\.0 GiB: 2 parameter servers need"):
        plan.check()


def test_the_graph_that_every_feature_worker_makes_is_counted(dataset, caplog):
    assembly = assembly_of(dataset, "gnn", num_feature_workers=3)
    graph = graph_of_dataset(dataset)
    plan, without = plan_memory(assembly), plan_memory(assembly_of(dataset, "sasrec", num_feature_workers=3))

    assert graph.state.num_bytes <= plan.worker_bytes < 1.3 * graph.state.num_bytes
    assert without.worker_bytes == 0
    assert plan.machine_bytes - replace(plan, worker_holds={}).machine_bytes == 3 * plan.worker_bytes
    with caplog.at_level(logging.INFO):
        plan.log()
    assert "3 feature workers hold a graph of" in caplog.text
    too_much = replace(plan, worker_holds={"a graph": 10**12}, machine_limit=10**12)
    with pytest.raises(InputError, match=r"3 feature workers .* for a graph each.*data\.graph"):
        too_much.check()


def test_the_tree_of_codes_that_every_feature_worker_makes_is_counted(dataset, caplog):
    plan = plan_memory(assembly_of(dataset, "prefix"))

    assert plan.worker_bytes > 8 * len(dataset.items)
    with caplog.at_level(logging.INFO):
        plan.log()
    assert "1 feature workers hold a tree of codes of" in caplog.text
    assert "data.graph" not in caplog.text


def test_a_cluster_that_is_joined_is_not_judged_by_this_machine(dataset, monkeypatch):
    monkeypatch.setattr(memory_plan, "starts_cluster", lambda config: False)
    plan = plan_memory(assembly_of(dataset, sparse={"expected_rows": {"item": 10**11}}))

    plan.check()

    assert plan.machine_limit is None


def test_rows_are_expected_of_known_tables_only():
    values = {"data": {"path": "d"}, "model": {"name": "sasrec"}, "sparse": {"expected_rows": {"itme": 3}}}

    with pytest.raises(InputError, match=r"sparse\.expected_rows names table 'itme'"):
        RunConfig.parse(values)
