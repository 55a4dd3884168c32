"""Output of the command line: errors in one line, progress bars, tables, a line of JSON."""

from __future__ import annotations

import functools
import inspect
import json
import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Annotated, Any, Protocol

import typer
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from rayrec.platform.errors import InputError, MachineError, NoRoomError
from rayrec.platform.files import no_room, unusable_path, without_nan

out = Console()
log = Console(stderr=True)

Answer = dict[str, Any]
JsonOption = Annotated[bool, typer.Option("--json", help="End with one line of JSON.")]
DebugOption = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]


def command(app: typer.Typer, name: str) -> Callable[[Callable[..., Answer]], Callable[..., None]]:
    """Register a command: adds --json and --debug, and turns errors into one line and an exit code.

    Exit codes: 0 success, 1 a bug or a failure of the machine, 2 wrong input, 130 interrupted.
    """

    def register(function: Callable[..., Answer]) -> Callable[..., None]:
        @functools.wraps(function)
        def run(*args: Any, json_line: bool, debug: bool, **kwargs: Any) -> None:
            logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stderr)
            logging.getLogger("rayrec").setLevel(logging.INFO)
            # Of transformers, for each file that it reads or writes, here and in workers of Ray.
            os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
            # Schedulers end jobs with SIGTERM: clean up as after Ctrl-C.
            signal.signal(signal.SIGTERM, signal.default_int_handler)
            sys.unraisablehook = _said_once
            try:
                answer = function(*args, **kwargs)
            except KeyboardInterrupt:
                log.print("rayrec: interrupted", style="red")
                raise typer.Exit(130) from None
            except typer.Exit:  # of --help of another command, whose arguments were read
                raise
            except Exception as error:
                if debug:
                    raise
                raise typer.Exit(_report(error)) from None
            if json_line:
                print(json.dumps(without_nan(answer), allow_nan=False))

        keyword = inspect.Parameter.KEYWORD_ONLY
        signature = inspect.signature(function, eval_str=True)
        run.__signature__ = signature.replace(  # type: ignore[attr-defined]
            parameters=[
                *signature.parameters.values(),
                inspect.Parameter("json_line", keyword, default=False, annotation=JsonOption),
                inspect.Parameter("debug", keyword, default=False, annotation=DebugOption),
            ],
            return_annotation=None,
        )
        run.__annotations__ |= {"json_line": JsonOption, "debug": DebugOption, "return": None}
        app.command(name)(run)
        return run

    return register


def _said_once(unraisable: sys.UnraisableHookArgs) -> None:
    """Leave out what destructors say of a full disk: files fail once more when they are closed."""
    if unraisable.exc_value is None or no_room(unraisable.exc_value) is None:
        sys.__unraisablehook__(unraisable)


def _report(error: Exception) -> int:
    """Print an error as the last line; returns the exit code."""
    cause: BaseException = error
    if "ray" in sys.modules:
        from rayrec.platform.ray_errors import root_cause

        cause = root_cause(error)
    cause = no_room(cause) or unusable_path(cause) or cause
    text = str(cause) if isinstance(cause, InputError | NoRoomError) else f"{type(cause).__name__}: {cause}"
    log.print(f"rayrec: {text}", style="red", markup=False, highlight=False, soft_wrap=True)
    # What a machine lacks may be there later: a scheduler that reads the exit code is to try again.
    return 2 if isinstance(cause, InputError) and not isinstance(cause, MachineError) else 1


class ShowProgress(Protocol):
    """Takes how much is done, of how much (None if that is not known), and a note such as the loss."""

    def __call__(self, done: int, total: int | None, note: str = "") -> None: ...


@contextmanager
def progress_bar(description: str) -> Iterator[ShowProgress]:
    """Show progress on the error stream: a bar on a terminal, elsewhere a line every half minute."""
    if not log.is_terminal:
        yield ProgressLines(
            description, lambda line: log.print(line, markup=False, highlight=False, soft_wrap=True)
        )
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[note]}"),
    )
    with Progress(*columns, console=log, transient=True) as bars:
        task = bars.add_task(description, total=None, note="")

        def update(done: int, total: int | None, note: str = "") -> None:
            bars.update(task, completed=done, total=total, note=note)

        yield update


LINE_EVERY_S = 30.0


class ProgressLines:
    """Progress as lines for logs of jobs, which have no terminal: done, rate and time left."""

    def __init__(
        self, description: str, write: Callable[[str], None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._description, self._write, self._clock = description, write, clock
        self._last_s = clock()
        self._first: tuple[float, int] | None = None
        """When the first call came, and how much was done by then: a resumed run does not begin at 0."""

    def __call__(self, done: int, total: int | None, note: str = "") -> None:
        now_s = self._clock()
        if self._first is None:
            self._first = now_s, done
        if now_s - self._last_s < LINE_EVERY_S:
            return
        self._last_s = now_s
        began_s, began = self._first
        share = f"{done:,}" if not total else f"{done:,} of {total:,} ({done / total:.0%})"
        parts = [f"{self._description} {share}"]
        if note:
            parts.append(note)
        if now_s > began_s and done > began:
            rate = (done - began) / (now_s - began_s)
            parts.append(f"{rate:,.3g} a second")
            if total:
                parts.append(f"{timedelta(seconds=round((total - done) / rate))} left")
        self._write(", ".join(parts))


def new_table(title: str, headings: Sequence[str], figures: Collection[str] = ()) -> Table:
    """An empty table for 80 columns and fewer: the widest columns wrap, and a figure that is cut ends in "…".

    Args:
        headings: a metric's cutoff stands below its name.
        figures: those of the headings below which figures stand.
    """
    # No frame: a line between two columns takes three characters, which is one column in five.
    table = Table(title=escape(title) or None, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    table.padding = (0, 1, 0, 0)
    for heading in headings:
        if heading in figures:
            table.add_column(escape(heading).replace("@", "\n@"), justify="right")
        else:
            table.add_column(escape(heading), overflow="fold")
    return table


def print_rows(title: str, rows: list[tuple[str, str]]) -> None:
    """Print a table of labels and values to the standard output."""
    table = Table(title=escape(title), show_header=False, title_justify="left")
    for label, value in rows:
        table.add_row(escape(label), escape(value))
    out.print(table)
