"""Causal language models of the package `transformers`: from settings or from a folder, never from a hub.

`transformers` is imported when a network is made, not before: the rest of this room does without it.
"""

from __future__ import annotations

import difflib
import importlib.util
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from rayrec.models.attention.jagged import JaggedLayout
from rayrec.models.base.meta_device import weights_are_meta
from rayrec.models.generative.transformers_attention import ATTENTION, PackedRows, register
from rayrec.platform.errors import InputError

SPECIAL_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")
"""Of a vocabulary that has codes alone there are none."""
WITHOUT_EFFECT = frozenset({"transformers_version", *SPECIAL_TOKENS})
"""Settings of a `generation_config.json` that would not change what constrained decoding gives."""


def network_from_settings(settings: Mapping[str, Any], num_codes: int, num_positions: int) -> nn.Module:
    """A network with random weights, whose vocabulary is the codes; token c is code c.

    Args:
        settings: of `transformers`, `model_type` among them; those of the vocabulary are ours.
        num_codes: codes of all levels.
        num_positions: longest row, in tokens.

    Raises:
        InputError: the package is missing, or there is no such network, or it cannot attend as we need.
    """
    transformers = _package()
    source = "model.backbone.network.settings"
    if own := sorted({"vocab_size", *SPECIAL_TOKENS} & set(settings)):
        raise InputError(f"{source}: {own[0]!r} follows from the semantic IDs; leave it out")
    known, model_type = _model_types(), settings.get("model_type")
    if model_type not in known:
        close = difflib.get_close_matches(str(model_type), known, n=1)
        hint = f"did you mean {close[0]!r}?" if close else "'qwen3' or 'llama', say"
        raise InputError(
            f"{source}.model_type: transformers {transformers.__version__} has no causal language model "
            f"{model_type!r}; {hint}"
        )
    ours: dict[str, Any] = {"vocab_size": num_codes, **dict.fromkeys(SPECIAL_TOKENS)}
    try:
        config = transformers.AutoConfig.for_model(
            **({"max_position_embeddings": num_positions} | dict(settings) | ours)
        )
        _without_dropout(config)
        network = transformers.AutoModelForCausalLM.from_config(
            config, attn_implementation=ATTENTION, dtype=torch.float32
        )
    except Exception as error:
        raise InputError(
            f"{source}: transformers {transformers.__version__} makes no network of {dict(settings)}: {error}"
        ) from error
    return _checked(network, num_positions, source)


def network_from_folder(folder: str | Path, num_codes: int, num_positions: int) -> tuple[nn.Module, int]:
    """(A saved network with new tokens for the codes behind its vocabulary, the first of these).

    Weights are float32, as training needs them; on the meta device (`rayrec.models.base.meta_device`), the
    folder's are not read. Its `generation_config.json` has no say, see `ignored_generation_settings`.

    Raises:
        InputError: as `network_from_settings`; or there is no such folder. A name of a hub is none: nothing
            is downloaded.
    """
    transformers = _package()
    if not (Path(folder) / "config.json").is_file():
        raise InputError(
            f"model.backbone.network.folder: {folder} is no folder with a config.json of transformers; "
            "nothing is downloaded from a hub: save the model to a folder first"
        )
    _ = ignored_generation_settings(folder)  # or it refuses the file, by its name
    try:
        config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True)
        _without_dropout(config)
        as_ours = {"attn_implementation": ATTENTION, "dtype": torch.float32}
        network: Any
        if weights_are_meta():
            network = transformers.AutoModelForCausalLM.from_config(config, **as_ours)
        else:
            network = transformers.AutoModelForCausalLM.from_pretrained(
                folder,
                config=config,
                local_files_only=True,
                use_safetensors=True,  # a pickle could run code
                **as_ours,
            )
    except Exception as error:
        raise InputError(
            f"model.backbone.network.folder: transformers {transformers.__version__} cannot load a causal "
            f"language model from {folder}: {error}"
        ) from error
    first_token = network.get_input_embeddings().num_embeddings
    network.resize_token_embeddings(first_token + num_codes, mean_resizing=False)
    return _checked(network, num_positions, str(folder)), first_token


def _package() -> Any:
    if importlib.util.find_spec("transformers") is None:
        raise InputError(
            "a causal language model needs the package transformers, which cannot be imported; install the "
            "extra with: pip install 'rayrec[hf]'"
        )
    import transformers

    register()
    return transformers


