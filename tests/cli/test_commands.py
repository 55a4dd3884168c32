"""The command as a person meets it: exit codes, the error in one line, the last line for machines."""

import os
import signal
import socket
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from rayrec.cli import app
from rayrec.platform.checkout import CHECKOUT
from tests.cli.commands import answer, rayrec, refused
from tests.helpers.data import random_events, write_source
from tests.helpers.later_data import run_of_words
from tests.helpers.runs import NUM_ITEMS, make_run


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return make_run(tmp_path_factory.mktemp("cli"))


@pytest.fixture
def source(tmp_path):
    return write_source(tmp_path / "source", random_events(20, 10))


COMMANDS = (
    *("prepare", "tokenize", "plan", "train", "evaluate", "export", "recommend", "serve", "bench", "doctor"),
)


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_explains_itself(name):
    code, stdout, _ = rayrec(name, "--help")
    assert code == 0
    for option in ("--json", "--debug"):
        assert option in stdout


def test_a_log_becomes_a_data_set_with_semantic_ids(source, tmp_path):
    prepared = answer("prepare", source, tmp_path / "data", "--no-ray")
    assert prepared["counts"]["users"] == 20
    tokenized = answer("tokenize", tmp_path / "data")
    assert tokenized["num_items"] == 10
    assert (tmp_path / "data" / "semantic_ids" / "registry.json").is_file()


def test_without_json_the_standard_output_is_a_table(source, tmp_path):
    code, stdout, _ = rayrec("prepare", source, tmp_path / "data", "--no-ray")
    assert code == 0
    assert "Prepared" in stdout
    assert "{" not in stdout


def test_a_missing_source_is_named(tmp_path):
    assert f"{tmp_path / 'nothing'}: " in refused("prepare", tmp_path / "nothing", tmp_path / "data")


def test_what_is_refused_leaves_nothing_behind(tmp_path):
    source = write_source(tmp_path / "source", [("u", "i", 1.0), ("u", "j", -5.0), ("u", "k", 3.0)])
    before = sorted(tmp_path.rglob("*"))
    assert "-5" in refused("prepare", source, tmp_path / "data", "--no-ray")
    assert sorted(tmp_path.rglob("*")) == before


def test_debug_shows_the_traceback(tmp_path):
    result = CliRunner().invoke(
        app, ["prepare", str(tmp_path / "nothing"), str(tmp_path / "data"), "--debug"]
    )
    assert result.exit_code == 1
    assert type(result.exception).__name__ == "InputError"  # raised on, so that Python prints it


def test_a_column_without_a_role_is_explained(source, tmp_path):
    line = refused("prepare", source, tmp_path / "data", "--column", "customer")
    assert "expected ROLE=NAME" in line


def test_a_setting_that_does_not_exist_suggests_the_nearest(tmp_path):
    config = tmp_path / "run.yaml"
    config.write_text("data: {path: nowhere}\nmodel: {name: sasrec}\ntraining: {batchsize: 4}\n")
    line = refused("train", config, "--run", tmp_path / "run")
    assert "training.batchsize" in line
    assert "batch_size" in line
    assert not (tmp_path / "run").exists()


def test_an_override_that_does_not_exist_suggests_the_nearest(tmp_path):
    config = tmp_path / "run.yaml"
    config.write_text("data: {path: nowhere}\nmodel: {name: sasrec}\n")
    assert "epochs" in refused("train", config, "--set", "training.epoch=3")


def test_a_data_set_that_is_missing_is_named(tmp_path):
    config = tmp_path / "run.yaml"
    config.write_text(f"data: {{path: {tmp_path / 'nowhere'}}}\nmodel: {{name: sasrec}}\n")
    assert str(tmp_path / "nowhere") in refused("train", config, "--run", tmp_path / "run")
    assert not (tmp_path / "run").exists()


def write_config(tmp_path, run):
    config = tmp_path / "run.yaml"
    config.write_text(
        f"data: {{path: {run.parent / 'data'}}}\nmodel: {{name: sasrec, item_matrix: sparse}}\n"
    )
    return config


def test_the_plan_says_what_every_server_will_hold(run, tmp_path):
    plan = answer("plan", write_config(tmp_path, run), "--set", "sparse.num_servers=3")
    assert [server["shard"] for server in plan["servers"]] == [0, 1, 2]
    assert sum(table["num_rows"] for server in plan["servers"] for table in server["tables"]) == 30
    assert all(server["peak_bytes"] > server["num_bytes"] > 0 for server in plan["servers"])


