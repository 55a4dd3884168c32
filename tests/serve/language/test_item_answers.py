"""A served item-language model: titles of codes, codes of titles, and items within a text."""

import json
import re
import socket
import urllib.request

import numpy as np
import pytest

pytest.importorskip("transformers")

from rayrec.models.tokenizers.registry import SemanticIdRegistry
from rayrec.pipelines.inference.export import export_run
from rayrec.samples.text.tokens import TextTokenizer
from rayrec.serve.config.serve import ServeConfig
from rayrec.serve.language.config import ModelsConfig
from rayrec.serve.launch.language import serving_models
from tests.helpers.optional import skip_without
from tests.pipelines.test_item_language_runs import settings, shop, trained  # noqa: F401 - a fixture

skip_without("peft")

CODE = re.compile(r"<([a-z])_(\d+)>")


@pytest.mark.slow
def test_titles_are_said_of_codes_and_items_within_a_text(shop, tmp_path):  # noqa: F811
    trained(settings(shop, epochs=1, prompt="had {history.codes}", event="{codes}"), tmp_path / "run")
    export_run(tmp_path / "run", tmp_path / "folder", "last")
    ids_folder = shop / "data" / "semantic_ids"
    registry, tokenizer = SemanticIdRegistry.load(ids_folder), TextTokenizer.load(tmp_path / "folder")
    known = {tuple(codes) for codes in registry.codes_IL.tolist()}
    served = {"name": "shop", "folder": str(tmp_path / "folder"), "semantic_ids": str(ids_folder)}
    limits = {"context_length": 96, "concurrency": 2}
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]

    def ask(url, prompt, **more):
        body = {"model": "shop", "prompt": prompt, "max_tokens": 24, "temperature": 1.0, "seed": 3} | more
        request = urllib.request.Request(
            f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=60) as response:
            return json.load(response)["choices"][0]["text"]

    models = ModelsConfig.parse({"models": [served | limits]})
    with serving_models(models, ServeConfig(port=port, single_process=True)) as url:
        # As the alignment prompts of the run ask.
        title = ask(url, f"{tokenizer.code_text(registry.learned_codes_IL[0])} is ")
        codes = ask(url, "Item 3 is ", response_format={"type": "items"})
        mixed = ask(url, "I like ", response_format={"type": "items", "least": 2, "most": 3, "in_text": True})

    assert title
    depth = registry.codes_IL.shape[1]

    def items_in(text):
        found = [int(code) for _, code in CODE.findall(text)]
        assert len(found) % depth == 0
        return [tuple(each) for each in np.array(found).reshape(-1, depth).tolist()]

    assert CODE.sub("", codes).strip() == ""
    assert len(items_in(codes)) == 1
    assert set(items_in(codes)) <= known
    said = items_in(mixed)
    assert 2 <= len(said) <= 3
    assert len(set(said)) == len(said)
    assert set(said) <= known
    assert CODE.sub("", mixed).strip()  # words around them
