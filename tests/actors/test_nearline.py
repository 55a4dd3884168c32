"""Near-line work as actors of Ray: what only processes of their own can show."""

import time
from functools import partial

import pytest
import ray

from rayrec.actors.nearline import NearlineActor, spawn_nearline_workers
from rayrec.pipelines.inference.recommender import Recommender
from rayrec.pipelines.nearline.config import NearlineConfig
from rayrec.pipelines.nearline.product_store import ProductStore
from rayrec.pipelines.nearline.products import ProductKey
from rayrec.platform.errors import InputError
from rayrec.samples.stores import open_values
from rayrec.serve.launch.nearline import NearlineJob, NearlineLoop, NearlineReport, run_actors
from tests.helpers.runs import NUM_USERS, make_run

pytestmark = pytest.mark.ray


def test_workers_divide_the_users_and_stop_when_told(tmp_path, ray_cluster):
    run, store = make_run(tmp_path, "sasrec"), str(tmp_path / "products")
    job = NearlineJob(str(run), store, None, NearlineConfig(batch_users=4))
    actors = spawn_nearline_workers(partial(NearlineLoop, job, num_parts=2), 2, num_cpus=0)

    reports = [NearlineReport(*each) for each in ray.get([actor.finish.remote() for actor in actors])]
    assert sum(each.computed for each in reports) == NUM_USERS
    assert all(0 < each.computed < NUM_USERS for each in reports)
    running = [actor.run.remote() for actor in actors]
    ray.get([actor.stop.remote() for actor in actors])
    assert len(ray.get(running)) == 2
    recommender = Recommender.load(run)
    ids = recommender.dataset.users["user_id"].to_pylist()
    products = ProductStore(open_values(store))
    keys = [ProductKey("candidates", recommender.identity, user) for user in ids]
    assert None not in products.get_many(keys)
    products.close()
    for actor in actors:
        ray.kill(actor)


class Refused:
    """A loop that cannot go on."""

    def __init__(self, part):
        self._part = part

    def finish(self):
        pass

    def run(self, is_stopped):
        if self._part:
            raise InputError("something is wrong with its part")
        while not is_stopped(0.01):
            pass

    def report(self):
        return NearlineReport(0, 0, 0.0, 0)


def test_a_worker_that_ends_with_an_error_ends_all_of_the_work(ray_cluster):
    """The others went on, and nobody said that a part of the users had no worker any more."""
    actors = spawn_nearline_workers(Refused, 2, num_cpus=0)
    until = time.monotonic() + 60

    def is_stopped(wait_s):
        time.sleep(min(wait_s, 0.05))
        return time.monotonic() > until

    with pytest.raises(InputError, match="something is wrong with its part"):
        run_actors(actors, is_stopped)
    assert time.monotonic() < until
    for actor in actors:
        ray.kill(actor)


class Missing:
    def __init__(self, part: int) -> None:
        raise InputError("there is no such run")


def test_what_cannot_be_opened_is_told_by_the_first_call():
    """Of an error in an actor's constructor, Ray prints the stack besides."""
    actor = NearlineActor(Missing, 0)
    with pytest.raises(InputError, match="there is no such run"):
        actor.finish()