@pytest.mark.parametrize("name", ["plan", "train"])
def test_what_cannot_fit_is_refused_before_anything_starts(name, run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, _, stderr = rayrec(name, write_config(tmp_path, run), "--set", "sparse.server_memory=1 KiB")
    assert code == 2
    assert "sparse.server_memory allows 1.0 KiB: raise it to" in stderr.splitlines()[-1]
    assert not (tmp_path / "runs").exists()


def test_a_folder_that_holds_another_run_is_left_alone(run, tmp_path):
    config = tmp_path / "run.yaml"
    config.write_text(f"data: {{path: {run.parent / 'data'}}}\nmodel: {{name: sasrec}}\n")
    before = content(run)
    line = refused("train", config, "--run", run)
    assert str(run) in line
    assert "--run" in line
    assert content(run) == before


def test_where_to_resume_goes_with_resuming(run, tmp_path):
    error = refused("train", write_config(tmp_path, run), "--run", tmp_path / "new", "--snapshot", "previous")
    assert "--snapshot says where to resume; it goes with --resume or --resume-if-begun" in error
    assert not (tmp_path / "new").exists()


def content(run):
    """Its files and when they were written; the lock, which says nothing, aside."""
    return {
        path: path.stat().st_mtime_ns for path in run.rglob("*") if path.is_file() and path.name != ".lock"
    }


def test_evaluating_reports_model_and_popularity(run):
    report = answer("evaluate", run)
    assert {"recall@10", "ndcg@10"} <= set(report["results"]["popularity"])
    assert set(report["results"]) >= {"model", "popularity"}


def test_recommending_answers_with_titles(run):
    found = answer("recommend", run, "--user", "u3", "-k", 4)
    assert [item["title"] for item in found["items"]] == [
        f"Title of {item['item_key']}" for item in found["items"]
    ]
    assert len(found["items"]) == 4


def test_recommending_what_may_be_shown_says_how_much_is_left(run, capsys):
    found = answer("recommend", run, "--user", "u3", "--allow", "i4", "--allow", "i5", "--deny", "i5")
    assert {item["item_key"] for item in found["items"]} <= {"i4"}
    found = answer("recommend", run, "--user", "u3", "--where", "title=Title of i6")
    assert {item["item_key"] for item in found["items"]} <= {"i6"}
    assert "expected COLUMN=VALUE" in refused("recommend", run, "--user", "u3", "--where", "title")
    found = answer("recommend", run, "--user", "u3", "-k", 2, "--quota", "title=Title of i6:1-")
    assert "i6" in [item["item_key"] for item in found["items"]]
    assert found["control"]["quotas"] == "exact"
    found = answer("recommend", run, "--user", "u3", "--among", "i4", "--among", "i5")
    assert {item["item_key"] for item in found["items"]} <= {"i4", "i5"}
    assert found["control"]["candidates"] == "exact"
    for said in ("title=x", "title=x:-", "title:1-", "title=x:a-2"):
        line = refused("recommend", run, "--user", "u3", "--quota", said)
        assert f"--quota {said}: expected COLUMN=VALUE:LEAST-MOST" in line
    assert "3 items at least are more than 1 at most" in refused(
        "recommend", run, "--user", "u3", "--quota", "title=x:3-1"
    )


def test_a_list_that_is_short_says_where_the_other_items_are(tmp_path):
    run, later = run_of_words(tmp_path)
    met = later.items.keys.take(later.item_positions(later.history_of("u0"))).to_pylist()
    others = sorted({f"i{item}" for item in range(NUM_ITEMS)} - set(met))
    among = [option for key in ("a3", met[0], *others[:2]) for option in ("--among", key)]

    found = CliRunner().invoke(
        app, ["recommend", str(run), "--user", "u0", "--data", str(later.root), *among]
    )

    assert (
        "2 of 10 items: --allow, --deny, --where and --among leave 4; in the user's history: 1; not found: "
        "1, such as 'a3' (nothing is known of them)"
    ) in " ".join(found.output.split())


def test_recommending_with_beams_of_its_own(tmp_path, run):
    generative = make_run(tmp_path, "generative", beam_width=4)
    as_usual = answer("recommend", generative, "--user", "u3", "-k", 3)
    assert answer("recommend", generative, "--user", "u3", "-k", 3, "--beams", "4") == as_usual
    found = answer("recommend", generative, "--user", "u3", "-k", 3, "--beams", "32,16", "--beam-margin", 9)
    assert len(found["items"]) == 3
    for options, sentence in {
        ("--beams", "4,2"): "--beams 4,2: 2 after the last code find no 3 items (-k)",
        ("--beams", "many"): "--beams many: expected a number from 1",
        ("--beams", ",".join(["8"] * 9)): "9 numbers, and an item has ",
        ("--beam-margin", 0): "--beam-margin 0.0: expected a number above 0",
        ("--beams", 8, "--among", "i4"): "--among scores its items exactly",
    }.items():
        assert sentence in refused("recommend", generative, "--user", "u3", "-k", 3, *options)
    assert "this run's model scores every item" in refused("recommend", run, "--user", "u3", "--beams", 16)


def test_data_that_was_moved_can_be_pointed_at(tmp_path):
    run = make_run(tmp_path)
    (tmp_path / "data").rename(tmp_path / "elsewhere")
    assert str(tmp_path / "data") in refused("recommend", run, "--user", "u3")
    assert answer("recommend", run, "--user", "u3", "--data", tmp_path / "elsewhere")["items"]


def test_a_user_who_is_not_there_is_named(run):
    assert "--user nobody: there is no such user" in refused("recommend", run, "--user", "nobody")


@pytest.mark.parametrize("name", ["evaluate", "serve"])
def test_a_folder_that_is_no_run_is_refused(name, tmp_path):
    assert "not a run folder" in refused(name, tmp_path)


def test_a_port_in_use_is_refused(run):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert f"port {port} on 127.0.0.1 is in use" in refused("serve", run, "--port", port, code=1)


@pytest.mark.parametrize("option", ["--admission", "--access"])
def test_wrong_settings_of_admission_are_refused_by_either_name(run, tmp_path, option):
    settings = tmp_path / "admission.yaml"
    settings.write_text("callers: {rates: 3}")
    assert "there is no setting 'callers.rates'; did you mean 'rate'?" in refused(
        "serve", run, option, settings
    )


def test_settings_of_events_request_log_and_services_are_checked_before_anything_starts(run, tmp_path):
    settings = tmp_path / "settings.yaml"
    for option, text, said in (
        ("--events", "{log: {folders: x}}", "there is no setting 'log.folders'"),
        ("--request-log", "{folder: x, shares: 1}", "there is no setting 'shares'"),
        ("--services", "{dense: {replicas: 0}}", "dense.replicas"),
        ("--services", "{targets: {new: {run: x}}}", "nobody would ask 'new'"),
    ):
        settings.write_text(text)
        assert said in refused("serve", run, option, settings)
    for option in ("--events", "--request-log", "--services"):
        assert "missing.yaml" in refused("serve", run, option, tmp_path / "missing.yaml")
    settings.write_text("{}")
    assert "leave out --single-process" in refused("serve", run, "--services", settings, "--single-process")


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("evaluate --neighbors DATA --ranker nowhere", "--ranker is about a run, and --neighbors"),
        ("evaluate --neighbors DATA --snapshot last", "--snapshot is about a run"),
        ("evaluate --neighbors DATA --no-baselines", "--no-baselines is about a run"),
        (
            "evaluate RUN --candidates-with-neighbors 4 --slices",
            "--slices has no effect with --candidates-with",
        ),
        ("evaluate RUN --candidates-with-neighbors 4 --ranker RUN", "--ranker has no effect with"),
        ("recommend --neighbors DATA --user u3 --data nowhere", "--data is about a run"),
        ("recommend RUN --user u3 --candidates 7", "name one with --ranker"),
        ("recommend RUN --user u3 --ranker RUN --objective a=1 --objective a=2", "a is named twice"),
        ("replicas RUN --costs nowhere --rate 1 --within-ms 9 --max-batch 4", "--max-batch says how"),
        ("canary start nowhere --max-users 3", "--max-users says what of --data is predicted"),
        ("text export nowhere TMP/out --snapshot last", "--snapshot is of a run, which --run names"),
        ("off-policy nowhere --temperature 2", "--temperature is of --policy softmax"),
        ("quantize RUN --out TMP/out --no-scales --strength 0.5", "with --no-scales none do"),
    ],
)
def test_options_that_would_change_nothing_are_refused(run, tmp_path, command, message):
    places = {"RUN": str(run), "DATA": str(run.parent / "data"), "TMP/out": str(tmp_path / "out")}
    assert message in refused(*(places.get(word, word) for word in command.split()))
    assert not (tmp_path / "out").exists()


