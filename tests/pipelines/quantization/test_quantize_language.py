"""Language models as folders of quantized weights, read back by the package whose layout it is."""

import json

import pytest
import safetensors.torch
import torch

from rayrec.models.quantization.network import QuantizationPlan
from rayrec.models.quantization.schemes import QuantizedWeight, unpacked_int32
from rayrec.pipelines.quantization.quantize import QuantizationRequest, quantize_run
from rayrec.pipelines.quantization.quantize_language import quantize_language_run
from rayrec.pipelines.training.placements import in_process
from rayrec.pipelines.training.train import train
from rayrec.platform.errors import InputError

pytest.importorskip("transformers")

from tests.helpers.examples import cases
from tests.helpers.optional import skip_without
from tests.pipelines.test_language_runs import LLAMA, folders, settings  # noqa: F401 - a fixture

skip_without("peft")

WIDE = {"kind": "settings", "settings": LLAMA | {"hidden_size": 64, "intermediate_size": 96}}


@pytest.fixture(scope="module")
def run(folders, tmp_path_factory):  # noqa: F811
    path = tmp_path_factory.mktemp("language") / "run"
    train(settings(folders, base=WIDE, lora={"rank": 2}), path, cluster=in_process)
    return path


def quantized(run, out, scheme, **more):
    return quantize_language_run(run, out, QuantizationRequest(QuantizationPlan(scheme), **more))


def test_a_folder_is_written_with_its_report(run, tmp_path):
    report = quantized(run, tmp_path / "q", "w8a8", max_users=8)

    written = json.loads((tmp_path / "q" / "quantization.json").read_text())
    assert written["num_records"] == 8
    assert written["kl_of_next_tokens"]["value"] < 0.01
    assert report.comparison.metrics["loss"].ratio.value == pytest.approx(1.0, abs=0.02)
    section = json.loads((tmp_path / "q" / "config.json").read_text())["quantization_config"]
    assert section["format"] == "int-quantized"
    assert section["ignore"] == ["lm_head"]
    assert json.loads((tmp_path / "q" / "rayrec.json").read_text())["run"] == "run"


FORMATS = {
    "w8a8": {"weight": torch.int8, "weight_scale": torch.float32},
    "w8a8_static": {"weight": torch.int8, "weight_scale": torch.float32, "input_scale": torch.float32},
    "w8a16": {"weight_packed": torch.int32, "weight_scale": torch.float32, "weight_shape": torch.int64},
    "w4a16": {"weight_packed": torch.int32, "weight_scale": torch.float32, "weight_shape": torch.int64},
    "fp8": {"weight": torch.float8_e4m3fn, "weight_scale": torch.float32},
}


@pytest.mark.parametrize("scheme", cases(FORMATS, ["w4a16"]))
def test_tensors_have_the_names_and_types_of_the_layout(run, tmp_path, scheme):
    quantized(run, tmp_path / "q", scheme, max_users=4)

    tensors = safetensors.torch.load_file(tmp_path / "q" / "model.safetensors")
    layer = "model.layers.0.mlp.up_proj."
    found = {name.removeprefix(layer): each.dtype for name, each in tensors.items() if name.startswith(layer)}
    assert found == FORMATS[scheme]


@pytest.mark.parametrize("scheme", cases(["w8a8", "w4a16", "w8a16", "fp8"], ["w8a8", "w4a16"]))
def test_compressed_tensors_reads_what_was_written(run, tmp_path, scheme):
    pytest.importorskip("compressed_tensors")
    import transformers

    quantized(run, tmp_path / "q", scheme, max_users=4)

    read = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "q", dtype=torch.float32)

    tokens = torch.arange(5)[None]
    with torch.no_grad():
        theirs, ours = read(tokens).logits, dequantized(tmp_path / "q", scheme)(tokens).logits
    allowed = 1e-4 if scheme.endswith("a16") else 0.05
    assert (theirs - ours).norm() / ours.norm() < allowed


def dequantized(folder, scheme):
    """The network of a folder with float32 weights, by our own reading of the layout."""
    import transformers

    tensors = safetensors.torch.load_file(folder / "model.safetensors")
    config = transformers.AutoConfig.from_pretrained(folder)
    del config.quantization_config
    plan = QuantizationPlan(scheme).settings(("any",), torch.device("cpu"))
    for name in [name for name in tensors if name.endswith(".weight_scale")]:
        layer = name.removesuffix(".weight_scale")
        scale_OG = tensors.pop(name)
        tensors.pop(f"{layer}.weight_shape", None)
        packed = tensors.pop(f"{layer}.weight_packed", None)
        if packed is not None:
            values_OK = unpacked_int32(packed, 4 if scheme == "w4a16" else 8)
        else:
            values_OK = tensors[f"{layer}.weight"]
        tensors[f"{layer}.weight"] = QuantizedWeight(plan, values_OK, scale_OG).dequantized_OK
    network = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    network.load_state_dict(tensors, strict=False)
    network.tie_weights()
    return network.eval()


def test_what_loses_too_much_is_not_written(run, tmp_path):
    with pytest.raises(InputError, match=r"not written: loss goes from"):
        quantized(run, tmp_path / "q", "w4a16", max_users=8, most_loss=-0.5)

    assert not list(tmp_path.iterdir())


def test_a_language_model_recommends_nothing(run, tmp_path):
    with pytest.raises(InputError):
        quantize_run(run, tmp_path / "q", QuantizationRequest(QuantizationPlan("w8a8")))
