"""Networks, tokenizers and decoding. Imports with torch and numpy alone."""

import sys

from rayrec.platform.import_order import load_triton_apart

if "tensorflow" in sys.modules:
    # Before any of torch's modules that imports Triton: after TensorFlow, that ends the process.
    load_triton_apart()
