"""Networks, tokenizers and decoding, without Ray.

    from rayrec.models import SequenceModel, SemanticIdRegistry

`registry.MODELS` is the table of models; `tokenizers` has those of tokenizers and of item-vector sources.
Imports with torch, numpy, pydantic and yaml alone; arithmetic (`base`, `attention`, `decoding`, `program`)
without the last two. May import `platform`.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from rayrec.platform.import_order import load_triton_apart
from rayrec.platform.lazy_names import lazy_names

if "tensorflow" in sys.modules:
    # Before any of torch's modules that imports Triton: after TensorFlow, that ends the process.
    load_triton_apart()

if TYPE_CHECKING:
    from rayrec.models.attention.uni_attention import attend as attend
    from rayrec.models.base.keyed_random import KeyedDropout as KeyedDropout
    from rayrec.models.ctr.config import ImpressionModelConfig as ImpressionModelConfig
    from rayrec.models.ctr.losses import LabelLoss as LabelLoss
    from rayrec.models.ctr.model import CtrModel as CtrModel
    from rayrec.models.ctr.tensors import ImpressionTensors as ImpressionTensors
    from rayrec.models.decoding.beam import beam_search as beam_search
    from rayrec.models.decoding.beam_policy import Beams as Beams
    from rayrec.models.decoding.trie import CodeTrie as CodeTrie
    from rayrec.models.program.program import DenseProgram as DenseProgram
    from rayrec.models.sequence.catalog import Catalog as Catalog
    from rayrec.models.sequence.config import Negatives as Negatives
    from rayrec.models.sequence.config import SequenceModelConfig as SequenceModelConfig
    from rayrec.models.sequence.sequence_model import SequenceModel as SequenceModel
    from rayrec.models.sequence.sequence_model import TopItems as TopItems
    from rayrec.models.sequence.sequence_model import top_items as top_items
    from rayrec.models.sequence.tensor_batch import TensorBatch as TensorBatch
    from rayrec.models.tokenizers.item_tokenizer import ItemTokenizer as ItemTokenizer
    from rayrec.models.tokenizers.quantizer import Quantizer as Quantizer
    from rayrec.models.tokenizers.registry import SemanticIdRegistry as SemanticIdRegistry
    from rayrec.models.tokenizers.vector_sources import FittedVectors as FittedVectors
    from rayrec.models.tokenizers.vector_sources import ItemData as ItemData
    from rayrec.models.tokenizers.vector_sources import ItemVectorSource as ItemVectorSource
    from rayrec.models.tokenizers.vector_sources import Progress as Progress
    from rayrec.platform.impression_schema import ImpressionSchema as ImpressionSchema

__all__, __getattr__ = lazy_names(__name__, __file__)
