import os

import pytest

from rayrec.platform.errors import InputError
from rayrec.platform.tasks import run_tasks_locally
from rayrec.platform.work_folder import WorkFolder

PLAN = {"files": [], "seed": 1}


def double(shared, number):
    return shared * number


def never(shared, number):
    raise AssertionError("it is done already")


def interrupted(out):
    with pytest.raises(KeyboardInterrupt), WorkFolder.open(out, None, PLAN, resume=False) as work:
        assert work.run("doubles", run_tasks_locally, double, 2, [1, 2, 3]) == [2, 4, 6]
        raise KeyboardInterrupt


def test_what_is_done_is_read_in_order_and_goes_with_the_work(tmp_path):
    interrupted(tmp_path / "out")
    with WorkFolder.open(tmp_path / "out", None, PLAN, resume=True) as work:
        assert list(work.results("doubles", 3)) == [2, 4, 6]
        assert work.run("doubles", run_tasks_locally, never, 2, [1, 2, 3]) == [2, 4, 6]
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("mode", [0o777, 0o770])
def test_results_that_others_may_have_written_are_not_unpickled(tmp_path, mode):
    interrupted(tmp_path / "out")
    (path,) = tmp_path.iterdir()
    assert path.stat().st_mode & 0o077 == 0
    os.chmod(path, mode)

    with pytest.raises(InputError, match="others may write to it.*delete it, and begin again"):
        with WorkFolder.open(tmp_path / "out", None, PLAN, resume=True):
            pass

    assert path.exists()
