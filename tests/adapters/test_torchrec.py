"""RayRec's tables under torchrec's modules, against torchrec's own."""

import pickle
import subprocess
import sys

import numpy as np
import pytest
import torch
from torch import nn

from rayrec.embeddings.base.routing import ShardMap
from rayrec.embeddings.config import RowwiseAdagradConfig, SgdConfig
from rayrec.embeddings.lookup.exact_prefetch import ExactPrefetch
from rayrec.embeddings.lookup.lookups import SyncLookups, TrainerLink
from rayrec.embeddings.shard.shard import EmbeddingShard
from rayrec.embeddings.table.table import EmbeddingTable
from rayrec.embeddings.transport.client import LocalTransport
from rayrec.platform.errors import InputError
from rayrec.platform.schedule import RateSchedule


def test_without_torchrec_a_sentence_says_how_to_get_it():
    program = (
        "import sys; sys.modules['torchrec'] = None\n"
        "try: import rayrec.adapters.torchrec\n"
        "except ImportError as error: print(error)\n"
    )
    said = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True).stdout
    assert "pip install 'rayrec[torchrec]'" in said
    assert "pip install --no-deps torchrec==1.8.0" in said
    assert "\n" not in said.strip()


torchrec = pytest.importorskip(
    "torchrec",
    exc_type=ImportError,
    reason="torchrec is missing: pip install 'rayrec[torchrec]', then pip install --no-deps torchrec==1.8.0",
)

from torchrec import (  # noqa: E402
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    KeyedJaggedTensor,
    PoolingType,
)
from torchrec.modules.embedding_configs import DataType  # noqa: E402
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad  # noqa: E402

from rayrec.adapters.torchrec import (  # noqa: E402
    adapt,
    expected_rows,
    split_kjt,
    split_shares,
    table_configs,
    table_specs,
)

NUM_EMBEDDINGS = 50


def bag(name, dim, features, pooling=PoolingType.SUM, **settings):
    return EmbeddingBagConfig(
        name=name,
        embedding_dim=dim,
        num_embeddings=NUM_EMBEDDINGS,
        feature_names=features,
        pooling=pooling,
        **settings,
    )


def embedding(name, dim, features):
    return EmbeddingConfig(
        name=name, embedding_dim=dim, num_embeddings=NUM_EMBEDDINGS, feature_names=features
    )


def random_kjt(keys, batch_size=6, weighted=False, seed=0, longest=4):
    """Every other bag is empty now and then, ids repeat within and across features."""
    random = np.random.default_rng(seed)
    lengths = random.integers(0, longest + 1, size=len(keys) * batch_size)
    lengths[::3] = 0
    values = random.integers(0, NUM_EMBEDDINGS, size=lengths.sum())
    weights = torch.tensor(random.random(len(values)), dtype=torch.float32) if weighted else None
    return KeyedJaggedTensor.from_lengths_sync(
        keys=list(keys), values=torch.tensor(values), lengths=torch.tensor(lengths), weights=weights
    )


def theirs_and_ours(collection, kjt, loss_of):
    """(their outputs, weight gradients by table; our outputs, row gradients spread over all ids)."""
    bags = (
        collection.embedding_bags if isinstance(collection, EmbeddingBagCollection) else collection.embeddings
    )
    weights = {name: module.weight for name, module in bags.items()}
    their_output = collection(kjt)
    loss_of(their_output).backward()
    their_grads = {name: weight.grad.numpy() for name, weight in weights.items()}

    adapted = adapt(collection)
    batch = split_kjt(kjt, adapted.tables)
    rows = {name: weights[name].detach().numpy()[lookup.ids_M] for name, lookup in batch.lookups.items()}
    with adapted.using(batch, rows) as gradients:
        our_output = adapted.model(kjt)
        loss_of(our_output).backward()
    our_grads = {}
    for name, grads_MD in gradients.by_table().items():
        our_grads[name] = np.zeros_like(their_grads[name])
        our_grads[name][batch.lookups[name].ids_M] = grads_MD
    return their_output, their_grads, our_output, our_grads


