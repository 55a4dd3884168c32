"""A tiny random language model in a folder, as Hugging Face has it."""

import asyncio

import pytest

from tests.helpers.text_tokenizers import tokenizer_folder

TINY = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "max_position_embeddings": 1024,
    "initializer_range": 0.5,
}


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    transformers = pytest.importorskip("transformers", reason="the embedded engine is that of transformers")
    torch = pytest.importorskip("torch")
    folder = tokenizer_folder(tmp_path_factory.mktemp("models") / "tiny")
    tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(folder)
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=len(tokenizer), bos_token_id=0, eos_token_id=tokenizer.eos_token_id, **TINY
    )
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def settings(folder):
    from rayrec.serve.language.config import EmbeddedModel

    return EmbeddedModel.parse(
        {
            "name": "tiny",
            "engine": "embedded",
            "folder": str(folder),
            "context_length": 1024,
            "concurrency": 4,
            "max_waiting": 6,
            "page_tokens": 8,
            "prefill_tokens": 64,
            "prefix_cache_tokens": 256,
        }
    )


@pytest.fixture(scope="session")
def model(settings):
    """Loaded, with its engine running."""
    from rayrec.serve.language.loading import load_model

    loaded = load_model(settings)
    loaded.engine.start()
    yield loaded
    loaded.engine.stop()


@pytest.fixture
def answers(model):
    """What the engine gives for prompts that are submitted together: text, tokens and reason of each."""

    async def answer(prompt):
        pieces = [piece async for piece in model.engine.submit(prompt)]
        return (
            "".join(piece.text for piece in pieces),
            [chosen for piece in pieces for chosen in piece.tokens],
            pieces[-1].reason,
        )

    def run(*prompts):
        async def together():
            return await asyncio.gather(*map(answer, prompts))

        return asyncio.run(together())

    return run
