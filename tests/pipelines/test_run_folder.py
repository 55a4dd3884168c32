import errno
import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pytest

from rayrec.pipelines.config.run import RunConfig
from rayrec.pipelines.runs import run_folder
from rayrec.pipelines.runs.run_folder import RunFolder
from rayrec.platform.errors import InputError, MachineError
from rayrec.platform.files import unfinished_suffix


def config(**changes: object) -> RunConfig:
    return RunConfig.parse({"data": {"path": "data"}, "model": {"name": "sasrec"}} | changes)


def test_a_new_run_has_settings_and_a_state(tmp_path):
    folder = RunFolder.create(tmp_path / "deep" / "run", config(seed=4))

    assert RunFolder.open(folder.path).config == config(seed=4)
    state = folder.state
    assert state.pop("id")
    assert state == {"state": "running", "error": None, "best": None, "last": None}
    assert folder.name == "run"


def test_a_folder_that_holds_a_run_is_refused_whatever_became_of_it(tmp_path):
    RunFolder.create(tmp_path / "run", config()).update(state="failed", last="step-000000007")

    with pytest.raises(InputError, match=r"run: this folder holds a run already \(its state: failed\)"):
        RunFolder.create(tmp_path / "run", config())


@pytest.mark.parametrize("state", ["failed", "stopped", "running"])
def test_a_run_that_ended_without_a_snapshot_is_replaced(tmp_path, state):
    """Killed ones still say `running`; that none is alive is the lock's to know."""
    RunFolder.create(tmp_path / "run", config()).update(state=state, error="the cluster is too small")

    with RunFolder.locked(tmp_path / "run", "nothing"):
        folder = RunFolder.create(tmp_path / "run", config(seed=5))

    assert (folder.state["state"], folder.state["error"], folder.config.seed) == ("running", None, 5)


def test_a_run_that_replaces_one_whose_snapshots_were_deleted_just_has_none_yet(tmp_path):
    RunFolder.create(tmp_path / "run", config()).update(state="finished", deleted="a search keeps the best")

    folder = RunFolder.create(tmp_path / "run", config())

    with pytest.raises(InputError, match="no snapshot yet"):
        folder.chosen_snapshot("last")


TRAINING = """
import sys, time
from pathlib import Path
from rayrec.pipelines.config.run import RunConfig
from rayrec.pipelines.runs.run_folder import RunFolder

path = Path(sys.argv[1])
with RunFolder.locked(path, "nothing"):
    RunFolder.create(path, RunConfig.parse({"data": {"path": "data"}, "model": {"name": "sasrec"}}))
    print("holds it", flush=True)
    time.sleep(600)
"""


