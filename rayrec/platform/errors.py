"""The one exception a person is meant to read."""


class InputError(ValueError):
    """Something the caller gave cannot be used.

    The message is one sentence or two: which file, row or key; what was
    expected; what was found; what to do about it. The command prints it as its
    last line and exits with a code other than zero.
    """
