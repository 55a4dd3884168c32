"""The embedded engine: as `generate` writes, many at once, each by its own settings, and nobody's slot is
kept."""

import asyncio
import json
import time

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers", reason="the embedded engine is that of transformers")

from rayrec.models.generation.sampler import Chosen, Sampling, TokenSampler  # noqa: E402
from rayrec.serve.admission.limits import ServiceLimitError  # noqa: E402
from rayrec.serve.engine.batching import DeadlineError  # noqa: E402
from rayrec.serve.language.engine import (  # noqa: E402
    EmbeddedEngine,
    EngineStoppedError,
    Prompt,
    _Sequence,
)
from rayrec.serve.language.writing import Writing  # noqa: E402

GREEDY = Sampling(temperature=0)


def prompt(tokens, count=12, sampling=GREEDY, **more):
    return Prompt(list(tokens), count, sampling, **more)


PROMPTS = [[5, 9, 30, 31], [7], list(range(20, 90)), [100, 40, 41, 42, 43], [88, 3], [60] * 9]


def test_greedy_answers_are_those_of_generate(model, answers):
    found = answers(*map(prompt, PROMPTS))

    for tokens, (_, chosen, _) in zip(PROMPTS, found, strict=True):
        with torch.inference_mode():
            expected = model.network.generate(
                torch.tensor([tokens]),
                attention_mask=torch.ones(1, len(tokens), dtype=torch.long),
                do_sample=False,
                max_new_tokens=12,
                eos_token_id=list(model.text.info.ends),
                pad_token_id=0,
            )[0, len(tokens) :].tolist()
        expected = [token for token in expected if token not in model.text.info.ends]
        assert [one.token for one in chosen] == expected


def test_answers_that_have_ended_are_kept_nowhere(model, answers):
    answers(*map(prompt, PROMPTS))

    assert model.engine._manager.output_router.output_queue.empty()


def test_log_probabilities_are_those_of_the_network(model, answers):
    (_, chosen, _), *_ = answers(prompt(PROMPTS[0], 5, Sampling(temperature=0, num_top=3)))
    tokens = [*PROMPTS[0], *(one.token for one in chosen)]
    with torch.inference_mode():
        logits_TV = model.network(torch.tensor([tokens])).logits[0]
    log_TV = torch.log_softmax(logits_TV.float(), -1)[len(PROMPTS[0]) - 1 :]

    for place, one in enumerate(chosen):
        assert one.logprob == pytest.approx(log_TV[place, one.token].item(), abs=1e-4)
        values, ids = log_TV[place].topk(3)
        assert [token for token, _ in one.top] == ids.tolist()
        assert [value for _, value in one.top] == pytest.approx(values.tolist(), abs=1e-4)


def test_a_seed_gives_the_same_answer_alone_and_among_others(answers):
    own = prompt(PROMPTS[0], 10, Sampling(seed=5))
    others = [prompt(PROMPTS[2], 10, Sampling(seed=seed)) for seed in range(4)]
    alone = answers(own)[0]
    among = answers(*others[:2], own, *others[2:])[2]

    assert among == alone
    assert answers(prompt(PROMPTS[0], 10, Sampling(seed=6)))[0] != alone


def test_an_answer_ends_before_a_stop_text(answers):
    whole, _, reason = answers(prompt(PROMPTS[3], 20))[0]
    assert reason == "length"
    stop = whole[4:7]
    text, _, reason = answers(prompt(PROMPTS[3], 20, stops=[stop]))[0]

    assert reason == "stop"
    assert text == whole[: whole.index(stop)]


def test_a_schema_is_held_beside_answers_without_one(model, answers):
    pytest.importorskip("xgrammar")
    schema = {
        "type": "object",
        "properties": {"a": {"type": "string"}, "b": {"type": "integer"}},
        "required": ["a", "b"],
        "additionalProperties": False,
    }
    compiled = model.grammars.compile("json_schema", schema)
    held = [
        prompt(PROMPTS[0], compiled.least_tokens + more, Sampling(seed=more), grammar=compiled.begin())
        for more in (0, 2, 30)
    ]
    found = answers(prompt(PROMPTS[1]), *held)

    for text, _, reason in found[1:]:
        assert set(json.loads(text)) == {"a", "b"}
        assert reason == "stop"
    assert found[0] == answers(prompt(PROMPTS[1]))[0]


def test_a_listener_that_leaves_frees_its_slot_for_one_that_waits(model):
    async def leave():
        streams = [model.engine.submit(prompt(PROMPTS[0], 100)) for _ in range(4)]
        for stream in streams:
            await anext(stream)
        late = asyncio.ensure_future(anext(model.engine.submit(prompt(PROMPTS[1], 3))))
        await asyncio.sleep(0)
        assert model.engine.num_free == 0
        assert not late.done()
        left = model.engine.measures.num_left
        await streams[0].aclose()
        await asyncio.wait_for(late, 20)
        assert model.engine.measures.num_left >= left + 1
        for stream in streams[1:]:
            await stream.aclose()
        assert model.engine.num_free >= 3

    asyncio.run(leave())


