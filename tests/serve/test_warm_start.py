"""What a replica leaves, and what the next one makes of it before it is ready."""

import errno
import itertools
import json
import os
import stat
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from fastapi.testclient import TestClient

from rayrec.models.compiled_ranking.buckets import Bucket
from rayrec.platform.errors import InputError
from rayrec.serve.app.loading import load_api
from rayrec.serve.config.serve import ServeConfig
from rayrec.serve.config.warm_start import WarmStartConfig
from rayrec.serve.engine.compilation import CompileService
from rayrec.serve.engine.warm_files import Left
from rayrec.serve.engine.warm_start import WarmStart
from rayrec.serve.web.metrics import PrometheusMeter
from rayrec.serve.wire.schemas import RecommendRequest
from tests.helpers.runs import make_run


class Service:
    """Keeps what it is asked for, as long as there is room."""

    def __init__(self, room=10_000, keeps=True):
        self.asked, self._room, self._keeps = [], room, keeps

    @property
    def kept(self):
        return (min(len(self.asked), self._room), len(self.asked), 0) if self._keeps else None

    def warm(self, users):
        self.asked += users
        return len(users)


def warm_start(folder, clock=None, **settings):
    config = WarmStartConfig(folder=str(folder), **settings)
    return WarmStart(config) if clock is None else WarmStart(config, clock)


def left_by(folder, users, buckets=None, clock=None, **settings):
    before = warm_start(folder, clock, **settings)
    before.note([RecommendRequest(user_id=user) for user in users])
    if buckets is not None:
        before.start(lambda: buckets)
    before.close()


def test_the_newest_users_are_answered_first_and_once(tmp_path):
    left_by(tmp_path, ["a", "b", "a", 7, "c"])
    service = Service()
    assert warm_start(tmp_path).warm(service) == 4
    assert service.asked == ["c", "7", "a", "b"]


def test_users_of_all_replicas_are_known_and_no_more_than_are_wanted(tmp_path):
    clock = itertools.count(1.0).__next__
    left_by(tmp_path, ["a", "b"], clock=clock)
    left_by(tmp_path, ["c", "a"], clock=clock)
    after = warm_start(tmp_path, clock, users=2)
    assert list(after.left.users) == ["c", "a"]
    after.note([RecommendRequest(user_id="d")])
    after.save()
    assert set(warm_start(tmp_path, clock, users=10).left.users) == {"a", "b", "c", "d"}


def test_histories_and_nobody_are_not_remembered(tmp_path):
    before = warm_start(tmp_path)
    before.note([RecommendRequest(history=["x"]), RecommendRequest(), RecommendRequest(user_id="u" * 300)])
    before.close()
    assert list(tmp_path.iterdir()) == []


def test_shapes_of_programs_are_left_by_model(tmp_path):
    now = time.time()
    left_by(tmp_path, [], {"model": {Bucket(4, 64, 10): now, Bucket(8, 64, 10): now}})
    left_by(tmp_path, ["a"], {"model": {Bucket(4, 64, 10): now}, "other": {Bucket(1, 32, 5): now}})
    found = warm_start(tmp_path).left.buckets
    assert {name: set(each) for name, each in found.items()} == {
        "model": {Bucket(4, 64, 10), Bucket(8, 64, 10)},
        "other": {Bucket(1, 32, 5)},
    }


def test_it_stops_where_the_cache_is_full_or_time_is_over_or_the_model_fails(tmp_path, caplog):
    users = [f"u{number}" for number in range(100)]
    left_by(tmp_path, users)
    full = Service(room=20)
    warm_start(tmp_path).warm(full)
    assert full.asked == users[:-49:-1]  # three batches of 16: the third one found no room
    without_cache = Service(keeps=False)
    assert warm_start(tmp_path).warm(without_cache, max_batch=7) == 100
    assert warm_start(tmp_path, most_s=0).warm(Service()) == 0
    broken = SimpleNamespace(kept=None, warm=lambda users: 1 / 0)
    assert warm_start(tmp_path).warm(broken) == 0
    assert "not answered ahead: division by zero" in caplog.text


def test_damaged_and_old_files_are_passed_over(tmp_path, caplog):
    left_by(tmp_path, ["a"])
    (tmp_path / "warm-damaged.json").write_text('{"users": 3}')
    (tmp_path / "other.json").write_text("?")
    assert list(warm_start(tmp_path).left.users) == ["a"]
    assert "warm-damaged.json: cannot be read" in caplog.text
    mine = next(path for path in tmp_path.glob("warm-*.json") if "damaged" not in path.name)
    assert stat.S_IMODE(mine.stat().st_mode) == 0o600
    later = mine.stat().st_mtime + 100
    assert warm_start(tmp_path, clock=lambda: later, max_age_s=50).left == Left()
    assert not mine.exists()


