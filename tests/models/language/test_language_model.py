"""Language models, held to the loss, gradients and continuations of transformers' own code."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from rayrec.models.base.compute import ComputeSettings
from rayrec.models.language.language_model import LanguageModel
from rayrec.models.language.networks import Wanted
from rayrec.models.language.tensor_parallel import check_divides
from rayrec.models.language.text_program import TextProgramSpec
from rayrec.models.program.program import ProgramPlacement
from rayrec.platform.errors import InputError
from tests.models.language.texts import (
    FIRST_NEW,
    LLAMA,
    NUM_TOKENS,
    PROMPTS,
    ROWS,
    SHAPE,
    VOCABULARY,
    Lookup,
    config,
    optimizer,
    program,
    text,
)

transformers = pytest.importorskip("transformers")

HEADS = {"num_key_value_heads": 2, "head_dim": 8}
FAMILIES = {
    "llama": LLAMA,
    "qwen3": {
        "model_type": "qwen3",
        **SHAPE,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "tie_word_embeddings": True,
    },
    "gpt2": {"model_type": "gpt2", "n_embd": 32, "n_layer": 2, "n_head": 4},
    "phi": {"model_type": "phi", **SHAPE},  # its matrix of outputs has a bias
    "gemma": {
        "model_type": "gemma",
        **SHAPE,
        "num_key_value_heads": 2,
        "head_dim": 8,
    },  # its embeddings are scaled
}


def grown(trained, amount=0.2):
    """Weights large enough for every part to matter."""
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for weight in trained.model.parameters():
            weight.add_(amount * torch.randn(weight.shape, generator=generator))
    return trained


def their_loss(network, rows=ROWS, prompts=PROMPTS):
    """Sum over the targets, by transformers' own way through padded rows."""
    network.set_attn_implementation("eager")
    longest = max(map(len, rows))
    tokens, labels = torch.zeros(len(rows), longest, dtype=torch.long), torch.full((len(rows), longest), -100)
    mask = torch.zeros_like(tokens)
    for at, (row, given) in enumerate(zip(rows, prompts, strict=True)):
        tokens[at, : len(row)] = torch.tensor(row)
        labels[at, given : len(row)] = torch.tensor(row[given:])
        mask[at, : len(row)] = 1
    mean = network(input_ids=tokens, attention_mask=mask, labels=labels).loss
    return mean * int((labels != -100).sum())


@pytest.mark.parametrize("rows", ["packed", "padded"])
@pytest.mark.parametrize("family", FAMILIES)
def test_loss_and_gradients_are_those_of_transformers(family, rows):
    ours = grown(program(FAMILIES[family], rows=rows))
    features = text()
    gradients = ours.backward(features, {})
    found = {name: weight.grad.clone() for name, weight in ours.model.network.named_parameters()}

    ours.model.zero_grad()
    loss = their_loss(ours.model.network)
    (loss / features.num_targets).backward()

    assert gradients.loss_sum == pytest.approx(loss.item(), rel=1e-5)
    for name, weight in ours.model.network.named_parameters():
        torch.testing.assert_close(found[name], weight.grad, rtol=1e-4, atol=1e-6, msg=name)


@pytest.mark.parametrize("family", ["llama", "qwen3", "phi"])
def test_packed_and_padded_rows_have_the_same_gradients(family):
    packed, padded = (grown(program(FAMILIES[family], rows=rows)) for rows in ("packed", "padded"))

    losses = [each.backward(text(), {}).loss_sum for each in (packed, padded)]

    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
    ours, theirs = (
        torch.cat([weight.grad.flatten() for _, weight in sorted(each.model.named_parameters())])
        for each in (packed, padded)
    )
    assert (ours - theirs).norm() < 1e-6 * theirs.norm()


@pytest.mark.parametrize(
    ("settings", "trainers", "said"),
    [
        (LLAMA, 4, r"LlamaForCausalLM has num_key_value_heads 2, which 4 trainers .* cannot share equally"),
        (FAMILIES["gpt2"], 2, r"no plan by which GPT2LMHeadModel could be split"),
    ],
)
def test_a_network_that_trainers_cannot_share_is_refused_by_name(settings, trainers, said):
    network = program(settings).model.network

    with pytest.raises(InputError, match=rf"model\.base: .*{said}.* fsdp2"):
        check_divides(network, trainers, "model.base")
    check_divides(program(LLAMA).model.network, 2, "model.base")


