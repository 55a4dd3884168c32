"""Models in llama.cpp's format: their weights, tokenizer and chat template."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from rayrec.models.language.networks import Wanted, network_from_gguf
from rayrec.platform.errors import InputError
from rayrec.samples.text.chat import ChatTemplate
from rayrec.samples.text.records import Message
from rayrec.samples.text.tokens import TextTokenizer, write_tokenizer_of_gguf
from tests.helpers.text_tokenizers import CHATML, tokenizer_folder

gguf = pytest.importorskip("gguf")
pytest.importorskip("transformers")

WIDTH, HIDDEN, HEADS = 32, 48, 2


@pytest.fixture(scope="module")
def written(tmp_path_factory) -> tuple[Path, dict[str, np.ndarray], Path]:
    """A file with a small network, its weights by name, and the folder of its tokenizer."""
    root = tmp_path_factory.mktemp("gguf")
    folder = tokenizer_folder(root / "tokenizer")
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    special = {token["content"] for token in tokenizer["added_tokens"]}
    tokens = sorted(vocabulary, key=vocabulary.__getitem__)
    generator = np.random.default_rng(3)

    def matrix(rows: int, columns: int) -> np.ndarray:
        return generator.normal(0, 0.2, (rows, columns)).astype(np.float32)

    weights = {
        "token_embd.weight": matrix(len(tokens), WIDTH),
        "output_norm.weight": np.ones(WIDTH, dtype=np.float32),
        "blk.0.attn_norm.weight": np.ones(WIDTH, dtype=np.float32),
        "blk.0.ffn_norm.weight": np.ones(WIDTH, dtype=np.float32),
        **{f"blk.0.attn_{name}.weight": matrix(WIDTH, WIDTH) for name in ("q", "k", "v", "output")},
        "blk.0.ffn_gate.weight": matrix(HIDDEN, WIDTH),
        "blk.0.ffn_up.weight": matrix(HIDDEN, WIDTH),
        "blk.0.ffn_down.weight": matrix(WIDTH, HIDDEN),
    }
    path = root / "small.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(64)
    writer.add_embedding_length(WIDTH)
    writer.add_block_count(1)
    writer.add_feed_forward_length(HIDDEN)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_merges([" ".join(pair) for pair in tokenizer["model"]["merges"]])
    kinds = gguf.TokenType
    writer.add_token_types([kinds.CONTROL if token in special else kinds.NORMAL for token in tokens])
    writer.add_bos_token_id(vocabulary["<s>"])
    writer.add_eos_token_id(vocabulary["<|im_end|>"])
    writer.add_chat_template(CHATML)
    for name, weight in weights.items():
        writer.add_tensor(name, weight)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path, weights, folder


def test_a_network_has_the_weights_of_the_file(written):
    path, weights, _ = written

    network = network_from_gguf(path, Wanted(32))

    held = dict(network.named_parameters())
    for theirs, ours in (
        ("token_embd.weight", "model.embed_tokens.weight"),
        ("blk.0.attn_v.weight", "model.layers.0.self_attn.v_proj.weight"),
        ("blk.0.ffn_down.weight", "model.layers.0.mlp.down_proj.weight"),
    ):
        np.testing.assert_array_equal(held[ours].detach().numpy(), weights[theirs])
    assert {weight.dtype for weight in held.values()} == {torch.float32}


def test_a_tokenizer_is_written_as_a_folder(written, tmp_path):
    path, _, folder = written

    write_tokenizer_of_gguf(path, tmp_path / "tokenizer")

    ours, original = TextTokenizer.extended(tmp_path / "tokenizer", (4, 4)), TextTokenizer.extended(folder)
    text = "What is the capital of France? Ünï 東京 🙂<|im_end|>"
    assert ours.encode(text) == original.encode(text)
    assert ours.keeps(text + ours.code_text((1, 2)))
    assert ours.info.ends == original.info.ends
    template = ChatTemplate.of_folder(tmp_path / "tokenizer")
    try:
        (rendered,) = template.render([[Message("user", "hi")]], open_turn=True)
    finally:
        template.close()
    assert rendered == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"


def test_what_is_no_gguf_file_is_refused_and_nothing_is_overwritten(written, tmp_path):
    (tmp_path / "broken.gguf").write_bytes(b"GGUF" + bytes(20))
    with pytest.raises(InputError, match="holds no tokenizer that can be read"):
        write_tokenizer_of_gguf(tmp_path / "broken.gguf", tmp_path / "out")
    assert not (tmp_path / "out").exists()
    with pytest.raises(InputError, match="no such file"):
        write_tokenizer_of_gguf(tmp_path / "missing.gguf", tmp_path / "out")
    with pytest.raises(InputError, match="has files already"):
        write_tokenizer_of_gguf(written[0], tmp_path)
