"""How a device's graphs are called, with a stand-in for its module in torch: there is no such device here."""

from __future__ import annotations

from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from rayrec.platform import devices
from rayrec.platform.devices import fixed_shapes, values_may_decide
from rayrec.platform.graphs import WARM_UPS, CaptureFailedError, DeviceGraphs, graphs_of


class Module:
    """As `torch.cuda` and `torch.npu` are; notes what is called."""

    def __init__(self, graph_class):
        self.calls = []
        setattr(self, graph_class, self._graph)
        self._numbers = iter(range(9))

    def _graph(self):
        number = next(self._numbers)
        return SimpleNamespace(
            pool=lambda: f"pool {number}", replay=lambda: self.calls.append(f"replay {number}")
        )

    def Stream(self, device):
        return SimpleNamespace(wait_stream=lambda other: self.calls.append("wait"))

    def current_stream(self):
        return SimpleNamespace(wait_stream=lambda other: self.calls.append("waited for"))

    def synchronize(self):
        self.calls.append("synchronize")

    @contextmanager
    def stream(self, stream):
        yield

    @contextmanager
    def graph(self, graph, **options):
        self.calls.append(("record", {name: each for name, each in options.items() if name != "stream"}))
        yield
        self.calls.append("recorded")


@pytest.mark.parametrize(
    ("kind", "graph_class", "options"),
    [("cuda", "CUDAGraph", {"capture_error_mode": "thread_local"}), ("npu", "NPUGraph", {})],
)
def test_work_is_warmed_up_recorded_and_replayed_with_one_pool(kind, graph_class, options, monkeypatch):
    module, num_runs = Module(graph_class), []
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)
    graphs = DeviceGraphs(SimpleNamespace(type=kind))

    first = graphs.capture(lambda: num_runs.append(1))
    second = graphs.capture(lambda: num_runs.append(1))
    assert len(num_runs) == 2 * (WARM_UPS + 1)
    recorded = [each for each in module.calls if isinstance(each, tuple)]
    assert recorded == [("record", {"pool": None, **options}), ("record", {"pool": "pool 0", **options})]
    module.calls.clear()
    first()
    second()

    assert module.calls == ["wait", "replay 0", "waited for", "wait", "replay 1", "waited for"]
    assert len(num_runs) == 2 * (WARM_UPS + 1), "no Python runs"


def test_what_work_did_wrong_is_said_and_the_stream_is_the_one_before(monkeypatch):
    class Broken(Module):
        """As torch's, whose recordings end with an error of their own and leave their stream current."""

        @contextmanager
        def graph(self, graph, **options):
            self.calls.clear()
            try:
                yield
            finally:
                raise RuntimeError("capture was invalidated")

        def current_stream(self):
            return SimpleNamespace(wait_stream=lambda other: None, name="before")

        def set_stream(self, stream):
            self.calls.append(stream.name)

    module, num_runs = Broken("CUDAGraph"), []
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)

    def work():
        num_runs.append(1)
        if len(num_runs) > WARM_UPS:
            raise ValueError("a value was read")

    with pytest.raises(CaptureFailedError, match="ValueError: a value was read") as raised:
        DeviceGraphs(SimpleNamespace(type="cuda")).capture(work)

    assert isinstance(raised.value.__cause__, ValueError)
    assert module.calls == ["before"]


def test_the_host_has_no_graphs():
    assert graphs_of(devices.HOST.torch) is None


def test_values_decide_on_the_host_alone_and_not_where_shapes_are_fixed():
    host = devices.HOST.torch
    assert values_may_decide(host)
    assert not values_may_decide(torch.device("meta"))
    with fixed_shapes():
        assert not values_may_decide(host)
        with fixed_shapes():
            pass
        assert not values_may_decide(host)
    assert values_may_decide(host)
