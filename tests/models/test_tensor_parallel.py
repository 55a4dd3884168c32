"""Ranks that compute each layer together against one process, over gloo; and what they cannot share.

The rule: the same items, and scores that are equal to 1e-5; sums over ranks round otherwise than one product.
"""

from __future__ import annotations

import copy
import dataclasses
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rayrec.models.base.cache_sizes import CacheSizes
from rayrec.models.base.config import QuantizationConfig
from rayrec.models.program.fused_sums import fuse_sums
from rayrec.models.quantization.linear import with_quantized_layers
from rayrec.models.sequence.sequence_model import SequenceModel
from rayrec.models.sequence.sequence_program import SequenceProgram
from rayrec.pipelines.inference.tensor_parallel import check_split, split
from rayrec.platform.errors import InputError
from tests.models.generative import prompt_models
from tests.models.networks import CPU, table_rows
from tests.models.recipes import NUM_ITEMS, SETTINGS, features_of, model_of
from tests.models.two_trainers import in_processes

OURS = (
    "sasrec",
    "sampled",
    "bsarec",
    "hstu",
    "hstu, dense",
    "gnn",
    "prefix_decoder",
    "prefix_decoder, sparse",
    "light_decoder",
    "lazy_decoder",
    "encoder_decoder",
    "lazy_decoder, instructed",
    "encoder_decoder, instructed",
    "lazy_decoder, long",
    "encoder_decoder, long",
)
OF_TRANSFORMERS = ("causal_lm",)
INSTRUCTION = {"scenario": 1, "behavior": 2, "trigger_item": 3}


def with_large_weights(model: SequenceModel) -> SequenceModel:
    """Large enough for every part of a network to matter."""
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator))
    return model


def program_of(model: SequenceModel) -> SequenceProgram:
    made = SequenceProgram(model, SETTINGS, CPU, 5)
    if made.table_of_catalog is not None:
        made.take_catalog(np.arange(NUM_ITEMS), rows_of_catalog)
    return made


def rows_of_catalog(ids_M: np.ndarray) -> np.ndarray:
    return np.sin(np.arange(8) + ids_M[:, None] % 97).astype(np.float32)


def asked_of(name: str):
    """A batch of several rows and its rows of tables."""
    (features,) = features_of(name)
    parts = {part: np.full(len(features.offsets_B1) - 1, code) for part, code in INSTRUCTION.items()}
    features = dataclasses.replace(features, instruction=parts)
    return features, table_rows(features)


def check_equal(parts: SequenceProgram, whole: SequenceProgram, features, rows, name: str) -> None:
    num_rows = len(features.offsets_B1) - 1
    excluded_BE = np.tile([0, -1], (num_rows, 1))
    for k, excluded, beams_B in (
        (3, None, None),
        (5, excluded_BE, None),
        (4, None, [4 + row % 3 for row in range(num_rows)]),
    ):
        found = parts.recommend(features, rows, k, excluded, beams_B)
        expected = whole.recommend(features, rows, k, excluded, beams_B)
        assert found.items_BK.tolist() == expected.items_BK.tolist(), name
        np.testing.assert_allclose(found.scores_BK, expected.scores_BK, rtol=1e-5, atol=1e-5, err_msg=name)


def held(model: torch.nn.Module) -> int:
    return sum(getattr(weight, "to_local", lambda w=weight: w)().numel() for weight in model.parameters())


def _ranks_answer_as_one_process_does(rank: int, folder: Path) -> None:
    for name in (*OURS, *OF_TRANSFORMERS):
        model = with_large_weights(model_of(name))
        whole, parts = program_of(model), program_of(copy.deepcopy(model))
        split(parts, name)
        assert held(parts.model) < held(whole.model), name
        check_equal(parts, whole, *asked_of(name), name)
    _compiled_layers_have_their_sums_in_the_graphs()
    _what_was_read_of_users_is_kept_in_parts()
    _prompts_are_read_together()


def _compiled_layers_have_their_sums_in_the_graphs() -> None:
    model = with_large_weights(model_of("hstu, dense"))
    whole, parts = program_of(model), program_of(copy.deepcopy(model))
    split(parts, "hstu")
    sums: list[str] = []

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        sums.extend(str(node.target) for node in graph.graph.nodes if "all_reduce" in str(node.target))
        return graph

    assert fuse_sums(parts.model, backend) == 4  # two methods of each of two layers
    check_equal(parts, whole, *asked_of("hstu, dense"), "compiled")
    assert sums


