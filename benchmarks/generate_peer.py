"""The same causal language model, as Hugging Face transformers would have it used."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rayrec.models.generative.causal_lm import CausalLmBackbone
from rayrec.models.generative.recommender import GenerativeRecommender
from rayrec.platform.arrays import Int64Array


class GeneratePeer:
    """The network and weights of a model of ours, whose items come from `generate`."""

    def __init__(self, model: GenerativeRecommender) -> None:
        import transformers

        assert isinstance(model.backbone, CausalLmBackbone)
        ours = model.backbone.network
        config = type(ours.config).from_dict(ours.config.to_dict())
        self.network: Any = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
        self.network.load_state_dict(ours.state_dict())
        self.network.eval()
        self._tokens_IL = model.backbone.tokens_IL.numpy()
        self._item_of = {tuple(tokens): item for item, tokens in enumerate(self._tokens_IL.tolist())}
        children: dict[tuple[int, ...], set[int]] = {}
        for tokens in self._tokens_IL.tolist():
            for level, token in enumerate(tokens):
                children.setdefault(tuple(tokens[:level]), set()).add(token)
        self._children = {prefix: torch.tensor(sorted(tokens)) for prefix, tokens in children.items()}

    def generate(self, histories: Sequence[Int64Array], **options: Any) -> Any:
        """Call `generate` for histories of catalog positions, padded on the left.

        Args:
            options: of `generate`: how sequences are chosen, and how many.
        """
        num_levels = self._tokens_IL.shape[1]
        longest = num_levels * max(map(len, histories))
        ids_BT = torch.zeros(len(histories), longest, dtype=torch.int64)
        mask_BT = torch.zeros_like(ids_BT)
        for row, items in enumerate(histories):
            tokens = torch.from_numpy(self._tokens_IL[items].ravel())
            ids_BT[row, longest - len(tokens) :] = tokens
            mask_BT[row, longest - len(tokens) :] = 1
        children = self._children

        def allowed(_: int, sequence: Tensor) -> Tensor:
            return children[tuple(sequence[longest:].tolist())]

        return self.network.generate(
            input_ids=ids_BT,
            attention_mask=mask_BT,
            max_new_tokens=num_levels,
            prefix_allowed_tokens_fn=allowed,
            renormalize_logits=True,
            use_cache=True,
            pad_token_id=0,
            **options,
        )

    def items(self, sequences: Tensor, num_histories: int) -> Int64Array:
        """[B, N] catalog positions of the sequences that `generate` returned."""
        codes = sequences[:, -self._tokens_IL.shape[1] :].tolist()
        return np.array([self._item_of[tuple(tokens)] for tokens in codes]).reshape(num_histories, -1)