def test_a_folder_in_which_a_run_is_alive_is_refused_until_it_is_killed(tmp_path):
    path = tmp_path / "run"
    with subprocess.Popen(
        [sys.executable, "-c", TRAINING, path], stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout.readline() == "holds it\n"
            for holds in ("run", "part", "nothing"):
                with (
                    pytest.raises(MachineError, match=r"run: a run is alive in this folder") as raised,
                    RunFolder.locked(path, holds),
                ):
                    pass
                assert f"(process {process.pid} on " in str(raised.value)
                assert "--resume" not in str(raised.value)
            RunFolder.open(path)  # to look at it is allowed
        finally:
            os.kill(process.pid, signal.SIGKILL)

    with RunFolder.locked(path, "run"):
        assert RunFolder.resume(path, config()).state["state"] == "running"


def test_a_folder_that_cannot_be_made_is_refused():
    with (
        pytest.raises(InputError, match=r"/proc/run: the run's folder cannot be made .*choose another"),
        RunFolder.locked(Path("/proc/run"), "nothing"),
    ):
        pass


def test_no_lock_is_left_in_a_folder_of_something_else(tmp_path):
    (tmp_path / "thesis.tex").write_text("important")

    for holds, expected in (("run", "not a run folder"), ("nothing", "not an empty folder")):
        with pytest.raises(InputError, match=expected), RunFolder.locked(tmp_path, holds):
            pass

    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


def test_an_empty_folder_stays_one_that_may_be_used_when_a_lock_was_left_in_it(tmp_path):
    with RunFolder.locked(tmp_path, "nothing"):
        pass

    with RunFolder.locked(tmp_path, "nothing"):
        RunFolder.create(tmp_path, config())


def test_a_run_begins_in_a_folder_in_which_one_was_killed_before_it_had_a_state(tmp_path):
    with RunFolder.locked(tmp_path, "nothing"):
        (tmp_path / "config.yaml").write_text("data: {path: another}")
        (tmp_path / f".run.json.{unfinished_suffix()}").write_text("{")

    with RunFolder.locked(tmp_path, "nothing"):
        folder = RunFolder.create(tmp_path, config())

    assert folder.config == config()


def test_settings_that_lie_in_a_folder_without_a_run_are_not_replaced(tmp_path):
    (tmp_path / "config.yaml").write_text("mine")

    with pytest.raises(InputError, match="not an empty folder"), RunFolder.locked(tmp_path, "nothing"):
        pass

    assert [path.name for path in tmp_path.iterdir()] == ["config.yaml"]


def test_a_folder_of_something_else_is_refused_and_left_alone(tmp_path):
    (tmp_path / "thesis.tex").write_text("important")
    file = tmp_path / "file"
    file.write_text("a file")

    for path in (tmp_path, file):
        with pytest.raises(InputError, match=f"{path}: not an empty folder"):
            RunFolder.create(path, config())

    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "thesis.tex"]


def test_an_empty_folder_may_be_used(tmp_path):
    RunFolder.create(tmp_path, config())

    assert (tmp_path / "run.json").is_file()


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"seed": 1}, "seed"),
        ({"training": {"batch_size": 3}}, r"training\.batch_size"),
        ({"model": {"name": "sasrec", "backbone": {"dim": 32}}}, r"model\.backbone\.dim"),
        ({"sparse": {"optimizer": {"kind": "adam"}}}, r"sparse\.optimizer\.kind"),
        ({"data": {"path": "data", "window_rows": 9}}, r"data\.window_rows"),
        ({"evaluation": {"metric": "recall"}}, r"evaluation\.metric"),
        ({"evaluation": {"max_users": 10}}, r"evaluation\.max_users"),
        ({"device": "cuda"}, "device"),
        ({"data": {"path": "data", "filters": [["price", ">", 3]]}}, r"data\.filters"),
        (
            {"data": {"path": "data", "features": [{"op": "truncate", "inputs": ["a"], "length": 1}]}},
            r"data\.features",
        ),
        ({"training": {"epochs": 20, "schedule": {"decay": "cosine"}}}, r"training\.epochs"),
        ({"sparse": {"wire": "bfloat16"}}, r"sparse\.wire"),
    ],
)
def test_a_run_goes_on_only_with_the_settings_its_results_depend_on(tmp_path, changes, key):
    RunFolder.create(tmp_path, config()).update(state="failed")

    with pytest.raises(InputError, match=f"holds another run: it differs from this config in .*{key}"):
        RunFolder.resume(tmp_path, config(**changes))

    assert RunFolder.open(tmp_path).state["state"] == "failed"


