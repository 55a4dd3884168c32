"""The command line as a function: what it prints, and what it refuses."""

import json

from typer.testing import CliRunner

from rayrec.cli import app


def rayrec(*arguments):
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    return result.exit_code, result.stdout, result.stderr


def refused(*arguments, code=2):
    """The one line that says why a command did nothing; code 1: it may do it the next time."""
    found, stdout, stderr = rayrec(*arguments)
    assert (found, stdout) == (code, "")
    *above, line = stderr.splitlines()
    assert not any("Traceback" in other for other in above)
    assert line.startswith("rayrec: ")
    return line


def answer(*arguments):
    """The last line of a command that succeeds."""
    code, stdout, stderr = rayrec(*arguments, "--json")
    assert code == 0, stderr
    return json.loads(stdout.splitlines()[-1])
