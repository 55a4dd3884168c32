"""Settings of a ranking model that is written in Keras."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import Field, field_validator

from rayrec.models.ctr.config import ImpressionModelConfig


class KerasModelConfig(ImpressionModelConfig):
    """A function of yours makes the model; it is trained as those that come with us are."""

    name: Literal["keras"]
    builder: str
    """`module:function`, called with the `ImpressionSchema`, `dim` and `arguments`; it returns a functional
    `keras.Model`, whose inputs have the names of columns (see `rayrec.models.keras.inputs`) and which gives
    logits, one for each label."""
    arguments: dict[str, Any] = Field(default_factory=dict)
    """Of the function, by name."""
    folder: Path | None = None
    """Where its module is, if Python does not find it by itself."""
    backend: Literal["tensorflow", "torch"] = "tensorflow"
    """What Keras computes with. One process has one."""

    @field_validator("builder")
    @classmethod
    def _names_a_function(cls, value: str) -> str:
        module, colon, function = value.partition(":")
        if not (module and colon and function):
            raise ValueError(f"model.builder must be 'module:function', got {value!r}")
        return value