def assert_same_gradients(theirs, ours):
    assert theirs.keys() == ours.keys()
    for name in theirs:
        np.testing.assert_allclose(ours[name], theirs[name], rtol=1e-5, atol=1e-6)


# Weighted means are not among them: torchrec's own unsharded module refuses those.
@pytest.mark.parametrize(
    ("pooling", "weighted"), [(PoolingType.SUM, False), (PoolingType.SUM, True), (PoolingType.MEAN, False)]
)
@pytest.mark.parametrize("seed", range(5))
def test_pooled_lookups_and_gradients_are_those_of_embedding_bag_collection(pooling, weighted, seed):
    torch.manual_seed(seed)
    # f1 is in two tables, t1 has two features, and the KJT has another order.
    tables = [bag("t1", 4, ["f1", "f2"], pooling), bag("t2", 8, ["f1"], pooling), bag("t3", 4, ["f3"])]
    kjt = random_kjt(["f3", "f1", "f2"], weighted=weighted, seed=seed)

    theirs, their_grads, ours, our_grads = theirs_and_ours(
        EmbeddingBagCollection(tables, is_weighted=weighted), kjt, lambda output: output.values().cos().sum()
    )

    assert ours.keys() == theirs.keys() == ["f1@t1", "f2", "f1@t2", "f3"]
    assert ours.length_per_key() == theirs.length_per_key()
    torch.testing.assert_close(ours.values(), theirs.values())
    for key in theirs.keys():  # noqa: SIM118
        torch.testing.assert_close(ours[key], theirs[key])
    assert_same_gradients(their_grads, our_grads)


def test_a_weighted_mean_divides_by_the_number_of_ids_as_fbgemm_does():
    ops = pytest.importorskip("fbgemm_gpu.split_table_batched_embeddings_ops_training")
    common = pytest.importorskip("fbgemm_gpu.split_table_batched_embeddings_ops_common")
    host = [(NUM_EMBEDDINGS, 4, common.EmbeddingLocation.HOST, ops.ComputeDevice.CPU)]
    theirs = ops.SplitTableBatchedEmbeddingBagsCodegen(host, pooling_mode=common.PoolingMode.MEAN)
    weights = torch.randn(NUM_EMBEDDINGS, 4)
    theirs.split_embedding_weights()[0].copy_(weights)
    kjt = random_kjt(["f"], weighted=True)
    adapted = adapt(EmbeddingBagCollection([bag("t", 4, ["f"], PoolingType.MEAN)], is_weighted=True))
    batch = split_kjt(kjt, adapted.tables)

    with adapted.using(batch, {"t": weights.numpy()[batch.lookups["t"].ids_M]}):
        ours = adapted.model(kjt).values()

    torch.testing.assert_close(ours, theirs(kjt.values(), kjt.offsets().long(), kjt.weights()))


@pytest.mark.parametrize("need_indices", [False, True])
@pytest.mark.parametrize("seed", range(5))
def test_sequence_lookups_and_gradients_are_those_of_embedding_collection(need_indices, seed):
    torch.manual_seed(seed)
    tables = [embedding("t1", 4, ["f1", "f2"]), embedding("t2", 4, ["f1"])]
    kjt = random_kjt(["f2", "f1"], seed=seed)

    def loss(output):
        return sum((jagged.values().cos() * (n + 1)).sum() for n, jagged in enumerate(output.values()))

    theirs, their_grads, ours, our_grads = theirs_and_ours(
        EmbeddingCollection(tables, need_indices=need_indices), kjt, loss
    )

    assert list(ours) == list(theirs) == ["f1@t1", "f2", "f1@t2"]
    for key in theirs:
        torch.testing.assert_close(ours[key].values(), theirs[key].values())
        torch.testing.assert_close(ours[key].lengths(), theirs[key].lengths())
        torch.testing.assert_close(ours[key].offsets(), theirs[key].offsets())
        torch.testing.assert_close(ours[key].weights_or_none(), theirs[key].weights_or_none())
    assert_same_gradients(their_grads, our_grads)


