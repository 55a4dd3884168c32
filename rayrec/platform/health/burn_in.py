"""What a device really does: its rate of products, of copies and of the disk, and whether it computes right.

Nothing here has a limit from a data sheet: what a device reaches is compared with what its peers do, and a
fixed computation has to give the same bits every time, and on every device of its kind. Others that work
on the device meanwhile would be measured too, so that a busy one is unknown.

Source of the parts: NVSentinel's and DCGM's preflight checks, and SuperBench (ATC '24), which validates nodes
by comparing the same short benchmarks between them. That a test's own load must not count against the next
one is issue #272 of NVIDIA/DCGM.
"""

from __future__ import annotations

import hashlib
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from rayrec.platform.devices import HOST, get_device
from rayrec.platform.health.counters import Card
from rayrec.platform.health.findings import Finding, Verdict

MOST_S = 0.2
"""Time for all repetitions of a product, the first aside, which warms up."""
SIZES = (512, 1024, 2048, 4096, 8192)
COPY_BYTES = 64 * 2**20
DISK_BYTES = 64 * 2**20
REPEATS = 5
"""Of each measurement; the best counts, since other work can only lower it."""
COPY_REPEATS = 30
"""A copy takes a hundredth of a second, and is disturbed by others that use the same memory."""
CHECKSUM_SIZE, CHECKSUM_ROUNDS, CHECKSUM_REPEATS = 384, 6, 3
LOAD_WINDOW_S = 0.2
MOST_BUSY = 0.25
"""Share of the CPUs, or of an accelerator's time, in use before, above which nothing is measured."""
MOST_OTHERS = 0.1
"""Share of the CPUs that others may take while this measures; what began after the look before shows here."""
MOST_USED_BYTES = 2 * 2**30
"""Of an accelerator's memory: who holds more of it works there, even if not at this moment."""
RATES = ("matrix_flops_per_s", "copy_bytes_per_s", "disk_write_bytes_per_s", "disk_read_bytes_per_s")
SUSPECT_BELOW: Mapping[str, float] = dict(zip(RATES, (0.85, 0.85, 0.5, 0.5), strict=True))
"""Share of the peers' median. Disks are shared, and have caches, so that they differ more without a fault. A
slow device is avoided and not left: a measurement of some seconds is no proof, wrong bits are."""
MIN_PEERS = 2
"""Others of a kind, below which there is nothing to compare with: of two nobody knows which is slow."""


@dataclass(frozen=True)
class BurnIn:
    """What one device reached."""

    device: str
    """`cpu`, `cuda` or `npu`."""
    kind: str
    """Devices of one kind compute the same bits at the same rate: model, torch, threads."""
    busy: str | None = None
    """Why nothing was measured; None where it was."""
    matrix_flops_per_s: float = 0.0
    copy_bytes_per_s: float = 0.0
    """Read and written within the device's memory, each byte counted once."""
    disk_write_bytes_per_s: float = 0.0
    """With what the disk needs to have it for good."""
    disk_read_bytes_per_s: float = 0.0
    """Past the system's cache, where it can be emptied."""
    checksums: tuple[str, ...] = ()
    """Of the fixed computation, each time that it ran."""
    seconds: float = 0.0

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def matrix_rate(device: torch.device, dtype: torch.dtype) -> float:
    """FLOP/s of the best product of two square matrices; by the threads of this process.

    Sizes grow as long as there is time: an accelerator is not busy with what fills a CPU.
    """
    best, left_s = 0.0, MOST_S
    for size in SIZES:
        factor = torch.ones(size, size, dtype=dtype, device=device)
        _product_s(factor)
        seconds = min(_product_s(factor) for _ in range(3))
        best = max(best, 2 * size**3 / seconds)
        left_s -= 4 * seconds
        if left_s < 4 * 8 * seconds:  # of twice the size
            break
    return best


def _product_s(factor: torch.Tensor) -> float:
    started = time.perf_counter()
    product = factor @ factor
    product[0, 0].item()  # waits for the device, whichever it is
    return time.perf_counter() - started


def copy_rate(device: torch.device, num_bytes: int = COPY_BYTES) -> float:
    """Bytes per second that are copied within the device's memory, or the host's."""
    source = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)

    def copied_s() -> float:
        started = time.perf_counter()
        target.copy_(source)
        target[-1].item()
        return time.perf_counter() - started

    copied_s()
    return num_bytes / min(copied_s() for _ in range(COPY_REPEATS))


