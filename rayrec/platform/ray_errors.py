"""Unwraps exceptions that Ray passed between processes."""

from __future__ import annotations

import re

from ray.exceptions import ActorDiedError, RayTaskError


class ActorDeathError(RuntimeError):
    """An actor's process has died; the message is one sentence that names the actor."""


def root_cause(error: BaseException) -> BaseException:
    """The original exception inside Ray's wrappers, however many actors it passed through.

    An exception of an actor's constructor comes out as itself, a process that died as `ActorDeathError`.
    """
    while True:
        if isinstance(error, RayTaskError) and error.cause is not None and error.cause is not error:
            error = error.cause
        elif isinstance(error, ActorDiedError):
            # Ray documents its `cause`: the constructor's error, if that is why there is no actor.
            of_constructor = [cause for cause in error.args if isinstance(cause, RayTaskError)]
            if not of_constructor:
                return _as_sentence(error)
            error = of_constructor[0]
        else:
            return error


def _as_sentence(error: ActorDiedError) -> ActorDeathError:
    """Shorten Ray's lines of `key: value` and its paragraph of advice to one sentence."""
    message = str(error)
    facts = dict(re.findall(r"^\s+(\w+): (.+)$", message, re.MULTILINE))
    name = facts.get("name") or facts.get("class_name") or "an actor"
    if "worker process has died" in message:
        reason = "its process was killed, ran out of memory or crashed"
    elif because := re.search(r"(?:because of|because) (.+?)(?:\.\s|\.?$)", message, re.MULTILINE):
        reason = because[1]
    else:
        reason = "Ray does not say why"
    where = [f"{label} {facts[key]}" for key, label in (("pid", "process"), ("ip", "on")) if key in facts]
    return ActorDeathError(f"{name} died: {reason}" + (f" ({' '.join(where)})" if where else ""))
