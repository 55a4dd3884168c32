"""A causal reader of the history and, at every event, feed-forward layers that emit the next item's codes.

A history event enters as the sum of its code embeddings (and, if asked for, its item embedding), all rows of
the sparse stage. The context is computed once and shared by all levels and beams, as in OneRec-V2's lazy
decoder (arXiv:2508.20900), here reduced to feed-forward layers, so that all positions and levels train at
once.

Axes: as in `backbone`.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional

from rayrec.models.base.keyed_random import KeyedDropout
from rayrec.models.base.tensor_plan import INPUTS, TensorPlan, outputs
from rayrec.models.decoding.beam_cache import BeamCache
from rayrec.models.generative.backbone import GenerativeBackbone, VectorContext, weighted_sum
from rayrec.models.generative.code_softmax import ALL_CODES, CodeSoftmax
from rayrec.models.sequence.backbones.history import contexts, last_contexts
from rayrec.models.sequence.backbones.transformer import CausalTransformer
from rayrec.models.sequence.item_content import ItemContent
from rayrec.models.sequence.tensor_batch import TensorBatch


class CodeDecoder(nn.Module):
    """Logits of one level's codes from a context and the codes chosen before it."""

    norm_readers = (("norms", ("up",)), ("output_norms", ("heads",)))

    def __init__(
        self, dim: int, level_sizes: tuple[int, ...], feedforward_dim: int, dropout: float, dropout_index: int
    ) -> None:
        super().__init__()
        # The last level's code conditions nothing.
        self.chosen_KD = nn.ParameterList(
            nn.Parameter(torch.empty(size, dim).normal_(std=0.02)) for size in level_sizes[:-1]
        )
        self.norms = nn.ModuleList(nn.LayerNorm(dim) for _ in level_sizes)
        self.up = nn.ModuleList(nn.Linear(dim, feedforward_dim) for _ in level_sizes)
        self.down = nn.ModuleList(nn.Linear(feedforward_dim, dim) for _ in level_sizes)
        self.output_norms = nn.ModuleList(nn.LayerNorm(dim) for _ in level_sizes)
        self.heads = nn.ModuleList(nn.Linear(dim, size) for size in level_sizes)
        self.dropouts = nn.ModuleList(
            KeyedDropout(dropout, dropout_index + level) for level in range(len(level_sizes))
        )

    def tensor_plan(self) -> TensorPlan:
        """Each rank has some of the inner widths; logits are of all codes at once."""
        (inner,) = {up.out_features for up in self.up if isinstance(up, nn.Linear)}
        levels = range(len(self.up))
        ups = {f"up.{level}": outputs(inner) for level in levels}
        return TensorPlan(
            sizes={"feedforward_dim": inner},
            modules=ups | {f"down.{level}": INPUTS for level in levels},
        )

    def condition(self, state: Tensor, level: int, codes: Tensor) -> Tensor:
        """[..., D] state after choosing `codes` [...] at `level`."""
        return state + functional.embedding(codes, self.chosen_KD[level])

    def logits(self, state: Tensor, level: int, keys_N: Tensor | None = None) -> Tensor:
        """[..., D] state to [..., K] logits; `keys_N` only while training."""
        hidden = functional.gelu(self.up[level](self.norms[level](state)))
        if keys_N is not None:
            hidden = self.dropouts[level](hidden, keys_N)
        return self.heads[level](self.output_norms[level](state + self.down[level](hidden)))


class LightDecoder(GenerativeBackbone[VectorContext]):
    """History to one vector, vector to codes."""

    def __init__(
        self,
        backbone: CausalTransformer,
        decoder: CodeDecoder,
        code_softmax: CodeSoftmax = ALL_CODES,
        content: ItemContent | None = None,
    ) -> None:
        """
        Args:
            content: of the items of histories, added to their codes; None: nothing is.
        """
        super().__init__()
        self.backbone = backbone
        self.decoder = decoder
        self.code_softmax = code_softmax
        self.content = content

    def embed_history(self, batch: TensorBatch) -> Tensor:
        """[N, D] input vector of every history event."""
        x_ND = batch.embed("code").sum(1)
        if self.content is not None:
            x_ND = x_ND + self.content(batch.items_N)
        return x_ND + batch.embed("item") if "item" in batch.rows else x_ND

    def loss(self, batch: TensorBatch, codes_NL: Tensor, weights_N: Tensor | None = None) -> Tensor:
        state_ND = contexts(self.backbone, self.embed_history(batch), batch)
        logits = self._levels(state_ND, codes_NL, batch.keys_N if self.training else None)
        return weighted_sum(self.code_softmax.losses(logits, codes_NL), weights_N)

    def _levels(self, state_ND: Tensor, codes_NL: Tensor, keys_N: Tensor | None) -> Iterator[Tensor]:
        """[N, K] logits of every level, each after the codes before it."""
        num_levels = codes_NL.shape[1]
        for level in range(num_levels):
            yield self.decoder.logits(state_ND, level, keys_N)
            if level + 1 < num_levels:
                state_ND = self.decoder.condition(state_ND, level, codes_NL[:, level])

    def encode_context(self, batch: TensorBatch) -> VectorContext:
        return VectorContext(last_contexts(self.backbone, self.embed_history(batch), batch))

    def step(self, context: VectorContext, cache: BeamCache, depth: int, codes_BWd: Tensor) -> Tensor:
        return self.decoder.logits(self._state(context, depth, codes_BWd), depth)

    def sequence_logits(self, context: VectorContext, codes_BWL: Tensor) -> list[Tensor]:
        return [
            self.decoder.logits(self._state(context, level, codes_BWL), level).expand(
                -1, codes_BWL.shape[1], -1
            )
            for level in range(codes_BWL.shape[2])
        ]

    def _state(self, context: VectorContext, depth: int, codes_BWd: Tensor) -> Tensor:
        """[B, W or 1, D] after the first `depth` codes."""
        state_BWD = context.vectors_BD[:, None, :]
        for level in range(depth):
            state_BWD = self.decoder.condition(state_BWD, level, codes_BWd[:, :, level])
        return state_BWD
