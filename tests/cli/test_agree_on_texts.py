"""`rayrec agree` on texts: runs, folders, precisions and services of language models."""

import json
import socket

import pytest

pytest.importorskip("transformers")

from rayrec.pipelines.inference.export import export_run
from rayrec.pipelines.inference.text_answers import TextAnswers, TextRequest
from rayrec.samples.text.records import Message
from rayrec.serve.config.serve import ServeConfig
from rayrec.serve.language.config import ModelsConfig
from rayrec.serve.launch.language import serving_models
from tests.cli.commands import answer, refused
from tests.helpers.optional import skip_without
from tests.pipelines.test_language_runs import folders, settings, trained  # noqa: F401 - a fixture

skip_without("peft")

QUESTIONS = [f"ask {number} {word}" for number in range(4) for word in ("red", "blue")]


@pytest.fixture(scope="module")
def run(folders, tmp_path_factory):  # noqa: F811
    run = tmp_path_factory.mktemp("runs") / "chat"
    trained(settings(folders, epochs=1, template="chat"), run)
    return run


@pytest.fixture(scope="module")
def folder(run, tmp_path_factory):
    folder = tmp_path_factory.mktemp("exported") / "model"
    export_run(run, folder)
    return folder


def lines(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def chats():
    return [{"messages": [{"role": "user", "content": one}], "max_tokens": 8} for one in QUESTIONS]


@pytest.mark.slow
def test_a_run_agrees_with_its_folder_and_is_judged_by_what_would_be_right(run, folder, tmp_path):
    plain = lines(tmp_path / "plain.jsonl", [{"prompt": one, "max_tokens": 8} for one in QUESTIONS])
    assert answer("agree", run, folder, "--requests", plain)["figures"]["equal"]["value"] == 1.0

    other = tmp_path / "differences.jsonl"
    requests = lines(tmp_path / "requests.jsonl", chats())
    found = answer("agree", run, folder, "--requests", requests, "--differences", other)
    assert found["figures"].keys() == {"equal"}
    assert found["figures"]["equal"]["value"] == 1.0
    assert not other.read_text()

    # Half of what would be right is what the run says: as the last message, or as `expected`.
    model = TextAnswers.of_run(run, None, "float32")
    texts = model.answer([TextRequest((Message("user", one),), max_tokens=8) for one in QUESTIONS], 8)
    model.close()
    known = [
        row | {"messages": [*row["messages"], {"role": "assistant", "content": text if place % 2 else "no"}]}
        for place, (row, text) in enumerate(zip(chats(), texts, strict=True))
    ]
    known[1] = chats()[1] | {"expected": ["no", texts[1]]}
    found = answer("agree", run, folder, "--requests", lines(requests, known))
    assert found["known"] == len(known)
    assert found["figures"]["accuracy A"]["value"] == found["figures"]["accuracy B"]["value"] == 0.5
    assert found["figures"]["accuracy B - A"] == {"value": 0.0, "low": 0.0, "high": 0.0}


@pytest.mark.slow
def test_a_run_agrees_with_its_service(run, folder, tmp_path):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    served = {"folder": str(folder), "context_length": 96, "concurrency": 4}
    models = ModelsConfig.parse({"models": [served | {"name": name} for name in ("one", "two")]})
    # The last one is longer than the service and the run read.
    rows = [*chats(), {"prompt": "red " * 200, "max_tokens": 8}]
    requests = lines(tmp_path / "requests.jsonl", rows)

    with serving_models(models, ServeConfig(port=port, single_process=True)) as url:
        found = answer("agree", run, url, "--requests", requests, "--model-b", "two")
        both = answer("agree", url, url, "--requests", requests, "--model-a", "one", "--model-b", "two")
        said = refused("agree", run, url, "--requests", requests)

    for figures in (found, both):
        assert figures["failed"] == {"a": 1, "b": 1}
        assert figures["figures"]["equal"]["value"] == pytest.approx(len(QUESTIONS) / len(rows))
    assert "has the models one, two; name one (--model-a, --model-b)" in said


@pytest.mark.slow
def test_two_precisions_of_a_run_are_compared(run, tmp_path):
    requests = lines(tmp_path / "requests.jsonl", chats())

    found = answer("agree", run, run, "--requests", requests, "--precision-b", "bfloat16")

    assert found["failed"] == {"a": 0, "b": 0}
    assert 0.0 <= found["figures"]["equal"]["value"] <= 1.0


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"messages": []}, "messages: there is no message"),
        ({"messages": [{"role": "user"}]}, "messages: expected a list of messages"),
        ({"prompt": "a", "messages": []}, "has messages and a prompt"),
        ({"prompt": "a", "temperature": 1}, "temperature: unknown field"),
        ({"prompt": "a", "max_tokens": 0}, "max_tokens: expected an integer from 1"),
        ({"user_id": "u1"}, "some requests are for recommendations and some for texts"),
    ],
)
def test_a_line_that_is_no_request_for_a_text_is_named(run, tmp_path, row, message):
    path = lines(tmp_path / "requests.jsonl", [*chats()[:1], row])

    assert f"requests.jsonl:2: {message}" in refused("agree", run, run, "--requests", path)
