"""Finding the stage that hangs, with heartbeats that the test makes up."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import ray

from rayrec.actors.heartbeats import Account, Heartbeat, HeartbeatMonitor, Heartbeats, ProcessId, kill_process
from rayrec.pipelines.cluster.watch import Watch
from rayrec.platform.ray_errors import StageHungError

pytestmark = pytest.mark.ray

LIMIT_S = 0.2
NEVER_S = 600.0


class Monitor:
    """What the watch asks; `accounts.remote` is Ray's way to spell it."""

    def __init__(self, accounts: dict[str, Account]) -> None:
        self.accounts = type("Method", (), {"remote": staticmethod(lambda: ray.put(accounts))})()


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    yield process
    process.kill()
    process.wait()


def account(call: str | None, busy_s: float, age_s: float, process: int = 1) -> Account:
    # Of process 1 nothing is killed: it did not start when this says.
    started = "never" if process == 1 else ProcessId.own().started
    return Account(
        Heartbeat(ProcessId(ray.get_runtime_context().get_node_id(), process, started), call, busy_s), age_s
    )


def nothing() -> Any:
    @ray.remote(num_cpus=0)
    def sleep() -> None:
        import time

        time.sleep(NEVER_S)

    return sleep.remote()


def watch_of(accounts: dict[str, Account], *stateless: str) -> Watch:
    return Watch(Monitor(accounts), frozenset(stateless), LIMIT_S)  # type: ignore[arg-type]


def test_what_is_there_is_not_waited_for(ray_cluster):
    refs = [ray.put(1), ray.put(2)]

    assert watch_of({}).get(refs) == [1, 2]
    assert set(watch_of({}).wait(refs)) <= set(refs)


def test_of_many_that_are_there_ray_is_not_asked_one_by_one(ray_cluster, monkeypatch):
    refs, asked, wait = [ray.put(number) for number in range(300)], [], ray.wait
    monkeypatch.setattr("ray.wait", lambda refs, **options: (asked.append(1), wait(refs, **options))[1])

    assert watch_of({}).get(refs) == list(range(300))
    assert len(asked) < 30


def test_a_process_that_gives_no_sign_of_life_is_named_before_those_that_wait_for_it(ray_cluster):
    pending = nothing()
    accounts = {
        "run/trainer-0": account("train(17)", busy_s=NEVER_S, age_s=0.01),
        "run/parameter_server-1": account(None, busy_s=0.0, age_s=400.0),
    }

    with pytest.raises(StageHungError, match=r"^run/parameter_server-1 hangs: .* no sign of life for 400 s$"):
        watch_of(accounts).get([pending])
    ray.cancel(pending, force=True)


def test_a_call_that_does_not_end_is_named_with_its_step(ray_cluster):
    pending = nothing()
    accounts = {
        "run/trainer-0": account("train(17)", busy_s=321.0, age_s=0.01),
        "run/parameter_server-1": account(None, busy_s=0.0, age_s=0.01),
    }

    with pytest.raises(StageHungError, match=r"^run/trainer-0 hangs: it has been in train\(17\) for 321 s$"):
        watch_of(accounts).get([pending])
    ray.cancel(pending, force=True)


def test_a_stateless_process_that_hangs_is_killed_and_the_wait_goes_on(ray_cluster, sleeper):
    os.kill(sleeper.pid, signal.SIGSTOP)

    @ray.remote(num_cpus=0)
    def when_it_is_gone(process: int) -> str:
        import time
        from pathlib import Path

        # Dead, and not yet waited for by its parent.
        while Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z":
            time.sleep(0.02)
        return "came back"

    accounts = {
        "run/sample_reader-0": Account(
            Heartbeat(
                ProcessId(ray.get_runtime_context().get_node_id(), sleeper.pid, started(sleeper.pid)), None, 0
            ),
            9.0,
        ),
        "run/trainer-0": account("train(3)", busy_s=9.0, age_s=0.01),
    }

    assert watch_of(accounts, "run/sample_reader-0").get([when_it_is_gone.remote(sleeper.pid)]) == [
        "came back"
    ]
    assert sleeper.wait() == -signal.SIGKILL


def test_a_call_that_may_take_long_is_waited_for(ray_cluster):
    @ray.remote(num_cpus=0)
    def takes_its_time() -> int:
        import time

        time.sleep(5 * LIMIT_S)
        return 7

    accounts = {"run/parameter_server-0": account("save", busy_s=9.0, age_s=0.01)}

    assert watch_of(accounts).get([takes_its_time.remote()], may_take_long=True) == [7]


