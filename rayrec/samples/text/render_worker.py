"""A program that renders a chat template, which is code of strangers, within limits of time and memory.

It reads lines of JSON: first the template with its limits, then lists of conversations. It answers a line for
the template and for each conversation: `{"text": ...}` or `{"error": ...}`. The system ends it when rendering
one conversation takes more processor time than allowed, whatever it computes; that is the answer, too.

Imports nothing but jinja2: it starts in a tenth of a second, and has nothing of a run in its memory. The
environment is that of `apply_chat_template` in transformers 5, but for what a template must not do here:
include files, ask the clock, and loop without an end.
"""

import contextlib
import json
import resource
import signal
import sys
from collections.abc import Iterator
from datetime import datetime
from typing import Any

import jinja2
import jinja2.ext
from jinja2 import nodes
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer


class TooMuchError(Exception):
    """A limit was reached; the message is a clause."""


class Budget:
    """Turns of loops and calls that are left for one conversation."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._left = limit

    def begin(self) -> None:
        self._left = self._limit

    def spend(self) -> None:
        self._left -= 1
        if self._left < 0:
            raise TooMuchError(f"it makes more than {self._limit:,} turns of loops and calls")


class Counted:
    """Something to loop over, each turn of which is counted."""

    def __init__(self, values: Any, budget: Budget) -> None:
        self._values, self._budget = values, budget

    def __iter__(self) -> Iterator[Any]:
        for value in self._values:
            self._budget.spend()
            yield value

    def __len__(self) -> int:
        return len(self._values)


class CountLoops(NodeTransformer):
    """Puts a filter around what every loop goes over."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        if node.recursive:
            raise TooMuchError(f"line {node.lineno} has a recursive loop")
        self.generic_visit(node)
        node.iter = nodes.Filter(node.iter, "_counted", [], [], None, None, lineno=node.iter.lineno)
        return node


class Environment(ImmutableSandboxedEnvironment):
    """The sandbox, with counted calls."""

    budget: Budget

    def call(self, *args: Any, **kwargs: Any) -> Any:
        """Call something for a template."""
        self.budget.spend()
        return super().call(*args, **kwargs)


class GenerationTag(jinja2.ext.Extension):
    """`{% generation %}`, which says what an assistant wrote; here it is found in another way."""

    tags = {"generation"}  # noqa: RUF012 - as the base class has it

    def parse(self, parser: Any) -> nodes.Node:
        """Parse to `endgeneration`."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_body"), [], [], body).set_lineno(line)

    def _body(self, caller: Any) -> Any:
        return caller()


class Namespace(jinja2.utils.Namespace):
    """One without names that begin with an underscore, which lead out of the sandbox."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        self, args = args[0], args[1:]
        attributes = dict(*args, **kwargs)
        for name in attributes:
            Namespace._check(name)
        jinja2.utils.Namespace.__init__(self, attributes)

    def __setitem__(self, name: Any, value: Any) -> None:
        Namespace._check(name)
        jinja2.utils.Namespace.__setitem__(self, name, value)

    @staticmethod
    def _check(name: Any) -> None:
        if isinstance(name, str) and name.startswith("_"):
            raise jinja2.exceptions.SecurityError(f"a namespace cannot have an attribute {name!r}")


def _raise(message: Any) -> None:
    raise jinja2.exceptions.TemplateError(str(message))


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: Any = None,
    separators: Any = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def compiled(settings: dict[str, Any], budget: Budget) -> jinja2.Template:
    """The template, with counted loops.

    Raises:
        jinja2.TemplateError: it is no template.
        TooMuchError: it includes files, or loops in a way that cannot be counted.
    """
    environment = Environment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationTag, jinja2.ext.loopcontrols]
    )
    environment.budget = budget
    environment.filters["tojson"] = _to_json
    environment.filters["_counted"] = lambda values: Counted(values, budget)
    environment.globals |= {"raise_exception": _raise, "namespace": Namespace}
    if settings["date"] is not None:
        date = datetime.fromisoformat(settings["date"])
        environment.globals["strftime_now"] = lambda form: date.strftime(form)
    tree = environment.parse(settings["template"])
    for node in tree.find_all((nodes.Include, nodes.Import, nodes.FromImport, nodes.Extends)):
        raise TooMuchError(f"line {node.lineno} reads another file, which no template may")
    code = environment.compile(CountLoops().visit(tree))
    return jinja2.Template.from_code(environment, code, environment.make_globals(None))


def rendered(
    template: jinja2.Template, values: dict[str, Any], budget: Budget, max_characters: int
) -> dict[str, str]:
    """The answer to one conversation."""
    budget.begin()
    parts, length = [], 0
    try:
        for part in template.generate(values):
            parts.append(part)
            length += len(part)
            if length > max_characters:
                raise TooMuchError(f"it writes more than {max_characters:,} characters")
    except Exception as error:
        return {"error": clause_of(error)}
    return {"text": "".join(parts)}


def clause_of(error: Exception) -> str:
    """What went wrong, as a clause."""
    if isinstance(error, TooMuchError):
        return str(error)
    if isinstance(error, jinja2.exceptions.TemplateSyntaxError):
        return f"line {error.lineno} is no Jinja ({error.message})"
    if isinstance(error, MemoryError):
        return "it needs more memory than it may"
    if isinstance(error, RecursionError):
        return "it calls itself without an end"
    if isinstance(error, OverflowError):
        return f"a number is too large ({error})"
    if type(error) is jinja2.exceptions.TemplateError:
        return f"it refuses the conversation ({error})"
    return f"{error or type(error).__name__}"


def main() -> None:
    """Answer until there is nothing more to read."""
    lines = sys.stdin.buffer
    settings = json.loads(lines.readline())
    _limit_memory(settings["max_bytes"])
    budget = Budget(settings["max_turns"])
    seconds = settings["max_seconds"]
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        template = compiled(settings, budget)
    except Exception as error:
        _answer({"error": clause_of(error)})
        return
    _answer({"text": ""})
    for line in lines:
        for values in json.loads(line):
            # Processor time, not the clock's: how busy the machine is makes no difference.
            signal.setitimer(signal.ITIMER_PROF, seconds)
            _answer(rendered(template, settings["tokens"] | values, budget, settings["max_characters"]))
            signal.setitimer(signal.ITIMER_PROF, 0)


def _answer(values: dict[str, str]) -> None:
    sys.stdout.buffer.write(json.dumps(values).encode() + b"\n")
    sys.stdout.buffer.flush()


def _limit_memory(num_bytes: int) -> None:
    # Not every system has it; the limit of time stays.
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_AS, (num_bytes, num_bytes))


if __name__ == "__main__":
    main()
