"""The `rayrec` command: arguments in, one call into the package, a table or a JSON line out."""

from rayrec.cli import cursors, data, runs, stores, tools  # which register their commands, in this order
from rayrec.cli.app import app

__all__ = ["app", "cursors", "data", "main", "runs", "stores", "tools"]


def main() -> None:
    """Entry point of the `rayrec` command."""
    app()
