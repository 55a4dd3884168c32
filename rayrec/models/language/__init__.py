"""Language models: networks of the package `transformers`, adapted, tuned, and asked as other models are.

Knows no Ray, and no semantic IDs: a token is a number of a vocabulary, whatever it stands for.
"""
