"""Runs everything that needs a GPU, one piece after the other, and writes one JSON report.

    python -m benchmarks.gpu --list                 the pieces, and what each needs
    python -m benchmarks.gpu                        all pieces that have not passed according to gpu.json
    python -m benchmarks.gpu --piece decode         one piece, even if it has passed
    python -m benchmarks.gpu --for-s 580            starts no piece that may take longer than is left of that
    python -m benchmarks.gpu --device cpu --out cpu.json     a dry run: small sizes, tests of CUDA are skipped

Run it in a checkout, which does not have to be installed. It needs Python, torch, numpy and triton, and no
Ray. A piece that needs more (see `--list`) is reported as not run where that is missing, and the exit code
is 1. Tests need pytest: `pip install pytest`, with `--no-index --find-links FOLDER` and its wheels in a
folder where there is no network.

Each piece is a process of its own with a limit of less than ten minutes, so that one that hangs, or leaves
the device unusable, does not take the others along. The report is written after each piece: after an
interruption, the same command goes on with the next one.

A new piece is one line in `PIECES`: tests by their path, or a program that prints its figures as JSON.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import torch

ROOT = Path(__file__).resolve().parents[1]
VERSIONS_OF = ("torch", "triton", "numpy", "transformers", "pytest")
TAIL = 4000
"""Characters of a failed piece's output that the report keeps."""
FAILURES, FAILURE = 5, 1000
"""Failed tests whose messages the report keeps, and the characters of each."""


@dataclass(frozen=True)
class Piece:
    """A program to run in a process of its own."""

    about: str
    arguments: Sequence[str]
    """For the interpreter."""
    needs: Sequence[str] = ()
    """Modules that it imports, beside torch and numpy."""
    on_cpu: Sequence[str] = ()
    """Further arguments of a dry run."""
    is_tests: bool = False
    """Whether pytest runs it; else it prints its figures to stdout, as JSON."""
    limit_s: float = 540.0

    @classmethod
    def tests(cls, about: str, path: str, *selected: str, needs: Sequence[str] = ()) -> Piece:
        """A file of tests, or those that pytest's options select."""
        # Without the conftest.py of all tests, which imports more than such a machine has.
        options = ("-q", "-p", "no:cacheprovider", "--confcutdir", str(Path(path).parent))
        return cls(about, ("-m", "pytest", *options, path, *selected), ("pytest", *needs), is_tests=True)


ATTENTION_TESTS = "tests/models/attention/test_cuda_backends.py"

PIECES: dict[str, Piece] = {
    "attention-triton": Piece.tests(
        "Our kernels, held to the reference", ATTENTION_TESTS, "-k", "triton", needs=["triton"]
    ),
    "attention-flex": Piece.tests(
        "FlexAttention, held to the reference", ATTENTION_TESTS, "-k", "flex", needs=["triton"]
    ),
    "attention-sdpa": Piece.tests(
        "PyTorch's attention, held to the reference", ATTENTION_TESTS, "-k", "sdpa"
    ),
    "devices": Piece.tests(
        "Training steps and recommendations of every model, held to the CPU",
        "tests/models/test_on_devices.py",
        needs=["pydantic", "yaml", "numba", "pyarrow", "pandas", "scipy", "triton"],
    ),
    "device-cache": Piece.tests(
        "Embedding rows cached on the device, held to the CPU",
        "tests/embeddings/test_device_cache.py",
        needs=["pydantic", "yaml", "numba", "pyarrow", "scipy", "xxhash", "hypothesis"],
    ),
    "quantized": Piece.tests(
        "Kernels of quantized layers, held to the reference",
        "tests/models/quantization/test_device_kernels.py",
        needs=["pydantic", "yaml"],
    ),
    "quantized-speed": Piece(
        "Products of int8 and float8, and whole quantized layers: microseconds, beside bfloat16",
        ("-m", "benchmarks.quantized_cuda"),
        needs=["pydantic", "yaml"],
        on_cpu=("--device", "cpu", "--small"),
    ),
    "attention-speed": Piece(
        "Attention by each backend: milliseconds, TFLOP/s, memory",
        ("-m", "benchmarks.attention"),
        needs=["triton"],
        on_cpu=("--device", "cpu"),
    ),
    "decode": Piece(
        "Beam search by a language model of 1.7 billion parameters: milliseconds",
        ("-m", "benchmarks.decode_cuda"),
        needs=["transformers"],
        on_cpu=("--device", "cpu", "--small"),
    ),
    "decode-graphs": Piece(
        "The same with recorded kernels and without: milliseconds, and whether both find the same",
        ("-m", "benchmarks.decode_graphs"),
        needs=["transformers", "pydantic", "yaml"],
        on_cpu=("--device", "cpu", "--small"),
    ),
    "language-tune": Piece(
        "Tuning a language model on packed rows: tokens/s and MFU, beside a padded loop; losses are equal",
        ("-m", "benchmarks.language_tune_cuda"),
        needs=["transformers", "pydantic", "yaml"],
        on_cpu=("--device", "cpu", "--small"),
    ),
    "language-serve": Piece(
        "The embedded engine: tokens/s and times to tokens, beside generate; greedy answers are equal",
        ("-m", "benchmarks.language_serve_cuda"),
        needs=["transformers", "pydantic", "yaml", "prometheus_client"],
        on_cpu=("--device", "cpu", "--small"),
    ),
}


