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


def test_tables_are_spilled_into_a_folder_that_is_there(tmp_path):
    """A disk that is not mounted would be the system's."""
    with (
        pytest.raises(InputError, match="disk: no such folder for the tables between the passes"),
        WorkFolder.open(tmp_path / "out", tmp_path / "disk", PLAN, resume=False),
    ):
        pytest.fail("it is opened")
    assert not list(tmp_path.iterdir())


def test_a_refusal_names_all_that_interrupted_work_has_left(tmp_path):
    (tmp_path / "disk").mkdir()
    with (
        pytest.raises(KeyboardInterrupt),
        WorkFolder.open(tmp_path / "out", tmp_path / "disk", PLAN, resume=False) as work,
    ):
        raise KeyboardInterrupt

    with (
        pytest.raises(InputError, match=rf"or delete .*\.out\.preparing and {work.spill}"),
        WorkFolder.open(tmp_path / "out", None, PLAN, resume=False),
    ):
        pytest.fail("it is opened")
