"""Language models trained by the same pipeline: records of text, adapters, snapshots, the same bits."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch

from rayrec.models.language.config import LoraConfig
from rayrec.models.program.program import ProgramPlacement
from rayrec.pipelines.config.run import RunConfig
from rayrec.pipelines.config.sections import ScheduleConfig
from rayrec.pipelines.evaluation.evaluate import evaluate
from rayrec.pipelines.inference.export import export_run
from rayrec.pipelines.inference.writer import TextWriter
from rayrec.pipelines.runs.run_folder import RunFolder
from rayrec.pipelines.runs.snapshots import read_snapshot
from rayrec.pipelines.tasks.assembly import assemble
from rayrec.pipelines.tasks.language import LanguageTask, TextQuestion, TextValidation, _right_choices
from rayrec.pipelines.tasks.text_rows import tokenizer_of, vocabulary_of
from rayrec.pipelines.training.placements import in_process
from rayrec.pipelines.training.train import train
from rayrec.platform.errors import InputError
from rayrec.samples.base.batches import RowBatch
from rayrec.samples.features.text_features import TextFeatures, TextRules
from rayrec.samples.reading.reader import SampleReader
from rayrec.samples.text.dataset import TextDataset
from rayrec.samples.text.prepare import TextPrepareConfig, _used, prepare_text
from rayrec.samples.text.records import SCHEMA, Record, Span

pytest.importorskip("transformers")

from tests.helpers.examples import cases
from tests.helpers.optional import skip_without
from tests.helpers.text_tokenizers import THINKS, tokenizer_folder

skip_without("peft")

WORDS = ("red", "blue", "green", "black", "white")
TOOLS = {"red": "paint", "blue": "sky", "green": "grass", "black": "ink", "white": "snow"}
LLAMA = {
    "model_type": "llama",
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "intermediate_size": 48,
}


def records() -> list[dict[str, Any]]:
    """Of four kinds; every answer follows from a word of the question."""
    found: list[dict[str, Any]] = []
    for number in range(12):
        for word in WORDS:
            text = f"{number} {word}"
            found.append({"prompt": f"ask {text}", "completion": TOOLS[word]})
            start = text.index(word)
            found.append(
                {
                    "text": f"part {text}",
                    "spans": [{"start": 5 + start, "end": 5 + start + len(word), "label": "color"}],
                }
            )
            found.append({"text": f"which {text}", "options": sorted(TOOLS.values()), "choice": TOOLS[word]})
            found.append({"text": f"say {text} {TOOLS[word]}"})
    return found


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A data set and a tokenizer."""
    folder = tmp_path_factory.mktemp("text")
    source = folder / "records.jsonl"
    source.write_text("".join(json.dumps(record) + "\n" for record in records()))
    cleaning = {"near_duplicates": None, "contamination_words": 50}
    settings = {"valid_fraction": 0.15, "test_fraction": 0.1, "cleaning": cleaning}
    prepare_text([source], folder / "data", TextPrepareConfig.parse(settings))
    return folder / "data", tokenizer_folder(folder / "tokenizer")


def settings(folders: tuple[Path, Path], epochs: int = 2, num_trainers: int = 1, **model: Any) -> RunConfig:
    data, tokenizer = folders
    return RunConfig.parse(
        {
            "data": {"path": str(data)},
            "model": {
                "name": "language_model",
                "base": {"kind": "settings", "settings": LLAMA},
                "tokenizer": str(tokenizer),
                "max_length": 96,
                **model,
            },
            "pipeline": {"trainer_threads": 1, "num_trainers": num_trainers},
            "training": {"batch_size": 32, "epochs": epochs, "optimizer": {"learning_rate": 5e-3}},
            "evaluation": {"answers": 8, "max_new_tokens": 24, "batch_size": 32},
        }
    )


def trained(config: RunConfig, run: Path, **options: Any) -> list[float]:
    losses: list[float] = []
    train(config, run, on_step=lambda done, total, loss: losses.append(loss), cluster=in_process, **options)
    return losses


def state_of(run: Path) -> dict[str, np.ndarray]:
    snapshot = read_snapshot(RunFolder.open(run).chosen_snapshot("last"))
    return {**snapshot.weights, **snapshot.optimizer_state}