def run_piece(piece: Piece, on_cpu: bool) -> dict[str, Any]:
    """Run a piece to its end or to its limit.

    Returns:
        `status` (passed, failed, timed out or not run) and `seconds`; for tests, how many passed, failed and
        were skipped; for programs, their `figures`; `reason` and `output` where it did not pass.
    """
    missing = [name for name in piece.needs if importlib.util.find_spec(name) is None]
    if missing:
        return {"status": "not run", "reason": f"not installed: {', '.join(missing)}"}
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        results = Path(folder) / "results.xml"
        command = [sys.executable, *piece.arguments, *(piece.on_cpu if on_cpu else ())]
        if piece.is_tests:
            command.append(f"--junitxml={results}")
        code, output, errors = _run(command, piece.limit_s)
        report: dict[str, Any] = {"seconds": round(time.monotonic() - started, 1)}
        if code is None:
            return report | {
                "status": "timed out",
                "reason": f"not done after {piece.limit_s:g} s",
                "output": (output + errors)[-TAIL:],
            }
        if piece.is_tests and results.is_file():
            report |= _counts(results)
            # Skipped tests show nothing, but on the CPU, where those of CUDA have nothing to run on.
            has_passed = code == 0 and (report["passed"] > 0 or on_cpu)
        elif not piece.is_tests and code == 0:
            report["figures"] = _figures(output)
            has_passed = report["figures"] is not None
        else:
            has_passed = False
    if has_passed:
        return report | {"status": "passed"}
    return report | {"status": "failed", "reason": f"exit code {code}", "output": (output + errors)[-TAIL:]}


def _run(command: Sequence[str], limit_s: float) -> tuple[int | None, str, str]:
    """Exit code, stdout and stderr; the code is None where the limit was reached."""
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        # pytest's plugins are not needed, and may not fit.
        env=os.environ | {"PYTHONPATH": path, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    try:
        output, errors = process.communicate(timeout=limit_s)
        return process.returncode, output, errors
    except subprocess.TimeoutExpired:
        # With its children: compilers, above all.
        os.killpg(process.pid, signal.SIGKILL)
        output, errors = process.communicate()
        return None, output, errors
    except BaseException:
        os.killpg(process.pid, signal.SIGKILL)
        raise


def _counts(results: Path) -> dict[str, Any]:
    """Of pytest's report."""
    counts = {"passed": 0, "failed": 0, "skipped": 0}
    reasons: set[str] = set()
    failures: list[str] = []
    for case in ElementTree.parse(results).iter("testcase"):
        skipped = case.find("skipped")
        if skipped is not None:
            counts["skipped"] += 1
            reasons.add(skipped.get("message", ""))
        elif wrong := [*case.iter("failure"), *case.iter("error")]:
            counts["failed"] += 1
            failures.append(f"{case.get('name')}: {wrong[0].get('message', '')}")
        else:
            counts["passed"] += 1
    # The end of the output names those that failed; why, the first ones show.
    shown = {"failures": [one[:FAILURE] for one in failures[:FAILURES]]} if failures else {}
    return {**counts, "skipped_because": sorted(reasons), **shown}


def _figures(output: str) -> Any:
    try:
        return json.loads(output)
    except json.JSONDecodeError:
        return None


def surroundings(kind: str) -> dict[str, Any]:
    """What the figures depend on, beside the device's load."""
    found: dict[str, Any] = {
        "device": torch.cuda.get_device_name() if kind == "cuda" else "cpu",
        "versions": {
            "python": sys.version.split()[0],
            "cuda": torch.version.cuda if kind == "cuda" else None,
            **{name: _version(name) for name in VERSIONS_OF},
        },
    }
    return found


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def main(arguments: Sequence[str] | None = None, pieces: Mapping[str, Piece] = PIECES) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--list", action="store_true", help="print the pieces")
    parser.add_argument("--piece", action="append", choices=pieces, help="run this one; may be repeated")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--out", type=Path, default=Path("gpu.json"))
    parser.add_argument("--for-s", type=float, default=float("inf"), help="start no piece that may end later")
    options = parser.parse_args(arguments)
    if options.list:
        for name, piece in pieces.items():
            print(f"{name:18} {piece.about}; needs {', '.join(piece.needs) or 'torch alone'}")
        return 0
    if options.device == "cuda" and not torch.cuda.is_available():
        print("torch sees no CUDA device here; --device cpu is a dry run", file=sys.stderr)
        return 1
    here = surroundings(options.device)
    report: dict[str, Any] = {**here, "pieces": {}}
    if options.out.is_file():
        report = json.loads(options.out.read_text())
        if {name: report.get(name) for name in here} != here:
            print(
                f"{options.out} is of another device or other versions: name another --out", file=sys.stderr
            )
            return 1

    started, left = time.monotonic(), []
    for name in options.piece or pieces:
        is_done = report["pieces"].get(name, {}).get("status") == "passed"
        if is_done and not options.piece:
            continue
        if time.monotonic() - started + pieces[name].limit_s > options.for_s:
            left.append(name)
            continue
        print(f"{name} ...", end=" ", flush=True)
        result = run_piece(pieces[name], options.device == "cpu")
        report["pieces"][name] = {"date": datetime.now(UTC).isoformat(timespec="seconds"), **result}
        _write(options.out, report)
        counts = ", ".join(f"{result[key]} {key}" for key in ("passed", "failed", "skipped") if key in result)
        print(": ".join(filter(None, [result["status"], counts, result.get("reason")])), flush=True)
    if left:
        print(f"no time for {', '.join(left)}: run the same command again")
    wanted = options.piece or pieces
    return 0 if all(report["pieces"].get(name, {}).get("status") == "passed" for name in wanted) else 1


def _write(path: Path, report: Mapping[str, Any]) -> None:
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(json.dumps(report, indent=2) + "\n")
    temporary.replace(path)


if __name__ == "__main__":
    sys.exit(main())
