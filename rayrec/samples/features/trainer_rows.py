"""Records of text as rows that trainers of language models read: JSON objects of a few documented forms.

    form        a row                                                      what is learned of it
    messages    {"messages": [{"role", "content"}, ...]}                   what the assistant says
    prompt      {"prompt": ..., "completion": ...}                         the completion
    text        {"text": ...}                                              all of it
    tokens      {"input_ids": [...], "labels": [...]}, -100 in labels      where there is a label

`prompt` has lists of messages where a chat template writes them, and texts where there is none. A
conversation of which several turns are learned becomes one row for each of them. Only `tokens` fixes what is
learned to the token; of the others, the template of the trainer does.

A record of kind `text` has no question. It becomes a row of form `text`, which trainers do not mix with
others, and lies in a file of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

from rayrec.platform.errors import InputError
from rayrec.samples.features.text_features import SEPARATOR, Tokens, chat_of
from rayrec.samples.text.chat import ChatTemplate, Learn
from rayrec.samples.text.records import Message, Record

Form = Literal["messages", "prompt", "text", "tokens"]
NOT_LEARNED = -100
"""Label of a token that is given: what losses of PyTorch and of transformers leave out."""

Row = dict[str, Any]
TokensOf = Callable[[Sequence[Record]], Sequence[Tokens | str]]
"""A row of tokens of each record; of one that is left out, why."""


class TrainerRows:
    """Records -> rows of one form."""

    def __init__(
        self,
        form: Form,
        template: ChatTemplate | None = None,
        is_chat: bool = True,
        learn: Learn = "all",
        tokens_of: TokensOf | None = None,
    ) -> None:
        """
        Args:
            template: of the run, which writes texts; only the form `text` needs it.
            is_chat: whether the trainer will write conversations in a chat template; else what is asked and
                answered stand one after the other.
            learn: which turns of an assistant.
            tokens_of: for the form `tokens`.

        Raises:
            InputError: the form cannot say what is learned, or there is nothing that makes it.
        """
        if form == "messages" and not is_chat:
            raise InputError(
                "form 'messages' is written by a chat template, and the run has none (model.template: "
                "plain); take the form 'prompt'"
            )
        if form == "tokens" and tokens_of is None:
            raise InputError("form 'tokens' needs a run, whose tokenizer and template make them; name one")
        if form == "text" and is_chat and template is None:
            raise InputError(
                "form 'text' needs a run, whose template writes conversations as texts; name one"
            )
        self.form = form
        self._template, self._is_chat, self._learn, self._tokens_of = template, is_chat, learn, tokens_of

    def of(self, records: Sequence[Record]) -> list[list[Row] | str]:
        """The rows of each record; of one that is left out, why.

        Raises:
            InputError: a conversation has more learned turns than the form can say, or its template refuses
                it.
        """
        if self.form == "tokens":
            assert self._tokens_of is not None, "checked when this was made"
            return [one if isinstance(one, str) else [_labeled(one)] for one in self._tokens_of(records)]
        if self.form == "text":
            return self._as_texts(records)
        return [
            [{"text": record.text}] if record.kind == "text" else self._asked_and_answered(record)
            for record in records
        ]

    def _as_texts(self, records: Sequence[Record]) -> list[list[Row] | str]:
        chats = [chat_of(record) for record in records if record.kind != "text"]
        if self._template is None:
            written = iter([_joined(chat) for chat in chats])
        else:
            written = iter(self._template.render(chats))
        return [[{"text": record.text if record.kind == "text" else next(written)}] for record in records]

    def _asked_and_answered(self, record: Record) -> list[Row]:
        chat = chat_of(record)
        turns = [number for number, one in enumerate(chat) if one.role == "assistant"]
        learned = turns if self._learn == "all" else turns[-1:]
        if self.form == "messages":
            if len(learned) < len(turns):
                raise InputError(
                    f"a conversation that begins with {record.asked[:60]!r} has {len(turns)} turns of an "
                    "assistant, of which the last one alone is learned (model.learn: last), which the form "
                    "'messages' cannot say; take the form 'prompt' or 'tokens'"
                )
            return [{"messages": _messages(chat)}]
        if not self._is_chat:
            return [
                {"prompt": _joined(chat[:turn]) + SEPARATOR, "completion": chat[turn].content}
                for turn in learned
            ]
        return [
            {"prompt": _messages(chat[:turn]), "completion": _messages(chat[turn : turn + 1])}
            for turn in learned
        ]


def _messages(chat: Sequence[Message]) -> list[dict[str, str]]:
    return [{"role": one.role, "content": one.content} for one in chat]


def _joined(chat: Sequence[Message]) -> str:
    return SEPARATOR.join(one.content for one in chat)


def _labeled(tokens: Tokens) -> Row:
    ids = tokens.ids_L.tolist()
    learned = tokens.is_target_L.tolist()
    labels = [token if one else NOT_LEARNED for token, one in zip(ids, learned, strict=True)]
    return {"input_ids": ids, "labels": labels}
