import json
import subprocess
import sys
from dataclasses import replace
from typing import get_args

import pytest
import torch

from rayrec.models.attention import choice
from rayrec.models.attention.call import Backend, Silu, Softmax
from rayrec.models.attention.choice import BACKENDS, Auto, Measured, Named, choice_named, shape_class
from rayrec.models.attention.masks import Causal, Full
from rayrec.models.base.config import Attention
from rayrec.models.sequence.catalog import Catalog
from rayrec.models.sequence.config import SILU_ATTENTIONS, SasRecConfig
from rayrec.models.sequence.sequence_program import build_model
from rayrec.platform.devices import device_named
from tests.models.attention.calls import CASES, Case, make_call


def call_of(*lengths, mask=Causal, **options):
    return make_call(Case(mask, lengths), **options)


def backend(name, seconds, clock, reason=None):
    """Takes as long as it says, by the clock of the test."""

    def attend(call):
        clock.now += seconds
        clock.calls.append(name)
        return call.query_NHC * call.value_MHE.sum() * call.key_MHC.sum()

    return Backend(name, lambda call: reason, attend)


class Clock:
    def __init__(self):
        self.now, self.calls = 0.0, []

    def __call__(self):
        return self.now


@pytest.mark.parametrize(
    ("lengths", "options", "expected"),
    [
        ((50, 50), {}, "sdpa"),  # nothing to put into buckets
        ((50, 1, 1), {}, "bucketed"),
        ((200, 190), {}, "bucketed"),
        ((200, 1, 1), {}, "bucketed"),
        ((50, 1, 1), {"mask": Full}, "sdpa"),  # short
        ((200, 190), {"mask": Full}, "sdpa"),  # long, but even
        ((200, 1, 1), {"mask": Full}, "grouped"),
        ((200, 190), {"scoring": Silu(200.0)}, "grouped"),
        ((200, 190), {"biased": True}, "grouped"),
        ((200, 1, 1), {"gradients": False}, "bucketed"),
    ],
)
def test_on_a_cpu_the_rule_pads_rows_to_such_of_like_length(lengths, options, expected):
    assert Auto()(call_of(*lengths, **options)).name == expected


def test_a_backend_that_is_demanded_is_taken_or_refused():
    call = make_call(CASES["causal"])

    assert choice_named("reference")(call) is BACKENDS["reference"]
    with pytest.raises(ValueError, match="'flex' cannot compute this call: it has no backward"):
        choice_named("flex")(call)
    with pytest.raises(ValueError, match="'ascend' cannot"):
        choice_named("ascend")(call)
    with pytest.raises(ValueError, match="one of reference, sdpa"):
        choice_named("flash")


@pytest.mark.parametrize("name", BACKENDS)
def test_no_backend_but_a_cpus_is_ever_chosen_on_a_cpu(name):
    able = BACKENDS[name].why_not(call_of(3)) is None

    assert able == (name in ("reference", "sdpa", "bucketed", "grouped"))


def test_the_fastest_is_measured_once_for_a_class_of_calls():
    clock = Clock()
    backends = [
        backend("sdpa", 3.0, clock),
        backend("grouped", 2.0, clock),
        backend("triton", 1.0, clock, "no"),
    ]
    measured = Measured(backends=backends, clock=clock)

    assert measured(call_of(5, 2)).name == "grouped"
    assert set(clock.calls) == {"sdpa", "grouped"}
    num_runs = len(clock.calls)
    assert measured(call_of(7, 1)).name == "grouped"
    assert len(clock.calls) == num_runs
    measured(call_of(9, 1))
    assert len(clock.calls) > num_runs


def failing(name, error, clock, works=0):
    """Raises after it has worked so many times."""

    def attend(call):
        if clock.calls.count(name) == works:
            raise error
        return backend(name, 0.1, clock).attend(call)

    return Backend(name, lambda call: None, attend)


@pytest.mark.parametrize("works", [0, 2], ids=["at once", "in a later round"])
def test_a_backend_that_runs_out_of_memory_while_it_is_measured_is_not_taken(works, caplog):
    clock = Clock()
    full = torch.OutOfMemoryError("tried to allocate 64 GiB")
    backends = [failing("sdpa", full, clock, works), backend("grouped", 2.0, clock)]

    assert Measured(backends=backends, clock=clock)(call_of(5, 2)).name == "grouped"
    assert "'sdpa' is not taken: tried to allocate 64 GiB" in caplog.text


def test_where_every_backend_fails_the_last_ones_error_is_raised():
    clock = Clock()
    backends = [failing(name, RuntimeError(name), clock) for name in ("sdpa", "grouped")]

    with pytest.raises(RuntimeError, match="grouped"):
        Measured(backends=backends, clock=clock)(call_of(5, 2))


