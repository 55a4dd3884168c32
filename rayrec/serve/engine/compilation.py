"""Compiled ranking in the background: no request waits for a compiler.

    request ─► CompiledRanking ─► program of its shape │ eager, at once, and ─► Compiler.order
                                        ▲                                            │
                 CompiledPrograms.add ──┘── its thread: package found? load : a process of its own

The serving process neither traces nor compiles: it loads packages. Whatever fails is logged once, and
requests of that shape stay eager. The process has a low priority from the first request on; before, the
service waits for it, and on a busy machine a minute would become an hour.
"""

from __future__ import annotations

import atexit
import logging
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import torch

from rayrec.models.compiled_ranking.buckets import Bucket, Buckets
from rayrec.models.compiled_ranking.captured import capture, captured_programs
from rayrec.models.compiled_ranking.compiler_process import CANNOT, NEVER
from rayrec.models.compiled_ranking.job import Job, RankingModel
from rayrec.models.compiled_ranking.packages import PackageError, PackageFolders, load
from rayrec.models.compiled_ranking.ranking import CompiledPrograms, CompiledRanking
from rayrec.platform.devices import KINDS, device_named
from rayrec.platform.errors import InputError
from rayrec.platform.graphs import graphs_of
from rayrec.serve.config.compile import CompileConfig

logger = logging.getLogger(__name__)

COMPILE_TIMEOUT_S = 1800.0
"""A compiler that takes longer is ended: at the lowest priority a minute may become many."""
LOWEST_PRIORITY = 19
"""Of the compiler's process while requests are answered."""
MAX_FAILURES = 3
"""In a row, after which nothing is compiled any more."""
FIRST_K = 10
"""Programs that readiness waits for are those of so many items, the default of requests, unless the service
says otherwise."""


class CompilationFailedError(RuntimeError):
    """No package; the message says why."""

    def __init__(self, message: str, is_final: bool = False) -> None:
        """
        Args:
            is_final: whether no other program of the model could be compiled either.
        """
        super().__init__(message)
        self.is_final = is_final


class Versioned(Protocol):
    """What of `rayrec.pipelines.inference.recommender.Recommender` is asked here."""

    @property
    def ranking_model(self) -> RankingModel: ...
    @property
    def device(self) -> torch.device: ...
    def rank_with(self, programs: CompiledPrograms) -> CompiledRanking: ...


