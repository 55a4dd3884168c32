"""Figures of language models, against hand-made cases."""

import numpy as np
import pytest

from rayrec.pipelines.metrics.text_metrics import is_json, mean, ratio, span_f1
from rayrec.samples.text.records import Span


def test_f1_counts_spans_that_are_right_in_every_part():
    right = [{Span(0, 3, "street"), Span(4, 6, "number")}, {Span(0, 2, "city")}]
    found = [{Span(0, 3, "street"), Span(4, 6, "city")}, set()]

    assert span_f1(found, right).value == pytest.approx(2 * 1 / (2 + 3))
    assert span_f1(right, right) == (1.0, 1.0, 1.0)
    assert np.isnan(span_f1([set()], [set()]).value)


def test_a_loss_is_over_tokens_and_its_interval_over_records():
    found = ratio(np.array([2.0, 6.0, 4.0]), np.array([2.0, 2.0, 4.0]))

    assert found.value == pytest.approx(12 / 8)
    assert found.low <= found.value <= found.high
    assert mean([1, 0, 1, 1]).value == 0.75


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('{"a": 1}', True),
        ("[]", True),
        ('{"a": 1} and more', False),
        ("", False),
        ("NaN", False),
        ("[" * 100_000, False),
    ],
)
def test_what_json_is(text, expected):
    assert is_json(text) == expected
