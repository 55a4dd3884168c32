"""From a model's logits to items: the trie of semantic IDs and the ways down it."""