class CompileService:
    """Compiled programs for every version of the models that a process serves."""

    def __init__(
        self, run: Path | None, config: CompileConfig, threads: int, fewer_beams: Sequence[int] = ()
    ) -> None:
        """
        Args:
            run: folder of the run, or of versions; None where it is not on this machine.
            threads: of the model.
            fewer_beams: that the service goes down to under load.
        """
        self._fewer_beams = fewer_beams
        self._config = config
        self._threads = threads
        self._buckets = Buckets(config.row_counts, config.lengths)
        self.compiler = Compiler(PackageFolders(config.folders(run)))
        atexit.register(self.compiler.close)
        self._programs: dict[str, CompiledPrograms] = {}
        self.expected: Mapping[str, Iterable[Bucket]] = {}
        """Shapes that readiness waits for, too, by the fingerprint of their model."""

    @property
    def asked(self) -> dict[str, dict[Bucket, float]]:
        """Shapes of the programs that are there, with when a batch last had them (UNIX seconds), by the
        fingerprint of their model."""
        found = {}
        for each in list(self._programs.values()):
            asked_at = each.asked_at.copy()
            if asked := {bucket: asked_at[bucket] for bucket in each.ready if bucket in asked_at}:
                found[each.model.fingerprint] = asked
        return found

    def give(self, recommender: Versioned) -> CompiledRanking:
        """Have a version ranked by programs; those of a version of the same shapes are its own at once."""
        if self._config.graphs:
            return self._recorded(recommender)
        key = f"{recommender.ranking_model.fingerprint} {recommender.device}"
        if (programs := self._programs.get(key)) is not None:
            try:
                return recommender.rank_with(programs)
            except ValueError as error:
                logger.warning("compiled ranking starts again: %s", error)
        programs = CompiledPrograms(
            recommender.ranking_model,
            self._buckets,
            self.compiler.order,
            recommender.device,
            self._threads,
            self._config.most,
        )
        ranking = recommender.rank_with(programs)
        self._programs = {key: programs}  # a model of other shapes has replaced the one before
        return ranking

    @property
    def records(self) -> bool:
        """Whether every version has programs of its own, which are all made before it answers."""
        return self._config.graphs

    def _recorded(self, recommender: Versioned) -> CompiledRanking:
        model, device = recommender.ranking_model, recommender.device
        programs = captured_programs(model, self._buckets, device)
        # For what is left to the next replica, which records these shapes too.
        self._programs = {f"{model.fingerprint} {device}": programs}
        return recommender.rank_with(programs)

    def warm_up(self, ranking: CompiledRanking, ks: Sequence[int] = (FIRST_K,)) -> None:
        """Wait until batches of all lengths that the model reads have their programs, but not too long.

        Args:
            ranking: one that has seen a batch.
            ks: items that the service looks for where a request says nothing else.
        """
        programs, declared = ranking.programs, self._config.ks
        # Recordings are made in seconds and never later; programs are compiled in minutes, and ordered by the
        # first batch that lacks one: what is not declared can wait for that.
        asked_for = {*declared, *(ks if self._config.graphs else ())}
        programs.declared |= {ranking.model.num_beams(k) for k in asked_for}
        ks = [*ks, *declared]
        for k in ks:
            if ranking.width(k) is None:
                logger.warning("requests for which %d items are looked for are ranked eagerly", k)
        # Of a default above the model's beams, too: requests for fewer items have these.
        found = [*(ranking.width(k) for k in ks), ranking.width(1)]
        if self._config.graphs and ranking.model.num_beams(1):
            fewer = [ranking.model.num_beams(k, most) for most in self._fewer_beams for k in ks]
            found += [ranking.width(1, [beams]) for beams in fewer]
        widths = list(dict.fromkeys(width for width in found if width is not None))
        if programs.signature is None or not widths:
            logger.warning("nothing is compiled before requests come: no batch was ranked to learn from")
            self.compiler.give_way()
            return
        longest = self._buckets.of(1, programs.signature.max_length, widths[0])
        lengths = [each for each in self._buckets.lengths if longest is None or each <= longest.length]
        # Small ones first: most batches are, and there most is gained.
        buckets = [
            Bucket(rows, length, width)
            for width in widths
            for rows in self._buckets.row_counts
            for length in lengths
        ]
        buckets = list(dict.fromkeys([*buckets, *self.expected.get(programs.model.fingerprint, ())]))
        if self._config.graphs:
            graphs = graphs_of(programs.device)
            assert graphs is not None, "looked at when the version came"
            capture(ranking, graphs, buckets)
            return
        ordered = [bucket for bucket in buckets if programs.want(bucket)]
        logger.info("compiling, or loading, the programs of %d shapes before requests", len(ordered))
        if not self.compiler.wait(self._config.wait_s):
            logger.warning(
                "after %g s, %d of %d programs are ready; the others come while requests are answered",
                self._config.wait_s,
                sum(programs.of(bucket) is not None for bucket in ordered),
                len(ordered),
            )
        self.compiler.give_way()

    def close(self) -> None:
        self.compiler.close()


def check_records(kind: str) -> None:
    """Check that devices of a kind have graphs.

    Raises:
        InputError: names those that have.
    """
    if device_named(kind).graph_class is None:
        able = [each for each in KINDS if device_named(each).graph_class is not None]
        raise InputError(
            f"compile.graphs: {kind} records no kernels; leave it out, or serve on {' or '.join(able)} "
            "(--device)"
        )


@dataclass(frozen=True)
class _Order:
    programs: CompiledPrograms
    bucket: Bucket
    job: Job | None = field(default=None)


Compile = Callable[[Job, Path], None]
"""Writes the package; raises `CompilationFailedError`."""


