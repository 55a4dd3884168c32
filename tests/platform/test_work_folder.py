import pytest

from rayrec.platform.errors import InputError
from rayrec.platform.files import written_whole
from rayrec.platform.tasks import run_tasks_locally
from rayrec.platform.work_folder import WorkFolder, finished_report

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


def killed_while_it_writes(out):
    with WorkFolder.open(out, None, PLAN, resume=False) as work:
        for folder in (work.data, work.spill):
            with written_whole(folder / "part.parquet") as unfinished:
                unfinished.touch()
            unfinished.touch()  # as if it had been killed inside
        raise KeyboardInterrupt


def test_files_that_a_killed_process_has_begun_are_gone_when_its_work_goes_on(tmp_path):
    with pytest.raises(KeyboardInterrupt):
        killed_while_it_writes(tmp_path / "out")

    with WorkFolder.open(tmp_path / "out", None, PLAN, resume=True) as work:
        for folder in (work.data, work.spill):
            assert [path.name for path in folder.iterdir()] == ["part.parquet"]


def killed_at_its_end(out, spill):
    """When its result is in its place."""
    with WorkFolder.open(out, spill, PLAN, resume=False) as work:
        work.keep_plan(["said"])
        work.data.rename(out)
        raise KeyboardInterrupt


def test_a_result_says_what_it_was_made_of_and_what_was_left_beside_it_goes(tmp_path):
    (tmp_path / "disk").mkdir()
    with pytest.raises(KeyboardInterrupt):
        killed_at_its_end(tmp_path / "out", tmp_path / "disk")

    with pytest.raises(
        InputError, match=r"out: seed is 2, but the data set was made with 1; give a new folder"
    ):
        finished_report(tmp_path / "out", PLAN | {"seed": 2})
    with pytest.raises(InputError, match=r"out: log.csv: the file is new since the data set was made; give"):
        finished_report(tmp_path / "out", PLAN | {"files": [["log.csv", "5 bytes"]]})
    assert finished_report(tmp_path / "out", PLAN) == ["said"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["disk", "out"]
    assert not list((tmp_path / "disk").iterdir())

    (tmp_path / "other").mkdir()
    with pytest.raises(InputError, match="does not say what it was made of"):
        finished_report(tmp_path / "other", PLAN)


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


def left_beside_a_result(tmp_path, spilled):
    """A result, and beside it work that was killed at its very end, whose note says where it has spilled."""
    with pytest.raises(KeyboardInterrupt):
        killed_at_its_end(tmp_path / "out", None)
    left = tmp_path / ".out.preparing"
    (left / "spilled.txt").write_text(spilled)
    return left


@pytest.fixture
def home(tmp_path, monkeypatch):
    """The working folder, so that no test deletes another one."""
    folder = tmp_path / "home"
    (folder / "home").mkdir(parents=True)
    (folder / "letter.txt").touch()
    monkeypatch.chdir(folder)
    return folder


@pytest.mark.parametrize("spilled", ["", ".", "home", "{home}", "{home}/../home"])
def test_no_folder_is_deleted_that_only_a_note_names(tmp_path, home, spilled):
    left = left_beside_a_result(tmp_path, spilled.format(home=home))

    assert finished_report(tmp_path / "out", PLAN) == ["said"]

    assert not left.exists()
    assert sorted(path.name for path in home.iterdir()) == ["home", "letter.txt"]


def test_a_refusal_names_no_folder_that_only_a_note_names(tmp_path, home):
    interrupted(tmp_path / "out")
    (tmp_path / ".out.preparing" / "spilled.txt").write_text("")
    with (
        pytest.raises(InputError, match=r"or delete \S*\.out\.preparing$"),
        WorkFolder.open(tmp_path / "out", None, PLAN, resume=False),
    ):
        pytest.fail("it is opened")


def test_what_others_may_have_written_beside_a_result_stays(tmp_path, caplog):
    (tmp_path / "disk").mkdir()
    with pytest.raises(KeyboardInterrupt):
        killed_at_its_end(tmp_path / "out", tmp_path / "disk")
    (tmp_path / ".out.preparing").chmod(0o777)

    assert finished_report(tmp_path / "out", PLAN) == ["said"]

    assert (tmp_path / ".out.preparing").exists()
    assert list((tmp_path / "disk").iterdir())
    assert "others may write to it" in caplog.text


def test_interrupted_work_of_another_plan_beside_a_result_stays(tmp_path, home, caplog):
    left = left_beside_a_result(tmp_path, "spill")
    (left / "plan.json").write_text('{"files": [], "seed": 2}')

    assert finished_report(tmp_path / "out", PLAN) == ["said"]

    assert (left / "plan.json").exists()
    assert f"{left}: interrupted work of another plan" in caplog.text


def begun_again(out, plan=PLAN, resume=True):
    """What work does that finds nothing to go on with."""
    with WorkFolder.open(out, None, plan, resume=resume) as work:
        assert work.run("doubles", run_tasks_locally, double, 2, [1, 2]) == [2, 4]
        assert not list(work.spill.iterdir())
        assert not list(work.data.iterdir())


@pytest.mark.parametrize("resume", [True, False])
def test_work_whose_result_is_in_its_place_begins_again(tmp_path, resume):
    """Its tasks are done, and what they wrote is gone."""
    with (  # noqa: PT012
        pytest.raises(KeyboardInterrupt),
        WorkFolder.open(tmp_path / "out", None, PLAN, resume=False) as work,
    ):
        work.run("doubles", run_tasks_locally, double, 50, [1, 2])
        (work.spill / "rows.arrow").touch()
        work.data.rename(tmp_path / "out")
        raise KeyboardInterrupt

    begun_again(tmp_path / "out", PLAN if resume else PLAN | {"seed": 2}, resume)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_work_that_was_killed_while_it_was_deleted_begins_again(tmp_path, monkeypatch):
    def killed_inside(folder, ignore_errors):
        raise KeyboardInterrupt

    with (  # noqa: PT012
        pytest.raises(KeyboardInterrupt),
        WorkFolder.open(tmp_path / "out", None, PLAN, resume=False) as work,
    ):
        work.run("doubles", run_tasks_locally, double, 50, [1, 2])
        (work.data / "part.parquet").touch()
        monkeypatch.setattr("shutil.rmtree", killed_inside)
    monkeypatch.undo()

    begun_again(tmp_path / "out")
    assert not list(tmp_path.iterdir())
