"""The embedded engine: continuous batching of transformers, with each answer sampled by its own settings.

    event loop                          engine's thread, which belongs to the manager of transformers
    submit ─► at most `concurrency` ──► manager: pages, prefixes, chunks of prompts, forward passes
       ▲      run, others wait            └─► logits of each sequence ─► TokenSampler ─► Writing
       └──────────── pieces ◄─────────────────────────────────────────────────────────────┘

The manager has one way of sampling for all, and no grammars, seeds or stop texts of one request. So its step
from logits to tokens is replaced by ours (`_Runner`); memory, prefixes and attention stay its own. An answer
ends where ours says so: the manager is given a token of no meaning that it takes for an end. Sampling is on
the host, so graphs of a device are not used here.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import threading
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np
import torch
from transformers import GenerationConfig
from transformers.generation.configuration_utils import ContinuousBatchingConfig
from transformers.generation.continuous_batching.continuous_api import ContinuousBatchingManager, OutputRouter
from transformers.generation.continuous_batching.model_runner import ModelRunner

from rayrec.models.generation.sampler import Chosen, Sampling, TokenSampler
from rayrec.models.generation.token_grammar import TokenGrammar
from rayrec.serve.admission.limits import ServiceLimitError
from rayrec.serve.engine.batching import DeadlineError
from rayrec.serve.language.config import EmbeddedModel
from rayrec.serve.language.measures import EngineMeasures
from rayrec.serve.language.memory import page_plan
from rayrec.serve.language.writing import Piece, Writing

logger = logging.getLogger(__name__)

STOP_TIMEOUT_S = 30.0


class EngineStoppedError(RuntimeError):
    """The engine's thread has ended; nothing is computed any more."""


@dataclass(frozen=True)
class Prompt:
    """What is asked of the engine: one answer."""

    tokens: Sequence[int]
    most_tokens: int
    sampling: Sampling
    grammar: TokenGrammar | None = None
    stops: Sequence[str] = ()
    expires_at: float = float("inf")
    """By `time.monotonic`: ended there, whole or not."""


@dataclass
class _Sequence:
    """An answer, from its request to its end."""

    number: str
    prompt: Prompt
    writing: Writing
    sampler: TokenSampler
    deliver: Callable[[Piece | Exception], None]
    began_at: float
    left: int
    last_at: float | None = None
    """When its last token came."""
    is_over: bool = False
    lock: threading.Lock = field(default_factory=threading.Lock)
    """Around what is written and delivered: the loop ends it at its deadline, while the engine's thread
    adds a token."""