def test_of_a_store_of_versions_none_but_the_one_that_serves_is_read(run, tmp_path):
    store = tmp_path / "store"
    answer("publish", run, store)
    why = "is of runs, and"
    nearline = ("nearline", store, "--store", tmp_path / "products", "--once", "--single-process")
    assert why in refused(*nearline, "--snapshot", "last")
    assert why in refused(*nearline, "--data", run.parent / "data")
    (tmp_path / "actions.yaml").write_text("actions: [{name: full}]\n")
    curves = ("value-curves", store, "--request-log", "log", "--actions", tmp_path / "actions.yaml")
    assert why in refused(*curves, "--out", tmp_path / "curves.json", "--snapshot", "last")


def test_a_place_for_a_file_is_looked_at_before_the_file_is_computed(run, tmp_path):
    config = write_config(tmp_path, run)
    (tmp_path / "requests.jsonl").write_text('{"user_id": "u3"}\n')
    (tmp_path / "actions.yaml").write_text("actions: [{name: full}]\n")
    curves = ("value-curves", run, "--request-log", "log", "--actions", tmp_path / "actions.yaml")
    for *command, option in (
        ("calibrate", config, "--out"),
        ("agree", run, run, "--requests", tmp_path / "requests.jsonl", "--differences"),
        (*curves, "--out"),
    ):
        assert f"{option} {tmp_path}: is a folder" in refused(*command, option, tmp_path)
        missing = tmp_path / "missing" / "file"
        assert f"{option} {missing}: there is no such folder" in refused(*command, option, missing)


