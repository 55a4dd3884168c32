"""How long a request may take."""

from __future__ import annotations

import pytest

from rayrec.serve.wire.deadlines import ARRIVED_HEADER, HEADER, HeaderError, timeout_of


@pytest.mark.parametrize(
    ("said", "expected"),
    [(None, 10.0), ("250", 0.25), ("9999", 9.999), ("10001", 10.0), ("007", 0.007), ("9" * 5000, 10.0)],
    ids=["nothing", "less", "just less", "more", "zeros", "endless"],
)
def test_a_request_may_want_its_answer_earlier_and_not_later(said, expected):
    assert timeout_of({} if said is None else {HEADER: said}, 10.0) == expected


@pytest.mark.parametrize("said", ["", "0", "000", "-5", "+5", "1.5", "1_0", "soon", "٣"])
def test_what_is_no_time_is_refused(said):
    with pytest.raises(HeaderError, match="X-Request-Timeout-Ms: expected a whole number of milliseconds"):
        timeout_of({HEADER: said}, 10.0)


@pytest.mark.parametrize(
    ("came", "expected"),
    [
        ("999800", 0.3),  # 200 ms ago
        ("999500", 0.0),
        ("995000", 0.0),
        ("1000100", 0.5),  # a clock that is ahead
        ("900000", 0.5),  # 100 s ago, longer than anybody waits
        ("yesterday", 0.5),
        ("-5", 0.5),
        ("9" * 5000, 0.5),
    ],
)
def test_who_has_waited_before_has_less_time(came, expected):
    headers = {HEADER: "500", ARRIVED_HEADER: came}
    assert timeout_of(headers, 10.0, now=lambda: 1000.0) == pytest.approx(expected)
