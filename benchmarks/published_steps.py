"""The planner's streams, rates and collectives on systems that others have published steps of.

The numbers are in `benchmarks/published/`, with where they are from; what computes with them is ours. DLRM on
GPUs with tables split among them is not how RayRec trains, nor are transformers with tensor and pipeline
parallelism: this shows that the pieces of `rayrec.pipelines.capacity.streams` add up to what others measured.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from rayrec.pipelines.capacity.streams import Collective, Operation, Rate, Timeline, schedule

FOLDER = Path(__file__).parent / "published"


def published(name: str) -> dict[str, Any]:
    """The numbers of a file in `benchmarks/published/`."""
    found: dict[str, Any] = json.loads((FOLDER / f"{name}.json").read_text())
    return found


def dlrm_step(
    system: Mapping[str, float], model: Mapping[str, float], parallel: str, rows: float
) -> Timeline:
    """A step of a DLRM whose tables are split among all cards.

    Args:
        parallel: of the dense layers, `ddp` or `fsdp`.
        rows: of one card's share of the batch.
    """
    devices = system["num_devices"]
    compute = Rate.flat(system["flops"], system["flops_util"])
    memory = Rate.flat(system["mem_bw"], system["mem_bw_util"])
    within = system["num_nvlinks"] * system["bw_per_nvlink"] / 2 * system["nvlink_util"]
    per_node = devices / system["num_nodes"]
    between = system["num_ports"] * system["port_bw"] / 2 * system["port_util"] / per_node
    is_one_node = system["num_nodes"] == 1
    share = system["all_reduce_share_within"]
    reduce_rate = share * within + (1 - share) * between
    layer_weights = model["mlp_dim"] ** 2
    layer_bytes = layer_weights * model["bytes_per_weight"]
    layer_s = compute.seconds(2 * layer_weights * rows)
    reduce_s = layer_bytes / reduce_rate
    gather_s = reduce_s / 2
    # Each card looks up its tables' rows for the whole batch; a row's vectors then go to the card that has
    # it.
    lookup_bytes = (
        model["num_tables"] * model["pooling"] * model["emb_dim"] * model["bytes_per_row_number"] * rows
    )
    lookup_s = memory.seconds(lookup_bytes)
    exchange_s = 2 * lookup_bytes / devices / (within if is_one_node else between)
    bottom, top = int(model["bottom_layers"]), int(model["top_layers"])
    is_split = parallel == "fsdp"

    forward = [
        Operation("rows", "compute", lookup_s),
        Operation("rows to cards", "communicate", exchange_s, ("rows",)),
    ]
    layers = [f"layer {number}" for number in range(bottom + top)]
    for number, layer in enumerate(layers):
        after = [f"{layer} gathered"] + (["rows to cards"] if number == bottom else [])
        if is_split:
            two_before = (layers[number - 2],) if number >= 2 else ()
            forward.append(Operation(f"{layer} gathered", "communicate", gather_s, two_before))
        forward.append(Operation(layer, "compute", layer_s, tuple(after)))
    first = schedule(forward)

    backward = []
    for number in reversed(range(bottom + top)):
        layer = layers[number]
        if number == bottom - 1:
            backward.append(Operation("gradients to tables", "communicate", exchange_s, (layers[bottom],)))
        if is_split:
            two_after = (layers[number + 2],) if number + 2 < len(layers) else ()
            backward.append(Operation(f"{layer} gathered", "communicate", gather_s, two_after))
        backward.append(Operation(layer, "compute", 2 * layer_s, (f"{layer} gathered",)))
        sum_s = gather_s if is_split else reduce_s
        backward.append(Operation(f"{layer} summed", "communicate", sum_s, (layer,)))
    backward.append(Operation("rows updated", "compute", lookup_s, ("gradients to tables",)))
    second = schedule(backward)
    return Timeline(
        first.seconds + second.seconds,
        first.compute_s + second.compute_s,
        first.communicate_s + second.communicate_s,
    )


class _Work(NamedTuple):
    """One operation: FLOPs in the matrix or vector units, bytes of memory."""

    flops: float
    num_bytes: float
    is_matrix: bool = False


def transformer_batch_s(system: Mapping[str, Any], model: Mapping[str, int], recompute: str) -> float:
    """Seconds of a batch of a transformer with tensor and pipeline parallelism, in 16 bits.

    Args:
        recompute: `full`, all of forward again in backward, or `selective`: attention alone, with activations
            split along the sequence outside of it.
    """
    matrix = Rate(system["matrix_flops"], _pairs(system["matrix_achieved"]))
    vector = Rate(system["vector_flops"], _pairs(system["vector_achieved"]))
    memory = Rate(system["memory_bw"], _pairs(system["memory_achieved"]))
    ranks = system["tensor_parallel"]
    link = system["link_bw"] * system["link_achieved"]
    sum_ranks = Collective(link, system["link_latency"], scalar=2.0, offset=-1.0)
    half_sum = Collective(link, system["link_latency"], scalar=1.5, offset=-1.0)
    is_selective = recompute == "selective"
    micro, length, hidden = model["micro_batch"], model["length"], model["hidden"]
    tokens = micro * length
    whole = tokens * hidden
    outside = whole / ranks if is_selective else whole
    heads = micro * model["heads"] / ranks
    scores = heads * length * length
    wide = tokens * model["feedforward"] / ranks

    def seconds(works: list[_Work]) -> float:
        return sum(
            (matrix if work.is_matrix else vector).seconds(work.flops) + memory.seconds(work.num_bytes)
            for work in works
        )

    def product(n: float, k: float) -> _Work:
        return _Work(2 * tokens * n * k, 2 * (tokens * n + n * k + tokens * k), True)

    def attend() -> _Work:
        return _Work(
            2 * scores * model["head_dim"], 2 * (2 * heads * length * model["head_dim"] + scores), True
        )

    split = hidden / ranks
    linear = [*[product(hidden, split)] * 3, product(split, hidden)]
    linear += [product(hidden, model["feedforward"] / ranks), product(model["feedforward"] / ranks, hidden)]
    attention = [attend(), _Work(5 * scores, 4 * scores), _Work(scores, 5 * scores), attend()]
    around = [_Work(9 * outside, 4 * outside)] * 2  # normalization
    around += [_Work(outside, 5 * outside), _Work(outside, 6 * outside)] * 2  # dropout, residual
    around += [_Work(8 * wide, 4 * wide)]  # GELU
    forward = seconds(linear + attention + around)
    backward = 2 * seconds(linear) + seconds([attend()] * 4)
    backward += seconds([_Work(8 * scores, 4 * scores), _Work(scores, 5 * scores)])
    backward += seconds([_Work(21 * outside, 10 * outside)] * 2 + [_Work(13 * wide, 4 * wide)])
    backward += seconds([_Work(outside, 5 * outside), _Work(2 * outside, 6 * outside)] * 2)
    backward += seconds([_Work(2 * outside, 6 * outside)] * 2)  # sums where a value is used twice
    again = seconds(attention) if is_selective else forward

    # Twice in forward, twice in backward; buffers are read and written besides.
    buffers = memory.seconds(2 * 2 * whole)
    if is_selective:
        each = 2 * half_sum.seconds(2 * whole, ranks) + 2 * buffers
        exchange = 4 * each + 2 * (half_sum.seconds(2 * whole, ranks) + buffers)
    else:
        each = sum_ranks.seconds(2 * whole, ranks) + buffers
        exchange = 6 * each
    stages, chunks = model["pipeline"], model["interleaving"]
    blocks = model["blocks"] / stages
    of_stage = blocks * (forward + backward + again + exchange)
    if stages > 1:  # activations to the next stage and gradients back, for every chunk of blocks
        hop = Collective(system["pipeline_bw"] * system["pipeline_achieved"], system["pipeline_latency"])
        of_stage += 2 * chunks * hop.seconds(2 * whole, 2)
    rounds = model["batch"] / micro + (stages - 1) / chunks
    weights = blocks * (4 * hidden * split + 2 * hidden * model["feedforward"] / ranks)
    optimizer = vector.seconds(11 * weights) + memory.seconds(16 * weights)
    return rounds * of_stage + optimizer


def _pairs(found: list[list[float]]) -> tuple[tuple[float, float], ...]:
    return tuple((least, share) for least, share in found)


def dlrm_errors() -> dict[str, float]:
    """Of each published DLRM step, how far ours is off, as a share; of the exposed share in points."""
    numbers = published("madmax_dlrm")
    found = {}
    for run in numbers["runs"]:
        name = f"{run['model']} on {run['system']}, {run['parallel']}"
        step = dlrm_step(
            numbers["systems"][run["system"]],
            numbers["models"][run["model"]],
            run["parallel"],
            run["rows_per_device"],
        )
        devices = numbers["systems"][run["system"]]["num_devices"]
        found[f"step of {name}"] = 1000 * step.seconds / run["step_ms"] - 1
        found[f"exposed share of {name}"] = step.exposed_share / run["exposed_share"] - 1
        rate = run["rows_per_device"] * devices / step.seconds
        # Published with two digits.
        found[f"samples a second of {name}"] = rate / run["samples_per_s"] - 1
    return found


def transformer_errors() -> dict[str, float]:
    """Of each measured Megatron batch, how far ours is off, as a share."""
    numbers = published("calculon_megatron")
    return {
        f"{name}, {recompute}": transformer_batch_s(numbers["system"], numbers["models"][name], recompute)
        / times["measured"]
        - 1
        for name, by_recompute in numbers["seconds"].items()
        for recompute, times in by_recompute.items()
    }