def test_benchmarks_are_listed_and_a_wrong_name_suggests_one():
    assert "spine" in answer("bench")["benches"]
    assert "did you mean 'spine'?" in refused("bench", "spin")


@pytest.mark.slow
def test_the_doctor_compiles_what_a_first_run_would(tmp_path):
    cache = tmp_path / "cache"
    command = [sys.executable, "-m", "rayrec", "doctor", "--compile"]
    counts = []
    for _ in range(2):
        subprocess.run(command, env={**os.environ, "NUMBA_CACHE_DIR": str(cache)}, check=True, timeout=300)
        counts.append(len(list(cache.rglob("*.nbc"))))
    assert counts[0] == counts[1] > 50


def test_the_doctor_finds_what_every_run_needs():
    findings = {finding["subject"]: finding["status"] for finding in answer("doctor")["findings"]}
    assert findings["ray"] == findings["torch"] == "ok"


def test_as_a_module_it_is_the_same_command():
    shown = subprocess.run(
        [sys.executable, "-m", "rayrec", "--help"], capture_output=True, text=True, check=True
    )
    assert all(name in shown.stdout for name in COMMANDS)


SLEEPER = """
import time, typer
from rayrec.platform.console import command

app = typer.Typer()

@command(app, "sleep")
def sleep():
    print("asleep", flush=True)
    time.sleep(60)

app()
"""


def test_sigterm_ends_a_command_like_ctrl_c():
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", SLEEPER], **pipes) as process:
        assert process.stdout.readline() == "asleep\n"
        process.send_signal(signal.SIGTERM)
        _, stderr = process.communicate(timeout=30)
    assert process.returncode == 130
    assert stderr == "rayrec: interrupted\n"


@pytest.mark.parametrize(
    ("config", "command"),
    [
        ("mine.yaml", "rayrec prepare SOURCE"),
        ("criteo-dlrm.yaml", "rayrec impressions SOURCE"),
        ("language-lora.yaml", "rayrec text prepare SOURCE --out"),
    ],
)
def test_a_run_without_data_names_the_command_that_makes_what_its_model_reads(tmp_path, config, command):
    line = refused(
        "train", CHECKOUT / "configs" / config, "--run", tmp_path / "run", "--set", f"data.path={tmp_path}/no"
    )
    assert f"no such data set; `{command} {tmp_path}/no` makes one" in line
