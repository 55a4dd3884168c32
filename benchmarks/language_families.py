"""Which families of language models can be tuned, and whether their numbers are those of `transformers`.

    python -m benchmarks.language_families        # the table
    rayrec bench language-families                 # its bars

A small network of each family with random weights. Loss and gradients of rows of tokens by `LanguageModel`,
packed where our attention fits the family and padded where it does not, against the network's own forward
pass over padded rows with its plain attention (`eager`): the largest difference of a gradient, over the
largest gradient of the same weight (or a thousandth of the largest of all, where that is more: some are zero
but for rounding). Then how a run of two trainers may split the family (`training.parallel`): `tensor` by
the plan that `transformers` has for it, if heads and widths divide (a run compares what the split network
says before it begins); `fsdp2` block by block, which needs no plan. Families whose code is no part of
`transformers` would have to be run from their folder, which RayRec never does.

It writes the record `benchmarks/quality/language-families.json` with the date. Bars:

* `language-families`: families that can be tuned, over 24.
* `language-families-packed`: 1e-5 over the largest difference of those on packed rows.
* `language-families-padded`: the same of those on padded ones.

Where a family's difference is above 1e-5, its limit is what the last bit of each logit, rounded up or down by
chance, changes in the gradients of transformers itself: some are sums in which almost everything cancels.
"""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.harness import Bar, BenchOptions
from benchmarks.quality_page import RECORDS
from rayrec.models.attention.jagged import JaggedLayout
from rayrec.models.language.config import LanguageModelConfig
from rayrec.models.language.language_model import LanguageModel
from rayrec.models.language.tensor_parallel import check_divides
from rayrec.models.language.text_program import build_language_model
from rayrec.models.language.text_tensors import TextTensors
from rayrec.models.language.vocabulary import Vocabulary
from rayrec.models.program.sharding import blocks_of
from rayrec.platform.errors import InputError

RECORD = RECORDS / "language-families.json"
VOCABULARY = Vocabulary(96, 96, 0, (1,))
LENGTHS = (5, 2, 17, 9)
WIDTH = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
GROUPS = {**WIDTH, "num_key_value_heads": 2, "head_dim": 8}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
ROUTED = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "n_group": 1,
    "topk_group": 1,
}
OPT = {"hidden_size": 32, "word_embed_proj_dim": 32, "ffn_dim": 48}
TOLERANCE = 1e-5
ROUNDINGS = 4
"""Tries of the logits' last bits."""
NUM_TRAINERS, LEAST = 2, 24

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": GROUPS,
    "qwen2": GROUPS,
    "qwen3": GROUPS,
    "qwen3_moe": {**GROUPS, **EXPERTS},
    "mistral": GROUPS,
    "mixtral": {**GROUPS, "num_local_experts": 4},
    "gemma": GROUPS,
    "gemma2": GROUPS,
    "gemma3_text": GROUPS,
    "glm": GROUPS,
    "glm4": GROUPS,
    "glm4_moe": {**GROUPS, **ROUTED},
    "bloom": {"hidden_size": 32, "n_layer": 2, "n_head": 4},
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4},
    "gpt_neox": WIDTH,
    "opt": {**OPT, "num_hidden_layers": 2, "num_attention_heads": 4},
    "phi": WIDTH,
    "phi3": WIDTH,
    "starcoder2": GROUPS,
    "olmo2": GROUPS,
    "olmo3": GROUPS,
    "smollm3": GROUPS,
    "granite": GROUPS,
    "internlm3": GROUPS,
    "hunyuan_v1_dense": GROUPS,
    "ernie4_5": GROUPS,
    "seed_oss": GROUPS,
    "exaone4": GROUPS,
    "cohere": GROUPS,
    "cohere2": GROUPS,
    "stablelm": GROUPS,
    "nemotron": GROUPS,
    "gpt_oss": {**GROUPS, "num_local_experts": 4},
    "deepseek_v3": {
        **WIDTH, "num_key_value_heads": 4, "kv_lora_rank": 8, "q_lora_rank": 8, "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 8, "v_head_dim": 8, **ROUTED, "first_k_dense_replace": 1,
    },
    "llama4_text": GROUPS,
    "qwen3_next": GROUPS,
    "minimax": GROUPS,
}  # fmt: skip
"""Type of a configuration of transformers to what makes it small."""

