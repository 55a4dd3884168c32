"""Backends that need no device of their own, held to the reference in float64."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional

from rayrec.models.attention import bucketed, flex, grouped, reference, sdpa
from rayrec.models.attention.call import Silu, Softmax
from rayrec.models.attention.masks import Causal, Full
from tests.helpers.examples import cases
from tests.models.attention.calls import (
    CASES,
    SCORINGS,
    Case,
    SlidingWindow,
    TargetAware,
    assert_equal_results,
    make_call,
    results,
)

REFERENCE = reference.BACKEND
TOLERANCE = 1e-12


@pytest.mark.parametrize("scoring", SCORINGS, ids=["softmax", "silu"])
@given(lengths=st.lists(st.integers(1, 5), min_size=1, max_size=4))
def test_the_reference_is_what_is_written_in_the_papers(scoring, lengths):
    call = make_call(Case(Causal, lengths), scoring)

    out_NHE = REFERENCE.attend(call)

    start = 0
    for length in lengths:
        for token in range(start, start + length):
            past = slice(start, token + 1)
            for head in range(2):
                scores = call.key_MHC[past, head] @ call.query_NHC[token, head] / 5**0.5
                silu = functional.silu(scores) / 20.0
                weights = functional.softmax(scores, dim=0) if scoring == Softmax() else silu
                torch.testing.assert_close(out_NHE[token, head], weights @ call.value_MHE[past, head])
        start += length


def test_the_reference_adds_the_bias_to_the_scores():
    call = make_call(Case(Full, (2,)), Silu(2.0), biased=True)

    out_NHE = REFERENCE.attend(call)

    bias_HTS = call.bias.dense(call.queries, call.keys)[0]
    scores_HTS = torch.einsum("thc,shc->hts", call.query_NHC, call.key_MHC) / 5**0.5 + bias_HTS
    expected = torch.einsum("hts,she->the", functional.silu(scores_HTS) / 2.0, call.value_MHE)
    torch.testing.assert_close(out_NHE, expected)


@pytest.mark.parametrize("scoring", SCORINGS, ids=["softmax", "silu"])
def test_who_sees_nothing_gets_zeros_and_gradients_without_nan(scoring):
    call = make_call(Case(Causal, (3, 1), (1, 2)), scoring)

    for backend in (REFERENCE, grouped.BACKEND, *([sdpa.BACKEND] if scoring == Softmax() else [])):
        out_NHE, *gradients = results(backend, call)
        assert not out_NHE[:2].any()
        assert all(torch.isfinite(gradient).all() for gradient in gradients)


@pytest.mark.parametrize("biased", [False, True], ids=["", "biased"])
@pytest.mark.parametrize("case", CASES)
def test_sdpa_equals_the_reference(case, biased):
    assert_equal_results(sdpa.BACKEND, REFERENCE, make_call(CASES[case], biased=biased), TOLERANCE)


@pytest.mark.parametrize("biased", [False, True], ids=["", "biased"])
@pytest.mark.parametrize("scoring", SCORINGS, ids=["softmax", "silu"])
@pytest.mark.parametrize("case", CASES)
def test_grouped_equals_the_reference(case, scoring, biased):
    assert_equal_results(grouped.BACKEND, REFERENCE, make_call(CASES[case], scoring, biased), TOLERANCE)


@pytest.mark.parametrize("scoring", SCORINGS, ids=["softmax", "silu"])
@pytest.mark.parametrize("make_mask", [Causal, lambda: SlidingWindow(70)], ids=["causal", "window"])
def test_grouped_equals_the_reference_over_several_blocks_and_pieces(make_mask, scoring, monkeypatch):
    monkeypatch.setattr(grouped, "BLOCK_SCORES", 2 * 64 * 150)
    call = make_call(Case(make_mask, (150, 7, 140, 2, 65, 130)), scoring, biased=True)

    assert_equal_results(grouped.BACKEND, REFERENCE, call, TOLERANCE)


@given(
    lengths=st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40)), min_size=1, max_size=6),
    scoring=st.sampled_from(SCORINGS),
    kind=st.sampled_from(["causal", "full", "window", "targets"]),
    data=st.data(),
)
def test_grouped_equals_the_reference_on_any_rows(lengths, scoring, kind, data):
    lengths, key_lengths = zip(*lengths, strict=True)
    if not sum(lengths) or not sum(key_lengths):
        return
    counts = torch.tensor([data.draw(st.integers(0, length)) for length in key_lengths])
    masks = {
        "causal": Causal,
        "full": Full,
        "window": lambda: SlidingWindow(int(counts[0]) + 1),
        "targets": lambda: TargetAware(counts),
    }

    call = make_call(Case(masks[kind], lengths, key_lengths), scoring)

    assert_equal_results(grouped.BACKEND, REFERENCE, call, TOLERANCE)


@given(lengths=st.lists(st.integers(0, 60), min_size=1, max_size=8).filter(any))
def test_bucketed_equals_the_reference_on_any_rows(lengths):
    assert_equal_results(bucketed.BACKEND, REFERENCE, make_call(Case(Causal, lengths)), TOLERANCE)


def test_bucketed_refuses_all_but_histories_that_look_at_their_own_past():
    refusals = {
        name: bucketed.BACKEND.why_not(make_call(case)) for name, case in CASES.items() if name != "causal"
    }
    assert refusals.pop("causal, rows of one") is None
    assert all("own past" in reason for reason in refusals.values())
    assert "softmax" in bucketed.BACKEND.why_not(make_call(CASES["causal"], Silu(5.0)))
    assert "bias" in bucketed.BACKEND.why_not(make_call(CASES["causal"], biased=True))


def test_bucketed_rows_are_padded_to_rows_of_like_length_alone():
    lengths_B = np.random.default_rng(0).integers(0, 500, 60)

    buckets = bucketed.rows_of_buckets(lengths_B)

    assert sorted(np.concatenate(buckets)) == np.flatnonzero(lengths_B).tolist()
    for rows in buckets:
        longest, shortest = lengths_B[rows].max(), lengths_B[rows].min()
        assert longest <= bucketed.SHORT or longest <= bucketed.LENGTH_RATIO * shortest + 1


def test_bucketed_gives_the_same_bits_again():
    call = make_call(Case(Causal, (70, 3, 64, 9, 0, 150)), dtype=torch.float32)

    for first, second in zip(results(bucketed.BACKEND, call), results(bucketed.BACKEND, call), strict=True):
        assert torch.equal(first, second)


def test_bucketed_in_bfloat16_is_near_what_float64_gives():
    call = make_call(CASES["causal"], dtype=torch.bfloat16)
    exact = call.with_inputs([tensor.detach().double().requires_grad_() for tensor in call.inputs])

    for ours, theirs in zip(results(bucketed.BACKEND, call), results(REFERENCE, exact), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=2e-2, atol=2e-2)


def test_grouped_gives_the_same_bits_again():
    call = make_call(CASES["targets"], Silu(5.0), biased=True, dtype=torch.float32)

    for first, second in zip(results(grouped.BACKEND, call), results(grouped.BACKEND, call), strict=True):
        assert torch.equal(first, second)


def test_grouped_rows_are_padded_to_rows_of_like_length_alone():
    lengths = np.random.default_rng(0).integers(1, 500, 60)
    call = make_call(Case(Causal, tuple(lengths.tolist())), gradients=False)

    pieces = grouped.cut(call.queries, call.keys, call.spans, num_heads=2)

    assert sum(len(piece.queries.token_RT) for piece in pieces) == 60
    for piece in pieces:
        longest = piece.queries.token_RT.shape[1]
        rows_R = call.queries.row_N[piece.queries.token_RT[:, 0]].tolist()
        shortest = call.queries.lengths_B[rows_R].min()
        assert longest <= grouped.SHORT or longest <= grouped.LENGTH_RATIO * shortest + 1


def test_grouped_gives_the_same_bits_on_any_number_of_threads(monkeypatch):
    monkeypatch.setattr(grouped, "BLOCK_SCORES", 2 * 64 * 40)
    call = make_call(CASES["targets"], biased=True, dtype=torch.float32)
    alone = results(grouped.BACKEND, call)

    torch.set_num_threads(2)
    try:
        together = results(grouped.BACKEND, call)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(1)

    for first, second in zip(alone, together, strict=True):
        assert torch.equal(first, second)


def test_grouped_computes_in_float32_what_comes_in_bfloat16():
    call = make_call(CASES["causal"], dtype=torch.bfloat16)
    exact = call.with_inputs([tensor.detach().double().requires_grad_() for tensor in call.inputs])

    for ours, theirs in zip(results(grouped.BACKEND, call), results(REFERENCE, exact), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize(
    ("backend", "scoring"),
    [
        (REFERENCE, Softmax()),
        (REFERENCE, Silu(20.0)),
        (sdpa.BACKEND, Softmax()),
        (grouped.BACKEND, Softmax()),
        (grouped.BACKEND, Silu(20.0)),
    ],
)
@pytest.mark.parametrize("autocast", [False, True], ids=["", "autocast"])
def test_what_comes_in_bfloat16_may_have_bias_tables_in_float32(autocast, backend, scoring):
    """As under autocast, where tables are weights and the rest comes of matrix products."""
    call = make_call(CASES["targets"], scoring, biased=True, dtype=torch.bfloat16)
    tables = [table.detach().float().requires_grad_() for table in call.bias.tables]
    call = call.with_inputs([*call.inputs[:3], *tables])
    assert backend.why_not(call) is None
    exact = call.with_inputs([tensor.detach().double().requires_grad_() for tensor in call.inputs])

    with torch.autocast("cpu", enabled=autocast):
        assert backend.attend(call).dtype == torch.bfloat16
        found = results(backend, call)

    for ours, theirs in zip(found, results(REFERENCE, exact), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=5e-2, atol=5e-2)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("case", cases(CASES, ("causal, across", "window", "groups", "targets")))
def test_flex_equals_the_reference_forward(case):
    # Forward alone: FlexAttention has no backward pass on a CPU.
    call = make_call(CASES[case], gradients=False)

    assert_equal_results(flex.BACKEND, REFERENCE, call, 1e-6)


def test_flex_refuses_what_it_has_not():
    assert "backward" in flex.BACKEND.why_not(make_call(CASES["causal"]))
    assert "softmax" in flex.BACKEND.why_not(make_call(CASES["causal"], Silu(1.0), gradients=False))
    assert "bias" in flex.BACKEND.why_not(make_call(CASES["causal"], biased=True, gradients=False))


def test_a_silu_without_a_length_is_refused():
    with pytest.raises(ValueError, match="positive"):
        Silu(0.0)


def test_grouped_runs_on_threads_in_inference_mode(monkeypatch):
    """As a trainer validates: the threads write into what the caller made."""
    monkeypatch.setattr(grouped, "BLOCK_SCORES", 8)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with torch.inference_mode():
            call = make_call(CASES["causal"])
            out_NHE = grouped.BACKEND.attend(call)
            expected_NHE = REFERENCE.attend(call)
    finally:
        torch.set_num_threads(before)
    torch.testing.assert_close(out_NHE, expected_NHE)
