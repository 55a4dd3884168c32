"""Output of the command line: errors in one line, progress bars, tables, a line of JSON."""

from __future__ import annotations

import functools
import inspect
import json
import logging
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Annotated, Any, NoReturn

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from rayrec.platform.errors import InputError

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
            # Schedulers end jobs with SIGTERM: clean up as after Ctrl-C.
            signal.signal(signal.SIGTERM, lambda *_: _interrupt())
            try:
                answer = function(*args, **kwargs)
            except KeyboardInterrupt:
                log.print("rayrec: interrupted", style="red")
                raise typer.Exit(130) from None
            except Exception as error:
                if debug:
                    raise
                raise typer.Exit(_report(error)) from None
            if json_line:
                print(json.dumps(answer))

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


def _interrupt() -> NoReturn:
    raise KeyboardInterrupt


def _report(error: Exception) -> int:
    """Print an error as the last line; returns the exit code."""
    cause: BaseException = error
    if "ray" in sys.modules:
        from rayrec.platform.ray_errors import root_cause

        cause = root_cause(error)
    is_input = isinstance(cause, InputError)
    text = str(cause) if is_input else f"{type(cause).__name__}: {cause}"
    log.print(f"rayrec: {text}", style="red", markup=False, highlight=False, soft_wrap=True)
    return 2 if is_input else 1


@contextmanager
def progress_bar(description: str) -> Iterator[Callable[[int, int | None], None]]:
    """A bar on the error stream, driven by calls with (done, total); None if the total is not known."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=log, transient=True) as progress:
        task = progress.add_task(description, total=None)
        yield lambda done, total: progress.update(task, completed=done, total=total)


def print_rows(title: str, rows: list[tuple[str, str]]) -> None:
    """Print a table of labels and values to the standard output."""
    table = Table(title=title, show_header=False, title_justify="left")
    for label, value in rows:
        table.add_row(escape(label), escape(value))
    out.print(table)
