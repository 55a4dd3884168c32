"""The application that the commands register with."""

import typer

app = typer.Typer(
    name="rayrec",
    help="Generative recommendation on Ray: prepare, tokenize, train, evaluate, serve.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