JD_NAMES = {
    "qwen2": "Qwen 1.5, 2, 2.5",
    "glm": "GLM-4",
    "glm4": "GLM-4",
    "llama": "Llama, Yi",
    "bloom": "Bloom-z",
    "gemma": "Gemma",
    "mistral": "Mistral",
}
"""Families that JD's matrix of base models names."""
OTHER_CODE = {
    "ChatGLM 2, 3": "its code comes with its folder",
    "Baichuan 2": "its code comes with its folder",
}


@dataclass(frozen=True)
class Found:
    """What came of a family."""

    family: str
    rows: str | None
    """packed, padded, or None where it cannot be tuned."""
    why_not_packed: str | None
    loss_error: float | None
    """Relative."""
    gradient_error: float | None
    tensor: str = ""
    """`yes`, or why two trainers cannot split its layers."""
    fsdp2: str = ""
    """How many blocks are gathered one after the other, or that the network is gathered as a whole."""
    pipeline_plan: bool = False
    """Whether transformers has one; RayRec trains no pipelines, and hands such models over."""
    rounding: float | None = None
    """What the last bits of the logits change in their gradients, where `gradient_error` is above 1e-5."""

    @property
    def over_limit(self) -> float:
        """The larger error over what it may be; 0 if nothing was compared."""
        limit = max(TOLERANCE, self.rounding or 0.0)
        return max((self.loss_error or 0.0) / TOLERANCE, (self.gradient_error or 0.0) / limit)


def bench(options: BenchOptions) -> list[Bar]:
    found = _measured()
    return [
        Bar.once("language-families", sum(one.rows is not None for one in found) / LEAST, str(LEAST), 1.0),
        *(
            Bar.once(f"language-families-{rows}", 1 / _worst(found, rows), "transformers", 1.0)
            for rows in ("packed", "padded")
        ),
    ]


def measure(family: str) -> Found:
    """Build a family's network and compare it with its own code."""
    try:
        model, why_not = _built(family, "packed"), None
    except InputError as error:
        why_not = _short(error)
        try:
            model = _built(family, "padded")
        except InputError as further:
            return Found(family, None, _short(further), None, None)
    rows = "packed" if model.packed else "padded"
    try:
        loss_error, gradient_error = compare(model)
        rounding = rounding_of(model) if gradient_error > TOLERANCE else None
    except Exception as error:  # whatever the code of a family raises
        return Found(family, None, f"{type(error).__name__}: {_short(error)}", None, None)
    return Found(family, rows, why_not, loss_error, gradient_error, *_parallel(model), rounding)


def compare(model: LanguageModel) -> tuple[float, float]:
    """(Relative difference of the losses, and of the gradients, as above)."""
    batch = _batch()
    ours, gradients = _gradients(model, lambda: model.loss(batch))
    theirs, expected = _gradients(model, lambda: _their_loss(model.network, batch))
    return abs(ours - theirs) / theirs, _largest_difference(gradients, expected)


def rounding_of(model: LanguageModel) -> float:
    """The largest relative difference of their gradients with each logit's last bit rounded up or down."""
    batch = _batch()
    _, expected = _gradients(model, lambda: _their_loss(model.network, batch))
    worst = 0.0
    for seed in range(ROUNDINGS):
        generator = torch.Generator().manual_seed(seed)

        def rounded(_module: Any, _input: Any, logits: Tensor, generator: Any = generator) -> Tensor:
            ends = torch.where(torch.rand(logits.shape, generator=generator) < 0.5, torch.inf, -torch.inf)
            return logits + (torch.nextafter(logits, ends) - logits).detach()

        hook = model.network.get_output_embeddings().register_forward_hook(rounded)
        try:
            _, found = _gradients(model, lambda: _their_loss(model.network, batch))
        finally:
            hook.remove()
        worst = max(worst, _largest_difference(found, expected))
    return worst


def _batch() -> TextTensors:
    random = np.random.default_rng(0)
    tokens_N = torch.from_numpy(random.integers(2, VOCABULARY.num_tokens, sum(LENGTHS)))
    layout = JaggedLayout.from_offsets(np.cumsum([0, *LENGTHS]), torch.device("cpu"))
    return TextTensors(tokens_N, layout.place_N > 0, layout, {}, {})


def _gradients(model: LanguageModel, loss_of: Callable[[], Tensor]) -> tuple[float, dict[str, Tensor | None]]:
    """(The loss, and by name the gradients of it)."""
    model.eval()  # some families add a loss of their own, or noise, in training
    model.zero_grad()
    loss = loss_of()
    loss.backward()
    return loss.item(), {name: _copy(weight.grad) for name, weight in model.named_parameters()}


