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

text_app = typer.Typer(help="Records of text, which language models are tuned on.", no_args_is_help=True)
app.add_typer(text_app, name="text")

maas_app = typer.Typer(help="Language models behind the APIs of OpenAI and Triton.", no_args_is_help=True)
app.add_typer(maas_app, name="maas")

canary_app = typer.Typer(
    help="A published version for a share of the users, before it serves all.", no_args_is_help=True
)
app.add_typer(canary_app, name="canary")
