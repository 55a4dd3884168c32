"""Training over a narrow wire: bit for bit a dictionary that rounds what the calls round."""

import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayrec.embeddings.base.routing import ShardMap
from rayrec.embeddings.base.row_codec import RoundingKey, decode, encode_gradients, encode_rows
from rayrec.embeddings.lookup.bounded_stale import BoundedStale
from rayrec.embeddings.lookup.exact_prefetch import ExactPrefetch
from rayrec.embeddings.lookup.lookups import TrainerLink
from rayrec.embeddings.lookup.modes import LookupSettings, make_lookups
from rayrec.embeddings.shard.contributions import Part, UpdateTag
from rayrec.embeddings.transport.client import LocalTransport, ShardClient
from rayrec.embeddings.transport.narrow import NarrowTransport, over
from rayrec.embeddings.transport.protocol import (
    ApplyCall,
    ApplyHeadCall,
    EvictedCall,
    FetchCall,
    LookupCall,
    ShardTransport,
    WriteBackCall,
)
from rayrec.embeddings.transport.shared_blocks import why_unavailable
from rayrec.embeddings.transport.shared_calls import CallServer
from rayrec.embeddings.transport.shared_memory import SharedMemoryTransport
from tests.embeddings.dictionary_oracle import DictionaryTable
from tests.embeddings.dictionary_runs import MODES, Run, added_up, check_tables, dictionaries, runs
from tests.embeddings.sparse_runs import (
    ITEMS,
    AdversarialTransport,
    Seen,
    alone,
    gradient_of,
    ids,
    make_shards,
    run,
)
from tests.embeddings.test_group_caller import train_in_groups
from tests.helpers.examples import cases, examples

WIRES = ("bfloat16", "int8_row")
aheads = st.sampled_from(["never", "before rows", "behind rows"])


def rounded_dictionaries(
    run_: Run, wire: str, group_size: int = 1
) -> tuple[dict[str, DictionaryTable], list[Seen]]:
    """The tables after the run, and the rows that every source and step saw."""
    tables = dictionaries(run_)
    seen: list[Seen] = [[] for _ in run_.batches_by_source]
    for step in range(run_.num_steps):
        for source, batches in enumerate(run_.batches_by_source):
            seen[source].append(
                {name: rows_seen(tables[name], batch.ids_M, wire) for name, batch in batches[step].items()}
            )
        for name, table in tables.items():
            grads = [
                dict(
                    zip(
                        run_.batches_by_source[source][step][name].ids_M.tolist(),
                        gradient_of(rows[step][name], source, step),
                        strict=True,
                    )
                )
                for source, rows in enumerate(seen)
            ]
            groups = [grads[first : first + group_size] for first in range(0, len(grads), group_size)]
            sums = [
                rounded(added_up(group), wire, RoundingKey(table.config.seed, rank, step))
                for rank, group in enumerate(groups)
            ]
            table.commit(step, added_up(sums))
    return tables, seen


def rows_seen(table: DictionaryTable, ids_M: np.ndarray, wire: str) -> np.ndarray:
    rows_MD = np.array([table.lookup(i) for i in ids_M.tolist()], np.float32)
    return decode(encode_rows(wire, rows_MD)) if len(ids_M) else rows_MD


def rounded(grads: dict[int, np.ndarray], wire: str, key: RoundingKey) -> dict[int, np.ndarray]:
    if not grads:
        return grads
    ids_M, grads_MD = np.array(list(grads), np.int64), np.array(list(grads.values()), np.float32)
    return dict(zip(grads, decode(encode_gradients(wire, ids_M, grads_MD, key)), strict=True))


def assert_seen(found: list[Seen], expected: list[Seen]) -> None:
    for source, (rows, wanted) in enumerate(zip(found, expected, strict=True)):
        for step in range(len(wanted)):
            for name, wanted_MD in wanted[step].items():
                assert rows[step][name].tobytes() == wanted_MD.tobytes(), (source, step, name)


