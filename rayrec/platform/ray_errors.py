"""Errors that crossed processes, back in the form in which they were raised. Imports without Ray."""

from __future__ import annotations

import re
import sys
from typing import Any


class ActorDeathError(RuntimeError):
    """An actor's process is gone; one sentence that names the actor."""


class StageHungError(RuntimeError):
    """A process with state is alive and does nothing; one sentence that names the actor."""


def root_cause(error: BaseException) -> BaseException:
    """Return the exception behind Ray's wrappers, however many actors it passed through.

    An exception of an actor's constructor comes out as itself, a process that died as `ActorDeathError`.
    """
    if "ray" not in sys.modules:
        return error
    from ray.exceptions import ActorDiedError, RayTaskError

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


def is_of_cluster(cause: BaseException) -> bool:
    """Whether a root cause is the cluster's or an actor's end, not the fault of what the actor was asked."""
    if isinstance(cause, ActorDeathError | StageHungError):
        return True
    if "ray" not in sys.modules:
        return False
    from ray.exceptions import RayError

    return isinstance(cause, RayError)


def _as_sentence(error: Any) -> ActorDeathError:
    """Ray's lines of `key: value` and a paragraph of advice, in short."""
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
