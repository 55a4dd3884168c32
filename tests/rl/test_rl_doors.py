"""Rewards and policy losses of other packages: those of the guides, installed as packages are."""

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Literal

import pytest

from rayrec.platform.config import Config
from rayrec.platform.errors import InputError
from rayrec.platform.registry import Registry, settings_union
from rayrec.rl.losses.base import PolicyLoss
from rayrec.rl.rewards.config import REWARDS, RewardsConfig

REPO = Path(__file__).parents[2]
GUIDES = REPO / "docs" / "guides"
EXAMPLES = GUIDES / "examples"
PACKAGES = {"add-a-reward.md": "reward", "add-a-policy-loss.md": "policy_loss"}


def installed(site: Path, project: Path) -> None:
    """Copy a package, and write what an installer writes next to it."""
    described = tomllib.loads((project / "pyproject.toml").read_text())
    name, version = described["project"]["name"], described["project"]["version"]
    info = site / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    lines = [
        line
        for group, points in described["project"]["entry-points"].items()
        for line in (f"[{group}]", *(f"{point} = {value}" for point, value in points.items()))
    ]
    (info / "entry_points.txt").write_text("\n".join(lines) + "\n")
    for module in described["tool"]["setuptools"]["py-modules"]:
        (site / f"{module}.py").write_text((project / f"{module}.py").read_text())


def printed(site: Path, *arguments: str) -> str:
    """Output of a process in which the packages of `site` are installed."""
    environment = {**os.environ, "PYTHONPATH": f"{site}{os.pathsep}{REPO}"}
    done = subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, env=environment, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


STEP = """
import sys
from pathlib import Path
from rayrec.platform.errors import InputError
from rayrec.rl.config import RlConfig
from tests.rl.rl_steps import config_of, training_of
from tests.helpers.runs import make_run

run = make_run(Path(sys.argv[1]), "prefix")
parts = [{"kind": "hit"}, {"kind": "long_tail", "max_events": 5}]
loss = {"name": "advantage_weighted", "beta": 2.0}
training = training_of(config_of(run, rewards={"parts": parts}, algorithm=loss))
for report in training.steps():
    print(report.step, report.metrics["reward/long_tail.std"] > 0, report.metrics["loss"])
try:
    config_of(run, algorithm={**loss, "bata": 1})
except InputError as error:
    print(error)
"""


@pytest.mark.slow
def test_packages_of_the_guides_add_a_reward_and_a_policy_loss(tmp_path):
    site = tmp_path / "site"
    for package in PACKAGES.values():
        installed(site, EXAMPLES / package)

    *steps, mistake = printed(site, "-c", STEP, str(tmp_path)).splitlines()

    assert [line.split()[:2] for line in steps] == [["1", "True"], ["2", "True"]]
    assert all(float(line.split()[2]) != 0 for line in steps)
    assert "there is no setting 'algorithm.bata'; did you mean 'beta'?" in mistake


@pytest.mark.slow
@pytest.mark.parametrize(("guide", "package"), PACKAGES.items())
def test_guides_show_the_packages_and_print_what_they_say(tmp_path, guide, package):
    text, project = (GUIDES / guide).read_text(), EXAMPLES / package
    for file in (next(project.glob("*.py")), project / "pyproject.toml"):
        assert file.read_text() in text

    installed(tmp_path, project)
    (example,) = re.findall(r"^Try it .*?```python\n(.*?)```", text, re.DOTALL | re.MULTILINE)
    expected = example.rpartition("#")[2].strip()
    assert expected in printed(tmp_path, "-c", example)


def test_an_unknown_reward_is_answered_with_the_known_ones():
    with pytest.raises(InputError, match=r"parts.0.kind: expected one of 'validity', 'hit', .* got 'hits'"):
        RewardsConfig.parse({"parts": [{"kind": "hits"}]})
    assert REWARDS.names()[:2] == ("validity", "hit")


class Misnamed(PolicyLoss):
    name: Literal["other"] = "other"


class NoLoss(Config):
    name: Literal["thing"] = "thing"


@pytest.mark.parametrize(
    ("cls", "message"),
    [
        ("Misnamed", r"the policy loss 'thing' needs the field `name: Literal\['thing'\] = 'thing'`"),
        ("NoLoss", "the policy loss 'thing' is .*NoLoss.*, expected a subclass of PolicyLoss"),
    ],
)
def test_a_class_that_does_not_fit_is_refused(cls, message):
    with pytest.raises(InputError, match=message):
        settings_union(
            Registry("rayrec.tests", "policy loss", {"thing": f"{__name__}:{cls}"}), PolicyLoss, "name"
        )
