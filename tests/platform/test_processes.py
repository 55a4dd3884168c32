"""Whether a process that another one named has ended: only where that can be known."""

import os
import subprocess
import sys

import pytest

from rayrec.platform.processes import has_ended, own_process

pytestmark = pytest.mark.skipif(not own_process(), reason="this system does not tell processes apart")


@pytest.fixture(scope="module")
def ended() -> str:
    code = "from rayrec.platform.processes import own_process; print(own_process())"
    ran = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    return ran.stdout.strip()


def test_a_process_that_runs_has_not_ended_and_one_that_ran_has(ended):
    assert not has_ended(own_process())
    assert has_ended(ended)


def test_a_process_of_another_machine_or_container_is_not_known_to_have_ended(ended):
    machine, processes, number, began = ended.split("/")
    assert not has_ended(f"another/{processes}/{number}/{began}")
    assert not has_ended(f"{machine}/another/{number}/{began}")


def test_a_later_process_of_the_same_number_is_another_one():
    *place, number, began = own_process().split("/")
    assert number == str(os.getpid())
    assert has_ended("/".join([*place, number, str(int(began) - 1)]))


@pytest.mark.parametrize("text", ["", "a", "a/b/c/d", "a/b/1/2/3", "//0/0"])
def test_of_what_names_no_process_nothing_is_known(text):
    assert not has_ended(text)