@pytest.mark.parametrize(
    "changes",
    [
        {"pipeline": {"num_trainers": 2, "num_readers": 3, "mode": "sync"}},
        {"sparse": {"num_servers": 5, "server_threads": 2, "wait_timeout_s": 9}},
        {"evaluation": {"patience": 2, "batch_size": 7, "every_epochs": 3}},
        {"data": {"path": "moved", "semantic_ids": "moved/codes", "samples": "moved/log"}},
        {"data": {"path": "data", "on_corrupt": "skip", "cache": {"folder": "cache"}}},
        {"sparse": {"expected_rows": {"item": 40_000_000}}},
        {"sparse": {"tables": {"item": {"disk": {"memory": "1 GiB"}, "servers": [0]}}}},
        {"cluster": {"dashboard": False}},
        {"training": {"epochs": 20}},
    ],
)
def test_a_run_goes_on_with_its_work_laid_out_differently(tmp_path, changes):
    RunFolder.create(tmp_path, config()).update(state="failed", error="boom", last="step-000000003")

    folder = RunFolder.resume(tmp_path, config(**changes))
    assert folder.state["state"] == "failed"  # so far it may still be refused
    folder.begin(config(**changes))

    assert folder.state.items() >= {"state": "running", "error": None, "last": "step-000000003"}.items()
    assert folder.config == config(**changes)


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"attention": {"clicks": "category"}}, r"model\.attention\.clicks"),
        ({"attention_dims": [40]}, r"model\.attention_dims"),
    ],
)
def test_what_a_network_attends_to_is_not_how_attention_is_computed(tmp_path, changes, key):
    """`model.attention` may change: of other models, it is the name of a backend."""
    model = {"name": "din", "attention": {"clicks": "item"}}
    RunFolder.create(tmp_path, config(model=model)).update(state="failed")

    with pytest.raises(InputError, match=f"it differs from this config in .*{key}"):
        RunFolder.resume(tmp_path, config(model=model | changes))


def test_a_run_of_before_reads_the_newest_events_alone_as_it_began(tmp_path):
    """Windows of longer histories are newer than its settings: they would be other batches."""
    folder = RunFolder.create(tmp_path, config())
    folder.update(state="failed")
    written = (tmp_path / "config.yaml").read_text()
    (tmp_path / "config.yaml").write_text(written.replace("  windows: null\n", ""))

    assert folder.config.training.windows == 1
    with pytest.raises(InputError, match=r"differs from this config in training\.windows"):
        RunFolder.resume(tmp_path, config())
    begun = RunFolder.as_begun(tmp_path, config())
    assert RunFolder.resume(tmp_path, begun).config.windows == begun.windows == 1
    assert RunFolder.as_begun(tmp_path / "none", config()) == config()


def test_no_run_cannot_be_opened(tmp_path):
    for path, said in ((tmp_path, ""), (tmp_path / "nowhere", r" \(there is no such folder\)")):
        with pytest.raises(
            InputError, match=f"not a run folder{said}; expected one that 'rayrec train' made"
        ):
            RunFolder.open(path)


def test_a_run_without_snapshot_says_how_it_stands(tmp_path):
    folder = RunFolder.create(tmp_path, config())
    folder.update(state="failed")

    with pytest.raises(InputError, match=r"the run has no snapshot yet \(its state: failed\)"):
        folder.chosen_snapshot("best")


def test_a_run_that_was_not_validated_yet_has_no_best_snapshot(tmp_path):
    folder = RunFolder.create(tmp_path, config())
    folder.update(last="step-000000003")

    with pytest.raises(InputError, match="no best snapshot, since none was validated yet; take"):
        folder.chosen_snapshot("best")
    assert folder.chosen_snapshot("last").name == "step-000000003"


def test_only_the_named_snapshots_are_kept(tmp_path):
    folder = RunFolder.create(tmp_path, config())
    for step in (1, 2, 3):
        folder.snapshot_path(step).mkdir(parents=True)
    (tmp_path / "snapshots" / ".step-000000004.unfinished").mkdir()

    folder.keep_only({"step-000000001", "step-000000003"})

    kept = sorted(path.name for path in (tmp_path / "snapshots").iterdir())
    assert kept == ["step-000000001", "step-000000003"]


