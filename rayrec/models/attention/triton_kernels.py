"""Attention over jagged rows in Triton: one forward kernel and two backward ones.

A program of `forward` and `query_gradients` owns some queries of a row and one head and goes over the keys
that they see; one of `key_gradients` owns keys and goes over the queries that may see them. Nobody adds to
what another one owns, so every sum has one order. The one exception are the gradients of the bias tables, to
which all add: in fixed point, as integers, whose sum does not depend on the order.

What a query sees are the spans of `rayrec.models.attention.masks`, loaded beside it. Scores exist for a block
at a time, and are computed again in the backward pass.

Axes: T queries and S keys of a block, C width of a query or key head, E width of a value head; a constant
BLOCK_X is what axis X is padded to.

This module needs triton, whose annotations and `tl` it reads when a kernel is compiled; without it, it can be
imported and not used. `rayrec.models.attention.triton_backend` imports it when it is needed.

Source: Dao, FlashAttention-2, arXiv:2307.08691, for the order of the loops; HSTU, arXiv:2402.17152, for what
is computed.
"""

# mypy: ignore-errors

from rayrec.models.attention import bias, call

try:
    import triton
    import triton.language as tl
except ImportError:

    class _NoTriton:
        constexpr = None

        @staticmethod
        def jit(function=None, **_options):
            return function or (lambda function: function)

    triton = tl = _NoTriton

VARYING = ["num_queries"]
"""Arguments that differ from batch to batch: a kernel is not compiled again for their divisors."""
if tl.constexpr is not None:
    HIDDEN = tl.constexpr(call.HIDDEN)
    LOG_WIDTH = tl.constexpr(bias.LOG_WIDTH)


@triton.jit
def _seen(first0, stop0, first1, stop1, place_S, NUM_SPANS: tl.constexpr):
    """[T, S] whether the query sees the key."""
    seen = (place_S[None, :] >= first0[:, None]) & (place_S[None, :] < stop0[:, None])
    if NUM_SPANS == 2:
        seen |= (place_S[None, :] >= first1[:, None]) & (place_S[None, :] < stop1[:, None])
    return seen


@triton.jit
def _place_buckets(own_T, place_S, NUM_PLACES: tl.constexpr):
    middle: tl.constexpr = NUM_PLACES // 2
    apart = own_T[:, None] - place_S[None, :]
    return tl.minimum(tl.maximum(apart, -middle), middle) + middle


@triton.jit
def _time_buckets(query_time_T, key_time_S, BOUNDS, NUM_TIMES: tl.constexpr):
    """Estimated by a logarithm, which may be off by one, and put right by the integer bounds."""
    apart = tl.abs(query_time_T[:, None] - key_time_S[None, :])
    bucket = (tl.log(tl.maximum(apart, 1).to(tl.float32)) / LOG_WIDTH).to(tl.int32)
    bucket = tl.minimum(bucket, NUM_TIMES - 1)
    bucket = tl.where(apart < tl.load(BOUNDS + bucket), bucket - 1, bucket)
    above = tl.minimum(bucket + 1, NUM_TIMES - 1)
    return tl.where(apart >= tl.load(BOUNDS + above), above, bucket)


@triton.jit
def _sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def _biased(
    scores,
    own_T,
    place_S,
    query_time_T,
    key_time_S,
    PLACE_TABLE,
    TIME_TABLE,
    BOUNDS,
    head,
    NUM_PLACES: tl.constexpr,
    NUM_TIMES: tl.constexpr,
):
    if NUM_PLACES > 0:
        bucket = _place_buckets(own_T, place_S, NUM_PLACES)
        scores += tl.load(PLACE_TABLE + head * NUM_PLACES + bucket).to(scores.dtype)
    if NUM_TIMES > 0:
        bucket = _time_buckets(query_time_T, key_time_S, BOUNDS, NUM_TIMES)
        scores += tl.load(TIME_TABLE + head * NUM_TIMES + bucket).to(scores.dtype)
    return scores


