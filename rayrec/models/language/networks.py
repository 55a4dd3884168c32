"""Causal language models of the package `transformers`: from settings or from a folder, never from a hub.

`transformers` is imported when a network is made, not before: the rest of this room does without it.
"""

from __future__ import annotations

import contextlib
import difflib
import importlib.util
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from rayrec.models.attention.jagged import JaggedLayout
from rayrec.models.base.meta_device import weights_are_meta
from rayrec.models.language.attention import ATTENTION, PackedRows, register
from rayrec.platform.errors import InputError

SPECIAL_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")
"""Of a vocabulary that has codes alone there are none."""
WITHOUT_EFFECT = frozenset({"transformers_version", *SPECIAL_TOKENS})
"""Settings of a `generation_config.json` that would not change what constrained decoding gives."""


@dataclass(frozen=True)
class Wanted:
    """What a network has to be able to do, and the setting that asked for it."""

    num_positions: int
    """Longest row, in tokens."""
    setting: str = "model.backbone.network"
    """For messages."""
    packed: bool = True
    """Whether its attention is ours, over rows that stand one after the other; else that of transformers,
    over rows that are padded: slower, and for networks whose attention or logits ours are not."""

    otherwise: str = "choose another model_type"
    """What to do where a network does not fit, for messages."""

    @property
    def attention(self) -> str | None:
        """None: what transformers takes for the network."""
        return ATTENTION if self.packed else None


def network_from_settings(settings: Mapping[str, Any], num_tokens: int, wanted: Wanted) -> nn.Module:
    """A network with random weights and a vocabulary of so many tokens.

    Args:
        settings: of `transformers`, `model_type` among them; those of the vocabulary are ours.

    Raises:
        InputError: the package is missing, or there is no such network, or it cannot attend as we need.
    """
    transformers = _package()
    source = f"{wanted.setting}.settings"
    if own := sorted({"vocab_size", *SPECIAL_TOKENS} & set(settings)):
        raise InputError(f"{source}: {own[0]!r} follows from the tokens there are; leave it out")
    known, model_type = _model_types(), settings.get("model_type")
    if model_type not in known:
        close = difflib.get_close_matches(str(model_type), known, n=1)
        hint = f"did you mean {close[0]!r}?" if close else "'qwen3' or 'llama', say"
        raise InputError(
            f"{source}.model_type: transformers {transformers.__version__} has no causal language model "
            f"{model_type!r}; {hint}"
        )
    ours: dict[str, Any] = {"vocab_size": num_tokens, **dict.fromkeys(SPECIAL_TOKENS)}
    try:
        config = transformers.AutoConfig.for_model(
            **({"max_position_embeddings": wanted.num_positions} | dict(settings) | ours)
        )
        _without_dropout(config)
        network = transformers.AutoModelForCausalLM.from_config(
            config, attn_implementation=wanted.attention, dtype=torch.float32
        )
    except Exception as error:
        raise InputError(
            f"{source}: transformers {transformers.__version__} makes no network of {dict(settings)}: {error}"
        ) from error
    return _checked(network, wanted, source)


def network_from_folder(folder: str | Path, wanted: Wanted, dtype: torch.dtype = torch.float32) -> nn.Module:
    """A saved network.

    Weights are float32 by default, as training needs them; on the meta device
    (`rayrec.models.base.meta_device`), the folder's are not read. Its `generation_config.json` has no say,
    see `ignored_generation_settings`.

    Raises:
        InputError: as `network_from_settings`; or there is no such folder. A name of a hub is none: nothing
            is downloaded.
    """
    transformers = _package()
    if not (Path(folder) / "config.json").is_file():
        raise InputError(
            f"{wanted.setting}.folder: {folder} is no folder with a config.json of transformers; "
            "nothing is downloaded from a hub: save the model to a folder first"
        )
    _ = ignored_generation_settings(folder)  # or it refuses the file, by its name
    try:
        config = transformers.AutoConfig.from_pretrained(
            folder, local_files_only=True, trust_remote_code=False
        )
        _without_dropout(config)
        as_ours = {"attn_implementation": wanted.attention, "dtype": dtype}
        network: Any
        missing: list[str] = []
        if weights_are_meta():
            network = transformers.AutoModelForCausalLM.from_config(config, **as_ours)
        else:
            network, read = transformers.AutoModelForCausalLM.from_pretrained(
                folder,
                config=config,
                local_files_only=True,
                use_safetensors=True,  # a pickle could run code
                trust_remote_code=False,
                output_loading_info=True,
                **as_ours,
            )
            missing = sorted(read["missing_keys"])
    except Exception as error:
        raise InputError(
            f"{wanted.setting}.folder: transformers {transformers.__version__} cannot load a causal "
            f"language model from {folder}: {error}"
        ) from error
    if missing:  # which transformers would have made up
        raise InputError(
            f"{wanted.setting}.folder: {folder} lacks {len(missing)} weights of its network, such as "
            f"{missing[0]}; give a folder that was saved whole"
        )
    return _checked(network, wanted, str(folder))