@pytest.mark.parametrize("template", cases(["plain", "chat"], ["chat"]))
def test_a_run_learns_its_records_and_says_how_well(folders, tmp_path, template):
    losses = trained(settings(folders, epochs=4, template=template), tmp_path / "run")

    assert losses[-1] < 0.9 * losses[0]
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    validations = [figures["valid"] for line in lines if "valid" in (figures := json.loads(line))]
    assert {"loss", "exact_match", "span_f1", "choice_accuracy", "valid_json"} <= validations[-1].keys()
    assert validations[-1]["loss"] < validations[0]["loss"]
    judged_by = assemble(settings(folders, template=template)).task.judged_by
    assert not judged_by["loss"]
    assert {"log_likelihood", "exact_match", "span_f1", "choice_accuracy", "valid_json"} < judged_by.keys()


def test_a_run_that_was_stopped_ends_with_the_same_bits(folders, tmp_path):
    config = settings(folders, epochs=2, lora={"rank": 2})
    trained(config, tmp_path / "straight")

    class StoppedError(Exception):
        pass

    def stop(done: int, total: int | None, loss: float) -> None:
        if done == 6:
            raise StoppedError

    with pytest.raises(StoppedError):
        train(config, tmp_path / "stopped", on_step=stop, cluster=in_process)
    trained(config, tmp_path / "stopped", resume=True)

    ours, theirs = state_of(tmp_path / "stopped"), state_of(tmp_path / "straight")
    assert ours.keys() == theirs.keys()
    for name, array in ours.items():
        np.testing.assert_array_equal(array, theirs[name], err_msg=name)


def test_two_trainers_share_the_tokens_of_a_batch(folders, tmp_path):
    one = trained(settings(folders, epochs=1), tmp_path / "one")
    two = trained(settings(folders, epochs=1, num_trainers=2), tmp_path / "two")

    np.testing.assert_allclose(one, two, rtol=1e-5)


def test_a_record_longer_than_the_model_reads_is_named_cut_or_dropped(folders, tmp_path):
    message = r"a record of kind .* tokens, and the model reads 8 \(model.max_length\)"
    with pytest.raises(InputError, match=message):
        trained(settings(folders, epochs=1, max_length=8), tmp_path / "refused")

    losses = trained(settings(folders, epochs=1, max_length=40, long_rows="drop"), tmp_path / "dropped")
    assert all(np.isfinite(losses))


def test_a_prompt_leaves_room_for_its_answer(folders, tmp_path):
    gpt2 = {"model_type": "gpt2", "n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 40}
    config = settings(
        folders, epochs=1, base={"kind": "settings", "settings": gpt2}, max_length=40, long_rows="cut"
    )
    task = LanguageTask.open(config, config.model)
    features = assemble(config).features

    question = next(each for each in TextValidation(task, "test").batches() if each.what == "answer")
    prompts = features.prompts(0, question.rows)

    assert task.answer_tokens == 20
    assert int(np.diff(prompts.offsets_B1).max()) <= 20
    trained(config, tmp_path / "run")  # whose validation answers, though the network knows 40 places


def test_a_base_without_a_tokenizer_is_refused(folders, tmp_path):
    with pytest.raises(InputError, match=r"model\.tokenizer: name the folder of a tokenizer; a base of kind"):
        trained(settings(folders, tokenizer=None), tmp_path / "run")


@pytest.mark.slow
@pytest.mark.parametrize("lora", [None, {"rank": 2}], ids=["whole", "adapters"])
def test_an_exported_run_says_what_the_run_says(folders, tmp_path, lora):
    transformers = pytest.importorskip("transformers")
    config = settings(folders, epochs=1, lora=lora)
    trained(config, tmp_path / "run")
    figures = evaluate(tmp_path / "run").results["model"]

    exported = export_run(tmp_path / "run", tmp_path / "folder")

    assert exported.layout == "Hugging Face"
    network = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "folder")
    assert network.generation_config.eos_token_id == list(
        LanguageTask.open(config, config.model).vocabulary.ends
    )
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "folder")
    writer = TextWriter.load(tmp_path / "run")
    text = "ask 3 red\n"
    ids = tokenizer(text, return_tensors="pt", add_special_tokens=False).input_ids
    assert ids[0].tolist() == writer.task.tokenizer.encode(text)
    # As a base of its own, the folder is as likely as the run to say what is held out.
    again = settings(
        folders,
        epochs=1,
        base={"kind": "folder", "folder": str(tmp_path / "folder")},
        tokenizer=str(tmp_path / "folder"),
    )
    program = LanguageTask.open(again, again.model).program(assemble(again).dense_optimizer())
    built = program.build(ProgramPlacement(torch.device("cpu"), 0))
    question = next(TextValidation(writer.task, "test").batches())
    batch = writer.features.judged(0, question.rows)
    expected = writer.program.log_likelihoods(batch, {})
    np.testing.assert_allclose(built.log_likelihoods(batch, {}), expected, rtol=1e-4)
    assert network.config.vocab_size == len(built.model.network.get_input_embeddings().weight)
    assert np.isfinite(figures["loss"].value)
    with pytest.raises(InputError, match="is there already"):
        export_run(tmp_path / "run", tmp_path / "folder")


