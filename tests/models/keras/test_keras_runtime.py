"""How Keras and TensorFlow are started; stand-ins for those that are not there or do not fit."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace

import pytest

from rayrec.models.keras.runtime import hide_accelerators, load_keras, load_tensorflow
from rayrec.platform.errors import InputError

LOAD = {"tensorflow": lambda: load_tensorflow(1), "keras": lambda: load_keras("tensorflow")}


@pytest.mark.parametrize(("package", "name"), [("tensorflow", "TensorFlow"), ("keras", "Keras")])
def test_what_is_missing_is_named_with_what_to_install(monkeypatch, package, name):
    monkeypatch.setitem(sys.modules, package, None)

    with pytest.raises(InputError, match=rf"{name}, which is not installed; .* 'rayrec\[tensorflow\]'"):
        LOAD[package]()


@pytest.mark.parametrize("package", LOAD)
@pytest.mark.parametrize(
    ("source", "said"),
    [
        (
            "raise ImportError('numpy.core.multiarray failed\\nto import')",
            "ImportError: numpy.core.multi.* to",
        ),
        ("raise TypeError('Descriptors cannot be created directly')", "TypeError: Descriptors cannot be"),
        ("import no_such_module", "ModuleNotFoundError: No module named 'no_such_module'"),
    ],
)
def test_what_does_not_fit_is_named_with_versions_and_what_to_install(
    monkeypatch, tmp_path, package, source, said
):
    (tmp_path / f"{package}.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, package, raising=False)

    with pytest.raises(InputError, match=rf"cannot be imported \({said}.* 'rayrec\[tensorflow\]'") as raised:
        LOAD[package]()

    assert "\n" not in str(raised.value)
    assert raised.value.__cause__ is not None


def test_keras_2_is_refused(monkeypatch):
    old = ModuleType("keras")
    old.__version__ = "2.15.0"
    monkeypatch.setitem(sys.modules, "keras", old)

    with pytest.raises(InputError, match=r"keras 2\.15\.0 is too old, models are of Keras 3; .*pip install"):
        load_keras("tensorflow")


def tensorflow_with(visible: list[str], has_computed: bool = False):
    """Of a machine with an accelerator."""
    seen = list(visible)

    def show(devices: list[str]) -> None:
        if has_computed and devices != seen:
            raise RuntimeError("Visible devices cannot be modified after being initialized")
        seen[:] = devices

    config = SimpleNamespace(
        list_physical_devices=lambda kind: [kind], set_visible_devices=show, get_visible_devices=lambda: seen
    )
    return SimpleNamespace(config=config)


@pytest.mark.parametrize("has_computed", [False, True])
def test_accelerators_are_hidden_from_tensorflow_once(has_computed):
    tensorflow = tensorflow_with(["CPU"] if has_computed else ["CPU", "GPU"], has_computed)

    hide_accelerators(tensorflow)
    hide_accelerators(tensorflow)

    assert tensorflow.config.get_visible_devices() == ["CPU"]


def test_a_process_in_which_tensorflow_has_an_accelerator_already_is_told():
    with pytest.raises(InputError, match=r"computes on an accelerator .*set_visible_devices"):
        hide_accelerators(tensorflow_with(["CPU", "GPU"], has_computed=True))