@pytest.mark.parametrize("pooling", [PoolingType.SUM, PoolingType.MEAN])
def test_a_batch_without_any_id_is_a_batch(pooling):
    kjt = KeyedJaggedTensor.from_lengths_sync(
        keys=["f"], values=torch.empty(0, dtype=torch.int64), lengths=torch.zeros(3, dtype=torch.int64)
    )

    theirs, their_grads, ours, our_grads = theirs_and_ours(
        EmbeddingBagCollection([bag("t", 4, ["f"], pooling)]), kjt, lambda output: output.values().sum()
    )

    torch.testing.assert_close(ours.values(), theirs.values())
    assert_same_gradients(their_grads, our_grads)


def test_features_of_one_table_are_deduplicated_together():
    kjt = KeyedJaggedTensor.from_lengths_sync(
        keys=["a", "b", "c"],
        values=torch.tensor([7, 9, 7, 9, -(2**63), 7]),
        lengths=torch.tensor([2, 1, 1, 1, 0, 1]),
    )
    tables = table_specs([bag("ab", 4, ["a", "b"]), bag("c", 4, ["c"])])

    batch = split_kjt(kjt, tables)

    assert batch.lookups["ab"].ids_M.tolist() == [7, 9, -(2**63)]
    assert batch.lookups["ab"].inverse.tolist() == [0, 1, 0, 1, 2]
    assert batch.lookups["ab"].updated_ids is batch.lookups["ab"].ids_M
    assert batch.lookups["c"].ids_M.tolist() == [7]


def test_shares_of_several_trainers_know_what_the_others_touch():
    tables = table_specs([bag("t", 4, ["f"])])
    shares = [random_kjt(["f"], seed=seed) for seed in range(2)]

    batches = split_shares(shares, tables)

    ids = [set(batch.lookups["t"].ids_M.tolist()) for batch in batches]
    for batch, share in zip(batches, shares, strict=True):
        assert set(batch.lookups["t"].updated_ids.tolist()) == ids[0] | ids[1]
        assert batch.lookups["t"].ids_M[batch.lookups["t"].inverse].tolist() == share.values().tolist()


class Clicks(nn.Module):
    """Bags of plain features, a weighted bag, and a history that is read one by one."""

    def __init__(self, device=None):
        super().__init__()
        self.bags = EmbeddingBagCollection(
            [bag("user", 8, ["user"]), bag("item", 8, ["item", "liked"], PoolingType.MEAN)], device=device
        )
        self.weighted = EmbeddingBagCollection([bag("tag", 8, ["tag"])], is_weighted=True, device=device)
        self.history = EmbeddingCollection([embedding("seen", 8, ["seen"])], device=device)
        self.over = nn.Linear(5 * 8, 1)

    def forward(self, kjt, tags):
        seen = self.history(kjt)["seen"]
        summed_BD = torch.segment_reduce(seen.values(), "sum", lengths=seen.lengths(), axis=0, initial=0.0)
        vectors = [self.bags(kjt).values(), self.weighted(tags).values(), summed_BD]
        return self.over(torch.cat(vectors, dim=1)).squeeze(1)


def click_batches(num_batches, batch_size=12):
    for number in range(num_batches):
        kjt = random_kjt(["seen", "item", "user", "liked"], batch_size, seed=2 * number)
        tags = random_kjt(["tag"], batch_size, weighted=True, seed=2 * number + 1)
        labels = torch.tensor(np.random.default_rng(number).integers(0, 2, batch_size), dtype=torch.float32)
        yield kjt, tags, labels


