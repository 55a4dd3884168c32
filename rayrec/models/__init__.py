"""Networks, tokenizers and decoding, without Ray.

`registry.MODELS` is the table of models; `tokenizers` has those of tokenizers and of item-vector sources.
Imports with torch, numpy, pydantic and yaml alone; arithmetic (`base`, `attention`, `decoding`, `program`)
without the last two. May import `platform`.
"""

import sys

from rayrec.platform.import_order import load_triton_apart

if "tensorflow" in sys.modules:
    # Before any of torch's modules that imports Triton: after TensorFlow, that ends the process.
    load_triton_apart()
