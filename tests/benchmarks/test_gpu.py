"""The program that runs on a machine with a GPU, as far as it goes without one."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import gpu
from benchmarks.gpu import PIECES, Piece

FIGURES = Piece("prints figures", ("-c", "print('[1, 2]')"))


@pytest.fixture
def run(tmp_path):
    """Runs pieces on the CPU: exit code and report."""
    out = tmp_path / "report.json"

    def run(pieces, *options):
        code = gpu.main(["--device", "cpu", "--out", str(out), *options], pieces)
        return code, json.loads(out.read_text())["pieces"] if out.exists() else {}

    return run


def piece_of_tests(folder: Path, text: str) -> Piece:
    path = folder / "test_small.py"
    path.write_text(text)
    return Piece.tests("tests", str(path))


def test_figures_and_what_they_depend_on_are_reported(run, tmp_path):
    code, pieces = run({"small": FIGURES})

    report = json.loads((tmp_path / "report.json").read_text())
    assert code == 0
    assert pieces["small"].items() >= {"status": "passed", "figures": [1, 2]}.items()
    assert report["device"] == "cpu"
    assert {"python", "cuda", "torch", "triton"} <= report["versions"].keys()


def test_tests_are_counted(run, tmp_path):
    tests = (
        "import pytest\ndef test_a(): 1\ndef test_b(): assert 1 == 2\ndef test_c(): pytest.skip('no GPU')\n"
    )

    code, pieces = run({"tests": piece_of_tests(tmp_path, tests)})

    assert code == 1
    assert [pieces["tests"][key] for key in ("status", "passed", "failed", "skipped")] == ["failed", 1, 1, 1]
    assert pieces["tests"]["skipped_because"] == ["no GPU"]
    assert "assert 1 == 2" in pieces["tests"]["output"]


def test_tests_that_are_all_skipped_show_nothing_on_a_gpu(tmp_path):
    skipped = piece_of_tests(tmp_path, "import pytest\ndef test_c(): pytest.skip('no GPU')\n")

    assert gpu.run_piece(skipped, on_cpu=False)["status"] == "failed"
    assert gpu.run_piece(skipped, on_cpu=True)["status"] == "passed"


def test_a_piece_that_fails_hangs_or_lacks_a_package_does_not_stop_the_others(run):
    pieces = {
        "broken": Piece("fails", ("-c", "raise SystemExit('no such kernel')")),
        "words": Piece("prints no JSON", ("-c", "print('12 ms')")),
        "hangs": Piece("hangs", ("-c", "import time; time.sleep(60)"), limit_s=0.5),
        "lacks": Piece("imports", ("-c", "1"), needs=["no_such_package"]),
        "small": FIGURES,
    }

    code, found = run(pieces)

    assert code == 1
    assert [found[name]["status"] for name in pieces] == [
        "failed",
        "failed",
        "timed out",
        "not run",
        "passed",
    ]
    assert "no such kernel" in found["broken"]["output"]
    assert found["lacks"]["reason"] == "not installed: no_such_package"


def test_a_second_run_goes_on_with_what_has_not_passed(run):
    run({"one": Piece("fails", ("-c", "1/0")), "two": FIGURES})

    code, pieces = run({"one": FIGURES, "two": Piece("is not run again", ("-c", "1/0"))})

    assert code == 0
    assert [piece["status"] for piece in pieces.values()] == ["passed", "passed"]
    assert run({"two": Piece("asked for by name", ("-c", "1/0"))}, "--piece", "two")[0] == 1


def test_no_piece_is_started_that_may_not_end_in_time(run, capsys):
    code, pieces = run({"small": FIGURES}, "--for-s", "10")

    assert (code, pieces) == (1, {})
    assert "no time for small" in capsys.readouterr().out


def test_a_report_of_other_versions_is_kept(run, tmp_path, capsys):
    (tmp_path / "report.json").write_text(json.dumps({"device": "another", "versions": {}, "pieces": {}}))

    code, _ = run({"small": FIGURES})

    assert code == 1
    assert "another device or other versions" in capsys.readouterr().err


def test_the_pieces_name_files_that_exist():
    for piece in PIECES.values():
        paths = [argument for argument in piece.arguments if argument.endswith(".py")]
        modules = [argument for argument in piece.arguments if argument.startswith("benchmarks.")]
        assert [*paths, *modules]
        assert all((gpu.ROOT / path).is_file() for path in paths)
        assert all((gpu.ROOT / f"{module.replace('.', '/')}.py").is_file() for module in modules)


@pytest.mark.slow
def test_it_runs_where_torch_numpy_and_transformers_are_all_there_is(tmp_path, monkeypatch):
    """A network of the real piece, small; a package that is imported in spite of that fails the import."""
    pytest.importorskip("transformers")
    absent = ("ray", "pyarrow", "pandas", "numba", "pydantic", "scipy", "lmdb", "rich", "typer", "hypothesis")
    (tmp_path / "sitecustomize.py").write_text(f"import sys\nsys.modules.update(dict.fromkeys({absent}))\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    out = tmp_path / "report.json"
    pieces = ("--piece", "decode", "--piece", "attention-sdpa")
    command = [sys.executable, "-m", "benchmarks.gpu", "--device", "cpu", "--out", str(out), *pieces]

    done = subprocess.run(command, cwd=gpu.ROOT, capture_output=True, text=True, timeout=240)

    assert done.returncode == 0, done.stdout + done.stderr + out.read_text()
    pieces = json.loads(out.read_text())["pieces"]
    assert [figures["context_tokens"] for figures in pieces["decode"]["figures"]] == [99, 498]
    assert pieces["attention-sdpa"]["skipped"] > 40


@pytest.mark.slow
def test_language_models_are_measured_without_ray_and_http(tmp_path, monkeypatch):
    pytest.importorskip("transformers")
    absent = ("ray", "fastapi", "starlette", "uvicorn", "tritonclient", "xxhash", "lmdb", "rich", "typer")
    (tmp_path / "sitecustomize.py").write_text(f"import sys\nsys.modules.update(dict.fromkeys({absent}))\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    out = tmp_path / "report.json"
    pieces = ("--piece", "language-tune", "--piece", "language-serve")
    command = [sys.executable, "-m", "benchmarks.gpu", "--device", "cpu", "--out", str(out), *pieces]

    done = subprocess.run(command, cwd=gpu.ROOT, capture_output=True, text=True, timeout=240)

    assert done.returncode == 0, done.stdout + done.stderr + out.read_text()
    found = {name: piece["figures"] for name, piece in json.loads(out.read_text())["pieces"].items()}
    assert found["language-tune"]["largest_loss_difference"] < 1e-5
    assert {"packed", "packed_masters", "padded"} <= found["language-tune"].keys()
    assert found["language-serve"]["equal_answers"] == 8
    assert {"generate", "engine_1", "engine_8"} <= found["language-serve"].keys()