@pytest.mark.parametrize("lora", [None, {"rank": 2}], ids=["whole", "adapters"])
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_dropout_depends_on_step_and_row_and_not_on_how_a_batch_is_cut(family, lora):
    if lora is not None:
        pytest.importorskip("peft")
    settings, compute = {"dropout": 0.3, "lora": lora}, ComputeSettings(micro_batches=3)
    whole, pieces = grown(program(FAMILIES[family], **settings)), None
    spec = TextProgramSpec(config(FAMILIES[family], **settings), VOCABULARY, optimizer())
    pieces = grown(spec.build(ProgramPlacement(torch.device("cpu"), 0, compute=compute)))
    plain = grown(program(FAMILIES[family], lora=lora))

    one, three, without = (each.backward(text(), {}).loss_sum for each in (whole, pieces, plain))

    assert one == pytest.approx(three, rel=1e-6)
    for ours, theirs in zip(whole.model.parameters(), pieces.model.parameters(), strict=True):
        if ours.requires_grad:
            torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-4, atol=1e-6)
    assert one != pytest.approx(without, rel=1e-3)
    assert whole.backward(text(), {}).loss_sum == one
    assert whole.backward(text(step=1), {}).loss_sum != pytest.approx(one, rel=1e-3)


def test_a_language_model_is_judged_and_writes_without_dropout():
    plain, dropped = (grown(program(dropout=dropout)) for dropout in (0.0, 0.5))

    for made in (plain, dropped):
        made.backward(text(), {})

    np.testing.assert_array_equal(dropped.log_likelihoods(text(), {}), plain.log_likelihoods(text(), {}))
    rows = [row[:given] for row, given in zip(ROWS, PROMPTS, strict=True)]
    asked = text(rows, [len(row) for row in rows])
    written = [[list(row) for row in made.generate(asked, {}, 3)] for made in (plain, dropped)]
    assert written[0] == written[1]


def test_dropout_of_padded_rows_is_refused():
    with pytest.raises(InputError, match=r"model.dropout: padded rows .* set model.rows to packed"):
        config(rows="padded", dropout=0.1)


def test_micro_batches_give_the_gradients_of_the_whole_batch():
    whole = grown(program())
    expected = whole.backward(text(), {})
    spec = TextProgramSpec(config(), VOCABULARY, optimizer())
    placement = ProgramPlacement(torch.device("cpu"), 0)
    pieces = grown(spec.build(replace(placement, compute=replace(placement.compute, micro_batches=3))))

    found = pieces.backward(text(), {})

    assert found.loss_sum == pytest.approx(expected.loss_sum, rel=1e-6)
    for (name, one), other in zip(whole.model.named_parameters(), pieces.model.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-4, atol=1e-6, msg=name)


@pytest.mark.parametrize("family", ["llama", "phi"])
def test_log_likelihoods_are_of_each_row_alone(family):
    model = grown(program(FAMILIES[family]))

    found_B = model.log_likelihoods(text(), {})

    with torch.no_grad():
        alone_B = [
            -their_loss(model.model.network, [row], [given]).item()
            for row, given in zip(ROWS, PROMPTS, strict=True)
        ]
    np.testing.assert_allclose(found_B, alone_B, rtol=1e-5)


@pytest.mark.parametrize("rows", ["packed", "padded"])
def test_continuations_are_those_of_each_row_alone(rows):
    model = grown(program(rows=rows), 0.4)
    prompts = tuple(row[:given] for row, given in zip(ROWS, PROMPTS, strict=True))

    found = model.generate(text(prompts, tuple(map(len, prompts))), {}, max_new_tokens=6)

    network = model.model.network
    network.set_attn_implementation("eager")
    for prompt, tokens in zip(prompts, found, strict=True):
        expected = list(prompt)
        while len(expected) < len(prompt) + 6:
            with torch.no_grad():
                following = int(network(input_ids=torch.tensor([expected])).logits[0, -1].argmax())
            if following in VOCABULARY.ends:
                break
            expected.append(following)
        assert tokens.tolist() == expected[len(prompt) :]
    assert model.backward(text(), {}).loss_sum > 0  # it attends to packed rows again