def test_files_that_vanish_or_cannot_be_deleted_keep_nobody_from_starting(tmp_path, caplog):
    left_by(tmp_path, ["a"])
    (tmp_path / "warm-gone.json").symlink_to(tmp_path / "gone")  # as if another replica had just deleted it
    (tmp_path / "warm-folder.json").mkdir()
    os.utime(tmp_path / "warm-folder.json", (0, 0))
    assert list(warm_start(tmp_path).left.users) == ["a"]
    assert "warm-folder.json: cannot be read" in caplog.text


def test_a_store_that_is_down_keeps_nobody_from_starting(tmp_path, monkeypatch, caplog):
    def down(*_, **__):
        raise OSError(errno.EIO, "the store is down")

    monkeypatch.setattr(Path, "mkdir", down)
    monkeypatch.setattr(Path, "glob", down)
    assert warm_start(tmp_path / "warm").left == Left()
    assert "the store is down" in caplog.text


def test_readiness_does_not_wait_for_a_store_that_hangs(tmp_path, caplog):
    left_by(tmp_path, [f"u{number}" for number in range(40)])
    goes_on, asked = threading.Event(), []

    def hang(users):
        asked.append(len(users))
        goes_on.wait(60)
        return len(users)

    before = threading.active_count()
    assert warm_start(tmp_path, most_s=0.2).warm(SimpleNamespace(kept=None, warm=hang)) == 0
    assert "ready after 0.2 s" in caplog.text
    goes_on.set()
    wait_until(lambda: threading.active_count() == before)
    assert asked == [16]


def wait_until(condition):
    until = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.01)


def test_no_more_is_read_than_is_allowed_and_the_newest_files_first(tmp_path, caplog):
    now, sizes = time.time(), {}
    for age, user in enumerate(("new", "large" * 40, "old")):
        path = tmp_path / f"warm-{age}.json"
        path.write_bytes(Left({user: now}).to_bytes())
        os.utime(path, (now - age, now - age))
        sizes[user[:5]] = path.stat().st_size
    room = sizes["new"] + sizes["old"]
    assert set(warm_start(tmp_path, read_mib=room / 2**20).left.users) == {"new", "old"}
    assert f"1 file of {sizes['large']} bytes is passed over" in caplog.text
    assert set(warm_start(tmp_path, read_mib=(room - 1) / 2**20).left.users) == {"new"}
    assert "2 files of" in caplog.text


def test_what_is_no_file_is_not_waited_for(tmp_path, caplog):
    left_by(tmp_path, ["a"])
    os.mkfifo(tmp_path / "warm-pipe.json")  # opening it for reading would wait for a writer
    assert list(warm_start(tmp_path).left.users) == ["a"]
    assert "warm-pipe.json: is no file" in caplog.text


def test_a_store_that_hangs_keeps_nobody_from_starting_or_ending(tmp_path, monkeypatch, caplog):
    left_by(tmp_path, ["a"])
    goes_on, glob = threading.Event(), Path.glob

    def hang(path, pattern):
        goes_on.wait(60)
        return glob(path, pattern)

    monkeypatch.setattr(Path, "glob", hang)
    monkeypatch.setattr("rayrec.serve.engine.warm_start.write_atomically", lambda *_, **__: goes_on.wait(60))
    before = threading.active_count()
    after = warm_start(tmp_path, read_s=0.1)
    assert after.left == Left()
    assert "not read within 0.1 s" in caplog.text
    after.note([RecommendRequest(user_id="b")])
    after.close()
    assert "not written within 0.1 s" in caplog.text
    goes_on.set()
    wait_until(lambda: threading.active_count() == before)


@pytest.mark.parametrize("content", ["[" * 100_000, '{"users": [], "buckets": {"m": [[1e999, 1, 1, 1]]}}'])
def test_files_that_only_a_parser_dislikes_are_passed_over(tmp_path, caplog, content):
    (tmp_path / "warm-odd.json").write_text(content)
    assert warm_start(tmp_path).left == Left()
    assert "warm-odd.json: cannot be read" in caplog.text


def test_users_who_got_no_answer_are_not_counted(tmp_path):
    left_by(tmp_path, ["a", "b", "c"])
    assert warm_start(tmp_path).warm(SimpleNamespace(kept=None, warm=lambda users: len(users) - 1)) == 2


