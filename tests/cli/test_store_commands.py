"""`rayrec data store` and `rayrec data keys` as they are typed."""

import json

import pyarrow as pa
import pyarrow.parquet as pq
from typer.testing import CliRunner

from rayrec.cli import app


def rayrec(*arguments):
    result = CliRunner().invoke(app, ["data", *map(str, arguments), "--json"])
    return result.exit_code, result.stdout, result.stderr


def test_a_log_becomes_a_store_and_samples(tmp_path, redis_server):
    log = tmp_path / "log.parquet"
    pq.write_table(
        pa.table({"who": ["a", "a"], "item_id": [1, 2], "time": [5000, 6000], "price": [1.0, 2.0]}), log
    )
    for number, store in enumerate((tmp_path / "store", f"{redis_server.url}#commands")):
        options = ["--column", "user_id=who", "--time-unit", "ms", "--keep", "price", "--name", "shop"]
        code, stdout, stderr = rayrec("store", log, store, *options)
        assert code == 0, stderr
        answer = json.loads(stdout.splitlines()[-1])
        assert (answer["added"], answer["files"], answer["files_known"]) == (2, 1, 0)
        code, stdout, stderr = rayrec("keys", store, tmp_path / f"samples{number}")
        assert code == 0, stderr
        assert json.loads(stdout.splitlines()[-1])["samples"] == 1
    first, second = (pq.read_table(tmp_path / f"samples{number}") for number in range(2))
    assert first == second


def test_refusals_exit_with_two_and_name_the_option(tmp_path):
    code, _, stderr = rayrec("keys", tmp_path / "nowhere", tmp_path / "samples")
    assert code == 2
    assert "there is no event store; `rayrec data store SOURCE STORE` builds one" in " ".join(stderr.split())
    code, _, stderr = rayrec("store", tmp_path / "nowhere", tmp_path / "store", "--column", "who")
    assert code == 2
    assert "expected ROLE=NAME" in stderr
    twice = ("--column", "user_id=who", "--column", "user_id=whom")
    code, _, stderr = rayrec("store", tmp_path / "nowhere", tmp_path / "store", *twice)
    assert code == 2
    assert "--column user_id=whom: user_id is named twice" in stderr


def test_a_graph_that_is_bounded_stays_so_whatever_is_read_again(tmp_path):
    log, store, graph = tmp_path / "log.parquet", tmp_path / "store", tmp_path / "graph"
    times = [1_600_000_000 + 60 * minute for minute in range(12)]
    pq.write_table(pa.table({"user_id": [1, 2] * 6, "item_id": [7, 8, 9] * 4, "timestamp": times}), log)
    assert rayrec("store", log, store, "--name", "shop")[0] == 0
    for added, options in ((9, ["--max-per-node", 3]), (0, [])):  # the newest three of each of three items
        code, stdout, stderr = rayrec("graph", store, graph, *options)
        assert code == 0, stderr
        answer = json.loads(stdout.splitlines()[-1])
        assert (answer["edges"], answer["added"]) == (9, added)
    code, _, stderr = rayrec("graph", store, graph, "--max-per-node", 5)
    assert code == 2
    assert "keeps 3 edges of a node, which cannot be changed" in " ".join(stderr.split())
    for folder, options in ((graph, []), (tmp_path / "new", ["--max-per-node", 3])):
        code, _, stderr = rayrec("graph", store, folder, "--period-days", 3, *options)
        assert code == 2
        assert "--period-days 3 and --max-per-node 3 do not go together" in " ".join(stderr.split())
    for option, message in (("--period-days", "an end"), ("--keep-days", "to forget nothing")):
        code, _, stderr = rayrec("graph", store, tmp_path / "new", option, "inf")
        assert (code, message in stderr) == (2, True)


def test_a_store_becomes_a_graph_that_grows_with_it(tmp_path):
    log, store, graph = tmp_path / "log.parquet", tmp_path / "store", tmp_path / "graph"
    days = [1_600_000_000 + 86_400 * day for day in range(10)]
    for number in (0, 1):
        rows = slice(0, 6) if number == 0 else slice(6, 10)
        columns = {"user_id": [1, 2] * 5, "item_id": list(range(10)), "timestamp": days}
        part = log.with_name(f"{number}.parquet")
        pq.write_table(pa.table({name: values[rows] for name, values in columns.items()}), part)
        assert rayrec("store", part, store, "--name", "shop", "--by", "item")[0] == 0
        assert rayrec("store", part, store, "--name", "shop")[0] == 0
        code, stdout, stderr = rayrec("graph", store, graph, "--period-days", 3)
        assert code == 0, stderr
        answer = json.loads(stdout.splitlines()[-1])
        assert (answer["edges"], answer["added"]) == ((6, 6), (10, 4))[number]
        assert answer["segments"] > 1
    code, stdout, stderr = rayrec("graph", store, graph, "--keep-days", 2)
    assert code == 0, stderr
    assert json.loads(stdout.splitlines()[-1])["first"].startswith("2020-09-20")
    other = tmp_path / "other"
    assert rayrec("store", log.with_name("0.parquet"), other, "--name", "mail")[0] == 0
    code, _, stderr = rayrec("graph", other, graph)
    assert code == 2
    assert "another log" in stderr