def test_more_than_may_wait_are_refused(model):
    async def crowd():
        streams = [model.engine.submit(prompt(PROMPTS[0], 100)) for _ in range(11)]
        waiting = [asyncio.ensure_future(anext(stream)) for stream in streams]
        with pytest.raises(ServiceLimitError, match="being written or wait"):
            await waiting[-1]
        for each in waiting:
            each.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        for stream in streams:
            await stream.aclose()

    asyncio.run(crowd())
    assert model.engine.num_free == 4


def test_what_two_prompts_begin_with_is_read_once(model, answers):
    shared = [50 + place % 7 for place in range(64)]
    first = answers(prompt([*shared, 9], 4))[0]
    before = model.engine.measures.num_prefix_tokens
    again = answers(prompt([*shared, 9], 4))[0]

    assert again == first
    assert model.engine.measures.num_prefix_tokens - before == 64


def test_an_answer_that_has_not_begun_in_time_is_refused_and_takes_no_slot(model):
    async def late():
        with pytest.raises(DeadlineError, match="has not begun an answer in time"):
            await anext(model.engine.submit(prompt(PROMPTS[0], expires_at=0.0)))

    asyncio.run(late())
    assert model.engine.num_free == 4


def test_a_failure_of_one_answer_is_not_that_of_others(answers, model):
    class Broken:
        is_complete = is_over = False
        ending = ()

        def allowed_V(self):
            raise ZeroDivisionError("broken")

    async def both():
        async def broken():
            return [piece async for piece in model.engine.submit(prompt(PROMPTS[0], grammar=Broken()))]

        async def sound():
            return [piece async for piece in model.engine.submit(prompt(PROMPTS[1]))]

        return await asyncio.gather(broken(), sound(), return_exceptions=True)

    failed, sound = asyncio.run(both())
    assert isinstance(failed, ZeroDivisionError)
    assert "".join(piece.text for piece in sound) == answers(prompt(PROMPTS[1]))[0][0]
    assert model.engine.is_alive


def test_a_sequence_whose_time_is_over_while_its_token_is_chosen_says_nothing_more(model):
    """The loop has ended it, with all its text, while the engine's thread was choosing."""
    delivered, ends = [], list(model.text.info.ends)
    writing = Writing(model.text.tokenizer, frozenset(ends), frozenset())
    sequence = _Sequence("late", prompt([5]), writing, TokenSampler(GREEDY, ends), delivered.append, 0.0, 9)

    class Late:
        def choose(self, logits_V, left):
            with sequence.lock:
                sequence.is_over = True
            return Chosen(40, None, ())

    sequence.sampler = Late()
    logits_V = np.zeros(model.engine.num_tokens, np.float32)

    assert model.engine._next(sequence, logits_V) == model.engine.num_tokens
    assert not delivered
    assert sequence.left == 9
    assert writing.finish("length").tokens == ()


def test_what_is_written_until_the_deadline_is_told_by_a_late_loop(settings, model, monkeypatch):
    engine = EmbeddedEngine(model.network, model.text.tokenizer, model.text.info.ends, [], settings)
    monkeypatch.setattr(engine, "check_room", lambda count=1: None)
    tokens = model.text.encode("Paris is")

    class Known:
        def __init__(self):
            self.left = iter(tokens)

        def choose(self, logits_V, left):
            return Chosen(next(self.left), None, ())

    async def late():
        expires_at = time.monotonic() + 0.2
        told = []

        async def listen():
            async for piece in engine.submit(prompt([5], 99, expires_at=expires_at)):
                told.append(piece)

        listening = asyncio.create_task(listen())
        await asyncio.sleep(0)
        (sequence,) = engine._running.values()
        sequence.sampler = Known()
        engine._next(sequence, None)
        while not told:
            await asyncio.sleep(0.01)
        # The loop is held up while the engine's thread writes the rest, and finds it with the deadline.
        time.sleep(max(expires_at - time.monotonic(), 0) + 0.05)
        for _ in tokens[1:]:
            engine._next(sequence, None)
        await listening
        return told

    told = asyncio.run(late())
    assert [chosen.token for piece in told for chosen in piece.tokens] == tokens
    assert "".join(piece.text for piece in told) == "Paris is"
    assert [piece.reason for piece in told if piece.reason is not None] == ["length"]


def test_a_sequence_that_joins_an_engine_which_has_just_failed_is_told(settings, model, monkeypatch):
    engine = EmbeddedEngine(model.network, model.text.tokenizer, model.text.info.ends, [], settings)
    monkeypatch.setattr(engine, "check_room", lambda count=1: engine._fail_all())  # behind the check

    async def join():
        with pytest.raises(EngineStoppedError, match="has stopped"):
            await asyncio.wait_for(anext(engine.submit(prompt(PROMPTS[0]))), 20)

    asyncio.run(join())
