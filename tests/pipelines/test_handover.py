"""Hand-over to other trainers: rows of their forms, a model beside them, and what comes back."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

from rayrec.pipelines.inference.handover import HandoverManifest, write_handover
from rayrec.pipelines.inference.taken_back import take_back
from rayrec.pipelines.inference.writer import TextWriter
from rayrec.platform.errors import InputError
from rayrec.samples.text.dataset import TextDataset
from rayrec.samples.text.prepare import TextPrepareConfig, prepare_text
from tests.cli.commands import answer, refused

pytest.importorskip("transformers")

from tests.helpers.optional import skip_without
from tests.helpers.text_tokenizers import tokenizer_folder
from tests.pipelines.test_language_runs import settings, trained

skip_without("peft")

CLEANING = {"near_duplicates": None, "contamination_words": 50}


def records() -> list[dict[str, Any]]:
    """Every kind, and conversations of two turns."""
    found: list[dict[str, Any]] = []
    for number in range(12):
        found.append({"prompt": f"ask {number}", "completion": f"answer {number}"})
        found.append({"text": f"say {number}"})
        chat = [
            ("user", f"one {number}"),
            ("assistant", "first"),
            ("user", "two"),
            ("assistant", f"{number}"),
        ]
        found.append({"messages": [{"role": role, "content": content} for role, content in chat]})
    return found


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("text")
    (folder / "records.jsonl").write_text("".join(json.dumps(one) + "\n" for one in records()))
    given = {"valid_fraction": 0.2, "test_fraction": 0.1, "cleaning": CLEANING}
    prepare_text([folder / "records.jsonl"], folder / "data", TextPrepareConfig.parse(given))
    return folder / "data", tokenizer_folder(folder / "tokenizer")


@pytest.fixture(scope="module")
def chat_run(folders, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("runs") / "chat"
    trained(settings(folders, epochs=1, template="chat"), run)
    return run


@pytest.fixture(scope="module")
def handed(folders, chat_run, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("handed") / "over"
    write_handover(folders[0], folder, run=chat_run)
    return folder


def rows_in(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_rows_are_conversations_and_texts_lie_apart(folders, handed):
    dataset = TextDataset.open(folders[0])
    told = HandoverManifest.read(handed)

    rows = [row for split in ("train", "valid", "test") for row in rows_in(handed / f"{split}.jsonl")]
    texts = [row for path in handed.glob("*-text.jsonl") for row in rows_in(path)]

    assert {tuple(row) for row in rows} == {("messages",)}
    assert {tuple(row) for row in texts} == {("text",)}
    assert len(rows) == 24
    assert sorted(row["text"] for row in texts) == sorted(f"say {number}" for number in range(12))
    assert {"role": "assistant", "content": "answer 3"} in [row["messages"][-1] for row in rows]
    assert told.dataset_fingerprint == dataset.fingerprint
    assert told.records == dataset.manifest.rows
    assert {name: entry.rows for name, entry in told.files.items()} == {
        path.name: len(rows_in(path)) for path in handed.glob("*.jsonl")
    }
    info = json.loads((handed / "dataset_info.json").read_text())
    assert info["train"]["columns"] == {"messages": "messages"}
    assert info["train-text"]["columns"] == {"prompt": "text"}


def test_a_run_without_a_template_asks_and_answers_in_texts(folders, tmp_path):
    trained(settings(folders, epochs=1), tmp_path / "run")
    told = write_handover(folders[0], tmp_path / "over", run=tmp_path / "run")

    assert told.form == "prompt"
    rows = [row for name in told.files if "-text" not in name for row in rows_in(tmp_path / "over" / name)]
    assert {"prompt": "ask 3\n", "completion": "answer 3"} in rows
    # Of two learned turns each is a row.
    assert {"prompt": "one 3\n", "completion": "first"} in rows
    assert {"prompt": "one 3\nfirst\ntwo\n", "completion": "3"} in rows
    with pytest.raises(
        InputError, match="form 'messages' is written by a chat template, and the run has none"
    ):
        write_handover(folders[0], tmp_path / "chat", run=tmp_path / "run", form="messages")
    assert not (tmp_path / "chat").exists()


def test_rows_of_tokens_are_what_the_run_is_trained_on(folders, chat_run, tmp_path):
    write_handover(folders[0], tmp_path / "over", run=chat_run, form="tokens")

    rows = rows_in(tmp_path / "over" / "train.jsonl")
    writer = TextWriter.load(chat_run)
    found = list(TextDataset.open(folders[0]).records("train"))
    expected = writer.features.tokens(found)
    assert len(rows) == len(expected) > 3
    for row, tokens in zip(rows, expected, strict=True):
        assert row["input_ids"] == tokens.ids_L.tolist()
        learned = np.array(row["labels"]) != -100
        np.testing.assert_array_equal(learned, tokens.is_target_L)
        assert [row["labels"][place] for place in np.flatnonzero(learned)] == tokens.ids_L[learned].tolist()


def test_records_that_are_too_long_are_counted(folders, tmp_path):
    trained(settings(folders, epochs=1, max_length=12, long_rows="drop"), tmp_path / "run")
    told = write_handover(folders[0], tmp_path / "over", run=tmp_path / "run", form="tokens")

    assert told.left_out["rows_too_long"] > 0
    assert sum(told.left_out.values()) + sum(entry.rows for entry in told.files.values()) == 36


@pytest.mark.slow
def test_only_the_last_turn_is_learned_where_the_run_learns_that(folders, tmp_path):
    trained(settings(folders, epochs=1, template="chat", learn="last"), tmp_path / "run")

    with pytest.raises(InputError, match=r"2 turns of an assistant, of which the last one alone is learned"):
        write_handover(folders[0], tmp_path / "over", run=tmp_path / "run")
    write_handover(folders[0], tmp_path / "over", run=tmp_path / "run", form="prompt", files="parquet")

    rows = [
        row
        for split in ("train", "valid", "test")
        for row in pq.read_table(tmp_path / "over" / f"{split}.parquet").to_pylist()
    ]
    assert len(rows) == 24
    turns = [row for row in rows if len(row["prompt"]) == 3]
    assert len(turns) == 12
    assert all(row["completion"][0]["role"] == "assistant" for row in rows)


def test_what_is_handed_over_comes_back_untouched(handed, tmp_path):
    found = take_back(handed, handed / "model", tmp_path / "back")

    assert found.is_untouched
    assert found.difference == 0.0
    assert sorted(path.name for path in (tmp_path / "back").iterdir()) == sorted(
        path.name for path in (handed / "model").iterdir()
    )


def test_an_adapter_is_merged(handed, tmp_path):
    peft = pytest.importorskip("peft")
    transformers = pytest.importorskip("transformers")
    network = transformers.AutoModelForCausalLM.from_pretrained(handed / "model")
    adapted = peft.get_peft_model(network, peft.LoraConfig(r=2, target_modules="all-linear"))
    for name, weight in adapted.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(weight, std=0.1, generator=torch.Generator().manual_seed(0))
    adapted.save_pretrained(tmp_path / "adapter")

    found = take_back(handed, tmp_path / "adapter", tmp_path / "back")

    assert found.is_adapter
    assert not found.is_untouched
    merged = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "back")
    ids = torch.tensor([[5, 9, 11]])
    with torch.inference_mode():
        torch.testing.assert_close(merged(ids).logits, adapted.eval()(ids).logits)


def test_what_does_not_fit_is_refused_by_name(handed, tmp_path):
    transformers = pytest.importorskip("transformers")
    back = tmp_path / "back"

    def changed(name: str, **more: Any) -> Path:
        folder = tmp_path / name
        config = transformers.AutoConfig.from_pretrained(handed / "model", **more)
        transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
        return folder

    def refusal(folder: Path) -> str:
        with pytest.raises(InputError) as error:
            take_back(handed, folder, back)
        assert not back.exists()
        return str(error.value)

    assert "knows 500 tokens, and" in refusal(changed("larger", vocab_size=500))
    assert "weights are only in one of the two" in refusal(changed("deeper", num_hidden_layers=2))
    assert "has the shape (64, 32), and (48, 32)" in refusal(changed("wider", intermediate_size=64))
    network = transformers.AutoModelForCausalLM.from_pretrained(handed / "model")
    with torch.no_grad():
        network.model.layers[0].mlp.up_proj.weight[0, 0] = torch.nan
    network.save_pretrained(tmp_path / "diverged")
    assert "logits of prompt 1 are not finite" in refusal(tmp_path / "diverged")

    other = Path(shutil.copytree(handed / "model", tmp_path / "tokens"))
    values = json.loads((other / "tokenizer.json").read_text())
    vocab = values["model"]["vocab"]
    vocab["A"], vocab["B"] = vocab["B"], vocab["A"]
    (other / "tokenizer.json").write_text(json.dumps(values))
    assert "the token 'A' was handed over as number" in refusal(other)

    from safetensors.torch import load_file, save_file

    halved = Path(shutil.copytree(handed / "model", tmp_path / "halved"))
    weights = load_file(halved / "model.safetensors")
    del weights["model.layers.0.mlp.up_proj.weight"]
    save_file(weights, halved / "model.safetensors", {"format": "pt"})
    assert "lacks 1 weights of its network" in refusal(halved)


def test_a_model_that_was_changed_since_is_refused(handed, tmp_path):
    copy = Path(shutil.copytree(handed, tmp_path / "over"))
    network_file = copy / "model" / "model.safetensors"
    from safetensors.torch import load_file, save_file

    weights = load_file(network_file)
    save_file({name: 2 * weight for name, weight in weights.items()}, network_file, {"format": "pt"})

    with pytest.raises(InputError, match="its logits are off by"):
        take_back(copy, handed / "model", tmp_path / "back")


def test_the_commands_say_what_they_did(folders, chat_run, tmp_path):
    over = tmp_path / "over"
    told = answer("text", "export", folders[0], over, "--run", chat_run)
    assert told["form"] == "messages"
    assert sum(told["files"].values()) == 36

    back = answer("text", "take-back", over, over / "model", "--out", tmp_path / "back")

    assert back["untouched"]
    assert "is there already" in refused("text", "export", folders[0], over)
    answer("text", "export", folders[0], tmp_path / "rows")
    assert "holds rows alone" in refused(
        "text", "take-back", tmp_path / "rows", over / "model", "--out", tmp_path / "other"
    )


@pytest.mark.slow
@pytest.mark.parametrize("template", ["chat", "plain"])
def test_trl_trains_what_was_handed_over_and_a_run_goes_on_from_it(folders, tmp_path, template):
    trl = pytest.importorskip("trl")
    datasets = pytest.importorskip("datasets")
    config = settings(folders, epochs=1, template=template)
    trained(config, tmp_path / "run")
    over, rows = tmp_path / "over", tmp_path / "rows"
    write_handover(folders[0], over, run=tmp_path / "run", form="prompt")
    write_handover(folders[0], rows, run=tmp_path / "run", form="tokens")
    arguments = trl.SFTConfig(
        output_dir=str(tmp_path / "trl"),
        max_steps=2,
        per_device_train_batch_size=4,
        learning_rate=1e-2,
        logging_steps=1,
        report_to=[],
        bf16=False,
        use_cpu=True,
        gradient_checkpointing=False,
    )
    trainer = trl.SFTTrainer(
        str(over / "model"),
        arguments,
        train_dataset=datasets.load_dataset(
            "json", data_files=str(over / "train.jsonl"), split="train", cache_dir=str(tmp_path / "cache")
        ),
    )
    # What TRL learns of these rows is what the run learns, to the token.
    theirs = {(tuple(row["input_ids"]), tuple(row["labels"])) for row in trainer.train_dataset}
    ours = {(tuple(row["input_ids"]), tuple(row["labels"])) for row in rows_in(rows / "train.jsonl")}
    decode = TextWriter.load(tmp_path / "run").task.tokenizer.decode
    single = {row for row in ours if "answer" in decode(row[0])}
    assert len(single) > 3
    assert single <= theirs
    trainer.train()
    trainer.save_model(str(tmp_path / "tuned"))

    found = take_back(over, tmp_path / "tuned", tmp_path / "back")

    assert not found.is_untouched
    assert found.has_tokenizer
    again = settings(
        folders,
        epochs=1,
        template=template,
        base={"kind": "folder", "folder": str(tmp_path / "back")},
        tokenizer=None,
    )
    losses = trained(again, tmp_path / "on")
    assert np.isfinite(losses).all()
    # The run goes on from what TRL has learned: its first loss is that of the network as it came back.
    before = trained(config, tmp_path / "begin")
    assert losses[0] < before[0]
