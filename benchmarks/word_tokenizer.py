"""A tokenizer that is learned from texts at hand, for language models that begin with random weights."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

END = "<end>"


def learn_tokenizer(texts: Iterable[str], size: int, folder: Path) -> None:
    """Write a byte-level BPE tokenizer as a folder of Hugging Face.

    Args:
        size: most tokens.
        folder: is made where it is missing.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
