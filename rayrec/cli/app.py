"""The application that the commands register with."""

import typer

app = typer.Typer(
    name="rayrec",
    help="Generative recommendation on Ray: prepare, tokenize, train, evaluate, serve.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

data_app = typer.Typer(help="What samples are made of and what has become of them.", no_args_is_help=True)
app.add_typer(data_app, name="data")

queue_app = typer.Typer(help="Queues of teams that share a cluster.", no_args_is_help=True)
app.add_typer(queue_app, name="queue")
