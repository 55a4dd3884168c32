"""What a run leaves on disk, and which run a folder belongs to.

RUN/config.yaml            the settings
RUN/run.json               state, the error that ended it, best and last snapshot
RUN/metrics.jsonl          one line per validation
RUN/snapshots/step-N/      dense weights, optimizer state, embedding rows, manifest.json
RUN/evaluation-SPLIT.json  written by `rayrec evaluate`
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from rayrec.pipelines.config import RunConfig
from rayrec.platform.config import differing_keys
from rayrec.platform.errors import InputError
from rayrec.platform.files import write_atomically, write_json

FREE_TO_CHANGE = ("cluster.", "pipeline.", "sparse.num_servers", "sparse.wait_timeout_s", "evaluation.")
"""Settings that a resumed run may change: they move work about, or only look at it."""


class RunFolder:
    """One run's folder; see the module's docstring for what is in it."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @classmethod
    def create(cls, path: Path, config: RunConfig) -> RunFolder:
        """Begin a run in a new or empty folder, or in that of a run that ended before its first snapshot.

        Raises:
            InputError: the folder already holds a run, or something else.
        """
        folder = cls(path)
        held = folder.state if (path / "run.json").exists() else None
        if held is not None and (held["last"] is not None or held["state"] == "running"):
            raise InputError(
                f"{path}: this folder holds another run ({held['state']}); "
                "continue it with --resume, or choose another folder with --run"
            )
        if held is None and path.exists() and (not path.is_dir() or any(path.iterdir())):
            raise InputError(f"{path}: not an empty folder; choose another one with --run")
        path.mkdir(parents=True, exist_ok=True)
        write_atomically(path / "config.yaml", config.to_yaml().encode())
        folder.update(state="running", error=None, best=None, last=None)
        return folder

    @classmethod
    def resume(cls, path: Path, config: RunConfig) -> RunFolder:
        """Continue a run with the settings it was begun with.

        Raises:
            InputError: there is no run, or its settings differ in what the results depend on.
        """
        folder = cls.open(path)
        changed = [key for key in differing_keys(folder.config, config) if not key.startswith(FREE_TO_CHANGE)]
        if changed:
            raise InputError(
                f"{path}: holds another run: it differs from this config in {', '.join(changed)}; "
                "use the config it was begun with, or choose another folder with --run"
            )
        folder.update(state="running", error=None)
        return folder

    @classmethod
    def open(cls, path: Path) -> RunFolder:
        """A folder in which a run was begun."""
        if not (path / "run.json").is_file() or not (path / "config.yaml").is_file():
            raise InputError(f"{path}: not a run folder; expected one that 'rayrec train' made")
        return cls(path)

    @property
    def name(self) -> str:
        return self.path.resolve().name

    @property
    def config(self) -> RunConfig:
        return RunConfig.load(self.path / "config.yaml")

    @property
    def state(self) -> dict[str, Any]:
        values: dict[str, Any] = json.loads((self.path / "run.json").read_text())
        return values

    def update(self, **values: Any) -> None:
        """Change fields of run.json."""
        state = self.state if (self.path / "run.json").exists() else {}
        write_json(self.path / "run.json", {**state, **values})

    def snapshot_path(self, step: int) -> Path:
        return self.path / "snapshots" / f"step-{step:09d}"

    def chosen_snapshot(self, which: str) -> Path:
        """Folder of the `best` or the `last` snapshot."""
        name = self.state[which]
        if name is None:
            raise InputError(f"{self.path}: the run has no snapshot yet; it was {self.state['state']}")
        return self.path / "snapshots" / str(name)

    def keep_only(self, names: set[str]) -> None:
        """Delete every snapshot that is not named."""
        for folder in (self.path / "snapshots").iterdir():
            if folder.name not in names:
                shutil.rmtree(folder)

    def log(self, record: dict[str, Any]) -> None:
        with open(self.path / "metrics.jsonl", "a") as file:
            file.write(json.dumps(record) + "\n")