def _what_was_read_of_users_is_kept_in_parts() -> None:
    for name, changed in (("prefix_decoder", {"user_embedding": False}), ("causal_lm", {})):
        model = with_large_weights(model_of(name, **changed))
        whole, parts = program_of(model), program_of(copy.deepcopy(model))
        split(parts, name)
        kept, alone = (each.model.use_prefix_cache(CacheSizes(1 << 20)) for each in (parts, whole))
        features, _ = asked_of(name)
        features = dataclasses.replace(features, lookups={})
        for _ in range(2):
            check_equal(parts, whole, features, {}, name)
        assert kept.num_reused == alone.num_reused > 0
        assert kept.num_bytes < alone.num_bytes


def _prompts_are_read_together() -> None:
    model = prompt_models.model()
    whole, parts = program_of(model), program_of(copy.deepcopy(model))
    split(parts, "item_language")
    asked = [(tokens[:given], given) for tokens, given in prompt_models.ROWS if given > 2]
    features = prompt_models.features(asked)
    check_equal(parts, whole, features, prompt_models.users_of(features), "item_language")


@pytest.mark.slow
def test_ranks_answer_as_one_process_does(tmp_path):
    """In one test, since two processes take long to start."""
    pytest.importorskip("transformers")
    in_processes(_ranks_answer_as_one_process_does, tmp_path)


@pytest.mark.parametrize("name", OURS)
def test_heads_that_do_not_divide_are_refused_by_name(name):
    layer = r"(Block|FrequencyBlock|HstuLayer|CrossDecoderLayer|ExpertLayer)"
    with pytest.raises(
        InputError, match=rf"^runs/a: dense\.tensor_parallel: {layer} has num_heads 2, which 3 ranks"
    ):
        check_split(model_of(name), 3, "runs/a")


def test_widths_that_do_not_divide_are_refused_by_name():
    model = model_of("sasrec", backbone={"dim": 12, "num_heads": 3, "feedforward_dim": 16})

    with pytest.raises(InputError, match=r"Block has feedforward_dim 16, which 3 ranks cannot share equally"):
        check_split(model, 3, "runs/a")


def test_heads_of_networks_of_transformers_that_do_not_divide_are_refused_by_name():
    pytest.importorskip("transformers")
    with pytest.raises(InputError, match=r"Qwen3ForCausalLM has num_attention_heads 2, which 3 ranks.*1$"):
        check_split(model_of("causal_lm"), 3, "runs/a")


def test_a_network_without_a_plan_is_refused_by_name():
    pytest.importorskip("transformers")
    settings = {"model_type": "gpt2", "n_embd": 16, "n_layer": 1, "n_head": 2}
    network = {"kind": "transformers", "settings": settings}
    model = model_of("causal_lm", backbone={"max_length": 6, "network": network})

    with pytest.raises(InputError, match=r"no plan by which GPT2LMHeadModel could be split \(dense\.tensor"):
        check_split(model, 2, "runs/a")


def test_adapters_are_refused():
    pytest.importorskip("peft")
    with pytest.raises(InputError, match=r"not the adapters beside them \(model\.lora\)"):
        check_split(prompt_models.model(lora={"rank": 2}), 2, "runs/a")


@pytest.mark.parametrize(
    ("name", "layers"), [("sasrec", "qkv"), ("causal_lm", r"[qo]_proj"), ("light_decoder", r"up\.\d+")]
)
def test_quantized_layers_are_refused(name, layers):
    if name in OF_TRANSFORMERS:
        pytest.importorskip("transformers")
    model = model_of(name)
    quantized = tuple(full for full, _ in model.named_modules() if re.search(rf"\.{layers}$", full))
    assert quantized
    with_quantized_layers(model, QuantizationConfig(scheme="w8a8", modules=quantized))

    with pytest.raises(InputError, match=r"^runs/a: dense\.tensor_parallel: .* of this run are quantized"):
        check_split(model, 2, "runs/a")


def test_a_network_of_which_nothing_could_be_compiled_with_its_sums_is_refused():
    pytest.importorskip("transformers")
    check_split(model_of("hstu"), 2, "runs/a", fuses=True)
    check_split(model_of("causal_lm"), 2, "runs/a")

    with pytest.raises(InputError, match=r"^runs/a: dense\.fused_communication .* leave fused_communication"):
        check_split(model_of("causal_lm"), 2, "runs/a", fuses=True)


def test_a_model_without_layers_to_share_is_refused():
    with pytest.raises(InputError, match="Linear has no layers that ranks could share"):
        check_split(torch.nn.Linear(2, 2), 2, "runs/a")
