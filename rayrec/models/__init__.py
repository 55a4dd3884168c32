"""Networks, tokenizers and decoding. Imports with torch and numpy alone."""
