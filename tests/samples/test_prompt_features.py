"""Histories become prompts: which tokens are learned, and which prompts a row brings."""

import numpy as np
import pyarrow as pa
import pytest

from rayrec.platform.errors import InputError
from rayrec.platform.prompt_template import PromptTemplate
from rayrec.samples.features.prompt_features import AlignmentPrompts, PromptFeatures
from rayrec.samples.text.item_facts import ItemFacts
from rayrec.samples.text.prompts import PromptWriter
from rayrec.samples.text.tokens import TextTokenizer
from tests.helpers.data import sample_batch
from tests.helpers.text_tokenizers import tokenizer_folder

NUM_ITEMS = 12
TITLES = [None if item == 7 else f"Paris {item}" for item in range(NUM_ITEMS)]
CODES_IL = np.stack([np.arange(NUM_ITEMS) // 4, np.arange(NUM_ITEMS) % 4], axis=1)
ROWS = [[1, 4, 2], [3, 5], [0, 8, 7, 6], [4], [8, 1, 1, 2, 3, 5, 9, 10]]
ALIGNMENT = (("{title}: ", "{codes}", 1.0), ("{history.codes}then ", "{title}", 0.5))


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return TextTokenizer.extended(tokenizer_folder(tmp_path_factory.mktemp("base")), (3, 4))


def facts():
    return ItemFacts(np.arange(NUM_ITEMS), CODES_IL, (3, 4), "v", {"title": pa.array(TITLES, pa.string())})


def features(tokenizer, alignment=(), trained=range(NUM_ITEMS), max_tokens=64, **changed):
    items, given = facts(), {"prompt": "{table:user}had {history}", "event": "{codes}{table:item}"} | changed

    def writer(prompt, answer):
        template = PromptTemplate.parse(prompt, answer, given["event"])
        return PromptWriter(template, tokenizer, items, max_tokens)

    tasks = []
    for prompt, answer, weight in alignment:
        made = writer(prompt, answer)
        known_I = items.known(made.template.of_item)
        tasks.append(
            AlignmentPrompts(
                made, weight, known_I, np.flatnonzero(known_I & np.isin(range(NUM_ITEMS), trained))
            )
        )
    settings = {name: value for name, value in given.items() if name not in ("prompt", "event")}
    return PromptFeatures(
        np.arange(NUM_ITEMS),
        writer=writer(given["prompt"], "{codes}"),
        num_codes=2,
        alignment=tasks,
        **{"max_length": 6, "windows": 8, "seed": 3} | settings,
    )


def said(tokenizer, batch):
    """([prompt with its answer], [what is learned of each]) in words."""
    prompts = batch.prompts
    bounds = list(zip(prompts.offsets_B1, prompts.offsets_B1[1:], strict=False))
    texts = [tokenizer.decode(prompts.tokens_N[start:stop]) for start, stop in bounds]
    learned = [
        tokenizer.decode(prompts.tokens_N[start:stop][prompts.is_target_N[start:stop]])
        for start, stop in bounds
    ]
    return texts, learned


def code(item):
    return f"<a_{item // 4}><b_{item % 4}>"


def test_all_items_but_a_rows_first_are_learned_once(tokenizer):
    (batch,) = features(tokenizer)(sample_batch(ROWS))
    texts, learned = said(tokenizer, batch)

    pad = "<|im_end|>"
    assert texts[0] == f"{pad}had {code(1)}{pad}{code(4)}{pad}{code(2)}"
    assert learned[0] == code(4) + code(2)
    of_rows = ["".join(map(code, row[1:])) for row in ROWS if len(row) > 1]
    assert learned[:3] == of_rows[:3]
    newest, older = learned[3:]
    assert older + newest == of_rows[3]
    assert batch.num_targets == batch.prompts.is_target_N.sum() == 2 * sum(len(row) - 1 for row in ROWS)
    assert batch.counts["rows_without_target"] == 1
    assert batch.counts["unread_events"] == 0


def test_rows_of_tables_stand_where_the_prompt_names_them(tokenizer):
    (batch,) = features(tokenizer)(sample_batch(ROWS[:2]))
    lookups, places = batch.lookups, batch.prompts.filled_P

    assert lookups["user"].ids_M[lookups["user"].inverse].tolist() == [100, 101]
    assert places["user"].tolist() == batch.prompts.offsets_B1[:2].tolist()
    assert lookups["item"].ids_M[lookups["item"].inverse].tolist() == [1, 4, 3]
    assert (batch.prompts.tokens_N[places["item"]] == tokenizer.info.pad).all()


def test_histories_alone_are_given_where_they_are_not_learned(tokenizer):
    (batch,) = features(tokenizer, learn_history=False)(sample_batch(ROWS[:3]))

    assert said(tokenizer, batch)[1] == [code(2), code(5), code(6)]


def test_a_row_is_asked_as_it_was_trained(tokenizer):
    made = features(tokenizer, learn_history=False)
    (trained,) = made(sample_batch(ROWS[:3]))

    asked = made.ranking(sample_batch([row[:-1] for row in ROWS[:3]]))

    for row in range(3):
        before, after = trained.prompts, asked.prompts
        tokens = before.tokens_N[before.offsets_B1[row] : before.offsets_B1[row + 1] - 2]
        np.testing.assert_array_equal(
            after.tokens_N[after.offsets_B1[row] : after.offsets_B1[row + 1]], tokens
        )
    assert np.diff(asked.offsets_B1).tolist() == [2, 1, 3]


def test_a_question_leaves_room_for_the_answer_and_says_what_it_left_out(tokenizer):
    made = features(tokenizer, max_tokens=64)
    longest = int(np.diff(made.ranking(sample_batch([range(6)])).prompts.offsets_B1)[0]) + 2

    whole = features(tokenizer, max_tokens=longest).ranking(sample_batch([range(6)]))
    cut = features(tokenizer, max_tokens=longest - 1).ranking(sample_batch([range(6)]))

    assert whole.items_N.tolist() == [0, 1, 2, 3, 4, 5]
    assert cut.items_N.tolist() == [1, 2, 3, 4, 5]
    assert (whole.counts["unread_events"], cut.counts["unread_events"]) == (0, 1)


def test_what_a_row_brings_depends_on_seed_step_and_row_alone(tokenizer):
    made = features(tokenizer, ALIGNMENT)
    rows = [ROWS[row % len(ROWS)] for row in range(30)]

    (together,) = made(sample_batch(rows, step=4))
    several = features(tokenizer, ALIGNMENT, num_trainers=3)(sample_batch(rows, step=4))
    (later,) = made(sample_batch(rows, step=5))
    (other,) = features(tokenizer, ALIGNMENT, seed=4)(sample_batch(rows, step=4))

    texts, learned = said(tokenizer, together)
    shares = [said(tokenizer, share) for share in several]
    assert [text for share in shares for text in share[0]] == texts
    assert [text for share in shares for text in share[1]] == learned
    assert {share.num_targets for share in several} == {together.num_targets}
    for share in several:
        users = share.lookups["user"]
        assert set(users.ids_M) <= set(users.updated_ids)
        np.testing.assert_array_equal(users.updated_ids, several[0].lookups["user"].updated_ids)
    assert said(tokenizer, later)[0] != texts != said(tokenizer, other)[0]
    half = sum("then" in text for text in texts)
    assert sum(": " in text for text in texts) == 30
    assert 4 <= half <= 22


def test_items_without_training_events_are_in_no_prompt_but_histories_of_those_who_met_them(tokenizer):
    trained = sorted({item for row in ROWS for item in row} - {9, 10})
    made = features(tokenizer, (("{title}: ", "{codes}", 3.0),), trained)
    everything = features(tokenizer, (("{title}: ", "{codes}", 3.0),))

    def named(made):
        batches = [made(sample_batch(ROWS[:4], step=step))[0] for step in range(30)]
        texts = [text for batch in batches for text in said(tokenizer, batch)[0]]
        return {int(text.split(":")[0].split()[1]) for text in texts if ": " in text}

    assert named(made) == set(trained) - {7}  # 7 has no title
    assert named(everything) == set(range(NUM_ITEMS)) - {7}


def test_titles_are_of_the_item_behind_a_part_of_the_rows_own_history(tokenizer):
    made = features(tokenizer, (("{history.codes}then ", "{title}", 2.0),))
    found = set()
    for step in range(20):
        (batch,) = made(sample_batch(ROWS, step=step))
        found |= {text for text in said(tokenizer, batch)[0] if "then" in text}

    possible = {
        "".join(map(code, row[start:stop])) + f"then Paris {row[stop]}<|im_end|>"
        for row in ROWS
        for stop in range(1, len(row))
        for start in (0, 1)
        if row[stop] != 7
    }
    assert found <= possible
    assert len(found) > 8


def test_prompts_without_room_are_left_out_and_counted(tokenizer):
    size = len(tokenizer.encode("had ")) + 1
    made = features(tokenizer, (("{title}{title}{title}{title}: ", "{codes}", 1.0),), max_tokens=size + 5)

    (batch,) = made(sample_batch(ROWS))

    assert batch.counts["prompts_too_long"] == 5
    assert all(": " not in text for text in said(tokenizer, batch)[0])
    assert (np.diff(batch.prompts.offsets_B1) > 0).all()
    with pytest.raises(InputError, match="even without a history"):
        features(tokenizer, max_tokens=size + 1)


def test_a_batch_without_anything_to_learn_has_no_tokens(tokenizer):
    (batch,) = features(tokenizer)(sample_batch([[1], []]))

    assert batch.num_targets == batch.num_tokens == 0
    assert batch.counts["rows_without_target"] == 2