def network_from_gguf(path: str | Path, wanted: Wanted) -> nn.Module:
    """As `network_from_folder`, of a file of llama.cpp's format, whose weights become float32.

    Raises:
        InputError: as `network_from_folder`.
    """
    transformers = _package()
    if not Path(path).is_file():
        raise InputError(f"{wanted.setting}.file: there is no file {path}")
    if importlib.util.find_spec("gguf") is None:
        raise InputError(
            f"{wanted.setting}.file: {path} needs the package gguf, which cannot be imported; install the "
            "extra with: pip install 'rayrec[language]'"
        )
    source = {"gguf_file": Path(path).name, "local_files_only": True}
    try:
        config = transformers.AutoConfig.from_pretrained(str(Path(path).parent), **source)
        _without_dropout(config)
        network: Any = transformers.AutoModelForCausalLM.from_config(
            config, attn_implementation=wanted.attention, dtype=torch.float32
        )
        if not weights_are_meta():
            # What is read from GGUF refuses to be saved: its weights go into a network of their own.
            read = transformers.AutoModelForCausalLM.from_pretrained(
                str(Path(path).parent), dtype=torch.float32, **source
            )
            network.load_state_dict(read.state_dict())
    except Exception as error:
        raise InputError(
            f"{wanted.setting}.file: transformers {transformers.__version__} cannot load a causal language "
            f"model from {path}: {error}"
        ) from error
    return _checked(network, wanted, str(path))


def num_tokens_of(network: Any) -> int:
    """How many tokens a network knows."""
    count: int = network.get_input_embeddings().num_embeddings
    return count


def resize_tokens(network: Any, num_tokens: int) -> None:
    """Give a network rows for so many tokens; those of new ones come of torch's default generator."""
    network.resize_token_embeddings(num_tokens, mean_resizing=False)


@contextlib.contextmanager
def padded_attention(network: Any) -> Iterator[None]:
    """While the block lasts, a network of packed rows reads padded ones, by the attention of transformers."""
    try:
        network.set_attn_implementation("sdpa")
    except ValueError:  # some have no more than the plain one
        network.set_attn_implementation("eager")
    try:
        yield
    finally:
        network.set_attn_implementation(ATTENTION)


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


def _checked(network: Any, wanted: Wanted, source: str) -> nn.Module:
    """The network, unless it cannot read rows that long, or computes more than ours."""
    num_positions = wanted.num_positions
    known_positions = getattr(network.config, "max_position_embeddings", None)
    if known_positions is not None and known_positions < num_positions:
        raise InputError(
            f"{source}: the network knows {known_positions} positions, and a row has up to {num_positions} "
            "tokens; lower max_length or raise max_position_embeddings"
        )
    # What a folder sets there, such as a penalty for repetitions, would change answers.
    network.generation_config = type(network.generation_config)()
    for module in network.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    weight = network.get_input_embeddings().weight
    if wanted.packed and not weight.is_meta:
        was_training = network.training
        network.eval()
        _check_same_logits(network, len(weight), wanted, source)
        network.train(was_training)
    return network


@torch.no_grad()
def _check_same_logits(network: Any, vocabulary_size: int, wanted: Wanted, source: str) -> None:
    """Refuse a network whose own logits differ from those that come of our attention and its output matrix.

    Some have other things than attention, or factors and caps, of which we would know nothing.
    """
    name, num_positions = type(network).__name__, wanted.num_positions
    head = network.get_output_embeddings()
    num_layers = getattr(network.config, "num_hidden_layers", None)
    if getattr(head, "weight", None) is None or num_layers is None:
        what = "layers of its own" if num_layers is None else "matrix of outputs"
        raise InputError(f"{source}: {name} has no {what} that RayRec knows of; {wanted.otherwise}")
    num_tokens = min(8, num_positions)
    places = torch.arange(num_tokens, device=head.weight.device)
    tokens = (vocabulary_size - 1 - places * max(1, vocabulary_size // num_tokens)).clamp(min=0)[None]
    rows = PackedRows(JaggedLayout.even(1, num_tokens, places.device), keep=True)
    rows.num_tokens = num_positions  # a window too narrow for the longest row is to be refused here and now
    forward = {"input_ids": tokens, "position_ids": places[None], "use_cache": False}
    try:
        hidden = network.base_model(**forward, attending=rows).last_hidden_state
    except InputError as error:
        raise InputError(f"{source}: {error}; {wanted.otherwise}") from error
    except Exception as error:  # whatever the code of an architecture raises when it is called in our way
        raise _not_adapted(source, name, error, wanted) from error
    if sorted(rows.keys) != list(range(num_layers)):
        raise InputError(
            f"{source}: {name} has {num_layers} layers, of which {len(rows.keys)} attend by the attention "
            f"interface of transformers; {wanted.otherwise}"
        )
    if getattr(network.config, "final_logit_softcapping", None) is not None:
        raise InputError(
            f"{source}: {name} caps its logits; set final_logit_softcapping to null, or {wanted.otherwise}"
        )
    ours = nn.functional.linear(hidden, head.weight, getattr(head, "bias", None))
    try:
        network.set_attn_implementation("eager")
        theirs = network(**forward).logits
        network.set_attn_implementation(ATTENTION)
    except Exception as error:
        raise _not_adapted(source, name, error, wanted) from error
    difference, spread = (ours - theirs).abs().max().item(), theirs.std().item()
    if not difference <= 1e-3 * spread + 1e-6:
        raise InputError(
            f"{source}: the logits of {name} are off by {difference:.3g} (their spread is {spread:.3g}) when "
            "RayRec computes them: it does more than attention and a matrix of outputs; "
            f"{wanted.otherwise}"
        )


def _not_adapted(source: str, name: str, error: Exception, wanted: Wanted) -> InputError:
    said = " ".join(str(error).split())[:300]
    return InputError(
        f"{source}: {name} cannot be adapted ({type(error).__name__}: {said}); {wanted.otherwise}"
    )
