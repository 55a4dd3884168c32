"""The models by name. Adding one is a settings class with a `build`, and a line here.

Another package adds its own by an entry point of the group `rayrec.models`; see docs/guides/add-a-model.md.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rayrec.models.base.config import ModelConfig
from rayrec.models.ctr.config import ImpressionModelConfig
from rayrec.models.language.config import LanguageModelConfig
from rayrec.models.sequence.config import SequenceModelConfig
from rayrec.platform.registry import Registry, settings_union

MODELS: Registry[type[ModelConfig]] = Registry(
    "rayrec.models",
    "model",
    {
        # The next item of a history, every item scored.
        "sasrec": "rayrec.models.sequence.config:SasRecConfig",
        "bsarec": "rayrec.models.sequence.config:BsaRecConfig",
        "hstu": "rayrec.models.sequence.config:HstuConfig",
        "gnn": "rayrec.models.sequence.config:GnnConfig",
        # The next item of a history, its semantic ID generated.
        "prefix_decoder": "rayrec.models.generative.prefix_decoder_config:PrefixDecoderConfig",
        "light_decoder": "rayrec.models.generative.light_decoder_config:LightDecoderConfig",
        "lazy_decoder": "rayrec.models.generative.cross_decoder_config:LazyDecoderConfig",
        "encoder_decoder": "rayrec.models.generative.cross_decoder_config:EncoderDecoderConfig",
        "causal_lm": "rayrec.models.generative.causal_lm_config:CausalLmConfig",
        "item_language": "rayrec.models.generative.item_language_config:ItemLanguageConfig",
        # Labels of impressions.
        "dlrm": "rayrec.models.ctr.config:DlrmConfig",
        "deepfm": "rayrec.models.ctr.config:DeepFmConfig",
        "dcn_v2": "rayrec.models.ctr.config:DcnV2Config",
        "din": "rayrec.models.ctr.config:DinConfig",
        "mmoe": "rayrec.models.ctr.config:MmoeConfig",
        "keras": "rayrec.models.keras.config:KerasModelConfig",
        # How a text goes on.
        "language_model": "rayrec.models.language.config:LanguageModelConfig",
    },
)
"""Name of a model to the class of its settings."""


if TYPE_CHECKING:
    AnyModelConfig = SequenceModelConfig | ImpressionModelConfig | LanguageModelConfig
else:
    AnyModelConfig = settings_union(
        MODELS, (SequenceModelConfig, ImpressionModelConfig, LanguageModelConfig), "name"
    )
"""Settings of any model, those of other packages included; `name` says which one is meant."""
