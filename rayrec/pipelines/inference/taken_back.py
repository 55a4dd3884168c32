"""What another trainer made of a model that was handed over, taken back as a base.

    trainer's folder ─► same layers and vocabulary? ─► same tokens? ─► finite logits? ─► a base folder

A folder with an adapter of PEFT alone is merged into the model that was handed over. What does not fit is
refused, and nothing is written.
"""

from __future__ import annotations

import importlib.util
import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rayrec.models.base.meta_device import MetaWeights
from rayrec.models.language.networks import Wanted, network_from_folder
from rayrec.pipelines.inference.handover import MODEL, PROBES, HandedModel, HandoverManifest
from rayrec.pipelines.inference.probes import RELATIVE_TOLERANCE, Probes
from rayrec.platform.errors import InputError
from rayrec.samples.prepare.writer import whole_folder
from rayrec.samples.text.chat import read_json
from rayrec.samples.text.tokens import TextTokenizer

_ADAPTER, _ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_SHOWN = 3
"""Names in a message."""


@dataclass(frozen=True)
class TakenBack:
    """What was found."""

    is_adapter: bool
    num_parameters: int
    has_tokenizer: bool
    """Whether the trainer wrote one; else nothing could be compared."""
    difference: float
    """The largest change of a logit, as a share of their spread."""

    @property
    def is_untouched(self) -> bool:
        return self.difference <= RELATIVE_TOLERANCE


def take_back(handover: Path, trained: Path, out: Path) -> TakenBack:
    """Write what a trainer made of a model that was handed over as a folder that `model.base` names.

    Args:
        handover: what `write_handover` wrote, with a model.
        trained: of Hugging Face's layout, or an adapter of PEFT.
        out: made here, with the tokenizer and the template that were handed over.

    Raises:
        InputError: `out` is there already, a folder is missing, or the trainer's model has other layers,
            another vocabulary, other tokens, weights that are missing, or logits that are not finite; or the
            model that was handed over does not say any more what it did.
    """
    if out.exists():
        raise InputError(f"{out}: is there already; give another folder, or remove it")
    model = HandoverManifest.read(handover).model
    if model is None:
        raise InputError(f"{handover}: holds rows alone, and no model to compare with; write it with `--run`")
    if not trained.is_dir():
        raise InputError(f"{trained}: no such folder; give the one that the trainer wrote")
    is_adapter = not (trained / "config.json").is_file() and (trained / _ADAPTER).is_file()
    base = handover / MODEL
    tokenizer = TextTokenizer.load(base)
    probes = Probes.load(handover / PROBES)
    has_tokenizer = (trained / "tokenizer.json").is_file()
    if has_tokenizer:
        _check_tokens(trained, tokenizer, [tokenizer.decode(prompt.tolist()) for prompt in probes.prompts])
    if not is_adapter:
        _check_shapes(_on_meta(trained, model), model, trained)
    _check_untouched(base, model, probes)
    network = _merged(base, trained, model) if is_adapter else _loaded(trained, model)
    try:
        difference = probes.difference(network)
    except InputError as error:
        raise InputError(f"{trained}: {error}; take an earlier checkpoint") from error
    with whole_folder(out) as draft:
        tokenizer.save(draft)
        if is_adapter:
            network.save_pretrained(draft, safe_serialization=True)
        else:
            for file in sorted([trained / "config.json", *trained.glob("*.safetensors*")]):
                shutil.copyfile(file, draft / file.name)
            _with_ends_of(base, draft)
        made = {**read_json(base / "rayrec.json"), "taken_back_from": trained.name}
        (draft / "rayrec.json").write_text(json.dumps(made, indent=2) + "\n")
    num_parameters = sum(weight.numel() for weight in network.parameters())
    return TakenBack(is_adapter, num_parameters, has_tokenizer, difference)


def _wanted(model: HandedModel) -> Wanted:
    return Wanted(model.max_length, "the trainer's", packed=False, otherwise="take another folder")


def _loaded(folder: Path, model: HandedModel) -> Any:
    network: Any = network_from_folder(folder, _wanted(model))
    return network


def _on_meta(folder: Path, model: HandedModel) -> Any:
    with MetaWeights():
        return _loaded(folder, model)