@pytest.mark.slow
def test_the_first_twenty_losses_are_those_of_trl(folders, tmp_path):
    """The same rows in the same order through the trainer that language models are most often tuned with."""
    trl = pytest.importorskip("trl")
    datasets = pytest.importorskip("datasets")
    transformers = pytest.importorskip("transformers")
    config = settings(folders, epochs=20)
    num_rows = TextDataset.open(config.data.path).manifest.rows["train"]
    # Whole epochs: TRL's batches do not end where those of an epoch do.
    steady = {"schedule": ScheduleConfig(warmup_steps=0), "batch_size": num_rows}
    seldom = {"every_epochs": 20}
    config = config.model_copy(
        update={
            "training": config.training.model_copy(update=steady),
            "evaluation": config.evaluation.model_copy(update=seldom),
        }
    )
    ours = trained(config, tmp_path / "run")[:20]
    assembly = assemble(config)
    reader = SampleReader(assembly.plan.spec)
    rows = []
    for step in range(20):
        batch = assembly.plan.batch(step)
        assert batch is not None
        (share,) = assembly.features.training(step, reader.read_batch(batch))
        for start, stop in pairwise(share.offsets_B1):
            tokens, learned = share.tokens_N[start:stop], share.is_target_N[start:stop]
            rows.append({"input_ids": tokens.tolist(), "labels": np.where(learned, tokens, -100).tolist()})

    program = LanguageTask.open(config, config.model).program(assembly.dense_optimizer())
    network = program.build(ProgramPlacement(torch.device("cpu"), config.seed)).model.network
    network.set_attn_implementation("eager")
    optimizer = config.training.optimizer
    arguments = trl.SFTConfig(
        output_dir=str(tmp_path / "trl"),
        max_steps=20,
        per_device_train_batch_size=config.training.batch_size,
        train_sampling_strategy="sequential",
        learning_rate=optimizer.learning_rate,
        weight_decay=optimizer.weight_decay,
        max_grad_norm=optimizer.max_grad_norm or 0.0,
        lr_scheduler_type="constant",
        logging_steps=1,
        report_to=[],
        save_strategy="no",
        bf16=False,
        use_cpu=True,
        gradient_checkpointing=False,
        dataset_kwargs={"skip_prepare_dataset": True},
    )
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(folders[1] / "tokenizer.json"), pad_token="<|im_end|>", eos_token="<|im_end|>"
    )
    trainer = trl.SFTTrainer(
        network, arguments, train_dataset=datasets.Dataset.from_list(rows), processing_class=tokenizer
    )
    trainer.train()
    theirs = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]

    assert len(ours) == len(theirs) == 20
    np.testing.assert_allclose(ours, theirs, rtol=1e-4)


def test_an_option_that_the_model_cannot_read_is_not_chosen():
    records = tuple(Record("choice", text="?", options=("a", "b"), choice=choice) for choice in (0, 1, 1))
    log_B = np.array([-3.0, 0.0, -2.0, -1.0, -5.0, 0.0])
    targets_B = np.array([2, 0, 2, 2, 2, 0])

    # Of the first the right one is chosen, of the second too; of the third the right one cannot be read.
    assert _right_choices(records, log_B, targets_B) == [True, True]


