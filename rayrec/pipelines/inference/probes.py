"""Logits of a few prompts, by which a network is known again: what another program made of it, and whether
what is read is what was written.

Axes: P prompts, N tokens of all of them, V tokens of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import safetensors
import safetensors.numpy
import torch

from rayrec.platform.arrays import Float32Array, Int64Array
from rayrec.platform.errors import InputError

NUM_PROMPTS = 8
MOST_TOKENS = 64
"""Of a prompt: its last ones."""
RELATIVE_TOLERANCE = 1e-3
"""Of the spread of logits: what another machine, or another number of threads, may differ by."""


@dataclass(frozen=True)
class Probes:
    """Prompts, and the logits of the token behind each."""

    tokens_N: Int64Array
    ends_P: Int64Array
    logits_PV: Float32Array

    @classmethod
    def of(cls, network: Any, prompts: Sequence[Int64Array]) -> Probes:
        """Ask a network of transformers, which reads padded rows."""
        cut = [prompt[-MOST_TOKENS:] for prompt in prompts[:NUM_PROMPTS]]
        assert cut, "there is a prompt"
        assert all(map(len, cut)), "no prompt is empty"
        ends_P = np.cumsum([len(prompt) for prompt in cut])
        return cls(np.concatenate(cut), ends_P, logits_of(network, cut))

    @property
    def prompts(self) -> list[Int64Array]:
        return np.split(self.tokens_N, self.ends_P[:-1])

    @property
    def spread(self) -> float:
        """Standard deviation of all logits."""
        return float(self.logits_PV.std())

    def difference(self, network: Any) -> float:
        """The largest difference of a logit, as a share of their spread.

        Raises:
            InputError: logits are not finite.
        """
        found_PV = logits_of(network, self.prompts)
        if not np.isfinite(found_PV).all():
            number = int((~np.isfinite(found_PV)).any(axis=1).argmax())
            raise InputError(f"its logits of prompt {number + 1} are not finite: training has diverged")
        return float(np.abs(found_PV - self.logits_PV).max()) / max(self.spread, 1e-30)

    def save(self, path: Path) -> None:
        arrays: dict[str, np.ndarray] = {
            "tokens": self.tokens_N,
            "ends": self.ends_P,
            "logits": self.logits_PV,
        }
        safetensors.numpy.save_file(arrays, path)

    @classmethod
    def load(cls, path: Path) -> Probes:
        """What was saved.

        Raises:
            InputError: the file is missing, or no such file.
        """
        try:
            arrays = safetensors.numpy.load_file(path)
            return cls(arrays["tokens"], arrays["ends"], arrays["logits"])
        except (OSError, KeyError, safetensors.SafetensorError) as error:
            raise InputError(f"{path}: cannot be read ({error}); write the hand-over again") from error


@torch.inference_mode()
def logits_of(network: Any, prompts: Sequence[Int64Array]) -> Float32Array:
    """[P, V] logits behind each prompt, which is read alone."""
    device = network.get_input_embeddings().weight.device
    was_training = network.training
    network.eval()
    try:
        rows = [
            network(input_ids=torch.from_numpy(prompt)[None].to(device), use_cache=False).logits[0, -1]
            for prompt in prompts
        ]
    finally:
        network.train(was_training)
    found: Float32Array = torch.stack(rows).float().cpu().numpy()
    return found
