"""Conversations as the text that a base model was trained on, and which parts of it an assistant says.

The template is that of the base's tokenizer folder. It is code of strangers, so a program of its own renders
it, in jinja2's sandbox and within limits (`render_worker`):

    ChatTemplate ──conversations──► render_worker, one per process and template ──texts──► spans by difference

What an assistant says is found by rendering what was said before it, with the opening of its turn, and then
with its turn: the difference is what a model learns. No template has to mark it. A template that does not
continue its own beginning, so that there is no such difference, is refused.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, NamedTuple

from rayrec.platform.config import Config
from rayrec.platform.errors import InputError
from rayrec.samples.text.records import Message

Learn = Literal["all", "last"]
"""Which turns of an assistant a model learns."""

_WORKER = Path(__file__).with_name("render_worker.py")
_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class RenderLimits(Config):
    """What rendering one conversation may take; a template that takes more is refused."""

    max_turns: int = 1_000_000
    """Turns of loops, and calls."""
    max_characters: int = 4_000_000
    """Of the text that it writes."""
    max_seconds: float = 5.0
    """Of processor time."""
    max_bytes: int = 1 << 30
    """Of memory, all that the program has included."""


@dataclass(frozen=True)
class RenderedChat:
    """A conversation as one text."""

    text: str
    completions: tuple[tuple[int, int], ...]
    """[start, stop) in characters of what the model learns, ascending."""


@dataclass
class ChatTemplate:
    """A template and what it is rendered with; may be pickled, and called by several threads."""

    template: str
    tokens: Mapping[str, str]
    """Special tokens by name, as in `bos_token`."""
    where: str = "the chat template"
    """For messages."""
    date: str | None = None
    """ISO date that stands for today, where the template asks for it; None: it must do without."""
    limits: RenderLimits = field(default_factory=RenderLimits)
    _program: _Program | None = field(default=None, init=False, repr=False, compare=False)
    _lock: threading.Lock = field(default_factory=threading.Lock, init=False, repr=False, compare=False)

    @classmethod
    def of_folder(cls, folder: str | Path, date: str | None = None) -> ChatTemplate:
        """The template of a tokenizer's folder.

        Raises:
            InputError: there is none, its files cannot be read, or it is no template.
        """
        root = Path(folder)
        values = read_json(root / "tokenizer_config.json")
        own, named = root / "chat_template.jinja", values.get("chat_template")
        if own.is_file():
            named = own.read_text(encoding="utf-8")
        if isinstance(named, list):  # several, each with a name
            found = {one.get("name"): one.get("template") for one in named if isinstance(one, dict)}
            named = found.get("default")
        if not isinstance(named, str):
            raise InputError(
                f"{root}: no chat template; expected chat_template.jinja, or chat_template in "
                "tokenizer_config.json"
            )
        template = cls(named, special_tokens(values), f"{root}: the chat template", date)
        template.render([])  # compiles it
        return template

    @staticmethod
    def is_in(folder: str | Path) -> bool:
        """Whether a tokenizer's folder has a template.

        Raises:
            InputError: its files cannot be read.
        """
        root = Path(folder)
        if (root / "chat_template.jinja").is_file():
            return True
        return read_json(root / "tokenizer_config.json").get("chat_template") is not None

    def render(self, chats: Sequence[Sequence[Message]], open_turn: bool = False) -> list[str]:
        """Conversations as texts.

        Args:
            open_turn: with the opening of the assistant's next turn.

        Raises:
            InputError: the template cannot be rendered, refuses a conversation, or takes more than it may.
        """
        return self._texts([_Wanted(number, chat, open_turn) for number, chat in enumerate(chats, 1)])

    def opened(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None = None
    ) -> str:
        """A conversation with the opening of the assistant's turn, of messages as OpenAI's API has them.

        Args:
            tools: that the assistant may call; a template that does not know of tools passes them over.

        Raises:
            InputError: as `render`.
        """
        asked = {"messages": messages, "add_generation_prompt": True, "tools": tools, "documents": None}
        return self._answers([asked], lambda number: "")[0]

    def rendered(self, chats: Sequence[Sequence[Message]], learn: Learn = "all") -> list[RenderedChat]:
        """Conversations as texts, with what the assistant says in them.

        Raises:
            InputError: as `render`, or a text does not continue that of its beginning.
        """
        wanted: list[_Wanted] = []
        for number, chat in enumerate(chats, 1):
            wanted.append(_Wanted(number, chat, False))
            for turn in _turns(chat, learn):
                wanted += [_Wanted(number, chat[:turn], True), _Wanted(number, chat[: turn + 1], False)]
        texts = iter(self._texts(wanted))
        found = []
        for number, chat in enumerate(chats, 1):
            whole, spans, done = next(texts), [], 0
            for turn in _turns(chat, learn):
                before, behind = next(texts), next(texts)
                # A last turn may lack what a template writes between turns.
                if not (behind.startswith(before) and whole.startswith(behind) and len(before) >= done):
                    raise InputError(
                        f"{self.where} does not write message {turn + 1} of conversation {number} behind "
                        "what it writes of the messages before, so what is to be learned cannot be told from "
                        f"the rest; {_advice(chat, learn)}"
                    )
                done = len(behind)
                spans.append((len(before), done))
            found.append(RenderedChat(whole, tuple(spans)))
        return found

    def close(self) -> None:
        """End the program that renders; another one starts when it is needed."""
        with self._lock:
            if self._program is not None:
                self._program.end()
                self._program = None

    def __getstate__(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("template", "tokens", "where", "date", "limits")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)  # type: ignore[misc]

    def _texts(self, wanted: Sequence[_Wanted]) -> list[str]:
        asked = [
            {
                "messages": [{"role": one.role, "content": one.content} for one in each.chat],
                "add_generation_prompt": each.open_turn,
                "tools": None,
                "documents": None,
            }
            for each in wanted
        ]
        return self._answers(asked, lambda number: f" for conversation {wanted[number].number}")

    def _answers(self, asked: list[dict[str, Any]], which: Callable[[int], str]) -> list[str]:
        """What the program makes of conversations.

        Args:
            which: names one of them in messages.
        """
        with self._lock:
            if self._program is None:
                self._program = _Program(self._settings())
            try:
                return self._program.ask(asked)
            except _RenderError as error:
                if self._program.is_over:
                    self._program.end()
                    self._program = None
                said = "" if error.number is None else which(error.number)
                raise InputError(f"{self.where} cannot be rendered{said}: {error}") from error

    def _settings(self) -> dict[str, Any]:
        return {
            "template": self.template,
            "tokens": dict(self.tokens),
            "date": self.date,
            **self.limits.model_dump(),
        }


class _Wanted(NamedTuple):
    """A text that is asked for."""

    number: int
    """Of the conversation, from 1."""
    chat: Sequence[Message]
    open_turn: bool


class _RenderError(Exception):
    def __init__(self, clause: str, number: int | None) -> None:
        super().__init__(clause)
        self.number = number
        """Of what was asked; None: the template itself."""


class _Program:
    """The process that renders one template."""

    def __init__(self, settings: dict[str, Any]) -> None:
        if find_spec("jinja2") is None:
            raise InputError(
                "chat templates need the package jinja2; install it (pip install rayrec[language])"
            )
        self._seconds = settings["max_seconds"]
        # -P: the folder of the program has modules of other names in it.
        self._process = subprocess.Popen(
            [sys.executable, "-P", str(_WORKER)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        self._begun = False
        self._settings = settings
        self.is_over = False

    def ask(self, asked: list[dict[str, Any]]) -> list[str]:
        """The texts of what is asked.

        Raises:
            _RenderError: the template cannot be rendered.
        """
        if not self._begun:
            self._send(self._settings)
            self._begun = True
            self._receive(None)
        if not asked:
            return []
        self._send(asked)
        texts: list[str] = []
        failed: _RenderError | None = None
        for number in range(len(asked)):
            try:
                texts.append(self._receive(number))
            except _RenderError as error:
                if self.is_over:
                    raise
                failed = failed or error  # the answers behind it have to be read
        if failed is not None:
            raise failed
        return texts

    def end(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.communicate()

    def _send(self, values: Any) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(values).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # why is said where the answer is missing

    def _receive(self, number: int | None) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line.endswith(b"\n"):
            self.is_over = True
            code = self._process.wait()
            if code == -signal.SIGPROF:
                raise _RenderError(f"it computes for more than {self._seconds:g} s", number)
            raise _RenderError(f"the program that renders it ended with the code {code}", number)
        answer = json.loads(line)
        if "error" in answer:
            self.is_over = number is None
            raise _RenderError(answer["error"], number)
        return str(answer["text"])


def special_tokens(values: Mapping[str, Any]) -> dict[str, str]:
    """Special tokens by name, of the values of a `tokenizer_config.json`."""
    found = {}
    for name in _TOKENS:
        token = values.get(name)
        token = token.get("content") if isinstance(token, dict) else token
        if isinstance(token, str):
            found[name] = token
    return found


def read_json(path: Path) -> dict[str, Any]:
    """The values of a file of a tokenizer's folder.

    Raises:
        InputError: it is missing, or no JSON object.
    """
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise InputError(f"{path}: no such file; give the folder of a tokenizer of Hugging Face") from None
    except (OSError, ValueError) as error:
        raise InputError(f"{path}: cannot be read as JSON ({error})") from error
    if not isinstance(values, dict):
        raise InputError(f"{path}: expected a JSON object, found {type(values).__name__}")
    return values


def _turns(chat: Sequence[Message], learn: Learn) -> list[int]:
    turns = [number for number, one in enumerate(chat) if one.role == "assistant"]
    return turns if learn == "all" else turns[-1:]


def _advice(chat: Sequence[Message], learn: Learn) -> str:
    if learn == "all" and len(_turns(chat, "all")) > 1:
        return "some templates change earlier turns: learn the last one alone"
    return "take another template"