def disk_rates(folder: str | Path, num_bytes: int = DISK_BYTES) -> tuple[float, float]:
    """Bytes per second that are written to a folder's disk for good, and read from it.

    Raises:
        OSError: the folder cannot be written to, or the disk is full.
    """
    block = os.urandom(2**20)
    written_s, read_s = [], []
    with tempfile.NamedTemporaryFile(dir=folder, prefix=".burn-in-") as file:
        for _ in range(REPEATS):
            started = time.perf_counter()
            file.seek(0)
            for _ in range(num_bytes // len(block)):
                file.write(block)
            file.flush()
            os.fsync(file.fileno())
            written_s.append(time.perf_counter() - started)
            with suppress(OSError, AttributeError):
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            started = time.perf_counter()
            file.seek(0)
            while file.read(len(block)):
                pass
            read_s.append(time.perf_counter() - started)
    size = num_bytes // len(block) * len(block)
    return size / min(written_s), size / min(read_s)


def fixed_checksum(device: torch.device) -> str:
    """Hash of every bit that a fixed computation gives: products, sums and a nonlinearity, over and over.

    Two devices of one kind give the same; a device that does not give the same twice is broken.
    """
    size = CHECKSUM_SIZE
    numbers = (torch.arange(size * size, dtype=torch.int64) * 2654435761 % 1021).reshape(size, size)
    whole = numbers.to(device)
    factor = ((numbers - 510).float() / 510).to(device)
    state = factor
    for _ in range(CHECKSUM_ROUNDS):
        state = torch.tanh(state @ factor * size**-0.5) + factor.t() * 0.125
        whole = whole * 31 % 1021 + whole.cumsum(0) % 7
    digest = hashlib.sha256(state.cpu().numpy().tobytes())
    digest.update(whole.cpu().numpy().tobytes())
    return digest.hexdigest()


def kind_of(device: torch.device) -> str:
    """What decides about bits and rates: the model, the build of torch, and how many threads."""
    if device.type == HOST.kind:
        return f"{_cpu_model()}, {torch.get_num_threads()} threads, torch {torch.__version__}"
    return f"{torch.get_device_module(device.type).get_device_name(device)}, torch {torch.__version__}"


def _text(path: str) -> str | None:
    try:
        return Path(path).read_text(errors="replace")
    except OSError:
        return None


def cpu_load(
    window_s: float = LOAD_WINDOW_S,
    text: Callable[[str], str | None] = _text,
    sleep: Callable[[float], None] = time.sleep,
) -> float | None:
    """Share of the CPUs' time that is in use now; None where it cannot be read.

    The average of the last minute would still have what an earlier burn-in has done.
    """
    before = _cpu_times(text("/proc/stat"))
    sleep(window_s)
    return _others_share(before, _cpu_times(text("/proc/stat")), 0.0)


def why_busy(load: float | None, card: Card | None = None) -> str | None:
    """Say who would be measured, too; None if nobody is known to work there.

    Args:
        load: of the CPUs, see `cpu_load`.
        card: the accelerator that is to be measured.
    """
    if load is None:
        return "how busy the CPUs are cannot be read"
    if load > MOST_BUSY:
        return f"the CPUs are {load:.0%} busy"
    if card is None:
        return None
    if (use := card.number("utilization_percent")) is not None and use > 100 * MOST_BUSY:
        return f"{card.label} is {use:.0f} % busy"
    if (used := card.number("memory_used_bytes")) is not None and used > MOST_USED_BYTES:
        return f"{used / 2**30:.1f} GiB of {card.label} are in use"
    return None


def burn_in(
    device: str = HOST.kind,
    folder: str | Path | None = None,
    card: Card | None = None,
    load: Callable[[], float | None] = cpu_load,
    text: Callable[[str], str | None] = _text,
) -> BurnIn:
    """Measure this machine, or one of its accelerators, for some seconds.

    Args:
        device: a kind of device; of several, the first that this process sees.
        folder: whose disk to measure; None: none.
        card: what the driver says of the accelerator.
        load: how busy the CPUs are.
        text: of a file of the system.

    Raises:
        InputError: there is no such device.
    """
    began = time.perf_counter()
    here = get_device(device).torch
    kind = kind_of(here)
    if (busy := why_busy(load(), card)) is not None:
        return BurnIn(device, kind, busy)
    times, own_s = _cpu_times(text("/proc/stat")), time.process_time()
    dtype = torch.float32 if here.type == HOST.kind else torch.bfloat16
    rate = max(matrix_rate(here, dtype) for _ in range(REPEATS))
    checksums = tuple(fixed_checksum(here) for _ in range(CHECKSUM_REPEATS))
    written, read = (0.0, 0.0) if folder is None else disk_rates(folder)
    copied = copy_rate(here)
    others = _others_share(times, _cpu_times(text("/proc/stat")), time.process_time() - own_s)
    if here.type == HOST.kind and others is not None and others > MOST_OTHERS:
        return BurnIn(device, kind, f"others took {others:.0%} of the CPUs meanwhile")
    seconds = time.perf_counter() - began
    return BurnIn(device, kind, None, rate, copied, written, read, checksums, seconds)


def compare_burn_ins(results: Mapping[str, BurnIn]) -> dict[str, list[Finding]]:
    """Judge what devices reached, each by the others of its kind.

    Args:
        results: by place, such as a node and card.

    Returns:
        Findings by place.
    """
    return {
        place: _judged(place, result, [each for name, each in results.items() if name != place])
        for place, result in results.items()
    }


def _judged(place: str, result: BurnIn, others: Sequence[BurnIn]) -> list[Finding]:
    if result.busy is not None:
        return [Finding.of("burn-in", place, "unknown", detail=f"not measured: {result.busy}")]
    peers = [other for other in others if other.kind == result.kind and other.busy is None]
    findings = [_checksum_finding(place, result, peers)]
    for name in RATES:
        value, theirs = getattr(result, name), [getattr(peer, name) for peer in peers]
        if not value or len(theirs) < MIN_PEERS:
            continue
        median = statistics.median(theirs)
        verdict: Verdict = "suspect" if value < SUSPECT_BELOW[name] * median else "ok"
        code = "slow-" + name.removesuffix("_flops_per_s").removesuffix("_bytes_per_s").replace("_", "-")
        findings.append(Finding.of(code, place, verdict, value, SUSPECT_BELOW[name] * median))
    return findings


def _checksum_finding(place: str, result: BurnIn, peers: Sequence[BurnIn]) -> Finding:
    code = "checksum"
    if len(set(result.checksums)) != 1:
        detail = "a fixed computation has other bits every time"
        return Finding.of(code, place, "bad", len(set(result.checksums)), 1, detail)
    own = result.checksums[0][:12]
    theirs = [peer.checksums[0] for peer in peers if len(set(peer.checksums)) == 1]
    same = theirs.count(result.checksums[0])
    if same == len(theirs):
        return Finding.of(code, place, "ok", own)
    most = max(map(theirs.count, theirs))
    if most > same + 1:  # it and those who agree with it are fewer
        return Finding.of(code, place, "bad", own, detail="its peers have other bits, and agree")
    if same + 1 > most:
        return Finding.of(code, place, "ok", own, detail="some peers have other bits")
    return Finding.of(code, place, "unknown", own, detail="as many peers have other bits as have these")


def _cpu_model() -> str:
    for line in (_text("/proc/cpuinfo") or "").splitlines():
        name, _, value = line.partition(":")
        if name.strip() == "model name":
            return value.strip()
    return platform.processor() or platform.machine()


def _others_share(
    before: tuple[float, float] | None, after: tuple[float, float] | None, own_s: float
) -> float | None:
    """Share of the CPUs' time that was not idle, and not ours; None where it is not known.

    Args:
        own_s: processor seconds of this process meanwhile.
    """
    if before is None or after is None or after[1] <= before[1]:
        return None
    return max(after[0] - before[0] - own_s * os.sysconf("SC_CLK_TCK"), 0.0) / (after[1] - before[1])


def _cpu_times(stat: str | None) -> tuple[float, float] | None:
    """(in use, all) since the machine's start."""
    words = (stat or "").partition("\n")[0].split()
    if len(words) < 5 or words[0] != "cpu":
        return None
    times = [float(word) for word in words[1:9]]
    # Not idle, nor waiting for the disk; what the host of a virtual machine takes (`steal`) counts as in use.
    return sum(times) - times[3] - (times[4] if len(times) > 4 else 0.0), sum(times)
