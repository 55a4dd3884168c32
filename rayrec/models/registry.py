"""The models by name. Adding one is a settings class with a `build`, and a line here.

Another package adds its own by an entry point of the group `rayrec.models`; see docs/guides/add-a-model.md.
"""

from __future__ import annotations

from typing import get_args

from rayrec.models.base.config import ModelConfig
from rayrec.models.ctr.config import ImpressionModelConfig
from rayrec.models.sequence.config import SequenceModelConfig
from rayrec.platform.errors import InputError
from rayrec.platform.registry import Registry

MODELS: Registry[type[ModelConfig]] = Registry(
    "rayrec.models",
    "model",
    {
        # The next item of a history, every item scored.
        "sasrec": "rayrec.models.sequence.config:SasRecConfig",
        "hstu": "rayrec.models.sequence.config:HstuConfig",
        # The next item of a history, its semantic ID generated.
        "prefix_decoder": "rayrec.models.generative.config:PrefixDecoderConfig",
        "light_decoder": "rayrec.models.generative.config:LightDecoderConfig",
        "lazy_decoder": "rayrec.models.generative.config:LazyDecoderConfig",
        "encoder_decoder": "rayrec.models.generative.config:EncoderDecoderConfig",
        "causal_lm": "rayrec.models.generative.causal_lm_config:CausalLmConfig",
        # Labels of impressions.
        "dlrm": "rayrec.models.ctr.config:DlrmConfig",
        "deepfm": "rayrec.models.ctr.config:DeepFmConfig",
        "dcn_v2": "rayrec.models.ctr.config:DcnV2Config",
        "din": "rayrec.models.ctr.config:DinConfig",
        "mmoe": "rayrec.models.ctr.config:MmoeConfig",
        "keras": "rayrec.models.keras.config:KerasModelConfig",
    },
)
"""Name of a model to the class of its settings."""


def model_configs() -> tuple[type[ModelConfig], ...]:
    """The settings class of every model, those of other packages included.

    Raises:
        InputError: an entry point cannot be imported, or names what is not the settings of such a model.
    """
    found = MODELS.all()
    for name, settings in found.items():
        is_class = isinstance(settings, type)
        if not is_class or not issubclass(settings, SequenceModelConfig | ImpressionModelConfig):
            raise InputError(
                f"the model {name!r} of the entry points {MODELS.group!r} is {settings!r}; expected a class "
                "derived from SequenceModelConfig or ImpressionModelConfig"
            )
        field = settings.model_fields["name"]
        if get_args(field.annotation) != (name,):
            raise InputError(
                f"the model {name!r} of the entry points {MODELS.group!r} is {settings.__qualname__}, whose "
                f"name is {field.annotation}; declare it as name: Literal[{name!r}]"
            )
    return tuple(found.values())
