"""`quantize`: the products of a trained model in fewer bits, and what that costs."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rayrec.cli.app import app
from rayrec.cli.run_options import DataOption, EvaluationSplit, RunArgument, WhichOption, check_run
from rayrec.platform.console import Answer, command, new_table, out, progress_bar
from rayrec.platform.errors import InputError
from rayrec.platform.memory import human_size

if TYPE_CHECKING:
    from rayrec.pipelines.quantization.quantize import QuantizationReport


class SchemeOption(StrEnum):
    w8a8 = "w8a8"
    w8a8_static = "w8a8_static"
    w8a16 = "w8a16"
    w4a16 = "w4a16"
    fp8 = "fp8"


class GroupSizeOption(StrEnum):
    g32 = "32"
    g64 = "64"
    g128 = "128"


class WeightBitsOption(StrEnum):
    seven = "7"
    eight = "8"


@command(app, "quantize")
def quantize_command(
    run: RunArgument,
    *,
    to: Annotated[Path, typer.Option("--out", help="New folder for the quantized run.")],
    scheme: Annotated[
        SchemeOption, typer.Option(help="Bits of weights and of activations; w8a8 scales them row by row.")
    ] = SchemeOption.w8a8,
    group_size: Annotated[
        GroupSizeOption | None, typer.Option(help="Inputs that share a scale, of w4a16 \\[32].")
    ] = None,
    calibrate: Annotated[
        int, typer.Option(min=1, help="Users of `valid` whose histories scales are chosen by.")
    ] = 512,
    scales: Annotated[
        bool,
        typer.Option(
            help="Move scales into norms (SmoothQuant, AWQ) and clip ranges; without, it is plain rounding."
        ),
    ] = True,
    strength: Annotated[
        float | None,
        typer.Option(min=0, max=1, help="Exponent of SmoothQuant \\[chosen for each norm]."),
    ] = None,
    most_divergence: Annotated[
        float | None,
        typer.Option(
            min=0,
            help="Of recommenders: nats that first choices may be away by; until then, layers that matter "
            "most stay float32, a third of the weights at most \\[5e-5 of w8a8 and w8a8_static, else any].",
        ),
    ] = None,
    weight_bits: Annotated[
        WeightBitsOption | None,
        typer.Option(
            help="Of w8a8: 7 for any CPU, 8 for accelerators and CPUs with VNNI \\[7 of a run on a CPU]."
        ),
    ] = None,
    most_loss: Annotated[
        float | None,
        typer.Option(min=0, help="Share of the run's metric that may be lost; else nothing is written."),
    ] = None,
    split: Annotated[
        EvaluationSplit, typer.Option(help="Held-out events by which both models are compared.")
    ] = EvaluationSplit.test,
    max_users: Annotated[int | None, typer.Option(min=1, help="Compare so many users at most.")] = None,
    snapshot: WhichOption = "best",
    data: DataOption = None,
    device: Annotated[str | None, typer.Option(help="Device to compare on \\[the run's].")] = None,
) -> Answer:
    """Make a run of int8, int4 or float8 weights, which is evaluated, served and published like any other.
    Say what it loses."""
    check_run(run)
    if strength is not None and not scales:
        raise InputError("--strength is of scales that move, and with --no-scales none do; leave it out")
    from rayrec.models.quantization.network import QuantizationPlan
    from rayrec.pipelines.quantization.quantize import QuantizationRequest, quantize_run
    from rayrec.pipelines.quantization.quantize_language import quantize_language_run
    from rayrec.pipelines.runs.run_folder import RunFolder

    is_language = RunFolder.open(run).config.model.kind == "language"
    quantized = quantize_language_run if is_language else quantize_run
    plan = QuantizationPlan(
        scheme.value,
        None if group_size is None else int(group_size.value),  # type: ignore[arg-type]
        None if weight_bits is None else int(weight_bits.value),
        scales=scales,
        strength=strength,
        most_divergence=most_divergence,
    )
    request = QuantizationRequest(plan, calibrate, split.value, max_users, most_loss=most_loss)
    with progress_bar("quantize") as progress:
        report = quantized(
            run, to, request, snapshot, device, data, lambda stage, done, total: progress(done, total, stage)
        )
    _print(report, to)
    return report.to_json() | {"out": str(to)}


def _print(report: QuantizationReport, to: Path) -> None:
    found = report.to_json()
    unit = "users" if "num_users" in found else "records"
    title = f"{found[f'num_{unit}']:,} {unit}, {found['split']} split: {to}"
    table = new_table(title, ("", "before", "after", "after - before (95 %)"), ("before", "after"))
    for name, pair in report.comparison.metrics.items():
        change = pair.difference
        table.add_row(
            name,
            f"{pair.before.value:.4f}",
            f"{pair.after.value:.4f}",
            f"{change.value:+.4f} ({change.low:+.4f} to {change.high:+.4f}), {pair.ratio.value - 1:+.2%}",
        )
    for name, sizes in (
        ("bytes of quantized layers", report.layer_bytes),
        ("bytes of all dense weights", report.weight_bytes),
    ):
        share = f"{sizes['after'] / sizes['before']:.3f} of it"
        table.add_row(name, human_size(sizes["before"]), human_size(sizes["after"]), share)
    ms = found["ms_per_batch"]
    table.add_row(
        f"ms per batch of {found['batch_size']}",
        f"{ms['before']:.1f}",
        f"{ms['after']:.1f}",
        f"{ms['before'] / ms['after']:.2f} times as fast",
    )
    out.print(table)
    for name in ("overlap@10", "top_1_moved", "kl_of_first_codes", "kl_of_next_tokens"):
        if (estimate := found.get(name)) is not None:
            out.print(f"{name.replace('_', ' ')}: {estimate['value']:.4g}")
    out.print(", ".join(f"{count} layers by {name}" for name, count in sorted(report.kernels.items())))
