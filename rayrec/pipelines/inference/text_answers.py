"""Answers of a language model in this process: a run's, or a folder's that a run was exported to.

conversation ─► chat template, or turns one after the other ─┐
text that goes on ───────────────────────────────────────────┴─► tokens ─► the most probable ones ─► text
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Self

import numpy as np

from rayrec.models.base.compute import Precision
from rayrec.models.base.dense_optimizer import DenseOptimizerSettings
from rayrec.models.language.config import LanguageModelConfig
from rayrec.models.language.text_program import TextProgram
from rayrec.models.program.program import ProgramPlacement
from rayrec.pipelines.inference.writer import TextWriter
from rayrec.pipelines.metrics.agreement import Failed
from rayrec.pipelines.tasks.text_rows import tokenizer_of, vocabulary_of
from rayrec.platform.devices import autocast, get_device
from rayrec.platform.errors import InputError
from rayrec.platform.schedule import RateSchedule
from rayrec.samples.features.text_features import SEPARATOR, Tokens, said, text_batch
from rayrec.samples.text.chat import ChatTemplate, read_json
from rayrec.samples.text.records import Message
from rayrec.samples.text.tokens import TextTokenizer

AT_ONCE = 16
"""Requests that are answered together."""
MOST_LENGTH = 4096
"""Tokens of a folder's model that are read, where it does not say less."""


@dataclass(frozen=True)
class TextRequest:
    """What is asked."""

    messages: tuple[Message, ...] = ()
    prompt: str = ""
    """A text that goes on, where there are no messages."""
    max_tokens: int | None = None
    """Of the answer; None: as all."""

    @property
    def text(self) -> str:
        """What is asked about, which a form of answers may go by."""
        return self.messages[-1].content if self.messages else self.prompt


@dataclass
class TextAnswers:
    """Answers requests; not thread-safe."""

    program: TextProgram
    tokenizer: TextTokenizer
    template: ChatTemplate | None
    """None: turns stand one after the other."""
    max_length: int
    device: str
    precision: Precision = "float32"

    @classmethod
    def of_run(cls, run: str | Path, device: str | None, precision: Precision) -> Self:
        """The best snapshot of a run.

        Raises:
            InputError: it is no run of a language model.
        """
        writer = TextWriter.load(run, device=device)
        config = writer.task.config
        return cls(
            writer.program,
            writer.task.tokenizer,
            writer.features.template,
            writer.task.model.max_length,
            config.device,
            precision,
        )

    @classmethod
    def of_folder(cls, folder: str | Path, device: str, precision: Precision) -> Self:
        """A network in the layout of Hugging Face; of one that a run was exported to, with the run's template
        and window.

        Raises:
            InputError: a file is missing or does not fit.
        """
        root = Path(folder)
        made = read_json(root / "rayrec.json") if (root / "rayrec.json").is_file() else {}
        known = read_json(root / "config.json").get("max_position_embeddings") or MOST_LENGTH
        is_chat = made.get("template", "chat") == "chat" and ChatTemplate.is_in(root)
        model = LanguageModelConfig.parse(
            {
                "name": "language_model",
                "base": {"kind": "folder", "folder": str(root)},
                "rows": "padded",  # which all families go through
                "max_length": made.get("max_length") or min(int(known), MOST_LENGTH),
                "template": "chat" if is_chat else "plain",
            },
            source=str(folder),
        )
        tokenizer = tokenizer_of(model)
        spec = model.program(vocabulary_of(model, tokenizer), _NOT_TRAINED)
        program = spec.build(ProgramPlacement(get_device(device).torch, 0))
        assert isinstance(program, TextProgram), "of language"
        template = ChatTemplate.of_folder(root) if is_chat else None
        return cls(program, tokenizer, template, model.max_length, device, precision)

    def answer(self, requests: Sequence[TextRequest], max_tokens: int) -> list[str | Failed]:
        """The answer of each request, token by token the most probable one; of one that cannot be answered,
        why.

        Args:
            max_tokens: of an answer, where its request does not say.
        """
        found: list[str | Failed] = [Failed("not asked")] * len(requests)
        rows: dict[int, Tokens] = {}
        for place, request in enumerate(requests):
            prompt = self._prompt(request, request.max_tokens or max_tokens)
            if isinstance(prompt, Failed):
                found[place] = prompt
            else:
                rows[place] = prompt
        # Of about equal lengths: rows of a batch are padded to the longest, and all get as many tokens.
        order = sorted(
            rows, key=lambda place: (requests[place].max_tokens or max_tokens, len(rows[place].ids_L))
        )
        while order:
            most = requests[order[0]].max_tokens or max_tokens
            part = [place for place in order[:AT_ONCE] if (requests[place].max_tokens or max_tokens) == most]
            order = order[len(part) :]
            batch = text_batch(0, np.array(part, dtype=np.int64), [rows[place] for place in part])
            batch = replace(batch, given=tuple(requests[place].text for place in part))
            with autocast(get_device(self.device).torch, enabled=self.precision != "float32"):
                answers = self.program.generate(batch, {}, most)
            for place, tokens in zip(part, answers, strict=True):
                found[place] = self._said(tokens.tolist())
        return found

    def close(self) -> None:
        """End what renders the template."""
        if self.template is not None:
            self.template.close()

    def _said(self, tokens: Sequence[int]) -> str:
        """A text as services give it: without special tokens other than codes, and without a character of
        which a limit has left a part."""
        text = self.tokenizer.decode([token for token in tokens if token not in self._silent])
        return said(text.rstrip("\N{REPLACEMENT CHARACTER}"))

    @cached_property
    def _silent(self) -> frozenset[int]:
        added = self.tokenizer.tokenizer.get_added_tokens_decoder()
        first_new = self.tokenizer.info.first_new
        return frozenset(token for token, value in added.items() if value.special and token < first_new)

    def _prompt(self, request: TextRequest, max_tokens: int) -> Tokens | Failed:
        """The tokens of what is asked."""
        if not request.messages:
            text = request.prompt
        elif self.template is None:
            text = SEPARATOR.join(one.content for one in request.messages) + SEPARATOR
        else:
            try:
                (text,) = self.template.render([request.messages], open_turn=True)
            except InputError as error:
                return Failed(str(error))
        ids = self.tokenizer.encode(text)
        if not ids or len(ids) + max_tokens > self.max_length:
            return Failed(
                f"the request has {len(ids):,} tokens, and with {max_tokens:,} of an answer the model reads "
                f"{self.max_length:,}"
            )
        return Tokens(np.array(ids, dtype=np.int64), np.zeros(len(ids), dtype=bool))


_NOT_TRAINED = DenseOptimizerSettings(
    learning_rate=0.0, weight_decay=0.0, max_grad_norm=None, fused=False, schedule=RateSchedule()
)
