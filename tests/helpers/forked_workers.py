"""Workers of the tests' Ray clusters and processes of xdist are forks of one that has imported what they do.

Most of what a small run takes is imports, once per actor; so is most of what collecting tests takes. Ray's
own is not: while it is loaded it reads settings from the environment, and each worker has its own. What Ray
imports of others is shared.

Workers as users start them are in `tests/examples/test_ray_job.py`.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
import threading
import types
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

IMPORTED = (
    "pyarrow.dataset",
    "torch._dynamo",  # by every optimizer of torch
    "rayrec.embeddings.transport.shared_memory",
    "rayrec.pipelines.tuning.trial",
    "rayrec.serve.launch.nearline",
    # By Ray, and by Ray Serve.
    "aiohttp.web",
    "fastapi",
    "google.protobuf.json_format",
    "jsonschema",
    "pyarrow.json",
    "pydantic.v1",
    "requests",
    "uvicorn",
    "uvloop",
    # By the modules of tests whose functions are tasks.
    "pytest",
)
"""Without Ray, by many workers; of each room, the module that imports most."""
IMPORTED_IF_THERE = ("torchrec", "transformers.modeling_utils")
"""By modules of tests."""
TEMPLATE = "RAYREC_TEMPLATE_OF_TESTS"
"""In the environment: the address of a template that is there already."""
STARTS_S = 200.0
"""Longest that the imports may take."""
MESSAGE_BYTES = 1 << 20
STANDARD_STREAMS = (0, 1, 2)

# What Ray and xdist take for their interpreter. It hands a start to the template, and is there as long as it.
INTERPRETER = """
    #!{python} -SEs
    import json, os, socket, sys
    if not (sys.argv[1:] and sys.argv[1].endswith("default_worker.py") or sys.argv[1:3] == ["-u", "-c"]):
        os.execv({python!r}, [{python!r}, *sys.argv[1:]])
    template = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    template.connect({address!r})
    start = dict(arguments=sys.argv[1:], folder=os.getcwd(), environment=dict(os.environ))
    socket.send_fds(template, [json.dumps(start).encode()], [0, 1, 2])
    template.recv(1)
"""


@contextmanager
def forked_workers() -> Iterator[str]:
    """To be open as long as a cluster; gives what has to be `sys.executable` while that is started."""
    if TEMPLATE in os.environ:
        yield str(Path(os.environ[TEMPLATE]).with_name("python"))
        return
    # Names of sockets are short.
    with tempfile.TemporaryDirectory(prefix="workers-", dir="/tmp") as folder:
        address, interpreter = Path(folder) / "template", Path(folder) / "python"
        interpreter.write_text(
            textwrap.dedent(INTERPRETER).strip().format(python=sys.executable, address=str(address))
        )
        interpreter.chmod(0o755)
        command = [sys.executable, "-m", "tests.helpers.forked_workers", str(address)]
        root = Path(__file__).parents[2]
        # It ends with its input, also if nobody is left to end it.
        template = subprocess.Popen(command, cwd=root, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        try:
            assert template.stdout is not None
            if not select.select([template.stdout], [], [], STARTS_S)[0] or not template.stdout.read(1):
                raise RuntimeError("the template of Ray's workers did not start")
            yield str(interpreter)
        finally:
            template.communicate()


def serve(address: str) -> None:
    """Fork for every worker that is to start; returns in the fork, which then is one."""
    gc.disable()
    for module in IMPORTED:
        importlib.import_module(module)
    for module in IMPORTED_IF_THERE:
        with suppress(ImportError):
            importlib.import_module(module)
    assert "ray" not in sys.modules, "its settings would be those of this process"
    _fill_registry_of_numba()
    gc.freeze()  # a worker's collections would copy the pages of all that is shared
    gc.enable()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody asks what became of a worker
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(address)
        listener.listen(64)
        os.write(1, b"\n")
        while True:
            ready, _, _ = select.select([listener, 0], [], [])
            if 0 in ready:
                os._exit(0)
            connection, _ = listener.accept()
            if os.fork() == 0:
                break
            connection.close()
    _become_worker(connection)


def _fill_registry_of_numba() -> None:
    """What numba does at the first call of a kernel, also of one that it has compiled before."""
    from numba.core.registry import cpu_target

    cpu_target.typing_context.refresh()
    cpu_target.target_context.refresh()


def _become_worker(connection: socket.socket) -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    message, streams, _, _ = socket.recv_fds(connection, MESSAGE_BYTES, len(STANDARD_STREAMS))
    for stream, number in zip(streams, STANDARD_STREAMS, strict=True):
        os.dup2(stream, number)
        os.close(stream)
    start = json.loads(message)
    os.chdir(start["folder"])
    os.environ.clear()
    os.environ.update(start["environment"])
    if start["arguments"][0] == "-u":
        threading.Thread(target=_end_with, args=(connection,), daemon=True).start()
        sys.argv = ["-c"]
        sys.modules["__main__"] = main = types.ModuleType("__main__")
        exec(start["arguments"][2], main.__dict__)
        return
    os.setpgid(0, 0)  # Ray kills a worker with its group
    sys.argv = start["arguments"]
    sys.path[0] = str(Path(sys.argv[0]).parent)
    runpy.run_path(sys.argv[0], run_name="__main__")


def _end_with(connection: socket.socket) -> None:
    """What kills a process of xdist kills the one that it started, whose end closes the connection."""
    connection.recv(1)
    os._exit(1)


if __name__ == "__main__":
    serve(sys.argv[1])
