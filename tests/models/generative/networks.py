"""Small generative networks of every backbone, and what they read."""

from functools import partial

import numpy as np
import torch

from rayrec.models.decoding.trie import CodeTrie
from rayrec.models.generative.code_softmax import ALL_CODES, CodeSoftmax
from rayrec.models.generative.cross_decoder import CrossDecoder
from rayrec.models.generative.encoder_decoder import EncoderDecoder
from rayrec.models.generative.experts import ExpertSettings
from rayrec.models.generative.instruction import EventLabels, InstructionPrefix
from rayrec.models.generative.lazy_decoder import LazyDecoder
from rayrec.models.generative.light_decoder import CodeDecoder, LightDecoder
from rayrec.models.generative.prefix_composer import PrefixComposer
from rayrec.models.generative.prefix_decoder import PrefixDecoder
from rayrec.models.generative.prefix_rows import SparsePrefixDecoder
from rayrec.models.generative.retrieval import HistoryRetrieval, RetrievalSettings
from rayrec.models.sequence.item_content import ItemContent
from rayrec.platform.code_tree import CodeTree
from rayrec.platform.item_bags import ItemBags
from rayrec.samples.features.prefix_paths import PrefixPaths
from tests.models import networks
from tests.models.networks import DIM, backbone, histories, tensor_batch

CODES_IL = np.array([[0, 0, 1], [0, 0, 0], [0, 1, 0], [1, 1, 0], [1, 1, 1], [2, 0, 0], [2, 2, 0]])


CODES = torch.tensor(CODES_IL)


LEVEL_SIZES = (3, 3, 2)


LABEL_SIZES = networks.LABEL_SIZES


NUM_ITEMS = len(CODES_IL)


ROWS = [[0, 3, 5, 2], [6, 1], [4, 0, 1]]


MAX_LENGTH = 6


def among_children():
    return CodeSoftmax(CodeTrie.from_codes(CODES))


def light(dropout):
    decoder = CodeDecoder(DIM, LEVEL_SIZES, 16, dropout, 100)
    return LightDecoder(backbone(dropout), decoder), ("code",)


def light_among_children(dropout):
    decoder = CodeDecoder(DIM, LEVEL_SIZES, 16, dropout, 100)
    return LightDecoder(backbone(dropout), decoder, among_children()), ("code",)


def prefix(dropout):
    return PrefixDecoder(backbone(dropout), CODES, LEVEL_SIZES), ()


TREE = CodeTree.of(CODES_IL)


def rows_of(ids_M: np.ndarray) -> np.ndarray:
    """As `table_rows` has them."""
    rows = [np.random.default_rng(ident % 2**64).normal(scale=0.3, size=DIM) for ident in ids_M.tolist()]
    return np.array(rows, dtype=np.float32).reshape(-1, DIM)


def paths(num_siblings: int | None = None, trained_I: np.ndarray | None = None) -> PrefixPaths:
    return PrefixPaths(CODES_IL, num_siblings, trained_I, seed=4)


def pair(
    trained_I: np.ndarray | None = None,
    max_held: int = 100,
    codes_IL=CODES,
    known_I: torch.Tensor | None = None,
):
    """A network with vectors as weights, and one with the same vectors as rows."""
    torch.manual_seed(0)
    trained = None if trained_I is None else torch.tensor(trained_I)
    dense = PrefixDecoder(backbone(), codes_IL, LEVEL_SIZES, known_I, trained).eval()
    sparse = SparsePrefixDecoder(backbone(), codes_IL, LEVEL_SIZES, known_I, max_held).eval()
    with torch.no_grad():
        for depth, own_VD in enumerate(dense.own_VD):
            own_VD.copy_(torch.from_numpy(rows_of(TREE.prefix_ids(depth + 1))))
        for mine, theirs in zip(sparse.shared_KD, dense.shared_KD, strict=True):
            mine.copy_(theirs.add_(0.3 * torch.randn_like(theirs)))
    return dense, sparse


def assert_same_gradients(dense, sparse, features, batch) -> None:
    """Of the networks of a `pair`, after their losses on a batch went backward."""
    expected = dict(dense.named_parameters())
    for name, weight in sparse.named_parameters():
        torch.testing.assert_close(weight.grad, expected[name].grad, msg=name)
    grads = dict(zip(features.lookups["prefix"].ids_M.tolist(), batch.rows["prefix"].grad, strict=True))
    for depth, own_VD in enumerate(dense.own_VD):
        for ident, grad_D in zip(TREE.prefix_ids(depth + 1).tolist(), own_VD.grad, strict=True):
            torch.testing.assert_close(grads.get(ident, torch.zeros(DIM)), grad_D)


