"""The server's shell: what it saves and loads, and that its threads let updates pass waiting lookups."""

from pathlib import Path

import numpy as np
import pytest
import ray

from rayrec.actors.parameter_server import ParameterServer, ServerSpec, spawn_parameter_servers
from rayrec.actors.spawning import ActorRole, RayHost
from rayrec.actors.transport import RayTransport
from rayrec.embeddings.base.routing import ShardMap
from rayrec.embeddings.config import TableConfig
from rayrec.embeddings.shard.contributions import UpdateTag
from rayrec.embeddings.snapshot.saved_files import checksum_file
from rayrec.embeddings.storage.consistent_snapshot import SnapshotEndedError
from rayrec.embeddings.transport.protocol import ApplyCall, LookupCall
from rayrec.platform.errors import InputError
from rayrec.platform.metrics import PUBLISH_EVERY_BATCHES, RayStageMetrics
from rayrec.platform.ray_errors import root_cause

TABLES = (TableConfig(name="item", dim=4, seed=1), TableConfig(name="user", dim=4, seed=2))
IDS_M = np.arange(100, 160)


def servers(num_shards: int) -> list[ParameterServer]:
    return [
        ParameterServer(
            ActorRole("run", "parameter_server", shard),
            ServerSpec(TABLES, num_shards, shard, num_trainers=1, wait_timeout_s=5.0),
        )
        for shard in range(num_shards)
    ]


def rows(members: list[ParameterServer]) -> dict[str, np.ndarray]:
    """[M, D] rows of `IDS_M` by table, whichever shard has them."""
    found = {table.name: np.empty((len(IDS_M), table.dim), dtype=np.float32) for table in TABLES}
    for server, at in zip(members, ShardMap(len(members)).split(IDS_M), strict=True):
        for name, part_MD in server.answer(LookupCall({table.name: IDS_M[at] for table in TABLES})).items():
            found[name][at] = part_MD
    return found


def train_one_step(members: list[ParameterServer], incarnation: int = 0, step: int = 0) -> None:
    grads_MD = np.random.default_rng(step).normal(size=(len(IDS_M), 4)).astype(np.float32)
    for server, at in zip(members, ShardMap(len(members)).split(IDS_M), strict=True):
        update = {table.name: (IDS_M[at], grads_MD[at]) for table in TABLES}
        assert server.answer(ApplyCall(UpdateTag(incarnation, step, rank=0), update)) == step


def saved(server: ParameterServer, folder: Path, step: int, since: int | None = None) -> list[str]:
    server.begin_snapshot(step)
    return [file.name for file in server.save(str(folder), step, since)]


def test_a_server_keeps_to_its_memory():
    spec = ServerSpec(TABLES, 1, 0, num_trainers=1, wait_timeout_s=5.0, memory_limit=70_000)
    server = ParameterServer(ActorRole("run", "parameter_server", 0), spec)
    train_one_step([server])
    ids_M = np.arange(2000)

    with pytest.raises(MemoryError, match=r"table 'item' has 60 rows.*no row has changed"):
        server.answer(ApplyCall(UpdateTag(0, 1, 0), {"item": (ids_M, np.ones((2000, 4), dtype=np.float32))}))
    assert server.stats().shard.num_rows == {"item": 60, "user": 60}


def test_a_server_that_does_not_see_the_run_folder_says_so_before_the_run(tmp_path):
    (server,) = servers(1)
    (tmp_path / "run.json").write_text("{}")
    server.check_sees(str(tmp_path / "run.json"))
    with pytest.raises(InputError, match=r"run/parameter_server-0 on .* does not see /elsewhere/run\.json"):
        server.check_sees("/elsewhere/run.json")


@pytest.mark.parametrize("num_after", [1, 2, 3])
def test_any_number_of_servers_loads_what_two_saved_and_goes_on_alike(tmp_path, num_after):
    before, after = servers(2), servers(num_after)
    train_one_step(before)
    files = [str(Path(tmp_path) / name) for server in before for name in saved(server, tmp_path, 0)]

    for server in after:
        server.load([files], committed_step=0, incarnation=4)
    train_one_step(before, step=1)
    train_one_step(after, incarnation=4, step=1)

    assert len(set(files)) == 4
    for name, expected_MD in rows(before).items():
        assert rows(after)[name].tobytes() == expected_MD.tobytes()


