"""How long a request may take."""

from __future__ import annotations

import pytest

from rayrec.serve.access.deadlines import HEADER, HeaderError, timeout_of


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