class EmbeddedEngine:
    """Answers prompts; `submit` belongs to an event loop, all else may be called anywhere."""

    def __init__(
        self,
        network: Any,
        tokenizer: Any,
        ends: Sequence[int],
        silent: Sequence[int],
        settings: EmbeddedModel,
        measures: EngineMeasures | None = None,
    ) -> None:
        """
        Args:
            network: of transformers, on its device, for inference.
            tokenizer: of the package tokenizers.
            silent: tokens that are no text.
        """
        self.settings = settings
        self.measures = measures or EngineMeasures()
        self.num_tokens = int(network.get_input_embeddings().num_embeddings)
        self._tokenizer, self._ends, self._silent = tokenizer, list(ends), frozenset(silent)
        self._lock = threading.Lock()
        self._running: dict[str, _Sequence] = {}
        self._waiting: deque[_Sequence] = deque()
        self._numbers = itertools.count()
        plan = page_plan(settings)
        self._manager = _Manager(
            network,
            _batching(
                page_size=settings.page_tokens,
                num_blocks=plan.num_pages,
                max_batch_tokens=settings.prefill_tokens,
                max_requests_per_batch=settings.concurrency,
                max_blocks_per_request=0,
                max_memory_percent=1.0,
                allow_block_sharing=settings.prefix_cache_tokens > 0,
                safety_margin=plan.margin,
                use_async_batching=False,
                use_cuda_graph=False,
                auto_switch_to_flash=False,
            ),
            self._sample,
            self.measures.count_prefix,
            self._fail_all,
        )
        self._has_failed = False
        self.measures.watch(self._pages_used, lambda: len(self._running), lambda: len(self._waiting))

    def start(self) -> None:
        self._has_failed = False
        self._manager.start()

    def stop(self) -> None:
        """End the thread; answers that are being written end with an error."""
        self._manager.stop(block=True, timeout=STOP_TIMEOUT_S, hard_stop=True)
        self._fail_all()

    @property
    def is_alive(self) -> bool:
        return self._manager.is_running() and self._manager.background_thread_status.fatal_error is None

    @property
    def num_free(self) -> int:
        """Slots for answers that nobody has."""
        return self.settings.concurrency - len(self._running)

    @property
    def most_at_once(self) -> int:
        """Answers that are being written or wait."""
        return self.settings.concurrency + self.settings.max_waiting

    def check_room(self, count: int = 1) -> None:
        """Check that so many more answers could be begun, or wait.

        Raises:
            EngineStoppedError: none will be.
            ServiceLimitError: too many wait.
        """
        if not self.is_alive:
            raise self._stopped_error()
        held = len(self._running) + len(self._waiting)
        if held + count > self.most_at_once:
            raise ServiceLimitError(f"{held} answers of {self.settings.name} are being written or wait", 1.0)

    async def submit(self, prompt: Prompt) -> AsyncGenerator[Piece, None]:
        """The pieces of an answer, as they come; closing the generator frees the slot.

        Raises:
            EngineStoppedError: the engine has stopped.
            ServiceLimitError: too many wait.
            DeadlineError: the time was over before the first token.
        """
        self.check_room()
        if prompt.expires_at <= time.monotonic():
            raise self._late_error()
        loop = asyncio.get_running_loop()
        pieces: asyncio.Queue[Piece | Exception] = asyncio.Queue()

        def deliver(piece: Piece | Exception) -> None:
            try:
                loop.call_soon_threadsafe(pieces.put_nowait, piece)
            except RuntimeError:  # the loop has ended, and nobody listens
                logger.debug("an answer has no listener")

        sequence = self._begin(prompt, deliver)
        try:
            while True:
                try:
                    async with asyncio.timeout(max(prompt.expires_at - time.monotonic(), 0)):
                        piece = await pieces.get()
                except TimeoutError:
                    if sequence.last_at is None:
                        raise self._late_error() from None
                    with sequence.lock:
                        sequence.is_over = True
                        last = sequence.writing.finish("length")
                    # What was delivered before then stands before it: the loop has it after this step.
                    await asyncio.sleep(0)
                    while not pieces.empty():
                        piece = pieces.get_nowait()
                        if isinstance(piece, Exception):
                            raise piece from None
                        yield piece
                        if piece.reason is not None:
                            return
                    yield last
                    return
                if isinstance(piece, Exception):
                    raise piece
                yield piece
                if piece.reason is not None:
                    return
        finally:
            self._leave(sequence)

    def _begin(self, prompt: Prompt, deliver: Callable[[Piece | Exception], None]) -> _Sequence:
        sequence = _Sequence(
            number=str(next(self._numbers)),
            prompt=prompt,
            writing=Writing(self._tokenizer, frozenset(self._ends), self._silent, prompt.stops),
            sampler=TokenSampler(prompt.sampling, self._ends, prompt.grammar),
            deliver=deliver,
            began_at=time.monotonic(),
            left=prompt.most_tokens,
        )
        with self._lock:
            if self._has_failed:  # since the room was checked, and nobody will look again
                raise self._stopped_error()
            self._waiting.append(sequence)
            self._fill()
        return sequence

    def _fill(self) -> None:
        """Hand to the manager as many as may run; with the lock."""
        while self._waiting and len(self._running) < self.settings.concurrency:
            sequence = self._waiting.popleft()
            self._running[sequence.number] = sequence
            # No limit of its own and no ends: `_sample` says when an answer ends, by a token of no meaning.
            self._manager.add_request(
                list(sequence.prompt.tokens),
                sequence.number,
                max_new_tokens=None,
                eos_token_id=self.num_tokens,
            )

    def _leave(self, sequence: _Sequence) -> None:
        """Free the slot of an answer, wherever it is."""
        with self._lock:
            sequence.is_over = True
            if sequence in self._waiting:
                self._waiting.remove(sequence)
            if self._running.pop(sequence.number, None) is not None:
                self._manager.cancel_request(sequence.number)
                self.measures.count_left()
            self._fill()

    def _done(self, sequence: _Sequence) -> None:
        with self._lock:
            sequence.is_over = True
            self._running.pop(sequence.number, None)
            self._fill()

    def _sample(self, numbers: Sequence[str], logits_BV: np.ndarray) -> list[int]:
        """The next token of each sequence; that of no meaning where one is over."""
        return [
            self._next(sequence, logits_V)
            if (sequence := self._running.get(number)) is not None
            else self.num_tokens
            for number, logits_V in zip(numbers, logits_BV, strict=True)
        ]

    def _next(self, sequence: _Sequence, logits_V: np.ndarray) -> int:
        if sequence.is_over:
            return self.num_tokens
        try:
            chosen = sequence.sampler.choose(logits_V, sequence.left)
            with sequence.lock:
                if sequence.is_over:
                    return self.num_tokens
                piece = self._written(sequence, chosen)
                is_last = piece is not None and piece.reason is not None
                self._count(sequence)
                if is_last:
                    self._done(sequence)
                if piece is not None:
                    sequence.deliver(piece)
        except Exception as error:  # of one request; the others go on
            logger.exception("an answer of %s failed", self.settings.name)
            self._done(sequence)
            sequence.deliver(error)
            return self.num_tokens
        return self.num_tokens if is_last else chosen.token

    def _count(self, sequence: _Sequence) -> None:
        """Take down the time of a token."""
        now = time.monotonic()
        if sequence.last_at is None:
            self.measures.count_first(now - sequence.began_at, len(sequence.prompt.tokens))
        else:
            self.measures.count_next(now - sequence.last_at)
        sequence.last_at = now

    @staticmethod
    def _written(sequence: _Sequence, chosen: Chosen) -> Piece | None:
        """What can be said now that a token is chosen."""
        sequence.left -= 1
        grammar = sequence.prompt.grammar
        piece = sequence.writing.add(chosen, sequence.left <= 0)
        if grammar is not None and grammar.is_complete and (sequence.left <= 0 or grammar.is_over):
            # Nothing is missing, however it came to its end.
            last = piece or Piece("", ())
            rest = sequence.writing.finish("stop")
            piece = Piece(last.text + rest.text, last.tokens + rest.tokens, "stop")
        return piece

    def _pages_used(self) -> float:
        """Share of the pages for keys and values that is in use."""
        processor = self._manager.batch_processor
        return 0.0 if processor is None else 1.0 - _free_share(processor.cache)

    def _fail_all(self) -> None:
        with self._lock:
            self._has_failed = True
            sequences = [*self._running.values(), *self._waiting]
            self._running.clear()
            self._waiting.clear()
        for sequence in sequences:
            sequence.deliver(self._stopped_error())

    def _late_error(self) -> DeadlineError:
        return DeadlineError(f"{self.settings.name} has not begun an answer in time")

    def _stopped_error(self) -> EngineStoppedError:
        return EngineStoppedError(f"the engine of {self.settings.name} has stopped; its log says why")


