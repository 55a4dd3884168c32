"""Settings of the light decoder.

Imports no torch, as `rayrec.models.sequence.config`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from rayrec.models.generative.config import CodeSoftmaxSettings, GenerativeConfig
from rayrec.models.sequence.config import ContentConfig, built_content

if TYPE_CHECKING:
    from rayrec.models.attention.choice import Choice
    from rayrec.models.generative.backbone import GenerativeBackbone
    from rayrec.models.sequence.catalog import Catalog


class LightDecoderConfig(CodeSoftmaxSettings, GenerativeConfig):
    """Rows for codes, and a feed-forward decoder on top of the history."""

    name: Literal["light_decoder"]
    decoder_dim: int = Field(256, gt=0)
    """Hidden width of the decoder's feed-forward layers."""
    item_embedding: bool = True
    """Whether a history event is its item's row plus its code rows, or those alone."""
    content: ContentConfig | None = None
    """What is said of the items of a history, added to their vectors. None: nothing."""

    @property
    def item_content(self) -> ContentConfig | None:
        return self.content

    @property
    def tables(self) -> dict[str, int]:
        names = ("item", "code") if self.item_embedding else ("code",)
        return dict.fromkeys(names, self.backbone.dim) | super().tables

    def build_backbone(self, catalog: Catalog, choice: Choice) -> GenerativeBackbone[Any]:
        from rayrec.models.generative.light_decoder import CodeDecoder, LightDecoder

        settings, backbone = self.backbone, self.backbone.build(choice)
        decoder = CodeDecoder(
            settings.dim, catalog.level_sizes, self.decoder_dim, settings.dropout, backbone.num_dropouts
        )
        content = built_content(self.content, catalog, settings.dim)
        return LightDecoder(backbone, decoder, self.build_softmax(catalog), content)
