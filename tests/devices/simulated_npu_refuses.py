"""What the simulated NPU refuses, and what it is to our code; run by `test_simulated_npu.py`."""

import subprocess
import sys

import numpy as np
import pytest
import torch

from rayrec.models.attention import ascend
from rayrec.models.attention.call import AttentionCall, Softmax
from rayrec.models.attention.choice import by_rule
from rayrec.models.attention.jagged import JaggedLayout
from rayrec.models.attention.masks import Causal, Full
from rayrec.models.attention.reference import BACKEND as REFERENCE
from rayrec.models.ctr.program import build_ctr_model
from rayrec.models.ctr.tensors import ImpressionTensors
from rayrec.models.sequence.tensor_batch import TensorBatch
from rayrec.platform.device_copies import OverlappedCopies
from rayrec.platform.devices import get_device
from tests.helpers.simulated_npu import NPU
from tests.models.attention.calls import Case, make_call
from tests.models.ctr.programs import RANKING
from tests.models.keras import impressions
from tests.models.networks import table_rows
from tests.models.recipes import features_of


def test_the_device_layer_finds_it_unchanged():
    assert torch.tensor([1.0], device=get_device("npu").torch).device.type == "npu"


def test_an_operation_it_does_not_know_is_refused():
    x = torch.ones(3, device="npu")

    with pytest.raises(NotImplementedError, match=r"the simulated NPU has no operation aten\.erfinv"):
        torch.erfinv(x)


def test_one_that_backward_asks_for_is_named_although_autograd_loses_the_error():
    """It may even abort the process: so one of its own."""
    program = (
        "import torch, tests.helpers.simulated_npu as npu; npu.KNOWN.discard('threshold_backward'); "
        "torch.ones(3, device='npu', requires_grad=True).relu().sum().backward()"
    )

    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)

    assert done.returncode != 0
    assert "the simulated NPU has no operation aten.threshold_backward" in done.stderr


@pytest.mark.parametrize(
    "mix",
    [
        lambda there, here: there + here,
        lambda there, here: here * there,
        lambda there, here: here @ there,
        lambda there, here: torch.cat([there, here]),
        lambda there, here: there[here[0].long()],
        lambda there, here: torch.nn.functional.embedding(here.long(), there),
        lambda there, here: torch.where(there > 0, there, here),
        lambda there, here: there.add_(here),
    ],
)
def test_tensors_of_two_devices_do_not_mix(mix):
    with pytest.raises(RuntimeError, match=r"same device|on npu|on cpu"):
        mix(torch.ones(2, 2, device="npu"), torch.ones(2, 2))


def test_single_numbers_of_the_host_come_along():
    assert (torch.ones(2, device="npu") * torch.tensor(3.0)).tolist() == [3.0, 3.0]


def test_copies_are_waited_for_and_their_memory_is_kept():
    NPU.calls.clear()

    with OverlappedCopies(torch.device("npu")) as copies:
        there = copies.copied(np.arange(3))

    assert NPU.calls == ["copied on copies", "recorded on default", "default waits for copies"]
    assert there.tolist() == [0, 1, 2]


def test_what_was_made_for_a_batch_alone_is_copied_to_a_device_only():
    NPU.calls.clear()
    made = np.arange(3)

    with OverlappedCopies(torch.device("npu")) as copies:
        there = copies.moved(made)
    with OverlappedCopies(torch.device("cpu")) as copies:
        here = copies.moved(made)
    made[0] = 7

    assert NPU.calls == ["copied on copies", "recorded on default", "default waits for copies"]
    assert (there.tolist(), here.tolist()) == ([0, 1, 2], [7, 1, 2])


def test_a_batch_of_sequences_is_copied_beside_compute():
    (features,) = features_of("sasrec")
    NPU.calls.clear()

    TensorBatch.build(features, table_rows(features), 5, torch.device("npu"), training=True)

    assert_beside_compute(NPU.calls)


@pytest.mark.parametrize("name", RANKING)
def test_impressions_are_copied_beside_compute_and_nothing_of_them_later(name):
    """A copy on the stream that computes waits for all that was asked of it before."""
    device, features = torch.device("npu"), impressions.batch()
    model = build_ctr_model(RANKING[name], impressions.SCHEMA, seed=1).to(device)
    NPU.calls.clear()

    rows = impressions.table_rows(features)
    batch = ImpressionTensors.build(features, rows, 5, device, training=True)
    of_batch = list(NPU.calls)
    model.loss(batch)

    assert_beside_compute(of_batch)
    assert NPU.calls == of_batch


def assert_beside_compute(calls: list[str]) -> None:
    num_arrays = len(calls) // 2
    assert num_arrays > 3
    assert calls == ["copied on copies", "recorded on default"] * num_arrays + ["default waits for copies"]


@pytest.mark.parametrize("mask", [Causal, Full], ids=["causal", "full"])
def test_the_kernel_of_npus_is_called_so_that_it_computes_what_the_reference_does(mask):
    """By what torch_npu documents of its arguments."""
    call = make_call(Case(mask, (3, 1, 4), None), value_width=5)
    there = call.with_inputs([tensor.detach().float() for tensor in call.inputs])

    expected = REFERENCE.attend(there)
    torch.testing.assert_close(ascend.BACKEND.attend(there), expected, rtol=1e-5, atol=1e-5)


def test_attention_goes_by_the_kernel_of_npus():
    layout = JaggedLayout.from_offsets(np.array([0, 3, 5]), torch.device("npu"))
    x = torch.ones(5, 2, 4, device="npu")

    call = AttentionCall(x, x, x, layout, layout, Softmax(), Causal(), None, 0.5)

    assert by_rule(call).name == "ascend"
