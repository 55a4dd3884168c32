"""Where the token of a service comes from; `rayrec.serve.web.bearer_token` says who needs it."""

from __future__ import annotations

import hashlib
import logging
import os
import re
from collections.abc import MutableMapping
from pathlib import Path

from rayrec.platform.errors import InputError

logger = logging.getLogger(__name__)

VARIABLE = "RAYREC_SERVE_TOKEN"
MIN_LENGTH = 16
"""Characters: a shorter one could be guessed."""

_TOKEN = re.compile(r"[A-Za-z0-9\-._~+/]+=*")


def token_digest(file: Path | None, environment: MutableMapping[str, str] = os.environ) -> str | None:
    """SHA-256, in hexadecimal, of the token in the file or the environment; None where neither has one.

    Takes the variable out of the environment, which processes that are started later inherit.

    Raises:
        InputError: both have one, it cannot be read, or it is none.
    """
    told = environment.pop(VARIABLE, None)
    if file is None and told is None:
        return None
    if file is None:
        source, token = VARIABLE, told or ""
    elif told is not None:
        raise InputError(f"both --token-file and {VARIABLE} are there; give the token once")
    else:
        source = f"--token-file {file}"
        try:
            token = file.read_text(encoding="ascii")
        except OSError as error:
            raise InputError(f"{source}: cannot be read: {error.strerror}") from error
        except UnicodeDecodeError as error:
            raise InputError(f"{source}: expected a token of ASCII characters") from error
        if file.stat().st_mode & 0o077:
            logger.warning("%s: others may read or change the token; chmod 600 would stop that", file)
    token = token.strip()
    # Never the token itself in a message: it goes to logs.
    if len(token) < MIN_LENGTH or not _TOKEN.fullmatch(token):
        raise InputError(
            f"{source}: expected a token of at least {MIN_LENGTH} letters, digits and -._~+/, and found "
            f"something else of {len(token)} characters; 'openssl rand -hex 32' makes one"
        )
    return hashlib.sha256(token.encode()).hexdigest()
