"""`online`: a trainer and a service that learn from what users do."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rayrec.cli.app import app
from rayrec.cli.run_options import ConfigArgument, OverridesOption
from rayrec.platform.console import Answer, command


@command(app, "online")
def online_command(
    config_file: ConfigArgument,
    overrides: OverridesOption = None,
    run: Annotated[
        Path | None, typer.Option(help="Folder of the run (if not given, runs/ and the name of CONFIG).")
    ] = None,
    port: Annotated[int, typer.Option(min=1, max=65_535, help="Port of the HTTP service.")] = 8000,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
) -> Answer:
    """Train on the events that a service takes, and serve what was learned, until interrupted."""
    from rayrec.serve.config.serve import ServeConfig
    from rayrec.serve.launch.online import online_run

    folder = run or Path("runs") / config_file.stem
    service = ServeConfig.parse({"host": host, "port": port}, source="rayrec online")
    online_run(config_file, overrides or (), folder, service)
    return {"run": str(folder), "host": host, "port": port}
