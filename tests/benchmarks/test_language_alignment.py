"""The benchmark of words and codes asks for items that are in no history."""

from benchmarks.harness import BenchOptions
from benchmarks.language_alignment import _source, without_cold_items
from rayrec.samples.dataset.dataset import Dataset
from rayrec.samples.dataset.manifest import HISTORY_FILE


def test_items_that_are_asked_for_are_in_the_catalog_and_in_no_history(tmp_path):
    with _source(BenchOptions(), tmp_path) as source:
        data, questions = without_cold_items(source, tmp_path)
    dataset = Dataset.open(data)
    met = set(dataset.read(HISTORY_FILE, ["item_ids"])["item_ids"].combine_chunks().flatten().to_pylist())
    keys = dict(zip(dataset.items.ids_I.tolist(), dataset.items.keys.to_pylist(), strict=True))
    known = {keys[item] for item in met}

    assert len(questions) > 20
    assert len(dataset.items) == 120
    cold = set(keys.values()) - known
    assert 4 <= len(cold) <= 25
    for question in questions:
        assert question.answer in cold
        assert question.history
        assert set(question.history) <= known
        history = dataset.history_of(question.user)
        assert [keys[item] for item in history.tolist()] == list(question.history)