def _batching(**settings: Any) -> ContinuousBatchingConfig:
    """Settings by the names of transformers 5.19; before, tokens of a page were called `block_size`, and
    nothing kept it from switching the network to another attention."""
    known = {each.name for each in fields(ContinuousBatchingConfig)}
    if "page_size" not in known:
        settings["block_size"] = settings["page_size"]
    return ContinuousBatchingConfig(**{name: value for name, value in settings.items() if name in known})


def _free_share(cache: Any) -> float:
    """Of the pages; transformers before 5.18 counts pages and no bytes."""
    if hasattr(cache, "compute_free_capacity"):
        return float(cache.compute_free_capacity())
    return float(cache.get_num_free_blocks() / cache.num_blocks)


class _Manager(ContinuousBatchingManager):
    """Runs the loop with our sampling, and ends all answers when it fails."""

    def __init__(
        self,
        network: Any,
        config: ContinuousBatchingConfig,
        sample: Callable[[Sequence[str], np.ndarray], list[int]],
        count_prefix: Callable[[int], None],
        on_end: Callable[[], None],
    ) -> None:
        self._sample_tokens, self._count_prefix, self._on_end = sample, count_prefix, on_end
        super().__init__(network, GenerationConfig(do_sample=False, eos_token_id=-1), config)
        self.output_router = _NoOutputs()

    def _run_generation_loop(self) -> None:
        try:
            super()._run_generation_loop()
        finally:
            self._on_end()

    def _create_batch_processor(self) -> Any:
        processor = super()._create_batch_processor()
        processor.model_runner = _Runner(
            logit_processor=processor.logit_processor,
            cb_config=processor.cb_config,
            inputs_and_outputs=processor.inputs_and_outputs,
            cache=processor.cache,
            do_sample=False,
            return_logprobs=False,
        )
        processor.model_runner.sample_tokens = self._sample_tokens
        search = processor.cache.search_prefix_match

        def counted(request_id: str, prompt_ids: list[int]) -> int:
            found: int = search(request_id, prompt_ids)
            self._count_prefix(found)
            return found

        processor.cache.search_prefix_match = counted  # type: ignore[method-assign]
        return processor


class _NoOutputs(OutputRouter):
    """Keeps no answer that has ended; the package's own keeps each until somebody takes it, which nobody
    does here."""

    def deliver(self, output: Any) -> None:
        pass

    def deliver_batch(self, outputs: Any) -> None:
        pass


class _Runner(ModelRunner):
    sample_tokens: Callable[[Sequence[str], np.ndarray], list[int]]

    def _sample(self, scores: torch.Tensor, output_ids: torch.Tensor) -> None:
        """[1, B, V] logits of the sequences whose next token is wanted, in the order of the batch."""
        batch: Any = self.inputs_and_outputs
        states = [each.state for each in batch.requests_in_batch if each.has_new_token]
        # Behind these are rows of the sequences whose prompts are not read to their ends.
        logits_BV = scores[0, : len(states)].float().cpu().numpy()
        tokens = self.sample_tokens([state.request_id for state in states], logits_BV)
        output_ids[0, : len(tokens)] = torch.tensor(tokens, dtype=output_ids.dtype, device=output_ids.device)