def _merged(base: Path, trained: Path, model: HandedModel) -> Any:
    """The network that was handed over, with an adapter added to its weights.

    Raises:
        InputError: PEFT is missing, or the adapter does not fit.
    """
    if not (trained / _ADAPTER_WEIGHTS).is_file():
        raise InputError(
            f"{trained}: has no {_ADAPTER_WEIGHTS}; save the adapter as safetensors, other files could run "
            "code"
        )
    if importlib.util.find_spec("peft") is None:
        raise InputError(
            f"{trained}: an adapter needs the package peft, which cannot be imported; install the extra: "
            "pip install 'rayrec[language]'"
        )
    import peft

    try:
        adapted = peft.PeftModel.from_pretrained(_loaded(base, model), str(trained), local_files_only=True)
        merged: Any = adapted.merge_and_unload(safe_merge=True)
    except InputError:
        raise
    except Exception as error:  # whatever is wrong with an adapter of strangers
        said = " ".join(str(error).split())[:300]
        raise InputError(
            f"{trained}: the adapter does not fit the model that was handed over: {said}; give the one that "
            "was trained beside it"
        ) from error
    _check_shapes(merged, model, trained)
    return merged


def _check_untouched(base: Path, model: HandedModel, probes: Probes) -> None:
    """Check that the model that was handed over says what it did: else a comparison would say nothing."""
    if not base.is_dir():
        raise InputError(f"{base}: no such folder; keep the model that was handed over until it is back")
    difference = probes.difference(_loaded(base, model))
    if difference > RELATIVE_TOLERANCE:
        raise InputError(
            f"{base}: its logits are off by {difference:.3g} of their spread from those that were "
            "written with it: the folder was changed since, or this version of transformers computes "
            "otherwise; write the hand-over again"
        )


def _check_shapes(network: Any, model: HandedModel, folder: Path) -> None:
    """Check that a network has the weights of the one that was handed over.

    Raises:
        InputError: it is of another family, knows more or fewer tokens, or has other layers.
    """
    if network.config.model_type != model.model_type:
        raise InputError(
            f"{folder}: is a {network.config.model_type}, and a {model.model_type} was handed over; give the "
            "folder of that training"
        )
    num_tokens = network.get_input_embeddings().num_embeddings
    if num_tokens != model.num_tokens:
        raise InputError(
            f"{folder}: knows {num_tokens:,} tokens, and {model.num_tokens:,} were handed over; train "
            "without resizing the matrices of tokens"
        )
    found: Mapping[str, tuple[int, ...]] = {
        name: tuple(weight.shape) for name, weight in network.named_parameters()
    }
    if unmatched := sorted(found.keys() ^ model.weights.keys()):
        shown = ", ".join(unmatched[:_SHOWN]) + (", ..." if len(unmatched) > _SHOWN else "")
        raise InputError(
            f"{folder}: its layers are not those that were handed over, of which {len(unmatched)} weights "
            f"are only in one of the two ({shown}); give the folder of that training"
        )
    for name, shape in found.items():
        if shape != tuple(model.weights[name]):
            raise InputError(
                f"{folder}: the weight {name} has the shape {shape}, and {tuple(model.weights[name])} was "
                "handed over; give the folder of that training"
            )


def _check_tokens(folder: Path, ours: TextTokenizer, texts: Sequence[str]) -> None:
    """Check that a trainer's tokenizer has our tokens by our numbers, and makes the same of a few texts.

    Raises:
        InputError: it does not; of codes, the items they stand for would be others.
    """
    theirs = _tokenizer_in(folder)
    known = ours.tokenizer.get_vocab(with_added_tokens=True)
    found = theirs.get_vocab(with_added_tokens=True)
    codes = {token for token, number in known.items() if number >= ours.info.first_new}
    for token, number in sorted(known.items(), key=lambda each: (each[0] not in codes, each[1])):
        if found.get(token) != number:
            what = "the code" if token in codes else "the token"
            other = "is not in it" if token not in found else f"is number {found[token]}"
            raise InputError(
                f"{folder}: {what} {token!r} was handed over as number {number}, and {other}; train with the "
                "tokenizer of the folder that was handed over"
            )
    added = sorted(found.keys() - known.keys(), key=lambda token: found[token])
    if added:
        raise InputError(
            f"{folder}: its tokenizer has {len(added)} more tokens, such as {added[0]!r}; train with the "
            "tokenizer of the folder that was handed over"
        )
    for text in texts:
        if theirs.encode(text, add_special_tokens=False).ids != ours.encode(text):
            raise InputError(
                f"{folder}: its tokenizer divides {text[:60]!r} into other tokens; train with the tokenizer "
                "of the folder that was handed over"
            )


def _tokenizer_in(folder: Path) -> Any:
    from tokenizers import Tokenizer

    try:
        return Tokenizer.from_file(str(folder / "tokenizer.json"))
    except Exception as error:  # the library has one type for all
        raise InputError(f"{folder / 'tokenizer.json'}: is no tokenizer ({error})") from error


def _with_ends_of(base: Path, folder: Path) -> None:
    """A trainer may write other ends of texts than those that the template writes."""
    config, ours = read_json(folder / "config.json"), read_json(base / "config.json")
    for name in ("eos_token_id", "pad_token_id"):
        config[name] = ours.get(name)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