def train_theirs(model, sparse_optimizer, num_steps):
    dense = torch.optim.SGD(model.over.parameters(), lr=0.1)
    losses = []
    for kjt, tags, labels in click_batches(num_steps):
        loss = nn.functional.binary_cross_entropy_with_logits(model(kjt, tags), labels)
        model.zero_grad()
        loss.backward()
        dense.step()
        sparse_optimizer.step()
        losses.append(loss.item())
    return losses


def train_ours(adapted, mode, num_steps):
    dense = torch.optim.SGD(adapted.model.parameters(), lr=0.1)
    batches = [
        (split_kjt((kjt, tags), adapted.tables), labels) for kjt, tags, labels in click_batches(num_steps)
    ]
    losses = []
    mode.prefetch(0, batches[0][0].lookups)
    for step, (batch, labels) in enumerate(batches):
        if step + 1 < num_steps:
            mode.prefetch(step + 1, batches[step + 1][0].lookups)
        with adapted.using(batch, mode.rows(step, batch.lookups)) as gradients:
            loss = nn.functional.binary_cross_entropy_with_logits(adapted.model(*batch.kjts), labels)
            dense.zero_grad()
            loss.backward()
        mode.update(step, batch.lookups, gradients.by_table())
        dense.step()
        losses.append(loss.item())
    mode.drain()
    return losses


@pytest.mark.slow
@pytest.mark.parametrize("mode", [SyncLookups, ExactPrefetch])
@pytest.mark.parametrize("optimizer", ["sgd", "rowwise_adagrad"])
def test_training_is_that_of_torchrec(mode, optimizer):
    """The same model, batches and first rows; all of it through two shards and the lookup stage."""
    num_steps = 40
    torch.manual_seed(0)
    theirs, model = Clicks(), Clicks(device=torch.device("meta"))
    model.over.load_state_dict(theirs.over.state_dict())
    config = SgdConfig(lr=0.3) if optimizer == "sgd" else RowwiseAdagradConfig(lr=0.05, eps=1e-8)
    tables = table_configs(model, config)
    their_weights = {
        **{name: module.weight for name, module in theirs.bags.embedding_bags.items()},
        **{name: module.weight for name, module in theirs.weighted.embedding_bags.items()},
        **{name: module.weight for name, module in theirs.history.embeddings.items()},
    }
    everything = np.arange(NUM_EMBEDDINGS)
    for table in tables:
        with torch.no_grad():
            their_weights[table.name].copy_(torch.tensor(EmbeddingTable(table).lookup(everything)))
    sparse = (
        torch.optim.SGD(their_weights.values(), lr=0.3)
        if optimizer == "sgd"
        else RowWiseAdagrad(their_weights.values(), lr=0.05, eps=1e-8)
    )
    shards = [EmbeddingShard(tables, shard, 1, wait_timeout_s=5) for shard in range(2)]
    lookups = mode(TrainerLink(tables, ShardMap(2), LocalTransport(shards)))
    adapted = adapt(model)
    assert [name for name, _ in adapted.model.named_parameters()] == ["over.weight", "over.bias"]

    their_losses = train_theirs(theirs, sparse, num_steps)
    our_losses = train_ours(adapted, lookups, num_steps)

    np.testing.assert_allclose(our_losses, their_losses, rtol=1e-4)
    assert np.mean(our_losses[-5:]) < our_losses[0]
    for name, weights in their_weights.items():
        shard_of = ShardMap(2).shard_of(everything)
        ours = np.stack(
            [shards[shard_of[i]].lookup({name: everything[i : i + 1]})[name][0] for i in everything]
        )
        np.testing.assert_allclose(ours, weights.detach().numpy(), rtol=1e-3, atol=1e-5)