def test_what_is_no_snapshot_stays_among_them_and_is_none(tmp_path):
    folder = RunFolder.create(tmp_path, config())
    folder.snapshot_path(1).mkdir(parents=True)
    others = {"a copy by hand", ".DS_Store", "notes.txt", "step-000000002"}
    for name in others - {"a copy by hand"}:
        (tmp_path / "snapshots" / name).write_bytes(b"")
    (tmp_path / "snapshots" / "a copy by hand").mkdir()

    assert folder.snapshot_names() == ["step-000000001"]
    folder.keep_only(set())

    assert {path.name for path in (tmp_path / "snapshots").iterdir()} == others


@pytest.mark.parametrize("error", [OSError("it is busy"), FileNotFoundError("somebody else was first")])
def test_a_snapshot_that_cannot_be_deleted_is_no_reason_to_end(tmp_path, monkeypatch, caplog, error):
    folder = RunFolder.create(tmp_path, config())
    for step in (1, 2):
        folder.snapshot_path(step).mkdir(parents=True)
    rmtree, errors = shutil.rmtree, [error]

    def fails_once(path: Path) -> None:
        if errors:
            raise errors.pop()
        rmtree(path)

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", fails_once)
        folder.keep_only(set())
    assert folder.snapshot_names() == []
    is_warned = f"{tmp_path}/snapshots/.step-000000001.deleted: cannot be deleted: it is busy" in caplog.text
    assert is_warned == ("busy" in str(error))

    folder.keep_only(set())
    assert list((tmp_path / "snapshots").iterdir()) == []
    folder.snapshots.rmdir()
    folder.keep_only(set())


def test_the_log_has_one_line_of_json_per_record(tmp_path):
    folder = RunFolder.create(tmp_path, config())
    folder.log({"step": 1})
    folder.log({"step": 2})

    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2]


def test_a_snapshot_is_chosen_by_its_place_or_name(tmp_path):
    folder = RunFolder.create(tmp_path / "run", config())
    for step in (5, 10, 15):
        folder.snapshot_path(step).mkdir(parents=True)
    folder.update(last="step-000000015", best="step-000000005")

    chosen = {
        which: folder.chosen_snapshot(which).name for which in ("last", "best", "previous", "step-000000005")
    }

    assert chosen == {
        "last": "step-000000015",
        "best": "step-000000005",
        "previous": "step-000000010",
        "step-000000005": "step-000000005",
    }
    with pytest.raises(InputError, match=r"has no snapshot 'step-7'; it has .*step-000000010"):
        folder.chosen_snapshot("step-7")


def test_where_there_is_one_snapshot_there_is_none_before_it(tmp_path):
    folder = RunFolder.create(tmp_path / "run", config())
    folder.snapshot_path(5).mkdir(parents=True)
    folder.update(last="step-000000005")

    with pytest.raises(InputError, match=r"has no snapshot before step-000000005; see snapshots.keep"):
        folder.chosen_snapshot("previous")


def test_records_behind_the_step_that_a_run_goes_back_to_are_dropped(tmp_path):
    folder = RunFolder.create(tmp_path / "run", config())
    for step in (5, 10, 15):
        folder.log({"step": step})

    folder.forget_after(10)

    assert (folder.path / "metrics.jsonl").read_text() == '{"step": 5}\n{"step": 10}\n'


def test_how_long_a_folder_is_followed_may_be_changed(tmp_path):
    def following(**follow: object) -> RunConfig:
        data = {"path": "data", "samples": "log", "follow": follow}
        return config(data=data, evaluation={"every_steps": 5})

    RunFolder.create(tmp_path, following(every_s=3.0)).update(state="stopped")

    assert RunFolder.resume(tmp_path, following(every_s=1.0, stop_after_s=9.0)).path == tmp_path


