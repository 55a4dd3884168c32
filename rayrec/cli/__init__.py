"""The `rayrec` command: arguments in, one call into the package, a table or a JSON line out."""

from rayrec.cli import data, runs, tools  # which register their commands, in this order
from rayrec.cli.app import app

__all__ = ["app", "data", "main", "runs", "tools"]


def main() -> None:
    """Entry point of the `rayrec` command."""
    app()
