"""The process that trains while `benchmarks.chaos` kills it and its actors.

    python -m benchmarks.chaos_driver CONFIG RUN JOURNAL STEP_S

Appends one line of JSON to the journal for every step: its loss, and the processes that there are.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import ray

from rayrec.actors.heartbeats import Account
from rayrec.pipelines.config.run import RunConfig
from rayrec.pipelines.training.train import train


def main(config_file: str, run: str, journal: str, step_s: str) -> None:
    config = RunConfig.load(config_file)
    name = Path(run).name
    with open(journal, "a", buffering=1) as lines:

        def on_step(done: int, total: int, loss: float) -> None:
            accounts: dict[str, Account] = ray.get(ray.get_actor(f"{name}/heartbeats").accounts.remote())
            processes = {actor: account.heartbeat.process.number for actor, account in accounts.items()}
            lines.write(json.dumps({"step": done - 1, "loss": loss, "processes": processes}) + "\n")
            time.sleep(float(step_s))  # steps of a toy are over before anybody could be killed

        train(config, run, resume="if_begun", on_step=on_step)


if __name__ == "__main__":
    main(*sys.argv[1:])
