"""`rayrec quantize`: a run whose products are quantized, compared with the run that it was made of.

Start at `quantize.quantize_run`.
May import `evaluation`, `inference` and what is below them.
"""
