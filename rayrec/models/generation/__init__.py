"""What a language model may say next, and which of it is chosen: grammars over tokens, and sampling.

Start at `TokenGrammar`. Imports `decoding`, whose trie is one grammar; the packages that others need are
imported where they are used.
"""
