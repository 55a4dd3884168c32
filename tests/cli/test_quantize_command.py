"""`rayrec quantize`, as it is typed."""

import json

import pytest
from typer.testing import CliRunner

from rayrec.cli import app
from tests.helpers.runs import BACKBONE, make_run

WIDE = BACKBONE | {"dim": 32, "feedforward_dim": 64}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return make_run(tmp_path_factory.mktemp("run"), "prefix", backbone=WIDE)


def called(*arguments):
    return CliRunner().invoke(app, [*map(str, arguments)])


def test_a_run_is_quantized_recommends_and_is_refused_a_second_time(run, tmp_path):
    out = tmp_path / "int4"
    found = called("quantize", run, "--scheme", "w4a16", "--calibrate", 16, "--out", out, "--json")

    assert found.exit_code == 0, found.output
    answer = json.loads(found.stdout.splitlines()[-1])
    assert answer["quantization"]["group_size"] == 32
    assert answer["kernels"] == {"float32": len(answer["quantization"]["modules"])}
    assert called("recommend", out, "--user", "u1", "-k", 3).exit_code == 0
    again = called("quantize", out, "--out", tmp_path / "again")
    assert again.exit_code == 2
    assert "is quantized already" in " ".join(again.output.split())


def test_the_table_says_what_is_lost(run, tmp_path):
    found = called("quantize", run, "--max-users", 10, "--calibrate", 8, "--out", tmp_path / "int8")

    assert found.exit_code == 0, found.output
    for said in ("recall@10", "ndcg@10", "bytes of quantized layers", "ms per batch", "overlap@10:"):
        assert said in found.output


def test_groups_without_int4_are_refused(run, tmp_path):
    found = called("quantize", run, "--scheme", "w8a8", "--group-size", 32, "--out", tmp_path / "q")

    assert found.exit_code == 2
    assert "no other scheme has any" in " ".join(found.output.split())