def test_the_end_of_an_answer_is_the_token_that_the_template_writes_there(folders, tmp_path):
    other = tokenizer_folder(tmp_path / "tokenizer", more=("<|endoftext|>",), eos_token="<|endoftext|>")
    model = settings(folders, tokenizer=str(other), template="chat").model
    tokenizer = tokenizer_of(model)

    vocabulary = vocabulary_of(model, tokenizer)

    assert [tokenizer.tokenizer.id_to_token(end) for end in vocabulary.ends] == [
        "<|im_end|>",
        "<|endoftext|>",
    ]
    bare = "{% for m in messages %}{{ m['content'] }} {% endfor %}"
    without = tokenizer_folder(tmp_path / "bare", bare)
    plain = settings(folders, tokenizer=str(without), template="chat").model
    with pytest.raises(InputError, match="writes no special token behind an answer"):
        vocabulary_of(plain, tokenizer_of(plain))


def test_answers_are_held_to_a_form_however_little_a_model_knows(folders, tmp_path):
    """In validation by the trainer, in evaluation, and for records that are given."""
    pytest.importorskip("xgrammar", reason="the bytes of tokens are read by it")
    source = tmp_path / "spans.jsonl"
    whole = []
    for number in range(40):
        text = f"{number} {WORDS[number % 5]}"
        cut = text.index(" ")
        spans = [(0, cut, "number"), (cut, cut + 1, "other"), (cut + 1, len(text), "color")]
        named = [dict(zip(("start", "end", "label"), span, strict=True)) for span in spans]
        whole.append({"text": text, "spans": named})
    source.write_text("".join(json.dumps(record) + "\n" for record in whole))
    fractions = {"valid_fraction": 0.2, "test_fraction": 0.2, "cleaning": {"contamination_words": 50}}
    prepare_text([source], tmp_path / "data", TextPrepareConfig.parse(fractions))
    config = settings((tmp_path / "data", folders[1]), epochs=1, max_length=256)
    form = {"kind": "copy", "labels": ["number", "color", "other"]}
    judged = config.evaluation.model_dump() | {"form": form, "max_new_tokens": 80}
    config = RunConfig.parse(config.model_dump() | {"evaluation": judged})

    trained(config, tmp_path / "run")

    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert [one["valid"]["rebuilt"] for line in lines if "valid" in (one := json.loads(line))] == [1.0]
    figures = evaluate(tmp_path / "run").results["model"]
    assert figures["rebuilt"].value == figures["valid_json"].value == 1.0
    (said,) = TextWriter.load(tmp_path / "run").answers([Record("spans", text="nothing of the kind")])
    assert "".join(segment for _, segment in json.loads(said)) == "nothing of the kind"
    short = RunConfig.parse(config.model_dump() | {"evaluation": judged | {"max_new_tokens": 5}})
    with pytest.raises(InputError, match=r"shortest answer of evaluation\.form has \d+ tokens, and 5 may be"):
        trained(short, tmp_path / "short")
    bad = {"kind": "json_schema", "json_schema": {"multipleOf": 2}}
    refused = RunConfig.parse(config.model_dump() | {"evaluation": judged | {"form": bad}})
    with pytest.raises(InputError, match=r"evaluation\.form: .*multipleOf"):
        trained(refused, tmp_path / "refused")
    assert not (tmp_path / "refused").exists()


def test_a_column_is_one_field_and_what_is_said_comes_before_its_name():
    used = _used({"prompt": "question", "completion": "text"})

    assert used["question"] == "prompt"
    assert used["text"] == "completion"
    with pytest.raises(InputError, match="prompt and completion are both read of 'a'"):
        _used({"prompt": "a", "completion": "a"})


def test_answers_are_compared_as_a_template_with_thoughts_has_them_written(folders, tmp_path):
    thinking = tokenizer_folder(tmp_path / "tokenizer", THINKS)
    config = settings((folders[0], thinking), template="chat")
    task = LanguageTask.open(config, config.model)
    records = (
        Record("prompt", text="ask", completion="paint"),
        Record("prompt", text="ask", completion="sky"),
        Record("spans", text="a red one", spans=(Span(2, 5, "color"),)),
        Record("prompt", text="ask", completion="ink"),
    )
    empty = "<think>\n\n</think>\n\n"
    texts = [f"{empty}paint", "<think>blue, so</think>\nsky", f'{empty}[["color", "red"]]', f"{empty}paint"]
    answers = [np.array(task.tokenizer.encode(text)) for text in texts]
    rows = RowBatch(np.arange(4), None)

    found = TextValidation(task, "test").report(
        [
            (TextQuestion("judge", 0, rows, records), (np.full(4, -1.0), np.ones(4), {})),
            (TextQuestion("answer", 0, rows, records), (answers, {})),
        ]
    )

    assert found["exact_match"].value == 0.75
    assert found["span_f1"].value == 1.0
    assert found["valid_json"].value == 1.0