@triton.jit
def _load(BASE, token_T, stride_token, head, stride_head, valid_T, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """[T, BLOCK] of one head; zeros past the width and for tokens that are none."""
    column = tl.arange(0, BLOCK)
    where = token_T[:, None] * stride_token + head * stride_head + column[None, :]
    return tl.load(BASE + where, mask=valid_T[:, None] & (column[None, :] < WIDTH), other=0.0)


@triton.jit
def _store(
    BASE, x, token_T, stride_token, head, stride_head, valid_T, WIDTH: tl.constexpr, BLOCK: tl.constexpr
):
    column = tl.arange(0, BLOCK)
    where = token_T[:, None] * stride_token + head * stride_head + column[None, :]
    keep = valid_T[:, None] & (column[None, :] < WIDTH)
    tl.store(BASE + where, x.to(BASE.dtype.element_ty), mask=keep)


@triton.jit
def _spans(FIRST, STOP, token_T, valid_T, num_queries, NUM_SPANS: tl.constexpr):
    """First and stop of both spans of each query; those of no query are empty."""
    first0 = tl.load(FIRST + token_T, mask=valid_T, other=0)
    stop0 = tl.load(STOP + token_T, mask=valid_T, other=0)
    if NUM_SPANS == 2:
        first1 = tl.load(FIRST + num_queries + token_T, mask=valid_T, other=0)
        stop1 = tl.load(STOP + num_queries + token_T, mask=valid_T, other=0)
    else:
        first1 = first0
        stop1 = stop0
    return first0, stop0, first1, stop1


@triton.jit
def _hull(first0, stop0, first1, stop1):
    """The keys that any of the queries sees lie between these."""
    far: tl.constexpr = 1 << 30
    first = tl.minimum(
        tl.min(tl.where(stop0 > first0, first0, far), 0), tl.min(tl.where(stop1 > first1, first1, far), 0)
    )
    stop = tl.maximum(
        tl.max(tl.where(stop0 > first0, stop0, 0), 0), tl.max(tl.where(stop1 > first1, stop1, 0), 0)
    )
    return first, stop


@triton.jit(do_not_specialize=VARYING)
def forward(
    Q, K, V, OUT, LSE,
    q_token, q_head, k_token, k_head, v_token, v_head,
    QUERY_OFFSETS, KEY_OFFSETS, BLOCK_ROW, BLOCK_START, FIRST, STOP, num_queries,
    PLACE_TABLE, TIME_TABLE, QUERY_TIME, KEY_TIME, BOUNDS,
    scale, length,
    H: tl.constexpr, C: tl.constexpr, E: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_E: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_S: tl.constexpr,
    SOFTMAX: tl.constexpr, NUM_SPANS: tl.constexpr, NUM_PLACES: tl.constexpr, NUM_TIMES: tl.constexpr,
    ACC: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """OUT [N, H, E] and, for softmax, LSE [N, H]: the logarithm of the sum of each query's exponentials."""
    head = tl.program_id(1)
    row = tl.load(BLOCK_ROW + tl.program_id(0))
    query_start = tl.load(QUERY_OFFSETS + row)
    row_queries = (tl.load(QUERY_OFFSETS + row + 1) - query_start).to(tl.int32)
    key_start = tl.load(KEY_OFFSETS + row)
    row_keys = (tl.load(KEY_OFFSETS + row + 1) - key_start).to(tl.int32)
    place_T = tl.load(BLOCK_START + tl.program_id(0)) + tl.arange(0, BLOCK_T)
    valid_T = place_T < row_queries
    token_T = query_start + place_T
    own_T = place_T + row_keys - row_queries
    first0, stop0, first1, stop1 = _spans(FIRST, STOP, token_T, valid_T, num_queries, NUM_SPANS)
    first, stop = _hull(first0, stop0, first1, stop1)
    q = _load(Q, token_T, q_token, head, q_head, valid_T, C, BLOCK_C)
    query_time_T = place_T
    if NUM_TIMES > 0:
        query_time_T = tl.load(QUERY_TIME + token_T, mask=valid_T, other=0)
    acc = tl.zeros([BLOCK_T, BLOCK_E], dtype=ACC)
    highest_T = tl.full([BLOCK_T], HIDDEN, dtype=ACC)
    total_T = tl.zeros([BLOCK_T], dtype=ACC)
    for start in range(first, stop, BLOCK_S):
        place_S = start + tl.arange(0, BLOCK_S)
        valid_S = place_S < stop
        token_S = key_start + place_S
        k = _load(K, token_S, k_token, head, k_head, valid_S, C, BLOCK_C)
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION, out_dtype=ACC) * scale
        key_time_S = place_S
        if NUM_TIMES > 0:
            key_time_S = tl.load(KEY_TIME + token_S, mask=valid_S, other=0)
        scores = _biased(
            scores, own_T, place_S, query_time_T, key_time_S,
            PLACE_TABLE, TIME_TABLE, BOUNDS, head, NUM_PLACES, NUM_TIMES,
        )  # fmt: skip
        seen = _seen(first0, stop0, first1, stop1, place_S, NUM_SPANS)
        if SOFTMAX:
            scores = tl.where(seen, scores, HIDDEN)
            higher_T = tl.maximum(highest_T, tl.max(scores, 1))
            # Until a query has seen something, its hidden scores are its highest: they must not count.
            weights = tl.where(seen, tl.exp(scores - higher_T[:, None]), 0.0)
            shrink_T = tl.exp(highest_T - higher_T)
            total_T = total_T * shrink_T + tl.sum(weights, 1)
            acc = acc * shrink_T[:, None]
            highest_T = higher_T
        else:
            weights = tl.where(seen, scores * _sigmoid(scores), 0.0) / length
        v = _load(V, token_S, v_token, head, v_head, valid_S, E, BLOCK_E)
        acc += tl.dot(weights.to(v.dtype), v, input_precision=PRECISION, out_dtype=ACC)
    if SOFTMAX:
        total_T = tl.where(total_T > 0, total_T, 1.0)
        acc = acc / total_T[:, None]
        tl.store(LSE + token_T * H + head, highest_T + tl.log(total_T), mask=valid_T)
    _store(OUT, acc, token_T, H * E, head, E, valid_T, E, BLOCK_E)


@triton.jit
def _weights_and_gradients(
    scores, seen, d_weights, lse_T, delta_T, length, SOFTMAX: tl.constexpr
):  # fmt: skip
    """Weights, and the gradients of the scores."""
    if SOFTMAX:
        weights = tl.where(seen, tl.exp(scores - lse_T[:, None]), 0.0)
        d_scores = weights * (d_weights - delta_T[:, None])
    else:
        sigmoid = _sigmoid(scores)
        weights = tl.where(seen, scores * sigmoid, 0.0) / length
        d_scores = tl.where(seen, d_weights * sigmoid * (1.0 + scores * (1.0 - sigmoid)), 0.0) / length
    return weights, d_scores


@triton.jit
def _whole(x, units):
    """In fixed point: sums of integers do not depend on their order."""
    return tl.floor(x * units + 0.5).to(tl.int64)


@triton.jit
def _add_by_place(TO, d_scores, apart, units, NUM_PLACES: tl.constexpr, SIZE: tl.constexpr):
    """Add a square block's gradients to the entries of its diagonals: two atomic additions a column.

    Rolled by the number of its row, a row has in column c the key `(row + c) % SIZE`: pairs of one distance
    are a column's upper or its lower part.

    Args:
        apart: places from the block's first key to its first query.
    """
    middle: tl.constexpr = NUM_PLACES // 2
    row = tl.arange(0, SIZE)[:, None]
    column = tl.arange(0, SIZE)
    behind = row + column[None, :]
    rolled = _whole(tl.gather(d_scores, behind % SIZE, 1), units)
    upper = tl.sum(tl.where(behind < SIZE, rolled, 0), 0)
    lower = tl.sum(tl.where(behind < SIZE, 0, rolled), 0)
    bucket = tl.minimum(tl.maximum(apart - column, -middle), middle) + middle
    tl.atomic_add(TO + bucket, upper, mask=upper != 0, sem="relaxed")
    bucket = tl.minimum(tl.maximum(apart - column + SIZE, -middle), middle) + middle
    tl.atomic_add(TO + bucket, lower, mask=lower != 0, sem="relaxed")


@triton.jit
def _by_time(d_scores, bucket, seen, units, BLOCK_TIMES: tl.constexpr):
    """[BLOCK_TIMES] sums of a block's gradients by bucket, of which there are few away from the diagonal."""
    entry = tl.arange(0, BLOCK_TIMES)
    whole = tl.where(seen, _whole(d_scores, units), 0)
    lowest = tl.min(tl.min(tl.where(seen, bucket, BLOCK_TIMES), 1), 0)
    highest = tl.max(tl.max(tl.where(seen, bucket, -1), 1), 0)
    sums = tl.zeros([BLOCK_TIMES], dtype=tl.int64)
    for one in range(lowest, highest + 1):
        total = tl.sum(tl.sum(tl.where(bucket == one, whole, 0), 1), 0)
        sums += tl.where(entry == one, total, 0)
    return sums


@triton.jit(do_not_specialize=VARYING)
def query_gradients(
    Q, K, V, D_OUT, LSE, DELTA, D_Q, D_PLACE, D_TIME, UNITS,
    q_token, q_head, k_token, k_head, v_token, v_head,
    QUERY_OFFSETS, KEY_OFFSETS, BLOCK_ROW, BLOCK_START, FIRST, STOP, num_queries,
    PLACE_TABLE, TIME_TABLE, QUERY_TIME, KEY_TIME, BOUNDS,
    scale, length,
    H: tl.constexpr, C: tl.constexpr, E: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_E: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_S: tl.constexpr,
    SOFTMAX: tl.constexpr, NUM_SPANS: tl.constexpr, NUM_PLACES: tl.constexpr, NUM_TIMES: tl.constexpr,
    TABLE_COPIES: tl.constexpr, BLOCK_TIMES: tl.constexpr, ACC: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """D_Q [N, H, C], and what the pairs add to D_PLACE and D_TIME [copies, H, buckets], int64 in units."""
    head = tl.program_id(1)
    row = tl.load(BLOCK_ROW + tl.program_id(0))
    query_start = tl.load(QUERY_OFFSETS + row)
    row_queries = (tl.load(QUERY_OFFSETS + row + 1) - query_start).to(tl.int32)
    key_start = tl.load(KEY_OFFSETS + row)
    row_keys = (tl.load(KEY_OFFSETS + row + 1) - key_start).to(tl.int32)
    place_T = tl.load(BLOCK_START + tl.program_id(0)) + tl.arange(0, BLOCK_T)
    valid_T = place_T < row_queries
    token_T = query_start + place_T
    own_T = place_T + row_keys - row_queries
    first0, stop0, first1, stop1 = _spans(FIRST, STOP, token_T, valid_T, num_queries, NUM_SPANS)
    first, stop = _hull(first0, stop0, first1, stop1)
    q = _load(Q, token_T, q_token, head, q_head, valid_T, C, BLOCK_C)
    d_out = _load(D_OUT, token_T, H * E, head, E, valid_T, E, BLOCK_E)
    lse_T = place_T
    delta_T = place_T
    if SOFTMAX:
        lse_T = tl.load(LSE + token_T * H + head, mask=valid_T, other=0.0)
        delta_T = tl.load(DELTA + token_T * H + head, mask=valid_T, other=0.0)
    query_time_T = place_T
    if NUM_TIMES > 0:
        query_time_T = tl.load(QUERY_TIME + token_T, mask=valid_T, other=0)
    copy_and_head = (tl.program_id(0) % TABLE_COPIES) * H + head
    times = tl.zeros([BLOCK_TIMES], dtype=tl.int64)
    acc = tl.zeros([BLOCK_T, BLOCK_C], dtype=ACC)
    for start in range(first, stop, BLOCK_S):
        place_S = start + tl.arange(0, BLOCK_S)
        valid_S = place_S < stop
        token_S = key_start + place_S
        k = _load(K, token_S, k_token, head, k_head, valid_S, C, BLOCK_C)
        v = _load(V, token_S, v_token, head, v_head, valid_S, E, BLOCK_E)
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION, out_dtype=ACC) * scale
        key_time_S = place_S
        if NUM_TIMES > 0:
            key_time_S = tl.load(KEY_TIME + token_S, mask=valid_S, other=0)
        scores = _biased(
            scores, own_T, place_S, query_time_T, key_time_S,
            PLACE_TABLE, TIME_TABLE, BOUNDS, head, NUM_PLACES, NUM_TIMES,
        )  # fmt: skip
        seen = _seen(first0, stop0, first1, stop1, place_S, NUM_SPANS)
        d_weights = tl.dot(d_out, tl.trans(v), input_precision=PRECISION, out_dtype=ACC)
        _, d_scores = _weights_and_gradients(
            scores, seen, d_weights, lse_T, delta_T, length, SOFTMAX
        )  # fmt: skip
        if NUM_PLACES > 0:
            farthest = tl.load(BLOCK_START + tl.program_id(0)) + row_keys - row_queries - start
            _add_by_place(
                D_PLACE + copy_and_head * NUM_PLACES, d_scores, farthest, tl.load(UNITS), NUM_PLACES, BLOCK_S
            )  # fmt: skip
        if NUM_TIMES > 0:
            bucket = _time_buckets(query_time_T, key_time_S, BOUNDS, NUM_TIMES)
            times += _by_time(d_scores, bucket, seen, tl.load(UNITS), BLOCK_TIMES)
        acc += tl.dot(d_scores.to(k.dtype), k, input_precision=PRECISION, out_dtype=ACC)
    _store(D_Q, acc * scale, token_T, H * C, head, C, valid_T, C, BLOCK_C)
    if NUM_TIMES > 0:
        entry = tl.arange(0, BLOCK_TIMES)
        to = D_TIME + copy_and_head * NUM_TIMES + entry
        tl.atomic_add(to, times, mask=times != 0, sem="relaxed")


@triton.jit(do_not_specialize=VARYING)
def key_gradients(
    Q, K, V, D_OUT, LSE, DELTA, D_K, D_V,
    q_token, q_head, k_token, k_head, v_token, v_head,
    QUERY_OFFSETS, KEY_OFFSETS, BLOCK_ROW, BLOCK_START, SEEN_FROM, SEEN_TO, FIRST, STOP, num_queries,
    PLACE_TABLE, TIME_TABLE, QUERY_TIME, KEY_TIME, BOUNDS,
    scale, length,
    H: tl.constexpr, C: tl.constexpr, E: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_E: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_S: tl.constexpr,
    SOFTMAX: tl.constexpr, NUM_SPANS: tl.constexpr, NUM_PLACES: tl.constexpr, NUM_TIMES: tl.constexpr,
    ACC: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """D_K [M, H, C] and D_V [M, H, E]; SEEN_FROM and SEEN_TO bound the places of who may see a block."""
    head = tl.program_id(1)
    row = tl.load(BLOCK_ROW + tl.program_id(0))
    query_start = tl.load(QUERY_OFFSETS + row)
    row_queries = (tl.load(QUERY_OFFSETS + row + 1) - query_start).to(tl.int32)
    key_start = tl.load(KEY_OFFSETS + row)
    row_keys = (tl.load(KEY_OFFSETS + row + 1) - key_start).to(tl.int32)
    place_S = tl.load(BLOCK_START + tl.program_id(0)) + tl.arange(0, BLOCK_S)
    valid_S = place_S < row_keys
    token_S = key_start + place_S
    k = _load(K, token_S, k_token, head, k_head, valid_S, C, BLOCK_C)
    v = _load(V, token_S, v_token, head, v_head, valid_S, E, BLOCK_E)
    key_time_S = place_S
    if NUM_TIMES > 0:
        key_time_S = tl.load(KEY_TIME + token_S, mask=valid_S, other=0)
    d_k = tl.zeros([BLOCK_S, BLOCK_C], dtype=ACC)
    d_v = tl.zeros([BLOCK_S, BLOCK_E], dtype=ACC)
    seen_from = tl.load(SEEN_FROM + tl.program_id(0))
    seen_to = tl.load(SEEN_TO + tl.program_id(0))
    for start in range(seen_from, seen_to, BLOCK_T):
        place_T = start + tl.arange(0, BLOCK_T)
        valid_T = place_T < seen_to
        token_T = query_start + place_T
        own_T = place_T + row_keys - row_queries
        first0, stop0, first1, stop1 = _spans(FIRST, STOP, token_T, valid_T, num_queries, NUM_SPANS)
        q = _load(Q, token_T, q_token, head, q_head, valid_T, C, BLOCK_C)
        d_out = _load(D_OUT, token_T, H * E, head, E, valid_T, E, BLOCK_E)
        lse_T = place_T
        delta_T = place_T
        if SOFTMAX:
            lse_T = tl.load(LSE + token_T * H + head, mask=valid_T, other=0.0)
            delta_T = tl.load(DELTA + token_T * H + head, mask=valid_T, other=0.0)
        query_time_T = place_T
        if NUM_TIMES > 0:
            query_time_T = tl.load(QUERY_TIME + token_T, mask=valid_T, other=0)
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION, out_dtype=ACC) * scale
        scores = _biased(
            scores, own_T, place_S, query_time_T, key_time_S,
            PLACE_TABLE, TIME_TABLE, BOUNDS, head, NUM_PLACES, NUM_TIMES,
        )  # fmt: skip
        seen = _seen(first0, stop0, first1, stop1, place_S, NUM_SPANS)
        d_weights = tl.dot(d_out, tl.trans(v), input_precision=PRECISION, out_dtype=ACC)
        weights, d_scores = _weights_and_gradients(
            scores, seen, d_weights, lse_T, delta_T, length, SOFTMAX
        )  # fmt: skip
        d_v += tl.dot(tl.trans(weights).to(d_out.dtype), d_out, input_precision=PRECISION, out_dtype=ACC)
        d_k += tl.dot(tl.trans(d_scores).to(q.dtype), q, input_precision=PRECISION, out_dtype=ACC)
    _store(D_K, d_k * scale, token_S, H * C, head, C, valid_S, C, BLOCK_C)
    _store(D_V, d_v, token_S, H * E, head, E, valid_S, E, BLOCK_E)