def composed(dropout):
    composer = PrefixComposer(LEVEL_SIZES, 16, DIM)
    network = PrefixDecoder(backbone(dropout), CODES, LEVEL_SIZES, composer=composer, content=(BAGS, 5))
    return network, ()


BAGS = ItemBags(
    np.array([0, 2, 3, 3, 5, 5, 6, 7]), np.array([1, 4, 1, 0, 4, 2, 3]), np.ones(7, dtype=np.float32)
)
"""What is said of the items, in five buckets."""


def content():
    return ItemContent(BAGS, 5, DIM)


def described_lazy(dropout):
    decoder = CrossDecoder(DIM, 2, 2, 16, LEVEL_SIZES, dropout)
    return LazyDecoder(decoder, CODES, MAX_LENGTH, dropout, content=content()), ()


def described_light(dropout):
    decoder = CodeDecoder(DIM, LEVEL_SIZES, 16, dropout, 100)
    return LightDecoder(backbone(dropout), decoder, content=content()), ("code",)


def described_encoder_decoder(dropout):
    decoder = CrossDecoder(DIM, 2, 2, 16, LEVEL_SIZES, dropout)
    network = EncoderDecoder(
        decoder,
        CODES,
        num_layers=2,
        num_heads=2,
        feedforward_dim=16,
        max_length=MAX_LENGTH,
        dropout=dropout,
        content=content(),
    )
    return network, ()


def lazy(dropout, code_softmax=ALL_CODES):
    decoder = CrossDecoder(DIM, 2, 2, 16, LEVEL_SIZES, dropout)
    return LazyDecoder(decoder, CODES, MAX_LENGTH, dropout, code_softmax), ("user",)


def lazy_among_children(dropout):
    return lazy(dropout, among_children())


def encoder_decoder_among_children(dropout):
    return encoder_decoder(dropout, among_children())


def encoder_decoder(dropout, code_softmax=ALL_CODES):
    decoder = CrossDecoder(DIM, 2, 2, 16, LEVEL_SIZES, dropout)
    network = EncoderDecoder(
        decoder,
        CODES,
        num_layers=2,
        num_heads=2,
        feedforward_dim=16,
        max_length=MAX_LENGTH,
        dropout=dropout,
        code_softmax=code_softmax,
    )
    return network, ("user",)


def instructed_lazy(dropout):
    decoder = CrossDecoder(
        DIM, 2, 2, 16, LEVEL_SIZES, dropout, experts=ExpertSettings(3, per_token=2, balance_weight=0.01)
    )
    instruction = InstructionPrefix(DIM, LABEL_SIZES, with_trigger=True, drop=0.4)
    labels = EventLabels(DIM, LABEL_SIZES)
    network = LazyDecoder(decoder, CODES, MAX_LENGTH, dropout, instruction=instruction, event_labels=labels)
    return network, ()


def retrieving(dropout, q2i_weight=0.1):
    """Of up to six events, the newest one and two more are encoded."""
    network = EncoderDecoder(
        CrossDecoder(DIM, 2, 2, 16, LEVEL_SIZES, dropout, experts=ExpertSettings(3, 1, 0.0)),
        CODES,
        num_layers=2,
        num_heads=2,
        feedforward_dim=16,
        max_length=3,
        dropout=dropout,
        instruction=InstructionPrefix(DIM, {"behavior": 3}, with_trigger=True, drop=0.4),
        event_labels=EventLabels(DIM, {"scenario": 2}),
        retrieval=HistoryRetrieval(DIM, RetrievalSettings(3, 1, q2i_weight, 1.0), with_instruction=True),
    )
    return network, ("user",)


shares = partial(networks.shares, num_negatives=4)


def network_of(make, dropout=0.0):
    """The network, with weights large enough for all of its parts to matter, and the tables it reads."""
    torch.manual_seed(0)
    network, tables = make(dropout)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return network.eval(), tables


def contexts_of(network, tables, rows=ROWS, instruction=None):
    return network.encode_context(tensor_batch(histories(rows, NUM_ITEMS, tables, CODES_IL, instruction)))


def unbalanced_lazy(dropout):
    """Without the loss that belongs to no sequence."""
    network, tables = instructed_lazy(dropout)
    network.decoder.balance_weight = 0.0
    return network, tables