NARROW = {name: MODES[name] for name in ("sync", "exact_prefetch", "bounded_stale(0)")}
NARROW["as runs choose"] = lambda link, exchange: make_lookups(
    LookupSettings(wire="bfloat16"), link, exchange if exchange.num_trainers > 1 else None
)


@pytest.mark.parametrize(
    ("mode", "wire"),
    cases(
        [(mode, wire) for mode in NARROW for wire in WIRES],
        [(mode, "int8_row") for mode in NARROW] + [("sync", "bfloat16")],
    ),
)
@examples(40)
@given(run_=runs(), num_shards=st.integers(1, 3), seed=st.integers(0, 10_000), ahead=aheads)
def test_every_mode_gives_the_rows_of_a_dictionary_that_rounds(mode, wire, run_, num_shards, seed, ahead):
    expected, expected_rows = rounded_dictionaries(run_, wire)
    shards = make_shards(run_.tables, num_shards, len(run_.batches_by_source))
    calls = AdversarialTransport(shards, seed, repeated=0.3, lost=0.2)
    found = run(
        NARROW[mode],
        run_.tables,
        NarrowTransport(calls, wire, run_.tables),
        num_shards,
        run_.batches_by_source,
        ahead=ahead,
    )
    calls.finish()
    assert_seen([seen for seen, _ in found], expected_rows)
    check_tables(shards, run_, expected)


@pytest.mark.parametrize("wire", WIRES)
@examples(20)
@given(run_=runs(most_trainers=4), group_size=st.integers(2, 3), ahead=aheads, seed=st.integers(0, 1000))
def test_groups_round_what_they_have_added_up(wire, run_, group_size, ahead, seed):
    expected, expected_rows = rounded_dictionaries(run_, wire, group_size)
    shards, seen = train_in_groups(run_, "exact_prefetch", 2, group_size, ahead, seed, wire)
    assert_seen(seen, expected_rows)
    check_tables(shards, run_, expected)


def test_stale_rows_are_rounded_too():
    shards = make_shards(ITEMS, 1, max_staleness=2)
    client = ShardClient(ITEMS, ShardMap(1), over(LocalTransport(shards), "int8_row", ITEMS))
    mode = BoundedStale(
        TrainerLink(ITEMS, ShardMap(1), over(LocalTransport(shards), "int8_row", ITEMS)), max_staleness=2
    )
    batch = alone(1, 2)
    for step in range(4):
        mode.prefetch(step, batch)
        rows = mode.rows(step, batch)
        wanted_MD = decode(encode_rows("int8_row", shards[0].lookup({"items": ids(1, 2)})["items"]))
        assert rows["items"].tobytes() == wanted_MD.tobytes()
        mode.update(step, batch, {"items": gradient_of(rows["items"], 0, step)})
    mode.drain()
    assert shards[0].committed_step == 3
    assert client.read({"items": ids(1)})["items"].shape == (1, 4)


class Pickled(ShardTransport):
    """Calls and replies as Ray brings them; counts their bytes."""

    def __init__(self, shards) -> None:
        self._shards = shards
        self.num_bytes = 0

    def call(self, shard, call):
        reply = self._sent(self._sent(call).carry_out(self._shards[shard]))
        return type("Reply", (), {"result": lambda _: reply})()

    def _sent(self, value):
        pickled = pickle.dumps(value, protocol=5)
        self.num_bytes += len(pickled)
        return pickle.loads(pickled)


def calls_of(transport: ShardTransport) -> list[bytes]:
    """Rows that come of each kind of call."""
    random = np.random.default_rng(0)
    grads_MD = random.normal(size=(3, 4)).astype(np.float32)
    update, wide = {"items": (ids(1, 2, -5), grads_MD)}, {"items": ids(2**40, 1, -5)}
    assert transport.call(0, ApplyCall(UpdateTag(0, 0, 0), update)).result() == 0
    found = [transport.call(0, LookupCall(wide, 0)).result()["items"]]
    head = UpdateTag(0, 1, 0, Part.HEAD)
    found.append(
        transport.call(0, ApplyHeadCall(head, update, {"items": ids(9)}, {"items": ids(1, 2)})).result()[
            "items"
        ]
    )
    rest = ApplyCall(head._replace(part=Part.REST), {"items": (ids(9), grads_MD[:1])})
    assert transport.call(0, rest).result() == 1
    found.append(transport.call(0, LookupCall({"items": ids(9, 1, 2)}, 1)).result()["items"])
    found.append(transport.call(0, LookupCall({"items": ids()}, 1)).result()["items"])
    assert transport.call(0, EvictedCall(0, 1)).result() == {}
    return [rows_MD.tobytes() for rows_MD in found]