def test_when_everybody_is_well_and_nothing_comes_the_run_is_given_up(ray_cluster):
    pending = nothing()

    with pytest.raises(StageHungError, match="nothing has come of the run's actors"):
        watch_of({"run/trainer-0": account(None, busy_s=0.0, age_s=0.01)}).get([pending])
    ray.cancel(pending, force=True)


def test_a_process_number_that_is_used_again_is_not_killed(ray_cluster, sleeper):
    kill_process(ProcessId(ray.get_runtime_context().get_node_id(), sleeper.pid, "another time"))
    assert sleeper.poll() is None

    kill_process(ProcessId(ray.get_runtime_context().get_node_id(), sleeper.pid, started(sleeper.pid)))
    assert sleeper.wait() == -signal.SIGKILL


def started(process: int) -> str:
    with open(f"/proc/{process}/stat") as stat:
        return stat.read().rpartition(")")[2].split()[19]


def test_the_monitor_says_how_old_a_heartbeat_is():
    now = 100.0
    monitor = HeartbeatMonitor(clock=lambda: now)
    heartbeat = Heartbeat(ProcessId("node", 7, "0"), "read(3)", 1.5)

    monitor.take("run/sample_reader-0", heartbeat)
    now = 112.0

    assert monitor.accounts() == {"run/sample_reader-0": Account(heartbeat, 12.0)}


def test_an_actor_nobody_watches_sends_nothing():
    heartbeats = Heartbeats("run/trainer-0", to=None)

    with heartbeats.during("train", 3):
        pass


def test_who_waits_for_a_process_that_has_just_fallen_silent_is_not_blamed(ray_cluster):
    """Stopped a little later than the wait began, it does not count as silent at the first look."""
    pending = nothing()
    looks = iter([0.6 * LIMIT_S, 1.6 * LIMIT_S])

    def accounts() -> Any:
        return ray.put(
            {
                "run/trainer-0": account("train(17)", busy_s=NEVER_S, age_s=0.01),
                "run/parameter_server-1": account(None, busy_s=0.0, age_s=next(looks)),
            }
        )

    monitor: Any = SimpleNamespace(accounts=SimpleNamespace(remote=accounts))
    with pytest.raises(StageHungError, match=r"^run/parameter_server-1 hangs: .* no sign of life"):
        Watch(monitor, frozenset(), LIMIT_S).get([pending])
    ray.cancel(pending, force=True)


def test_a_monitor_that_has_died_itself_ends_no_run_and_lets_none_wait_for_ever(ray_cluster):
    pending = nothing()

    @ray.remote(num_cpus=0)
    class Dead:
        def accounts(self) -> None:
            os._exit(1)

    dead = Dead.remote()
    with pytest.raises(StageHungError, match="nothing has come of the run's actors"):
        Watch(dead, frozenset(), LIMIT_S).get([pending])
    ray.cancel(pending, force=True)


def test_a_process_of_a_node_that_is_gone_need_not_be_killed(ray_cluster):
    kill_process(ProcessId(ray.NodeID.from_random().hex(), 1, "0"), timeout_s=10.0)


@ray.remote(num_cpus=0)
class Server:
    def stats(self) -> int:
        return 1

    def die(self) -> None:
        os._exit(1)


def test_the_death_of_one_with_state_is_heard_of_by_who_waits_for_somebody_else(ray_cluster):
    """As of a worker that was lost with the same node, and has no place to come back to."""
    pending = nothing()
    alive, dies = Server.remote(), Server.remote()
    watch = Watch(Monitor({}), frozenset(), NEVER_S, [alive, dies], ask_every_s=0.1)  # type: ignore[arg-type]
    ray.get([alive.stats.remote(), dies.stats.remote()])
    dies.die.remote()

    with pytest.raises(ray.exceptions.ActorDiedError):
        watch.wait([pending])
    ray.cancel(pending, force=True)
    ray.kill(alive)


def test_those_with_state_are_asked_while_nothing_comes_and_answers_are_taken(ray_cluster):
    @ray.remote(num_cpus=0)
    def late() -> str:
        import time

        time.sleep(1.0)
        return "there"

    server = Server.remote()
    watch = Watch(Monitor({}), frozenset(), NEVER_S, [server], ask_every_s=0.05)  # type: ignore[arg-type]

    assert watch.get([late.remote()]) == ["there"]
    ray.kill(server)
