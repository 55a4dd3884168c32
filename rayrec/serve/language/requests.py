"""What callers ask of a language model, as OpenAI's API has it, and the prompts that it becomes.

Everything that a request says has an effect, or is refused by name.

Source: the reference of OpenAI's API, platform.openai.com/docs/api-reference.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from typing import Annotated, Any, Literal, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    StrictBool,
    StrictInt,
    StrictStr,
    ValidationInfo,
    field_validator,
    model_validator,
)

from rayrec.models.generation.copy_grammar import CopyLabels
from rayrec.models.generation.item_grammar import ItemGrammar
from rayrec.models.generation.sampler import Sampling
from rayrec.models.generation.text_grammar import ANY_OBJECT
from rayrec.models.generation.token_grammar import TokenGrammar
from rayrec.platform.errors import InputError
from rayrec.serve.language.engine import Prompt
from rayrec.serve.language.loading import LanguageModelHere
from rayrec.serve.wire.errors import RequestError

MOST_CHOICES = 16
MOST_TOP = 20
"""As in OpenAI's API."""

MOST_DIGITS = 9
"""Of a token: more than any vocabulary needs."""

SHORT_CHARACTERS = 2000
"""Of a prompt, which becomes tokens within half a millisecond."""

NewGrammar = Callable[[], TokenGrammar]