@pytest.mark.skipif(why_unavailable() is not None, reason=str(why_unavailable()))
@pytest.mark.parametrize("wire", WIRES)
def test_every_transport_gives_the_same_bits(wire):
    in_process = calls_of(over(LocalTransport(make_shards(ITEMS, 1)), wire, ITEMS))
    pickled = calls_of(over(Pickled(make_shards(ITEMS, 1)), wire, ITEMS))
    (shard,) = make_shards(ITEMS, 1)
    server = CallServer("server", lambda call, empty: call.carry_out(shard, empty))
    shared = SharedMemoryTransport({0: server.endpoint})
    try:
        through_memory = calls_of(over(shared, wire, ITEMS))
    finally:
        shared.close()
        server.close()
    assert in_process == pickled == through_memory
    assert in_process != calls_of(LocalTransport(make_shards(ITEMS, 1)))


@pytest.mark.parametrize(("wire", "share"), [("bfloat16", 0.51), ("int8_row", 0.28)])
def test_a_step_has_so_many_of_the_bytes_of_float32(wire, share):
    tables = (ITEMS[0].model_copy(update={"dim": 64}),)
    ids_M, grads_MD = np.arange(2_000), np.ones((2_000, 64), np.float32)
    sent = {}
    for name in ("float32", wire):
        counted = Pickled(make_shards(tables, 1))
        client = ShardClient(tables, ShardMap(1), over(counted, name, tables))
        for reply in client.send(UpdateTag(0, 0, 0), {"items": ids_M}, {"items": grads_MD}):
            reply.result()
        client.read({"items": ids_M}, 0)
        sent[name] = counted.num_bytes
    assert sent[wire] / sent["float32"] < share


@pytest.mark.parametrize("wire", WIRES)
def test_gradients_that_are_not_finite_are_refused_as_without(wire):
    bad_MD = np.ones((2, 4), np.float32)
    bad_MD[1, 2] = np.nan
    said = []
    for transport in (
        LocalTransport(make_shards(ITEMS, 1)),
        over(LocalTransport(make_shards(ITEMS, 1)), wire, ITEMS),
    ):
        with pytest.raises(ValueError, match="the gradient of id 8 is nan at element 2") as refused:
            transport.call(0, ApplyCall(UpdateTag(0, 0, 0), {"items": (ids(7, 8), bad_MD)})).result()
        said.append(str(refused.value))
    assert said[0] == said[1]


def test_whole_records_have_no_narrow_form():
    transport = over(LocalTransport(make_shards(ITEMS, 1)), "int8_row", ITEMS)
    records = {"items": (ids(1), np.zeros((1, 7), np.int32))}
    for call in (
        FetchCall({"items": ids(1)}),
        WriteBackCall(0, -1, records),
        ApplyCall(UpdateTag(0, 0, 0), {}, records),
    ):
        with pytest.raises(
            TypeError, match=f"{type(call).__name__} brings whole records, which have no int8"
        ):
            transport.call(0, call)


def test_an_only_trainer_holds_no_rows_of_a_narrow_wire():
    link = TrainerLink(ITEMS, ShardMap(1), LocalTransport(make_shards(ITEMS, 1)))
    lookups = make_lookups(LookupSettings(wire="bfloat16"), link, None)
    assert isinstance(lookups._mode, ExactPrefetch)


def test_float32_is_the_transport_itself():
    transport = LocalTransport([])
    assert over(transport, "float32", ITEMS) is transport