def _largest_difference(found: dict[str, Tensor | None], expected: dict[str, Tensor | None]) -> float:
    worst = 0.0
    least = 1e-3 * max(gradient.abs().max().item() for gradient in expected.values() if gradient is not None)
    for name, theirs in expected.items():
        ours = found[name]
        if theirs is None or ours is None:
            assert theirs is None or not theirs.any(), name
            assert ours is None or not ours.any(), name
            continue
        worst = max(worst, ((ours - theirs).abs().max() / theirs.abs().max().clamp(min=least)).item())
    return worst


def _built(family: str, rows: str) -> LanguageModel:
    settings = {"model_type": family, **FAMILIES[family]}
    config = {"name": "language_model", "base": {"kind": "settings", "settings": settings}}
    parsed = LanguageModelConfig.parse(config | {"max_length": 32, "rows": rows, "attention": "reference"})
    model = build_language_model(parsed, VOCABULARY, seed=0)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in model.parameters():  # large enough for every part to matter
            weight.add_(0.1 * torch.randn(weight.shape, generator=generator))
    return model


def _their_loss(network: Any, batch: TextTensors) -> Tensor:
    network.set_attn_implementation("eager")
    tokens_BT = batch.layout.pad(batch.tokens_N)
    real_BT = batch.layout.pad(torch.ones_like(batch.tokens_N))
    labels_BT = torch.where(real_BT == 1, tokens_BT, -100)
    logits_BTV = network(input_ids=tokens_BT, attention_mask=real_BT, use_cache=False).logits
    loss: Tensor = torch.nn.functional.cross_entropy(
        logits_BTV[:, :-1].flatten(0, 1).float(), labels_BT[:, 1:].flatten(), reduction="sum"
    )
    return loss


def _parallel(model: LanguageModel) -> tuple[str, str, bool]:
    """What two trainers can do: (tensor, fsdp2, whether there is a plan of a pipeline)."""
    network = model.network
    try:
        check_divides(network, NUM_TRAINERS, "model.base")
        tensor = "yes"
    except InputError as error:
        no_plan = "has no plan" in str(error)
        tensor = "no plan" if no_plan else _short(error)
    blocks = len(list(blocks_of(model)))
    pipeline = network.config.base_model_pp_plan or getattr(network, "_pp_plan", None)
    return tensor, f"{blocks} blocks" if blocks else "as a whole", bool(pipeline)


def _copy(gradient: Tensor | None) -> Tensor | None:
    return None if gradient is None else gradient.clone()


def _short(error: Exception) -> str:
    said = " ".join(str(error).split()).removeprefix("model.base.settings: ")
    return said.split("; choose another")[0][:200]


def table(found: Sequence[Found]) -> str:
    """As the benchmark page shows it."""
    lines = [
        "| family | JD's name | rows | loss | gradients | tensor | fsdp2 | why not packed |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for one in found:
        errors = ["", ""]
        if one.loss_error is not None and one.gradient_error is not None:
            errors = [f"{one.loss_error:.0e}", f"{one.gradient_error:.0e}"]
            if one.rounding is not None:
                errors[1] += f" (last bits: {one.rounding:.0e})"
        cells = [f"`{one.family}`", JD_NAMES.get(one.family, ""), one.rows or "**none**", *errors]
        lines.append(f"| {' | '.join([*cells, one.tensor, one.fsdp2, one.why_not_packed or ''])} |")
    for name, why in OTHER_CODE.items():
        lines.append(f"| {name} | {name} | **none** | | | | | {why} |")
    return "\n".join(lines)


def _measured() -> list[Found]:
    """All families, written to the record."""
    import transformers

    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    found = [measure(family) for family in FAMILIES]
    made = {
        "date": datetime.now(UTC).date().isoformat(),
        "transformers": transformers.__version__,
        "torch": torch.__version__,
        "families": [asdict(one) for one in found],
    }
    RECORD.write_text(json.dumps(made, indent=2) + "\n")
    return found


def _worst(found: Sequence[Found], rows: str) -> float:
    return max(one.over_limit for one in found if one.rows == rows)


def main() -> int:
    found = _measured()
    print(table(found))
    for rows in ("packed", "padded"):
        count = sum(one.rows == rows for one in found)
        print(
            f"{count} families on {rows} rows, at most {_worst(found, rows):.2f} of the limit",
            file=sys.stderr,
        )
    return int(max(_worst(found, rows) for rows in ("packed", "padded")) > 1)


if __name__ == "__main__":
    sys.exit(main())
