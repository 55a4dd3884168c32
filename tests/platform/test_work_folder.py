import pytest

from rayrec.platform.errors import InputError
from rayrec.platform.tasks import run_tasks_locally
from rayrec.platform.work_folder import WorkFolder

PLAN = {"files": [], "seed": 1}


def double(shared, number):
    return shared * number


def never(shared, number):
    raise AssertionError("it is done already")


def killed(out):
    """Work that ends after its first stage."""
    with WorkFolder.open(out, None, PLAN, resume=False) as work:
        assert work.run("doubles", run_tasks_locally, double, 2, [1, 2, 3]) == [2, 4, 6]
        raise KeyboardInterrupt


def interrupted(out):
    with pytest.raises(KeyboardInterrupt):
        killed(out)


def resumed(out):
    with WorkFolder.open(out, None, PLAN, resume=True) as work:
        assert work.run("doubles", run_tasks_locally, never, 2, [1, 2, 3]) == [2, 4, 6]
        return list(work.results("doubles", 3))


def test_what_is_done_is_read_in_order_and_goes_with_the_work(tmp_path):
    interrupted(tmp_path / "out")
    assert resumed(tmp_path / "out") == [2, 4, 6]
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("mode", [0o777, 0o770])
def test_results_that_others_may_have_written_are_not_unpickled(tmp_path, mode):
    interrupted(tmp_path / "out")
    (path,) = tmp_path.iterdir()
    assert path.stat().st_mode & 0o077 == 0
    path.chmod(mode)

    with pytest.raises(InputError, match=r"others may write to it.*delete it, and begin again"):
        resumed(tmp_path / "out")

    assert path.exists()