def test_configs_are_named_and_scaled_as_theirs():
    tables = [
        bag("a", 4, ["f"]),
        bag("b", 8, ["g"], weight_init_max=0.5, weight_init_min=-0.5),
        bag("c", 2, ["h"], data_type=DataType.BF16),
    ]

    a, b, c = table_configs(tables, {"b": SgdConfig(lr=0.5)}, seed=3, schedule=RateSchedule(10))

    assert (a.name, a.dim, a.weight_dtype) == ("a", 4, "float32")
    assert a.init_scale == pytest.approx(NUM_EMBEDDINGS**-0.5)
    assert (b.init_scale, b.optimizer) == (0.5, SgdConfig(lr=0.5))
    assert (a.optimizer, a.schedule) == (RowwiseAdagradConfig(), RateSchedule(10))
    assert c.weight_dtype == "bfloat16"
    assert len({a.seed, b.seed, c.seed, *(config.seed for config in table_configs(tables))}) == 6
    assert expected_rows(tables) == {"a": NUM_EMBEDDINGS, "b": NUM_EMBEDDINGS, "c": NUM_EMBEDDINGS}


def test_a_batch_that_was_pickled_is_still_the_one_that_forward_may_look_up():
    adapted = adapt(EmbeddingBagCollection([bag("t", 4, ["f"])]))
    batch = pickle.loads(pickle.dumps(split_kjt(random_kjt(["f"]), adapted.tables)))

    with adapted.using(batch, {"t": np.ones((len(batch.lookups["t"].ids_M), 4), np.float32)}):
        assert adapted.model(batch.kjt).values().shape == (6, 4)


def test_a_batch_that_was_moved_is_looked_up_where_it_is():
    adapted = adapt(EmbeddingBagCollection([bag("t", 4, ["f"])]))
    batch = split_kjt(random_kjt(["f"]), adapted.tables).to(torch.device("cpu"))

    with adapted.using(batch, {"t": np.ones((len(batch.lookups["t"].ids_M), 4), np.float32)}):
        assert adapted.model(batch.kjt).values().device.type == "cpu"


class BuildsItsOwn(nn.Module):
    def __init__(self):
        super().__init__()
        self.bags = EmbeddingBagCollection([bag("t", 4, ["f"])])

    def forward(self, kjt):
        return self.bags(kjt.permute([0]))


def test_a_kjt_built_inside_forward_is_refused():
    adapted = adapt(BuildsItsOwn())
    batch = split_kjt(random_kjt(["f"]), adapted.tables)
    rows = {"t": np.zeros((len(batch.lookups["t"].ids_M), 4), np.float32)}

    with (
        adapted.using(batch, rows),
        pytest.raises(InputError, match="a KeyedJaggedTensor that the lookup stage has not seen"),
    ):
        adapted.model(batch.kjt)


def test_a_model_without_rows_says_where_they_come_from():
    adapted = adapt(BuildsItsOwn())

    with pytest.raises(InputError, match=r"has no rows: run the model inside `with adapted\.using"):
        adapted.model(random_kjt(["f"]))


def test_rows_of_another_shape_are_refused():
    adapted = adapt(EmbeddingBagCollection([bag("t", 4, ["f"])]))
    batch = split_kjt(random_kjt(["f"]), adapted.tables)
    num_ids = len(batch.lookups["t"].ids_M)

    with (
        pytest.raises(InputError, match=rf"table 't': expected rows of shape \({num_ids}, 4\).*found none"),
        adapted.using(batch, {}),
    ):
        pass
    with (
        pytest.raises(InputError, match=rf"found \({num_ids}, 5\)"),
        adapted.using(batch, {"t": np.zeros((num_ids, 5), np.float32)}),
    ):
        pass


@pytest.mark.parametrize(
    ("tables", "message"),
    [
        ([], "there are no tables"),
        ([bag("t", 4, ["f"]), bag("t", 4, ["g"])], "two tables have the name 't'; they would share rows"),
        ([bag("t", 4, ["f"]), bag("t", 8, ["g"])], "name 't', with rows of 4 and of 8 numbers"),
        ([bag("t", 4, ["f"], data_type=DataType.INT8)], "table 't' has data_type INT8"),
        ([bag("", 4, ["f"])], r"features \['f'\] has no name"),
    ],
)
def test_tables_that_cannot_be_are_refused(tables, message):
    with pytest.raises(InputError, match=message):
        table_specs(tables)