@pytest.mark.slow
def test_servers_go_on_from_a_snapshot_and_its_increment(tmp_path):
    before, after = servers(2), servers(3)
    chain = []
    for step, since in ((0, None), (1, 0)):
        train_one_step(before, step=step)
        folder = tmp_path / str(step)
        folder.mkdir()
        for server in before:
            server.begin_snapshot(step)
        if step == 1:
            train_one_step(before, step=2)  # which is not in it
        files = [file for server in before for file in server.save(str(folder), step, since)]
        assert {file.since for file in files} == {since}
        assert {file.checksum for file in files} == {checksum_file(folder / file.name) for file in files}
        chain.append([str(folder / file.name) for file in files])
    for server in after:
        server.load(chain, committed_step=1, incarnation=1)
    train_one_step(after, incarnation=1, step=2)

    for name, expected_MD in rows(before).items():
        assert rows(after)[name].tobytes() == expected_MD.tobytes()


def test_a_snapshot_that_cannot_be_written_does_not_stay_in_the_way(tmp_path):
    (server,) = servers(1)
    train_one_step([server])
    server.begin_snapshot(0)
    with pytest.raises(OSError, match="nowhere"):
        server.save(str(tmp_path / "nowhere"), 0)
    train_one_step([server], step=1)
    assert len(saved(server, tmp_path, 1)) == 2


def test_a_save_that_comes_only_after_a_return_reads_nothing_of_the_new_snapshot(tmp_path):
    (server,) = servers(1)
    train_one_step([server])
    files = [str(tmp_path / name) for name in saved(server, tmp_path, 0)]
    train_one_step([server], step=1)
    server.begin_snapshot(1)
    server.load([files], committed_step=0, incarnation=1)
    train_one_step([server], incarnation=1, step=1)
    server.begin_snapshot(1)

    late, folder = tmp_path / "late", tmp_path / "now"
    late.mkdir()
    folder.mkdir()
    with pytest.raises(SnapshotEndedError, match="incarnation 1 began"):
        server.save(str(late), 1, None, 0)
    assert not list(late.iterdir())
    assert len(server.save(str(folder), 1, None, 1)) == 2


def test_updates_of_the_time_before_a_recovery_are_refused(tmp_path):
    (server,) = servers(1)
    train_one_step([server])
    files = [str(tmp_path / name) for name in saved(server, tmp_path, 0)]
    server.load([files], committed_step=0, incarnation=1)

    with pytest.raises(ValueError, match="incarnation 1 and refuses the update of step 1"):
        server.answer(ApplyCall(UpdateTag(0, 1, rank=0), {}))
    with pytest.raises(ValueError, match="is in incarnation 1 and cannot begin 1"):
        server.load([files], committed_step=0, incarnation=1)


def test_only_work_while_the_clock_runs_is_a_servers_time():
    """Lookups of validation and rows of a snapshot are none of the training's seconds."""
    (server,) = servers(1)
    server.start_clock()
    train_one_step([server])
    server.stop_clock()
    times = server.stats().stage
    rows([server])

    assert times.num_batches == 1
    assert times.busy_s > 0
    assert times.waiting_s > 0
    assert server.stats().stage == times


def test_a_server_publishes_its_times_while_steps_are_committed(monkeypatch):
    published = []
    monkeypatch.setattr(
        RayStageMetrics, "publish", lambda self, times, further: published.append(times.num_batches)
    )
    (server,) = servers(1)

    for step in range(2 * PUBLISH_EVERY_BATCHES + 1):
        train_one_step([server], step=step)

    assert published == [20, 40]


@pytest.mark.ray
def test_lookups_that_wait_let_updates_pass_and_errors_arrive_as_they_were_raised(ray_cluster):
    spec = ServerSpec(TABLES, num_shards=1, shard=0, num_trainers=2, wait_timeout_s=60)
    handles = spawn_parameter_servers(RayHost("server-test"), spec, num_cpus=0)
    try:
        assert "server-test/parameter_server-0" in ray.util.list_named_actors()
        transport = RayTransport(handles)
        # As many as two trainers can have waiting: two each.
        waiting = [transport.call(0, LookupCall({"item": IDS_M}, after_step=0)) for _ in range(4)]
        before = transport.call(0, LookupCall({"item": IDS_M}, after_step=None)).result()
        grads_MD = np.ones((len(IDS_M), 4), dtype=np.float32)
        for source in (0, 1):
            transport.call(0, ApplyCall(UpdateTag(0, 0, source), {"item": (IDS_M, grads_MD)})).result()

        for reply in waiting:
            assert (reply.result()["item"] < before["item"]).all()
        assert ray.get(handles[0].stats.remote()).shard.num_rows == {"item": len(IDS_M), "user": 0}

        with pytest.raises(ray.exceptions.RayTaskError) as raised:
            transport.call(0, ApplyCall(UpdateTag(0, 1, 0), {"item": (IDS_M, grads_MD * np.nan)})).result()
        cause = root_cause(raised.value)
        assert type(cause) is ValueError
        assert "refuses step 1 because of trainer 0" in str(cause)
    finally:
        for handle in handles:
            ray.kill(handle)