def test_measuring_leaves_no_gradients_behind():
    call = call_of(5, 2)

    Measured()(call)

    assert all(tensor.grad is None for tensor in call.inputs)


def test_what_was_measured_is_kept_and_used_by_the_next_run(tmp_path):
    path, clock = tmp_path / "run" / "attention.json", Clock()
    slow_first = [backend("sdpa", 3.0, clock), backend("grouped", 2.0, clock)]
    call = call_of(5, 2)

    Measured(path, slow_first, clock)(call)

    assert json.loads(path.read_text()) == {"backends": {shape_class(call): "grouped"}}
    fast_first = [backend("sdpa", 1.0, clock), backend("grouped", 2.0, clock)]
    assert Measured(path, fast_first, clock)(call).name == "grouped"
    assert Auto(path)(call).name == "grouped"
    assert Auto(path)(call_of(40, 2)).name == "bucketed"  # of another class: by the rule
    assert Auto(tmp_path / "none.json")(call).name == "bucketed"


def test_a_file_of_something_else_is_refused(tmp_path):
    path = tmp_path / "attention-choices"
    for text in ("[]", "{", '{"backends": {"a call": "flash"}}'):
        path.write_text(text)
        with pytest.raises(ValueError, match="attention-choices"):
            Auto(path)


def test_a_class_tells_calls_apart_for_which_another_backend_may_be_faster():
    calls = [
        call_of(5, 2),
        call_of(9, 2),
        call_of(5, 2, 2),
        call_of(8, 8, 8),
        call_of(5, 2, dtype=torch.float32),
        call_of(5, 2, scoring=Silu(2.0)),
        call_of(5, 2, biased=True),
        call_of(5, 2, gradients=False),
        call_of(5, 2, width=8),
        make_call(Case(Full, (5, 2))),
        make_call(Case(Causal, (5, 2), (5, 2))),
    ]

    assert len({shape_class(call) for call in calls}) == len(calls)
    assert shape_class(call_of(5, 2)) == shape_class(call_of(6, 3))
    with torch.no_grad():
        assert shape_class(call_of(5, 2)) == shape_class(call_of(5, 2, gradients=False))


def test_a_class_names_torch_and_the_device():
    key = shape_class(call_of(3))

    assert f"torch={torch.__version__}" in key
    assert f"device=cpu:{torch.backends.cpu.get_cpu_capability()}:{torch.get_num_threads()}" in key


def test_a_config_may_name_every_backend_and_is_heard(tmp_path):
    assert set(get_args(Attention)) == {"auto", "measured", *BACKENDS}
    path = tmp_path / "attention.json"
    for name, expected in (("auto", Auto), ("measured", Measured), ("grouped", Named)):
        config = SasRecConfig(name="sasrec", attention=name)
        network = build_model(config, Catalog(num_items=5), seed=0, attention_file=path)
        assert isinstance(network.backbone.blocks[0].choice, expected)


@pytest.mark.slow
def test_nothing_is_imported_for_backends_that_are_not_used():
    program = (
        "import sys; import rayrec.models.attention.uni_attention; "
        "assert not {'triton', 'torch_npu', 'torch.nn.attention.flex_attention'} & set(sys.modules)"
    )

    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)


def test_the_rule_says_why_nothing_can_compute_a_call(monkeypatch):
    none = {name: Backend(name, lambda call: "it is broken", None) for name in BACKENDS}
    monkeypatch.setattr(choice, "BACKENDS", none)

    with pytest.raises(ValueError, match="grouped: it is broken; sdpa: it is broken"):
        choice.by_rule(call_of(99, 1, scoring=Silu(1.0)))


def test_a_gpu_computes_a_history_alone_as_pytorch_does_and_others_without_padding(monkeypatch):
    able = {name: replace(backend, why_not=lambda call: None) for name, backend in choice.BACKENDS.items()}
    monkeypatch.setattr(choice, "BACKENDS", able)
    monkeypatch.setattr(choice, "device_of", lambda device: device_named("cuda"))

    assert choice.by_rule(call_of(99)).name == "sdpa"
    assert choice.by_rule(call_of(99, scoring=Silu(1.0))).name == "triton"
    assert choice.by_rule(call_of(99, 1)).name == "triton"


@pytest.mark.parametrize("scoring", [Softmax(), Silu(9.0)])
def test_what_settings_accept_for_a_cpu_can_be_trained_with(scoring):
    device = device_named("cpu")
    call = call_of(3, 9, scoring=scoring)
    refused = {name for name in BACKENDS if BACKENDS[name].why_not(call) is not None}

    able = set(device.attention_backends) - set(device.attention_without_backward)
    if isinstance(scoring, Silu):
        able &= set(SILU_ATTENTIONS)
    assert refused == set(BACKENDS) - able
