"""Beam policies: rows of different ones are searched together, and each finds what it finds alone."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rayrec.models.decoding.beam import beam_search, searches_of
from rayrec.models.decoding.beam_policy import BeamPolicy
from rayrec.models.decoding.prefixes import ItemDistribution
from rayrec.models.decoding.trie import CodeTrie
from tests.helpers.examples import examples
from tests.models.decoding.test_beam import NUM_ROWS, RandomModel

pytestmark = pytest.mark.usefixtures("rows_of_children")

CODES_IL = np.unique(np.random.default_rng(0).integers(0, 8, (150, 3)), axis=0)
OPEN_IL = np.stack(np.meshgrid(*[np.arange(6)] * 3), axis=-1).reshape(-1, 3)
"""Every tuple of codes, so that the model is asked about every prefix."""


class OneRow:
    """A row of a model as a model of its own; counts the prefixes that it is asked about."""

    def __init__(self, model, row):
        self._model, self._row = model, row
        self.widths = []

    def __call__(self, depth, codes_BWd, parent_BW):
        self.widths.append(codes_BWd.shape[1])
        return self._model(depth, codes_BWd.expand(NUM_ROWS, -1, -1), None)[self._row : self._row + 1]


def found_by(step, num_rows, width, beams_B=None, codes_IL=CODES_IL):
    return beam_search(ItemDistribution(step, CodeTrie.from_codes(codes_IL), num_rows), width, beams_B)


policies = st.one_of(
    st.integers(1, 40),
    st.builds(
        BeamPolicy,
        st.lists(st.integers(1, 40), min_size=1, max_size=4).map(tuple),
        st.one_of(st.none(), st.floats(0.05, 10.0)),
    ),
)


@examples(60)
@given(st.lists(policies, min_size=NUM_ROWS, max_size=NUM_ROWS), st.integers(0, 1000))
def test_a_row_of_a_mixed_batch_finds_bit_for_bit_what_it_finds_alone(beams_B, seed):
    model = RandomModel(8, 3, seed, dtype=torch.float32)

    together = found_by(model, NUM_ROWS, 40, beams_B)

    for row, beams in enumerate(beams_B):
        alone = found_by(OneRow(model, row), 1, 40, [beams])
        assert torch.equal(together.items_BW[row], alone.items_BW[0])
        assert torch.equal(together.log_probs_BW[row], alone.log_probs_BW[0])
        assert together.num_valid_B[row] == alone.num_valid_B[0]


@examples(20)
@given(st.integers(1, 40), st.integers(0, 1000))
def test_a_fixed_policy_is_a_number_of_beams(width, seed):
    model = RandomModel(8, 3, seed, dtype=torch.float32)
    expected = found_by(model, NUM_ROWS, width)

    for fixed in (width, BeamPolicy((width,)), BeamPolicy((width, width, width))):
        found = found_by(model, NUM_ROWS, width, [fixed] * NUM_ROWS)
        assert torch.equal(found.items_BW, expected.items_BW)
        assert torch.equal(found.log_probs_BW, expected.log_probs_BW)


def test_a_schedule_keeps_as_many_prefixes_after_each_level_as_it_says():
    model = OneRow(RandomModel(8, 3, seed=1), 0)

    found = found_by(model, 1, 6, [BeamPolicy((2, 5, 6))], OPEN_IL)

    assert model.widths == [1, 2, 5]
    assert found.num_valid_B.tolist() == [6]
    assert len({OPEN_IL[item, 0] for item in found.items_BW[0].tolist()}) <= 2


def test_the_last_width_of_a_schedule_holds_for_further_levels():
    model = OneRow(RandomModel(8, 3, seed=1), 0)

    found_by(model, 1, 7, [BeamPolicy((3, 7))], OPEN_IL)

    assert model.widths == [1, 3, 7]


def of_two_levels(margin):
    """First codes of log-probabilities -0.1, -3 and -4 or so; two items below each, as probable."""
    codes_IL = np.array([[code, digit] for code in range(3) for digit in range(2)])
    logits = torch.tensor([3.0, 0.1, -0.9])

    def step(depth, codes_BWd, parent_BW):
        return torch.zeros(1, codes_BWd.shape[1], 2) if depth else logits.expand(1, 1, 3)

    return beam_search(
        ItemDistribution(step, CodeTrie.from_codes(codes_IL), 1), 6, [BeamPolicy((6,), margin)]
    )


@pytest.mark.parametrize(("margin", "num_found"), [(1.0, 2), (3.0, 4), (4.0, 6), (None, 6)])
def test_prefixes_that_are_further_below_the_best_than_the_margin_are_dropped(margin, num_found):
    assert of_two_levels(margin).num_valid_B.tolist() == [num_found]


def test_a_margin_drops_no_item_of_the_last_level():
    logits = torch.tensor([5.0, 0.0, -5.0])
    trie = CodeTrie.from_codes(np.array([[0], [1], [2]]))
    distribution = ItemDistribution(lambda depth, codes, parent: logits.expand(1, 1, 3), trie, 1)

    assert beam_search(distribution, 3, [BeamPolicy((3,), 0.5)]).items_BW.tolist() == [[0, 1, 2]]


def test_beams_beyond_the_margin_are_not_asked_about():
    narrow, wide = OneRow(RandomModel(8, 3, seed=3), 0), OneRow(RandomModel(8, 3, seed=3), 0)

    found_by(narrow, 1, 30, [BeamPolicy((30,), 0.5)])
    found_by(wide, 1, 30, [30])

    assert sum(narrow.widths) < sum(wide.widths) / 2


def test_policies_are_decoded_without_a_look_at_a_device_for_a_value():
    trie = CodeTrie.from_codes(CODES_IL).to("meta")

    def step(depth, codes_BWd, parent_BW):
        return torch.empty(2, codes_BWd.shape[1], 8, device="meta")

    found = beam_search(ItemDistribution(step, trie, 2), 9, [BeamPolicy((2, 9), 1.0), 4])
    assert found.items_BW.shape == (2, 9)


def test_rows_of_different_schedules_are_searched_together_where_that_wastes_little():
    falling, rising = BeamPolicy((64, 16, 16)), BeamPolicy((16, 64, 64))

    assert searches_of([64, BeamPolicy((64, 48, 48)), 40]) == [(slice(0, 3), 64)]
    assert searches_of([falling, falling, 16]) == [(slice(0, 3), 64)]
    # No search is as wide as both.
    assert searches_of([falling, rising]) == [(slice(0, 1), 64), (slice(1, 2), 64)]


def test_a_budget_narrows_a_policy_and_leaves_it_wide_enough_for_the_items():
    schedule = BeamPolicy((100, 50, 20), 2.0)

    assert schedule.within(10) == schedule
    assert schedule.within(10, 30) == BeamPolicy((30, 30, 20), 2.0)
    assert schedule.within(10, 4) == BeamPolicy((10, 10, 10), 2.0)
    assert schedule.within(60, 4) == BeamPolicy((60, 60, 60), 2.0)
    assert BeamPolicy((64,)).within(10, 20).beams == 20
    assert BeamPolicy((64, 64)).beams == 64


def test_a_schedule_that_begins_narrow_finds_as_many_items_as_are_asked_for():
    """Two items below each first code: two first codes alone would lead to four."""
    codes_IL = np.array([[code, digit] for code in range(6) for digit in range(2)])

    def step(depth, codes_BWd, parent_BW):
        return torch.zeros(1, codes_BWd.shape[1], 2 if depth else 6)

    def num_found(policy):
        found = beam_search(ItemDistribution(step, CodeTrie.from_codes(codes_IL), 1), 10, [policy])
        return found.num_valid_B.tolist()

    schedule = BeamPolicy((2, 10))
    assert num_found(schedule) == [4]
    assert num_found(schedule.within(10)) == [10]


@pytest.mark.parametrize(
    ("widths", "margin", "sentence"),
    [
        ((), None, "widths of at least 1, got \\[\\]"),
        ((4, 0), None, "widths of at least 1, got \\[4, 0\\]"),
        ((4,), 0.0, "must be positive, got 0.0"),
        ((4,), float("nan"), "must be positive, got nan"),
    ],
)
def test_a_policy_that_keeps_nothing_is_refused(widths, margin, sentence):
    with pytest.raises(ValueError, match=sentence):
        BeamPolicy(widths, margin)
