"""Progress as a person sees it who reads the log of a job."""

from __future__ import annotations

import errno
import os
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import typer
from rich.console import Console
from typer.testing import CliRunner

from rayrec.jobs.ledger import LedgerBusyError
from rayrec.platform import console
from rayrec.platform.console import LINE_EVERY_S, ProgressLines
from rayrec.platform.errors import InputError, MachineError, NoRoomError


class Clock:
    now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


def test_without_a_terminal_progress_is_a_line_every_half_minute() -> None:
    lines: list[str] = []
    clock = Clock()
    progress = ProgressLines("train", lines.append, clock)
    for done in range(0, 181, 2):
        progress(done, 1800, f"loss {done / 100:.2f}")
        clock.now_s += LINE_EVERY_S / 15
    assert len(lines) == 6
    assert lines[0] == "train 30 of 1,800 (2%), loss 0.30, 1 a second, 0:29:30 left"
    assert lines[-1] == "train 180 of 1,800 (10%), loss 1.80, 1 a second, 0:27:00 left"


def test_a_resumed_run_reports_the_rate_since_it_resumed() -> None:
    lines: list[str] = []
    clock = Clock()
    progress = ProgressLines("train", lines.append, clock)
    progress(1000, None)
    clock.now_s += LINE_EVERY_S
    progress(1015, None)
    assert lines == ["train 1,015, 0.5 a second"]


def test_what_a_full_disk_makes_destructors_say_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[BaseException | None] = []
    monkeypatch.setattr(
        console.sys, "__unraisablehook__", lambda unraisable: said.append(unraisable.exc_value)
    )
    full, other = OSError(errno.ENOSPC, "No space left on device"), ValueError("a bug")

    for error in (full, other, None):
        unraisable: Any = SimpleNamespace(exc_value=error)
        console._said_once(unraisable)

    assert said == [other, None]


def test_a_command_shows_no_bars_of_libraries_unless_it_is_told_to(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[str | None] = []
    app = typer.Typer()

    @console.command(app, "look")
    def look() -> console.Answer:
        found.append(os.environ.get("HF_HUB_DISABLE_PROGRESS_BARS"))
        return {}

    monkeypatch.setenv("HF_HUB_DISABLE_PROGRESS_BARS", "0")
    CliRunner().invoke(app, [])
    monkeypatch.delenv("HF_HUB_DISABLE_PROGRESS_BARS")
    CliRunner().invoke(app, [])
    assert found == ["0", "1"]


def test_the_line_of_json_has_no_number_that_json_lacks() -> None:
    app = typer.Typer()

    @console.command(app, "judge")
    def judge() -> console.Answer:
        return {"auc": float("nan"), "of": [1.5, (float("inf"), 2)]}

    found = CliRunner().invoke(app, ["--json"])

    assert found.stdout == '{"auc": null, "of": [1.5, [null, 2]]}\n'


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (InputError("epochs: expected a number"), 2),
        (MachineError("no Ray cluster answers"), 1),
        (NoRoomError("a disk is full"), 1),
        (LedgerBusyError.of(Path("jobs.db")), 1),
        (RuntimeError("a bug"), 1),
    ],
)
def test_only_wrong_input_has_the_code_of_what_no_second_try_mends(error: Exception, code: int) -> None:
    app = typer.Typer()

    @console.command(app, "fail")
    def fail() -> console.Answer:
        raise error

    found = CliRunner().invoke(app, [])

    assert found.exit_code == code
    assert found.stderr.splitlines()[-1].endswith(str(error))


def test_eighty_columns_hold_a_name_and_seven_figures() -> None:
    narrow = Console(width=80)
    figures = [f"recall@{cutoff}" for cutoff in (1, 5, 10, 50, 100, 500, 1000)]
    table = console.new_table("Lists", ["", *figures], figures)
    name = "neighbors, co-visitation at the time, seen items kept"
    table.add_row(name, *["0.1234\n±0.0123"] * len(figures))

    with narrow.capture() as printed:
        narrow.print(table)

    lines = printed.get().splitlines()
    assert "…" not in printed.get()
    assert sum(line.count("±0.0123") for line in lines) == len(figures)
    assert (
        "".join(line[:16].strip() for line in lines if line.strip())
        .replace(" ", "")
        .endswith(name.replace(" ", ""))
    )


def test_titles_are_shown_as_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    console.print_rows("Trained: runs/q[/x]", [("steps [b]", "3")])

    printed = capsys.readouterr().out
    assert "runs/q[/x]" in printed
    assert "steps [b]" in printed


@pytest.mark.parametrize("width", [40, 60])
def test_figures_for_which_there_is_no_room_are_seen_to_be_cut_and_names_stay(width: int) -> None:
    figures = [f"recall@{cutoff}" for cutoff in (1, 5, 10, 50, 100, 500, 1000)]
    table = console.new_table("[b]Lists[/x]", ["", *figures], figures)
    table.add_row("neighbors", *["0.1234"] * len(figures))
    narrow = Console(width=width)

    with narrow.capture() as printed:
        narrow.print(table)

    lines = printed.get().splitlines()
    assert "[b]Lists[/x]" in lines[0]
    assert "…" in printed.get()
    assert "nei" in printed.get()
    assert not re.search(r"\b0\.12?3?\b(?!…)", printed.get())
