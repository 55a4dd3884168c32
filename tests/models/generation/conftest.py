"""A tokenizer of a few hundred tokens, and what compiles grammars for it."""

import numpy as np
import pytest

from tests.helpers.text_tokenizers import tokenizer_folder


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory):
    transformers = pytest.importorskip("transformers")
    folder = tokenizer_folder(tmp_path_factory.mktemp("tokenizer"))
    return transformers.PreTrainedTokenizerFast.from_pretrained(folder)


@pytest.fixture(scope="session")
def compilers(tokenizer):
    """By backend; one that is not installed is not there."""
    pytest.importorskip("xgrammar", reason="grammars are xgrammar's")
    from rayrec.models.generation.text_grammar import GrammarCompiler

    found = {"xgrammar": GrammarCompiler(tokenizer, [tokenizer.eos_token_id], len(tokenizer))}
    try:
        found["llguidance"] = GrammarCompiler(
            tokenizer, [tokenizer.eos_token_id], len(tokenizer), backend="llguidance"
        )
    except Exception as error:
        if "llguidance" not in str(error):
            raise
    return found


@pytest.fixture(scope="session")
def write(tokenizer):
    """The text that a model of random logits writes under a grammar, by at most so many tokens."""
    from rayrec.models.generation.sampler import Sampling, TokenSampler

    def written(grammar, limit, seed=0, temperature=3.0):
        sampler = TokenSampler(Sampling(temperature, seed=seed), [tokenizer.eos_token_id], grammar)
        random, tokens = np.random.default_rng(seed), []
        while len(tokens) < limit and not grammar.is_over:
            logits_V = random.normal(size=len(tokenizer)).astype(np.float32)
            token = sampler.choose(logits_V, limit - len(tokens)).token
            if token == tokenizer.eos_token_id:
                break
            tokens.append(token)
        assert grammar.is_complete
        return tokenizer.decode(tokens)

    return written