def test_two_collections_cannot_have_tables_of_one_name():
    model = nn.Sequential(
        EmbeddingBagCollection([bag("t", 4, ["f"])]), EmbeddingCollection([embedding("t", 8, ["g"])])
    )

    with pytest.raises(InputError, match="two tables have the name 't'"):
        adapt(model)
    assert isinstance(model[0], EmbeddingBagCollection)


@pytest.mark.parametrize(
    "settings", [{"init_fn": nn.init.ones_}, {"weight_init_min": 0.0, "weight_init_max": 1.0}]
)
def test_rows_that_start_in_another_way_need_a_scale(settings):
    tables = [bag("t", 4, ["f"], **settings)]

    with pytest.raises(InputError, match=r"table 't' starts its rows in a way of its own.*init_scale"):
        table_configs(tables)
    assert table_configs(tables, init_scale={"t": 0.25})[0].init_scale == 0.25


def test_settings_of_a_table_that_is_not_there_are_refused():
    with pytest.raises(InputError, match="optimizer names table 'u'; the model's tables are t"):
        table_configs([bag("t", 4, ["f"])], {"u": SgdConfig()})


def test_features_have_to_match_the_tables():
    tables = table_specs([bag("t", 4, ["f", "g"])])

    with pytest.raises(InputError, match="feature 'h' is in no table; tables read f, g"):
        split_kjt(random_kjt(["f", "g", "h"]), tables)
    split_kjt(random_kjt(["f", "g", "h"]), tables, ignored_features={"h"})
    with pytest.raises(InputError, match="has the feature 'g', which table 't' reads; found f"):
        split_kjt(random_kjt(["f"]), tables)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (torch.tensor([1.0, 2.0]), "feature 'f' has values of type float32; ids are integers of 64 bits"),
        (torch.tensor([True, False]), "feature 'f' has values of type bool"),
        (torch.tensor([1, 2**63], dtype=torch.uint64), "feature 'f' has the id 9223372036854775808"),
    ],
)
def test_ids_that_are_none_are_refused(values, message):
    kjt = KeyedJaggedTensor(keys=["f"], values=values, lengths=torch.tensor([1, 1]))

    with pytest.raises(InputError, match=message):
        split_kjt(kjt, table_specs([bag("t", 4, ["f"])]))


@pytest.mark.parametrize("dtype", [torch.int32, torch.uint8, torch.uint64, torch.int64])
def test_ids_of_any_integer_type_are_widened(dtype):
    kjt = KeyedJaggedTensor(
        keys=["f"], values=torch.tensor([3, 200, 3], dtype=dtype), lengths=torch.tensor([1, 2])
    )

    lookup = split_kjt(kjt, table_specs([bag("t", 4, ["f"])])).lookups["t"]

    assert lookup.ids_M.tolist() == [3, 200]
    assert lookup.ids_M.dtype == np.int64


def test_batch_sizes_by_feature_are_refused():
    kjt = KeyedJaggedTensor(
        keys=["f", "g"],
        values=torch.tensor([1, 2, 3]),
        lengths=torch.tensor([1, 1, 1]),
        stride_per_key_per_rank=[[2], [1]],
    )

    with pytest.raises(InputError, match="variable stride"):
        split_kjt(kjt, table_specs([bag("t", 4, ["f", "g"])]))


def test_collections_of_other_kinds_are_refused():
    adapted = adapt(EmbeddingBagCollection([bag("t", 4, ["f"])]))

    with pytest.raises(InputError, match="the model is a LentEmbeddingBagCollection"):
        adapt(adapted.model)