def test_what_is_judged_without_its_beginning_or_not_at_all_is_counted(folders, tmp_path):
    trained(settings(folders, epochs=1, max_length=30, long_rows="cut"), tmp_path / "run")

    report = evaluate(tmp_path / "run")

    features = TextWriter.load(tmp_path / "run").features
    rows = features.tokens(list(TextDataset.open(folders[0]).records("test")))
    expected = {"rows_cut": 0, "rows_too_long": 0}
    for row in rows:
        if isinstance(row, str):
            expected[row] += 1
        elif row.is_cut:
            expected["rows_cut"] += 1
    assert expected["rows_cut"] > 0
    found = report.to_json()["not_whole"]
    assert {name: found.get(name, 0) for name in expected} == expected
    share = report.results["model"]["rows_cut"].value
    assert share == pytest.approx(expected["rows_cut"] / report.count)
    over = report.to_json()["num_judged"]
    assert over["loss"] == report.count - expected["rows_too_long"]
    assert 0 < over["span_f1"] < over["exact_match"] <= report.count


def test_operations_make_held_out_rows_whatever_a_cache_has_of_training_rows(folders):
    tokenizer = tokenizer_of(settings(folders).model)
    row = Record("prompt", text="ask", completion="sky").row()
    made = pa.RecordBatch.from_pylist([row | {"completion": "grass"}], SCHEMA)
    rows = RowBatch(np.array([7]), pa.RecordBatch.from_pylist([row], SCHEMA))

    def program(rows: pa.RecordBatch, context: Any) -> pa.RecordBatch:
        return made

    features = TextFeatures(program, tokenizer, None, TextRules(64), is_prepared=True)  # type: ignore[arg-type]

    (trained_on,), judged = features.training(0, rows), features.judged(0, rows)
    assert "sky" in tokenizer.decode(trained_on.tokens_N)
    assert "grass" in tokenizer.decode(judged.tokens_N)


@pytest.mark.slow
@pytest.mark.parametrize(
    "lora",
    [pytest.param(None, id="whole"), pytest.param({"rank": 2}, id="adapters")],
)
def test_a_run_goes_on_from_one_of_other_texts(folders, tmp_path, lora):
    other = [{"prompt": f"name {number}", "completion": "Ann"} for number in range(40)]
    (tmp_path / "other.jsonl").write_text("".join(json.dumps(record) + "\n" for record in other))
    cleaning = {"near_duplicates": None, "contamination_words": 50}
    prepare_text(
        [tmp_path / "other.jsonl"], tmp_path / "data", TextPrepareConfig.parse({"cleaning": cleaning})
    )
    trained(settings(folders, epochs=1, lora=lora), tmp_path / "first")
    model = {"template": "chat", "max_length": 80, "dropout": 0.1}
    config = settings((tmp_path / "data", folders[1]), epochs=1, lora=lora, **model)
    begun = config.model_copy(
        update={"training": config.training.model_copy(update={"init_from": str(tmp_path / "first")})}
    )

    losses = trained(begun, tmp_path / "second")

    assert losses[0] != trained(config, tmp_path / "afresh")[0]
    # A tokenizer of the same size with other tokens: the weights would stand for something else.
    swapped = tokenizer_folder(tmp_path / "swapped")
    values = json.loads((swapped / "tokenizer.json").read_text())
    vocabulary = values["model"]["vocab"]
    vocabulary["A"], vocabulary["B"] = vocabulary["B"], vocabulary["A"]
    (swapped / "tokenizer.json").write_text(json.dumps(values))
    model = begun.model.model_copy(update={"tokenizer": str(swapped)})
    with pytest.raises(InputError, match="was trained with another tokenizer"):
        trained(begun.model_copy(update={"model": model}), tmp_path / "third")
    wider = begun.model.model_copy(update={"lora": LoraConfig(rank=3)})
    with pytest.raises(InputError, match=r"write it by `rayrec export` and name the folder as model\.base"):
        trained(begun.model_copy(update={"model": wider}), tmp_path / "fourth")