def filled_text():
    """Rows whose token 37 is row 1 of the table, and 39 row 0."""
    features = text()
    places_P = np.flatnonzero(np.isin(features.tokens_N, (37, 39)))
    return replace(
        features,
        filled_P={"user": places_P},
        lookups={"user": Lookup(np.array([100, 200]), np.array([1, 0]))},
    )


class TableSettings:
    """Of a network beside which a table of users lies."""

    def build(self, vocabulary):
        network = config().network(vocabulary, Wanted(16))
        return LanguageModel(network, {"user": 3})


def with_table(micro_batches=1):
    placement = ProgramPlacement(torch.device("cpu"), 0)
    placement = replace(placement, compute=replace(placement.compute, micro_batches=micro_batches))
    return TextProgramSpec(TableSettings(), VOCABULARY, optimizer()).build(placement)


def test_a_row_of_a_table_is_read_in_the_place_of_a_word():
    model = grown(with_table())
    rows = {"user": np.random.default_rng(0).normal(size=(2, 3)).astype(np.float32)}
    features = filled_text()

    loss = model.backward(features, rows)
    moved = {"user": rows["user"].copy()}
    eps = 1e-2
    moved["user"][1, 2] += eps
    up = model.backward(features, moved).loss_sum
    moved["user"][1, 2] -= 2 * eps
    down = model.backward(features, moved).loss_sum

    assert loss.row_grads["user"].shape == (2, 3)
    slope = (up - down) / (2 * eps) / features.num_targets
    assert loss.row_grads["user"][1, 2] == pytest.approx(slope, rel=2e-2)
    # What the words there would have been has no part in what is read.
    with torch.no_grad():
        model.model.network.get_input_embeddings().weight[[37, 39]] += 1.0
    read_ND = model.model.vectors(model._batch(features, rows, training=False))
    projected = model.model.projections["user"](torch.tensor(rows["user"]))
    torch.testing.assert_close(read_ND[features.filled_P["user"]], projected[[1, 0]])


def test_micro_batches_read_the_rows_of_their_places():
    rows = {"user": np.random.default_rng(0).normal(size=(2, 3)).astype(np.float32)}
    whole = grown(with_table()).backward(filled_text(), rows)
    pieces = grown(with_table(micro_batches=4))

    found = pieces.backward(filled_text(), rows)

    np.testing.assert_allclose(found.row_grads["user"], whole.row_grads["user"], rtol=1e-4, atol=1e-7)


def test_a_saved_base_gets_rows_for_new_tokens_alone(tmp_path):
    known = transformers.LlamaConfig(
        vocab_size=FIRST_NEW, **{k: v for k, v in LLAMA.items() if k != "model_type"}
    )
    saved = transformers.LlamaForCausalLM(known)
    saved.save_pretrained(tmp_path)

    model = program({"kind": "folder", "folder": str(tmp_path)})

    weight = model.model.network.get_input_embeddings().weight
    assert weight.shape[0] == NUM_TOKENS
    assert torch.equal(weight[:FIRST_NEW], saved.get_input_embeddings().weight)
    with pytest.raises(InputError, match="the network knows 36 tokens, and its tokenizer has 38"):
        program({"kind": "folder", "folder": str(tmp_path)}, vocabulary=replace(VOCABULARY, first_new=38))


def test_what_does_not_fit_packed_rows_is_refused_by_name_and_trained_on_padded_ones():
    gemma2 = {"model_type": "gemma2", **SHAPE, **HEADS}

    with pytest.raises(
        InputError, match=r"model\.base\.settings: .*caps its attention scores.*or set model\.rows to padded"
    ):
        program(gemma2)
    model = grown(program(gemma2, rows="padded"))

    loss = model.backward(text(), {}).loss_sum
    assert loss == pytest.approx(their_loss(model.model.network).item(), rel=1e-5)


def test_a_row_longer_than_the_network_knows_is_refused_before_training():
    with pytest.raises(InputError, match="the network knows 8 positions, and a row has up to 16 tokens"):
        program(LLAMA | {"max_position_embeddings": 8})
