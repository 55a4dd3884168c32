"""What generative backbones with a cross decoder share; they differ in the context that they give it.

Axes: as in `backbone` and `cross_decoder`; P tokens of an instruction.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from rayrec.models.attention.jagged import JaggedLayout
from rayrec.models.base.keyed_random import level_keys
from rayrec.models.decoding.beam_cache import BeamCache
from rayrec.models.decoding.prefixes import JaggedStep, Step
from rayrec.models.generative.backbone import GenerativeBackbone
from rayrec.models.generative.chunk_summaries import ChunkSummaries
from rayrec.models.generative.code_softmax import CodeSoftmax
from rayrec.models.generative.cross_decoder import ContextKeys, CrossDecoder, Look
from rayrec.models.generative.experts import balance_losses
from rayrec.models.generative.instruction import EventLabels, InstructionPrefix
from rayrec.models.sequence.item_content import ItemContent
from rayrec.models.sequence.tensor_batch import ChunkBatch, TensorBatch
from rayrec.platform.arrays import Int64Array


class CrossBackbone(GenerativeBackbone[ContextKeys]):
    """Steps, losses and instructions; `loss` and `encode_context` are a backbone's own."""

    has_jagged_step = True
    codes_IL: Tensor

    def __init__(
        self,
        decoder: CrossDecoder,
        codes_IL: Tensor,
        code_softmax: CodeSoftmax,
        instruction: InstructionPrefix | None = None,
        event_labels: EventLabels | None = None,
        content: ItemContent | None = None,
    ) -> None:
        """
        Args:
            instruction: makes the prefix of each sequence; None: there is none.
            event_labels: what is added to the vectors of the history's events; None: nothing.
            content: of the items of the history, added likewise.
        """
        super().__init__()
        self.summaries: ChunkSummaries | None = None
        self.decoder = decoder
        self.code_softmax = code_softmax
        self.instruction = instruction
        self.event_labels = event_labels
        self.content = content
        self.register_buffer("codes_IL", codes_IL, persistent=False)

    def added_to(self, vectors_ED: Tensor, items_E: Tensor, labels: Mapping[str, Tensor]) -> Tensor:
        """[E, D] vectors of events, with what is known of them besides their codes."""
        if self.event_labels is not None:
            vectors_ED = vectors_ED + self.event_labels(labels)
        return vectors_ED if self.content is None else vectors_ED + self.content(items_E)

    def step(self, context: ContextKeys, cache: BeamCache, depth: int, codes_BWd: Tensor) -> Tensor:
        return self.decoder.step(context, cache, depth, codes_BWd)

    def start_jagged(self, context: ContextKeys) -> tuple[Step, JaggedStep | None]:
        cache = BeamCache()

        def next_logits(depth: int, codes_Nd: Tensor, parent_N: Tensor, counts_B: Int64Array) -> Tensor:
            cache.flattened(parent_N)
            return self.step(context.asked_by(counts_B), cache, depth, codes_Nd[None])[0]

        return self._start(context, cache), next_logits

    def sequence_logits(self, context: ContextKeys, codes_BWL: Tensor) -> list[Tensor]:
        return self.decoder.sequence_logits(context, codes_BWL)

    def item_vectors(self, items_S: Tensor) -> Tensor:
        """[S, D] vectors of catalog positions: those of their codes."""
        return self.decoder.item_vectors(self.codes_IL[items_S].long())

    def summarize(self, chunks: ChunkBatch) -> Tensor:
        assert self.summaries is not None, "of a model that reads them"
        return self.summaries.of(chunks, self._chunk_vectors)

    def _chunk_vectors(self, chunks: ChunkBatch) -> Tensor:
        return self.added_to(self.item_vectors(chunks.items_E), chunks.items_E, chunks.labels)

    def after_summaries(
        self, batch: TensorBatch, tokens: JaggedLayout, tokens_MD: Tensor
    ) -> tuple[JaggedLayout, Tensor]:
        """What a decoder looks at: tokens of the events that are read one by one, behind the summaries of
        older ones, if the network has any.

        Args:
            tokens: of the rows of the batch that have any, in order.
        """
        if self.summaries is None:
            return tokens, tokens_MD
        return self.summaries.before(batch, tokens, tokens_MD, self._chunk_vectors)

    def prefix_of_targets(self, batch: TensorBatch, event_S: Tensor) -> Tensor | None:
        """[S, P, D] the instructions of the targets behind these events, if the network reads any."""
        prefix = self.instruction
        return None if prefix is None else prefix(prefix.of_targets(batch, event_S), self.item_vectors)

    def prefix_of_requests(self, batch: TensorBatch) -> Tensor | None:
        """[B, P, D] those of the rows of a batch to be ranked for."""
        prefix = self.instruction
        return None if prefix is None else prefix(prefix.of_requests(batch), self.item_vectors)

    def sequence_losses(
        self,
        start_SD: Tensor,
        codes_SL: Tensor,
        look: Look,
        keys_S: Tensor | None,
        rows: JaggedLayout,
        prefix_SPD: Tensor | None = None,
    ) -> Tensor:
        """[S] what `code_softmax` says of each sequence, and the balance of experts.

        Args:
            keys_S: of dropout; only while training.
            rows: which sequences belong to which row.
        """
        num_tokens = codes_SL.shape[1] + (0 if prefix_SPD is None else prefix_SPD.shape[1])
        keys_SQ = None if keys_S is None else level_keys(keys_S, num_tokens)
        logits, all_gates = self.decoder(start_SD, codes_SL, look, keys_SQ, prefix_SPD)
        losses_S = self.code_softmax.losses(logits, codes_SL)
        for gates in all_gates:
            losses_S = losses_S + self.decoder.balance_weight * balance_losses(gates, rows)
        return losses_S