class _Request(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class ToolFunction(_Request):
    """A function that a model may call."""

    name: StrictStr = Field(pattern=r"^[A-Za-z0-9_-]{1,64}$")
    description: StrictStr | None = None
    parameters: dict[str, Any] | None = None
    """JSON schema of its arguments."""
    strict: StrictBool | None = None
    """Arguments are always held to the schema where a call is required."""


class Tool(_Request):
    type: Literal["function"]
    function: ToolFunction


class NamedFunction(_Request):
    name: StrictStr


class NamedTool(_Request):
    type: Literal["function"]
    function: NamedFunction


class SchemaFormat(_Request):
    name: StrictStr | None = None
    description: StrictStr | None = None
    schema_: dict[str, Any] | StrictBool = Field(alias="schema")
    strict: StrictBool | None = None
    """Answers are held to the schema in any case."""


_FIELDS_OF_TYPES = {
    "json_schema": ("json_schema",),
    "regex": ("regex",),
    "items": ("least", "most", "in_text"),
    "copy": ("text", "labels"),
}


class ResponseFormat(_Request):
    """What an answer has to be."""

    type: Literal["text", "json_object", "json_schema", "regex", "items", "copy"]
    json_schema: SchemaFormat | None = None
    regex: StrictStr | None = None
    """Not of OpenAI's: an expression that the whole answer matches."""
    least: StrictInt = Field(1, ge=0)
    """Not of OpenAI's: items that an answer of the type `items` has at least,"""
    most: StrictInt = Field(1, ge=1, le=1000)
    """and at most."""
    in_text: StrictBool = False
    """Whether there may be a text around them."""
    text: StrictStr | None = None
    """Not of OpenAI's: what an answer of the type `copy` divides into segments,"""
    labels: list[StrictStr] | None = None
    """and what these can be."""

    @model_validator(mode="after")
    def _fields_are_of_the_type(self) -> Self:
        own = {"type", *_FIELDS_OF_TYPES.get(self.type, ())}
        if other := [name for name in self.model_fields_set - own if getattr(self, name) is not None]:
            raise ValueError(f"{min(other)} is of another type than {self.type!r}; leave it out")
        return self


class StreamOptions(_Request):
    include_usage: StrictBool = False


class _Sampled(_Request):
    """What both kinds of requests say of sampling."""

    model: StrictStr
    n: StrictInt = Field(1, ge=1, le=MOST_CHOICES)
    max_tokens: StrictInt | None = Field(None, ge=1)
    temperature: float = Field(1.0, ge=0, le=2)
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: StrictInt = Field(0, ge=0)
    """Not of OpenAI's: the most probable tokens alone; 0: all."""
    presence_penalty: float = Field(0.0, ge=-2, le=2)
    frequency_penalty: float = Field(0.0, ge=-2, le=2)
    logit_bias: dict[StrictStr, Annotated[float, Field(ge=-100, le=100)]] | None = None
    seed: StrictInt | None = None
    stop: StrictStr | Annotated[list[StrictStr], Field(max_length=4)] | None = None
    stream: StrictBool = False
    stream_options: StreamOptions | None = None
    user: StrictStr | None = None
    response_format: ResponseFormat | None = None

    @field_validator("stream_options")
    @classmethod
    def _options_are_of_a_stream(cls, value: StreamOptions | None, info: ValidationInfo) -> Any:
        if value is not None and info.data.get("stream") is False:
            raise ValueError("are of a stream; leave them out, or let stream be true")
        return value

    @property
    def stops(self) -> list[str]:
        given = [self.stop] if isinstance(self.stop, str) else list(self.stop or ())
        return [each for each in given if each]

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage


class ChatRequest(_Sampled):
    """`POST /v1/chat/completions`."""

    messages: Annotated[list[dict[str, Any]], Field(min_length=1)]
    max_completion_tokens: StrictInt | None = Field(None, ge=1)
    logprobs: StrictBool = False
    top_logprobs: StrictInt | None = Field(None, ge=0, le=MOST_TOP)
    tools: list[Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: StrictBool | None = None
    """False: an answer has one call at most."""

    @field_validator("top_logprobs")
    @classmethod
    def _top_is_of_logprobs(cls, value: int | None, info: ValidationInfo) -> int | None:
        if value and info.data.get("logprobs") is False:
            raise ValueError("are told with log-probabilities; leave it out, or let logprobs be true")
        return value

    @property
    def most_tokens(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens

    @property
    def num_top(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None


class TextRequest(_Sampled):
    """`POST /v1/completions`."""

    prompt: StrictStr | list[StrictStr] | list[StrictInt] | list[list[StrictInt]]
    logprobs: StrictInt | None = Field(None, ge=0, le=5)
    echo: Literal[False] = False
    """A prompt is not said again."""
    best_of: StrictInt | None = None
    suffix: Literal[""] | None = None
    """Nothing is written into the middle of a text."""

    @property
    def most_tokens(self) -> int | None:
        return self.max_tokens

    @property
    def num_top(self) -> int | None:
        return self.logprobs

    @property
    def is_work(self) -> bool:
        """Whether to understand it takes so long that others should not wait for it."""
        is_text = self.response_format is None or self.response_format.type == "text"
        return not is_text or not isinstance(self.prompt, str) or len(self.prompt) > SHORT_CHARACTERS

    @property
    def num_prompts(self) -> int:
        given: Any = self.prompt
        return 1 if isinstance(given, str) or (given and isinstance(given[0], int)) else len(given)

    def prompts(self, model: LanguageModelHere) -> list[list[int]]:
        """Tokens of each prompt."""
        given: Any = self.prompt
        if isinstance(given, str):
            return [model.text.encode(given)]
        if given and isinstance(given[0], int):
            return [list(given)]
        return [model.text.encode(each) if isinstance(each, str) else list(each) for each in given]


class EmbeddingRequest(_Request):
    """`POST /v1/embeddings`."""

    model: StrictStr
    input: StrictStr | list[StrictStr] | list[StrictInt] | list[list[StrictInt]]
    encoding_format: Literal["float", "base64"] = "float"
    user: StrictStr | None = None


def grammar_of(wanted: ResponseFormat | None, model: LanguageModelHere) -> tuple[NewGrammar, int] | None:
    """(what begins a grammar, tokens of its shortest text); takes up to seconds, so not on the event loop.

    Raises:
        RequestError: it does not compile, or is not there.
    """
    if wanted is None or wanted.type == "text":
        return None
    try:
        if wanted.type == "items":
            items = model.items
            first = ItemGrammar(items, wanted.least, wanted.most, wanted.in_text)
            begin = lambda: ItemGrammar(items, wanted.least, wanted.most, wanted.in_text)  # noqa: E731
            return begin, len(first.ending)
        if wanted.type == "copy":
            if wanted.text is None or wanted.labels is None:
                raise InputError("text or labels are missing")
            begun = CopyLabels(wanted.labels, model.grammars.tokens).begin(wanted.text)
            return begun.fresh, len(begun.ending)
        if wanted.type == "regex":
            if wanted.regex is None:
                raise InputError("regex is missing")
            compiled = model.grammars.compile("regex", wanted.regex)
        elif wanted.type == "json_schema":
            if wanted.json_schema is None:
                raise InputError("json_schema is missing")
            compiled = model.grammars.compile("json_schema", wanted.json_schema.schema_)
        else:
            compiled = model.grammars.compile("json_schema", ANY_OBJECT)
    except InputError as error:
        raise RequestError(f"response_format: {error}", param="response_format") from error
    return compiled.begin, compiled.least_tokens


def prompts_of(
    request: ChatRequest | TextRequest,
    tokens: Sequence[int],
    grammar: tuple[NewGrammar, int] | None,
    model: LanguageModelHere,
    expires_at: float,
) -> list[Prompt]:
    """One prompt for each choice.

    Raises:
        RequestError: it is too long, or asks for what cannot be.
    """
    context = model.settings.context_length
    left = context - len(tokens)
    most = request.most_tokens
    if not tokens:
        raise RequestError("the prompt has no tokens; give a text", param="prompt")
    if left < (most or 1):
        asked = "" if most is None else f" and {most} are to be written"
        raise RequestError(
            f"the prompt has {len(tokens)} tokens{asked}; {model.name} takes {context} together",
            param="messages" if isinstance(request, ChatRequest) else "prompt",
            code="context_length_exceeded",
        )
    most = min(most or model.settings.max_tokens, left)
    if grammar is not None:
        if request.stops:
            raise RequestError(
                "stop: an answer that is held to a form ends where it is complete", param="stop"
            )
        if grammar[1] > most:
            raise RequestError(
                f"the shortest answer of that form has {grammar[1]} tokens, and {most} may be written; "
                "raise max_tokens",
                param="max_tokens",
            )
    seed = secrets.randbits(63) if request.seed is None else request.seed
    bias = {_token(name, model): value for name, value in (request.logit_bias or {}).items()}
    return [
        Prompt(
            tokens,
            most,
            Sampling(
                request.temperature,
                request.top_p,
                min(request.top_k, model.engine.num_tokens),
                request.presence_penalty,
                request.frequency_penalty,
                bias,
                seed,
                index,
                None if request.num_top is None else min(request.num_top, model.engine.num_tokens),
            ),
            None if grammar is None else grammar[0](),
            request.stops,
            expires_at,
        )
        for index in range(request.n)
    ]


def _token(name: str, model: LanguageModelHere) -> int:
    # Long texts of digits are no numbers to `int`, which refuses them with an error of its own.
    if not name.isdecimal() or len(name) > MOST_DIGITS or int(name) >= model.engine.num_tokens:
        raise RequestError(f"logit_bias: {name[:40]!r} is no token of {model.name}", param="logit_bias")
    return int(name)