def test_a_new_run_forgets_what_another_one_read(tmp_path):
    folder = RunFolder.create(tmp_path, config())
    schema = pa.schema([("user_id", pa.int64()), ("item_ids", pa.list_(pa.int32()))])
    folder.keep_columns(schema)
    (tmp_path / "accepted.jsonl").write_text("{}")
    assert RunFolder.open(tmp_path).columns == schema

    assert RunFolder.create(tmp_path, config(seed=1)).columns is None
    assert not (tmp_path / "accepted.jsonl").exists()


def test_a_snapshot_that_made_room_for_another_comes_back_where_that_did_not_arrive(tmp_path):
    """The process died between the two renames; run.json names the step."""
    folder = RunFolder.create(tmp_path / "run", config())
    for name in (".step-000000005.replaced", ".step-000000009.replaced", "step-000000009"):
        (folder.snapshots / name).mkdir(parents=True)

    RunFolder.resume(folder.path, config())

    assert folder.snapshot_names() == ["step-000000005", "step-000000009"]


def test_a_run_keeps_its_id_and_every_start_has_one_of_its_own(tmp_path):
    folder = RunFolder.create(tmp_path / "run", config())
    folder.mark_start()
    first = folder.state

    folder.mark_start()

    assert folder.state["id"] == first["id"] != RunFolder.create(tmp_path / "other", config()).state["id"]
    assert folder.state["start"] != first["start"]


@pytest.mark.parametrize("torn", ['{"step": 120, "los', "12", '{"step": "x"}', "\0\0"])
def test_a_torn_line_of_the_log_costs_that_line_alone(tmp_path, torn, caplog):
    folder = RunFolder.create(tmp_path / "run", config())
    for step in (60, 90):
        folder.log({"step": step, "loss": 1.0})
    with open(folder.path / "metrics.jsonl", "a") as file:
        file.write(torn)
    folder.log({"step": 100, "loss": 1.0})  # not glued to what is torn

    folder.forget_after(95)

    lines = (folder.path / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [60, 90]
    assert "metrics.jsonl: line 3 was cut short and is left out" in caplog.text


def test_an_append_that_fails_leaves_nothing(tmp_path, monkeypatch):
    folder = RunFolder.create(tmp_path / "run", config())
    folder.log({"step": 60})
    before = (folder.path / "metrics.jsonl").read_bytes()

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(OSError, match="No space left"):
            folder.log({"step": 90})

    assert (folder.path / "metrics.jsonl").read_bytes() == before


def test_how_a_run_ended_is_said_on_a_full_disk_too(tmp_path, monkeypatch):
    folder = RunFolder.create(tmp_path / "run", config())
    folder.mark_start()
    reserve = folder.path / ".reserve"
    assert reserve.stat().st_size == 64 * 1024

    def full(path: Path, values: object) -> None:
        if reserve.exists():
            raise OSError(errno.ENOSPC, "No space left on device")
        write_json(path, values)

    write_json = run_folder.write_json
    monkeypatch.setattr(run_folder, "write_json", full)
    folder.update(state="failed")

    assert folder.state["state"] == "failed"


def test_a_look_at_a_folder_does_not_refuse_a_start(tmp_path, monkeypatch):
    """`is_alive` holds the lock for a moment."""
    folder = RunFolder.create(tmp_path / "run", config())
    with open(folder.path / ".lock", "w+") as looking:
        fcntl.flock(looking, fcntl.LOCK_SH)
        monkeypatch.setattr(run_folder.time, "sleep", lambda seconds: looking.close())

        with RunFolder.locked(folder.path, "run"):
            assert looking.closed
            assert folder.is_alive


def test_a_process_whose_run_was_started_again_changes_nothing_any_more(tmp_path):
    """It was cut off, and a network file system let go of its lock."""
    old = RunFolder.create(tmp_path / "run", config())
    old.mark_start()
    new = RunFolder.open(old.path)
    new.mark_start()

    for refused in (old.check_own, lambda: old.update(last="step-000000005")):
        with pytest.raises(InputError, match="another process has started this run again"):
            refused()
    new.check_own()
    assert new.state["last"] is None