class Compiler:
    """Fills orders on a thread of its own, one after the other; those that only have to be loaded first."""

    def __init__(self, folders: PackageFolders, compile_package: Compile | None = None) -> None:
        """
        Args:
            compile_package: None: a process of its own.
        """
        self._folders = folders
        self._process = CompilerProcess()
        self._compile = compile_package or self._process.compile
        self._waiting: list[_Order] = []
        self._is_busy = False
        self._is_closed = False
        self._num_failures = 0
        self._given_up: set[CompiledPrograms] = set()
        self._changed = threading.Condition()
        self.num_compiled = 0
        """Packages that were compiled for this process."""
        self.num_loaded = 0
        """Programs that came into use."""
        self._thread = threading.Thread(target=self._run, name="compiler", daemon=True)
        self._thread.start()

    def order(self, programs: CompiledPrograms, bucket: Bucket) -> None:
        """Have a program compiled, or loaded, and added; returns at once."""
        with self._changed:
            self._waiting.append(_Order(programs, bucket))
            self._changed.notify_all()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Until no order is left.

        Returns:
            Whether none is left.
        """
        with self._changed:
            return self._changed.wait_for(lambda: not self._waiting and not self._is_busy, timeout_s)

    def give_way(self) -> None:
        """From now on requests are answered, and what is compiled has the lowest priority."""
        self._process.give_way()

    def close(self) -> None:
        """End the compiling process, and leave what is ordered."""
        with self._changed:
            self._is_closed = True
            self._waiting.clear()
            self._changed.notify_all()
        self._process.close()
        self._thread.join()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._is_closed)
                if self._is_closed:
                    return
                self._is_busy = True
                waiting = list(self._waiting)
            order = next((each for each in waiting if self._is_there(each)), waiting[0])
            try:
                self._fill(order)
            except Exception as error:
                self._failed(order, error)
            with self._changed:
                self._waiting = [each for each in self._waiting if each is not order]
                self._is_busy = False
                self._changed.notify_all()

    def _is_there(self, order: _Order) -> bool:
        try:
            return self._folders.find(order.programs.job(order.bucket).key) is not None
        except Exception:  # said when its turn has come, and no other one's is lost
            return False

    def _fill(self, order: _Order) -> None:
        job = order.programs.job(order.bucket)
        package = self._folders.find(job.key)
        if package is not None:
            try:
                self._take(order, package)
                return
            except PackageError as error:
                logger.warning("compiled again: %s", error)
                self._folders.refuse(package)
        if order.programs in self._given_up or self._num_failures >= MAX_FAILURES:
            return
        started = time.monotonic()
        package = self._folders.place_for(job.key)
        self._compile(job, package)
        self.num_compiled += 1
        self._take(order, package)
        self._num_failures = 0
        num_left = len(self._waiting)
        logger.info("compiled %s in %.0f s; %d to go", order.bucket, time.monotonic() - started, num_left)

    def _take(self, order: _Order, package: Path) -> None:
        order.programs.add(order.bucket, load(package))
        self.num_loaded += 1

    def _failed(self, order: _Order, error: Exception) -> None:
        if self._is_closed:
            return
        logger.warning("%s stay with eager ranking: %s", order.bucket, error)
        self._num_failures += 1
        if isinstance(error, CompilationFailedError) and error.is_final:
            self._given_up.add(order.programs)
            logger.warning("nothing more is compiled for this model")
        elif self._num_failures == MAX_FAILURES:
            logger.warning("nothing more is compiled: %d programs in a row failed", MAX_FAILURES)


class CompilerProcess:
    """Runs `compiler_process`, one at a time."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._is_closed = False
        self._gives_way = False
        self._changes = threading.Lock()
        # Of all its processes, which so compile headers once.
        self._cache = tempfile.mkdtemp(prefix="rayrec-compile-")

    def compile(self, job: Job, package: Path) -> None:
        """Compile one program and write its package.

        Raises:
            CompilationFailedError: there is no package.
        """
        with tempfile.TemporaryDirectory(dir=self._cache) as folder:
            job.save(Path(folder))
            errors = Path(folder, "stderr")
            self._run([folder, str(package), str(os.getpid())], errors)

    def _run(self, arguments: list[str], errors: Path) -> None:
        module = "rayrec.models.compiled_ranking.compiler_process"
        one_thread = {"OMP_NUM_THREADS": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1"}
        with open(errors, "wb") as stderr:
            with self._changes:
                if self._is_closed:
                    raise CompilationFailedError("the service ends")
                process = self._process = subprocess.Popen(
                    [sys.executable, "-m", module, *arguments],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=stderr,
                    # With its own children it can then be given a priority, or ended.
                    process_group=0,
                    env={**os.environ, **one_thread, "TORCHINDUCTOR_CACHE_DIR": self._cache},
                )
                if self._gives_way:
                    _set_lowest_priority(process)
            try:
                code = process.wait(COMPILE_TIMEOUT_S)
            except subprocess.TimeoutExpired as error:
                _kill(process)
                raise CompilationFailedError(f"the compiler took over {COMPILE_TIMEOUT_S:g} s") from error
        if code in (NEVER, CANNOT):
            lines = errors.read_text(errors="replace").strip().splitlines()
            raise CompilationFailedError(lines[-1], is_final=code == NEVER)
        if code:
            raise CompilationFailedError(f"the compiler's process ended with code {code}")

    def give_way(self) -> None:
        """The lowest priority, for the process that runs and all that follow."""
        with self._changes:
            self._gives_way = True
            if self._process is not None and self._process.poll() is None:
                _set_lowest_priority(self._process)

    def close(self) -> None:
        with self._changes:
            self._is_closed = True
            process = self._process
        if process is not None and process.poll() is None:
            _kill(process)
        shutil.rmtree(self._cache, ignore_errors=True)


def _set_lowest_priority(process: subprocess.Popen[bytes]) -> None:
    with suppress(ProcessLookupError):  # it may have ended meanwhile
        os.setpriority(os.PRIO_PGRP, process.pid, LOWEST_PRIORITY)


def _kill(process: subprocess.Popen[bytes]) -> None:
    """With the compiler that it runs."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
