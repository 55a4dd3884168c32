"""What is wrong with arguments is said before torch and Ray are imported, which takes seconds."""

import json
import subprocess
import sys
from pathlib import Path

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
WRONG = (
    ("serve", "nowhere"),
    ("serve", "nowhere", "--tls-cert", "mine.pem"),
    ("serve", "nowhere", "--admission", "nowhere.yaml"),
    ("online", "nowhere.yaml"),
    ("online", str(CONFIGS / "online.yaml"), "--set", "trainer.epochs=1"),
    ("rl", "nowhere.yaml"),
    ("rl", str(CONFIGS / "beauty-rl.yaml"), "--set", "algorithm.name=none"),
    ("rl", str(CONFIGS / "beauty-rl.yaml"), "--set", "init_from=nowhere"),
    ("tokenize", "nowhere"),
    ("tokenize", "nowhere", "--levels", "0"),
    ("tokenize", "nowhere", "--vector-setting", "dim"),
    ("train", str(CONFIGS / "mine.yaml"), "--set", "data.path=nowhere"),
    ("publish", "nowhere", "store"),
    ("evaluate", "nowhere"),
    ("recommend", "nowhere", "--user", "ann"),
)

CODE = """
import functools, json, sys
import typer.testing
from typer.testing import CliRunner
from rayrec.cli import app
typer.testing._get_command = functools.cache(typer.testing._get_command)  # made once
for arguments in json.loads(sys.argv[1]):
    code = CliRunner().invoke(app, arguments).exit_code
    print(json.dumps([code, [name for name in ("torch", "ray", "fastapi") if name in sys.modules]]))
"""


def test_errors_of_arguments_import_neither_torch_nor_ray(tmp_path):
    asked = [sys.executable, "-c", CODE, json.dumps(WRONG)]
    done = subprocess.run(asked, capture_output=True, text=True, cwd=tmp_path, check=True)
    found = dict(zip(WRONG, map(json.loads, done.stdout.splitlines()), strict=True))
    assert found == {arguments: [2, []] for arguments in WRONG}
