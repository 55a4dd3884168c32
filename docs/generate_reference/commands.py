"""The page of all commands, from the Typer application."""

from __future__ import annotations

from collections.abc import Iterator

import click
import typer
from markdown import cell, prose, table

from rayrec.cli import app

_HEAD = """# Command line

Every command prints its help with `--help`. It exits with 0 only if it did what was asked, with 2 if the
arguments, the settings or the data are at fault, and otherwise with 1: a machine, a cluster or a service
lacks what was asked at the moment, another process holds it, or something failed. The message is one
sentence, and `--debug` shows the traceback. With `--json` a command ends
with one line of JSON. `python -m rayrec` is the same as `rayrec`.
"""


def page() -> str:
    root = typer.main.get_command(app)
    context = click.Context(root, info_name="rayrec")
    found = list(_commands(root, context))
    overview = table(
        ["command", "what it does"],
        [
            [f"[`{path}`](#{path.replace(' ', '-')})", cell(command.get_short_help_str(limit=200))]
            for path, command, _ in found
        ],
    )
    return "\n".join([_HEAD, overview, *(_section(*one) for one in found)])


def _commands(
    command: click.Command, context: click.Context
) -> Iterator[tuple[str, click.Command, click.Context]]:
    for name in command.list_commands(context) if hasattr(command, "list_commands") else ():
        below = command.get_command(context, name)
        if below.hidden:
            continue
        path = f"{context.command_path} {name}"
        inner = click.Context(below, info_name=name, parent=context)
        if hasattr(below, "list_commands"):
            yield from _commands(below, inner)
        else:
            yield path, below, inner


def _section(path: str, command: click.Command, context: click.Context) -> str:
    usage = f"{path} {' '.join(command.collect_usage_pieces(context))}"
    parts = [f"## {path}\n", prose(_dedented(command.help or "")), f"```text\n{usage}\n```\n"]
    rows: dict[str, list[list[str]]] = {"argument": [], "option": []}
    for parameter in command.get_params(context):
        if getattr(parameter, "hidden", False) or parameter.name == "help":
            continue
        record = parameter.get_help_record(context)
        if record is not None:
            rows[parameter.param_type_name].append([f"`{_names(record[0])}`", cell(record[1] or "")])
    for kind, listed in rows.items():
        if listed:
            parts.append(table([kind, "meaning"], listed))
    return "\n".join(parts)


def _names(record: str) -> str:
    return record.replace("|", "\\|").strip()


def _dedented(text: str) -> str:
    return "\n".join(line.rstrip() for line in text.replace("\f", "").split("\n"))