def _model_types() -> list[str]:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def _without_dropout(config: Any) -> None:
    """Architectures spell it in many ways; all of them are probabilities whose names end alike."""
    for name, value in config.to_dict().items():
        if isinstance(value, float) and name.endswith(("dropout", "pdrop", "dropout_rate", "dropout_prob")):
            setattr(config, name, 0.0)


def ignored_generation_settings(folder: str | Path) -> str | None:
    """A sentence on what a folder's `generation_config.json` sets in vain; None if that is nothing.

    Raises:
        InputError: the file cannot be read, or is no object of JSON.
    """
    path = Path(folder) / "generation_config.json"
    if not path.is_file():
        return None
    try:
        settings = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise InputError(f"{path}: cannot be read as JSON: {error}; mend it, or remove it") from error
    if not isinstance(settings, dict):
        raise InputError(
            f"{path}: expected an object of settings, got {json.dumps(settings)[:40]}; mend it, or remove it"
        )
    ignored = sorted(name for name in settings if not name.startswith("_") and name not in WITHOUT_EFFECT)
    if not ignored:
        return None
    verb = "is" if len(ignored) == 1 else "are"
    return (
        f"{path}: {', '.join(ignored)} {verb} ignored; how items are decoded follows from the settings of "
        "the run alone"
    )


def _checked(network: Any, num_positions: int, source: str) -> nn.Module:
    """The network, unless it is longer histories that it cannot read, or more than ours that it computes."""
    known_positions = getattr(network.config, "max_position_embeddings", None)
    if known_positions is not None and known_positions < num_positions:
        raise InputError(
            f"{source}: the network knows {known_positions} positions, and a history has up to "
            f"{num_positions} codes; lower model.backbone.max_length or raise max_position_embeddings"
        )
    for module in network.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    weight = network.get_input_embeddings().weight
    if not weight.is_meta:
        was_training = network.training
        network.eval()
        _check_same_logits(network, len(weight), num_positions, source)
        network.train(was_training)
    return network


@torch.no_grad()
def _check_same_logits(network: Any, vocabulary_size: int, num_positions: int, source: str) -> None:
    """Refuse a network whose own logits differ from those that come of our attention and its output matrix.

    Some have other things than attention, or factors and caps, of which we would know nothing.
    """
    name = type(network).__name__
    head = network.get_output_embeddings()
    num_layers = getattr(network.config, "num_hidden_layers", None)
    if getattr(head, "weight", None) is None or num_layers is None:
        what = "layers of its own" if num_layers is None else "matrix of outputs"
        raise InputError(f"{source}: {name} has no {what} that RayRec knows of; choose another model_type")
    num_tokens = min(8, num_positions)
    places = torch.arange(num_tokens, device=head.weight.device)
    tokens = (vocabulary_size - 1 - places * max(1, vocabulary_size // num_tokens)).clamp(min=0)[None]
    rows = PackedRows(JaggedLayout.even(1, num_tokens, places.device), keep=True)
    rows.num_tokens = num_positions  # a window too narrow for the longest row is to be refused here and now
    forward = {"input_ids": tokens, "position_ids": places[None], "use_cache": False}
    try:
        hidden = network.base_model(**forward, attending=rows).last_hidden_state
    except InputError:
        raise
    except Exception as error:  # whatever the code of an architecture raises when it is called in our way
        raise _not_adapted(source, name, error) from error
    if sorted(rows.keys) != list(range(num_layers)):
        raise InputError(
            f"{source}: {name} has {num_layers} layers, of which {len(rows.keys)} attend by the attention "
            "interface of transformers; choose another model_type"
        )
    if getattr(network.config, "final_logit_softcapping", None) is not None:
        raise InputError(f"{source}: {name} caps its logits; set final_logit_softcapping to null")
    ours = nn.functional.linear(hidden, head.weight, getattr(head, "bias", None))
    try:
        network.set_attn_implementation("eager")
        theirs = network(**forward).logits
        network.set_attn_implementation(ATTENTION)
    except Exception as error:
        raise _not_adapted(source, name, error) from error
    difference, spread = (ours - theirs).abs().max().item(), theirs.std().item()
    if not difference <= 1e-3 * spread + 1e-6:
        raise InputError(
            f"{source}: the logits of {name} are off by {difference:.3g} (their spread is {spread:.3g}) when "
            "RayRec computes them: it does more than attention and a matrix of outputs; choose another "
            "model_type"
        )


def _not_adapted(source: str, name: str, error: Exception) -> InputError:
    said = " ".join(str(error).split())[:300]
    return InputError(
        f"{source}: {name} cannot be adapted ({type(error).__name__}: {said}); choose another model_type"
    )
