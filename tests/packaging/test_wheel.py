"""The wheel in a clean environment: nothing may depend on the checkout that it was built from."""

from __future__ import annotations

import csv
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

import rayrec

ROOT = Path(__file__).parents[2]
CONFIG = """
data: {path: data}
model: {name: sasrec, backbone: {dim: 8, num_layers: 1, num_heads: 2, feedforward_dim: 16, max_length: 8}}
training: {batch_size: 16, epochs: 1}
pipeline: {cpus_per_actor: 0.1, cpus_per_trainer: 0.1}
cluster: {dashboard: false}
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    source = tmp_path_factory.mktemp("source")
    # A copy: setuptools leaves its intermediate files beside what it builds.
    shutil.copytree(ROOT / "rayrec", source / "rayrec", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("setup.cfg", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    built = source / "wheels"
    options = ("--quiet", "--no-deps", "--no-build-isolation", "--no-index", "--wheel-dir", built)
    run(sys.executable, "-m", "pip", "wheel", *options, source, folder=source)
    (path,) = built.glob("*.whl")
    return path


def run(*command: object, folder: Path) -> str:
    """What a command prints to stdout, as a user runs it: without the paths of the tests."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [str(part) for part in command],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return done.stdout


@pytest.mark.slow
def test_the_wheel_has_every_file_of_the_package(wheel):
    files = [
        path for path in (ROOT / "rayrec").rglob("*") if path.is_file() and "__pycache__" not in path.parts
    ]
    expected = {
        path.relative_to(ROOT).as_posix() for path in files if path.suffix not in (".nbi", ".nbc", ".pyc")
    }

    names = set(zipfile.ZipFile(wheel).namelist())

    assert expected <= names
    assert {name.split("/")[0] for name in names} == {"rayrec", f"rayrec-{rayrec.__version__}.dist-info"}


@pytest.fixture
def environment(wheel, tmp_path) -> Path:
    """A virtual environment with the wheel; beside it, a log and a config."""
    folder = tmp_path / "environment"
    venv.create(folder, with_pip=False, symlinks=True)
    # Its requirements are those of this environment, so that nothing is downloaded. By a path in a .pth file:
    # the .pth files in that folder, an editable installation's among them, are not read.
    (site_of(folder) / "requirements.pth").write_text(sysconfig.get_path("purelib") + "\n")
    pip = (sys.executable, "-m", "pip", "--quiet", "--python", folder / "bin" / "python", "install")
    run(*pip, "--no-deps", "--no-index", "--force-reinstall", wheel, folder=tmp_path)
    (tmp_path / "log").mkdir()
    with open(tmp_path / "log" / "interactions.csv", "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["user_id", "item_id", "timestamp"])
        writer.writerows([f"u{u}", f"i{(u + 7 * n) % 23}", 1000 * n + u] for u in range(40) for n in range(8))
    (tmp_path / "run.yaml").write_text(CONFIG)
    return folder


def site_of(environment: Path) -> Path:
    (site,) = environment.glob("lib/python*/site-packages")
    return site


def check_a_run(environment: Path, *options: str) -> None:
    """Prepare, train, evaluate and recommend with the commands of the environment."""
    folder = environment.parent

    def rayrec_command(*arguments: str) -> str:
        """The last line of what it prints."""
        return run(environment / "bin" / "rayrec", *arguments, folder=folder).splitlines()[-1]

    rayrec_command("prepare", "log", "data", "--no-ray")
    rayrec_command("train", "run.yaml", "--run", "trained", *options)
    metrics = rayrec_command("evaluate", "trained", "--json")
    answer = rayrec_command("recommend", "trained", "--user", "u3", "-k", "5", "--json")

    assert "recall@10" in json.loads(metrics)["results"]["model"]
    assert len(json.loads(answer)["items"]) == 5


@pytest.mark.slow
@pytest.mark.ray
def test_a_clean_environment_trains_evaluates_and_recommends(environment):
    program = "import rayrec; print(rayrec.__version__, rayrec.__file__)"

    version, path = run(environment / "bin" / "python", "-c", program, folder=environment.parent).split()

    assert version == rayrec.__version__
    assert Path(path).is_relative_to(environment)
    check_a_run(environment)


@pytest.mark.slow
def test_where_ray_is_not_installed_it_does_so_in_process(environment):
    # None in sys.modules: the import fails.
    (site_of(environment) / "sitecustomize.py").write_text("import sys\nsys.modules['ray'] = None\n")

    check_a_run(environment, "--local")