def test_what_nobody_asks_for_any_more_is_forgotten_though_it_is_read_and_written_again(tmp_path):
    now = [100.0]
    settings = {"clock": lambda: now[0], "max_age_s": 50}
    left_by(tmp_path, ["old"], {"model": {Bucket(1, 4, 8): 100.0}}, **settings)
    now[0] = 140.0
    between = warm_start(tmp_path, **settings)
    assert list(between.left.users) == ["old"]
    between.note([RecommendRequest(user_id="new")])
    now[0] = 160.0
    between.close()
    assert warm_start(tmp_path, **settings).left == Left({"new": 140.0}, {})
    found = [json.loads(path.read_bytes())["users"] for path in tmp_path.iterdir()]
    assert [["new", 140.0]] in found


def test_a_file_is_its_owners_alone_from_the_first_byte_on(tmp_path, monkeypatch):
    replace, modes = os.replace, []

    def noted(source, target):
        modes.append(stat.S_IMODE(os.stat(source).st_mode))
        replace(source, target)

    monkeypatch.setattr("os.replace", noted)
    left_by(tmp_path, ["a"])
    assert modes == [0o600]


def test_shapes_are_left_with_when_a_batch_last_had_them():
    service = CompileService.__new__(CompileService)
    asked, only_ordered = Bucket(1, 4, 8), Bucket(2, 8, 100)
    model = SimpleNamespace(fingerprint="model")
    programs = SimpleNamespace(model=model, ready=[asked, only_ordered], asked_at={asked: 5.0})
    service._programs = {"one": programs}
    assert service.asked == {"model": {asked: 5.0}}


def test_a_folder_that_cannot_be_used_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match=r"warm_start\.folder: .*cannot be made"):
        warm_start(tmp_path / "file" / "below")
    with pytest.raises(InputError, match="leave out --warm-start, or --services"):
        ServeConfig.parse({"services": {}, "warm_start": {"folder": str(tmp_path)}})


def test_shapes_of_the_replica_before_are_ordered_before_it_is_ready():
    ordered = []
    programs = SimpleNamespace(
        signature=SimpleNamespace(max_length=4),
        model=SimpleNamespace(fingerprint="model"),
        want=lambda bucket: ordered.append(bucket) or True,
        declared=set(),
        of=lambda bucket: None,
    )
    ranking = SimpleNamespace(programs=programs, width=lambda k: 8)
    service = CompileService.__new__(CompileService)
    service._config = SimpleNamespace(wait_s=0.0, graphs=False, ks=())
    service._buckets = SimpleNamespace(
        lengths=[4, 8], row_counts=[1], of=lambda rows, length, width: Bucket(rows, length, width)
    )
    service.compiler = SimpleNamespace(wait=lambda seconds: True, give_way=lambda: None)
    service.expected = {"model": [Bucket(1, 4, 8), Bucket(2, 8, 100)], "other": [Bucket(9, 9, 9)]}
    service.warm_up(ranking)
    assert ordered == [Bucket(1, 4, 8), Bucket(2, 8, 100)]


def metric(client, name):
    lines = client.get("/metrics").text.splitlines()
    return float(next(line.split()[-1] for line in lines if line.startswith(f"rayrec_{name} ")))


@pytest.mark.slow
def test_a_replica_that_was_restarted_has_the_contexts_of_its_users_before_the_first_request(tmp_path):
    run = make_run(tmp_path, "prefix")
    warm = WarmStartConfig(folder=str(tmp_path / "warm"))
    config = ServeConfig(page=False, max_batch=2, prefix_cache_mib=4, warm_start=warm)

    def answers(client):
        asked = [{"user_id": f"u{number}", "k": 5} for number in range(20, 40)]
        return [client.post("/v1/recommend", json=each).json()["items"] for each in asked]

    with TestClient(load_api(run, config, PrometheusMeter())) as client:
        known_at_start = metric(client, "prefix_cache_histories")
        before = answers(client)
        kept = metric(client, "prefix_cache_histories")
    assert kept > known_at_start
    (left,) = (tmp_path / "warm").iterdir()
    assert len(json.loads(left.read_bytes())["users"]) == 20
    with TestClient(load_api(run, config, PrometheusMeter())) as client:
        assert metric(client, "warm_start_users") == 20
        assert metric(client, "prefix_cache_histories") >= kept
        read = metric(client, "prefix_cache_events_read_total")
        assert answers(client) == before
        # The last event of a history is read again for each answer, and no other one.
        assert metric(client, "prefix_cache_events_read_total") - read <= 20
    assert len(os.listdir(tmp_path / "warm")) == 2
