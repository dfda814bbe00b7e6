"""Calls a rollout function many times at once, in an event loop in a thread, and collects the calls' requests.

Where the model in training samples, rollouts proceed in rounds. A round begins when every unfinished rollout waits for
its client: then the main thread takes all requests (`take`), has the policy sample them together, and answers
(`answer`). Where a `Sender` samples, an engine, every request is sent at once, and no rollout waits for another.
Requests and their seeds depend on the rollouts only, not on the time that they take.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import logging
import math
import queue
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from types import FrameType
from typing import Any

from roll_batching.errors import DataError, EngineError, RollBatchingError
from roll_batching.jobs.engines.protocol import SampledTokens
from roll_batching.jobs.rollouts.contract import (
    LoadedRolloutFunction,
    RolloutPrompt,
    Sender,
    TokenRequest,
)
from roll_batching.jobs.rollouts.event_loop import DaemonThreads, place_of
from roll_batching.jobs.rollouts.rollout_client import Client
from roll_batching.jobs.rollouts.sample_checks import CheckedRollout, SampleFault, check_rollout
from roll_batching.jobs.texts.tokenizers import Tokenizer
from roll_batching.registry import describe_error, printable
from roll_batching.strategy.sampling import GenerationSettings

logger = logging.getLogger(__name__)

_POLL_SECONDS = 0.1
_BEAT_SECONDS = 0.2
"""Interval of the event loop's sign of life."""
_BLOCKED_SECONDS = 5.0
"""Without a sign of life for so long, a function is reported to block the event loop."""
_CURE = "Handle errors of tools inside the function"


class FunctionCalls:
    """Calls of `function` for `prompts`, one per rollout, all at once. A context manager.

    `settings` has the job's stop tokens, longest response and, if known, vocabulary size. `sender`: samples each
    request at once, instead of in rounds; then further prompts may follow (`add`).
    """

    def __init__(
        self,
        function: LoadedRolloutFunction,
        prompts: Sequence[RolloutPrompt],
        tokenizer: Tokenizer,
        settings: GenerationSettings,
        sender: Sender | None = None,
    ) -> None:
        self.sender = sender
        self.function, self.tokenizer = function, tokenizer
        self.prompts = dict(enumerate(prompts))
        """By number. This and what follows is forgotten once a rollout is collected."""
        self.settings = settings
        self.max_new_tokens = settings.max_new_tokens
        self.vocab_size = settings.vocab_size or tokenizer.vocab_size
        self.stop_token_ids = frozenset((settings.eos_token_id, *settings.stop_token_ids))
        self._rollouts: dict[int, CheckedRollout] = {}
        """Results by number; complete when `take` has returned no requests."""
        self.num_prompts = len(self.prompts)
        """Of all prompts, also of collected rollouts."""
        self._num_completed = 0
        self._messages: queue.SimpleQueue[list[TokenRequest] | int | RollBatchingError] = queue.SimpleQueue()
        """Requests of a round; or, where a sender samples, the number of a complete rollout."""
        self._waiting: dict[int, list[TokenRequest]] = {}
        """Requests of unfinished rollouts. This and the next six are used in the event loop's thread only."""
        self._working_since: dict[int, float] = {}
        """When those rollouts began to work that wait for no request."""
        self._num_begun, self._is_open = 0, False
        self._is_sampling = self._closing = False
        self._returned: dict[int, list[Any]] = {}
        """Returned samples by number, kept so that no identity is used twice."""
        self.loop = asyncio.new_event_loop()
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._beat = time.monotonic()
        self._is_reported = self._is_complete = False
        self._thread = threading.Thread(target=self._run, name="rollout function", daemon=True)

    def __enter__(self) -> FunctionCalls:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closing = True
        with contextlib.suppress(RuntimeError):  # it is closed
            self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(1.0)  # one that blocks is left behind: it ends with the process

    def take(self) -> list[TokenRequest]:
        """Waits for the requests of the next round, by rollout and call; returns none when all are complete.

        Raises DataError, with function, sample and cure, when a call
        fails, takes too long, or returns an invalid sample; EngineError when the sender fails.
        """
        requests = [] if self._is_complete else self._next(math.inf)  # once complete, other replicas go on
        assert isinstance(requests, list)
        self._is_complete = not requests
        return requests

    # ---- where a sender samples

    def add(self, prompts: Sequence[RolloutPrompt]) -> None:
        """Starts calls for further prompts, whose numbers follow those of the others."""
        numbers = range(self.num_prompts, self.num_prompts + len(prompts))
        self.prompts |= zip(numbers, prompts, strict=True)
        self.num_prompts += len(prompts)
        self.loop.call_soon_threadsafe(self._begin)

    def wait(self, seconds: float) -> int | None:
        """Waits for a rollout to be complete, for `seconds` at most; returns its number. Raises as `take`."""
        number = self._next(seconds)
        assert not isinstance(number, list)
        self._num_completed += number is not None
        return number

    def wait_for_all(self, seconds: float) -> bool:
        """Waits for `seconds` at most; returns whether all rollouts are complete. Raises as `take`."""
        until = time.monotonic() + seconds
        while self._num_completed < self.num_prompts and self.wait(until - time.monotonic()) is not None:
            pass
        return self._num_completed == self.num_prompts

    # ---- in either case

    def collect(self, numbers: range) -> list[CheckedRollout]:
        """Returns and forgets complete rollouts."""
        for number in numbers:
            del self.prompts[number], self._returned[number]
        return [self._rollouts.pop(number) for number in numbers]

    def _next(self, seconds: float) -> list[TokenRequest] | int | None:
        """The next message; None after `seconds`."""
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0:
            try:
                message = self._messages.get(timeout=min(_POLL_SECONDS, left))
            except queue.Empty:
                self._check_time()
                continue
            if isinstance(message, RollBatchingError):
                raise message
            return message
        return None

    def answer(self, requests: Sequence[TokenRequest], results: Sequence[tuple[list[int], list[float]]]) -> None:
        """Passes the sampled tokens and log-probs to the rollouts that asked for them, and starts the next round."""
        with contextlib.suppress(RuntimeError):  # the loop has failed meanwhile: `take` raises its error
            self.loop.call_soon_threadsafe(self._deliver, list(requests), list(results))

    # ---- in the event loop's thread

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        self.loop.set_default_executor(DaemonThreads())
        self._beat_again()
        self._starting = self.loop.create_task(self._start())
        ended: BaseException | None = None
        try:
            try:
                self.loop.run_forever()
            except BaseException as error:  # asyncio lets SystemExit of a task or callback end its loop
                ended, self._closing = error, True
            self.loop.set_exception_handler(lambda loop, context: None)  # the first failure is reported, and enough
            pending = asyncio.all_tasks(self.loop)
            for task in pending:
                task.cancel()
            waiting = self.loop.create_task(asyncio.wait(pending, timeout=1.0)) if pending else None
            while waiting is not None and not waiting.done():
                with contextlib.suppress(BaseException):  # further ones that end the loop
                    self.loop.run_until_complete(waiting)
            if self.sender is not None:
                with contextlib.suppress(BaseException):
                    self.loop.run_until_complete(self.sender.close())
        finally:
            self.loop.close()
            if ended is not None:
                message = f"rollout function {self.function.path} failed in a task or callback that it started"
                self._messages.put(DataError(f"{message}: {describe_error(ended)}. {_CURE}"))

    async def _start(self) -> None:
        if self.sender is not None:
            try:
                await self.sender.open()
            except Exception as error:
                self._messages.put(
                    error if isinstance(error, RollBatchingError) else EngineError(describe_error(error))
                )
                return
        self._is_open = True
        self._begin()
        self._check_round()

    def _begin(self) -> None:
        """Begins the calls for all prompts of which they have not begun, once the sender is open."""
        if not self._is_open:
            return
        numbers = range(self._num_begun, self.num_prompts)  # another thread raises it
        self._num_begun = numbers.stop
        self._waiting |= {number: [] for number in numbers}
        self._tasks |= {number: self.loop.create_task(self._call(number)) for number in numbers}

    def _beat_again(self) -> None:
        self._beat = time.monotonic()
        self.loop.call_later(_BEAT_SECONDS, self._beat_again)

    async def _call(self, number: int) -> None:
        """Calls the function for one rollout, and checks and keeps its result."""
        prompt = self.prompts[number]
        try:
            while True:
                self._waiting[number], self._working_since[number] = [], time.monotonic()
                client = Client(self, number)
                # Copies, for `context = prompt.tokens` that grows in place would lengthen the sample's prompt.
                copied = replace(prompt, tokens=list(prompt.tokens), record=copy.deepcopy(prompt.record))
                result = await self.function(copied, client, self.tokenizer)
                self._waiting[number] = []  # calls that it no longer waits for
                self._working_since.pop(number, None)  # the time of what follows is not the function's
                if self.sender is None or not await self.sender.has_restarted(client.servers):
                    break
            items = list(result) if isinstance(result, (list, tuple)) else [result]
            known = {id(item) for others in self._returned.copy().values() for item in others}
            if len(known | {id(item) for item in items}) < len(known) + len(items):
                raise SampleFault("it returned an object that it has returned for another sample: make a new one")
            self._returned[number] = items
            rollout = check_rollout(
                result,
                prompt,
                self.function,
                vocab_size=self.vocab_size,
                stop_token_ids=tuple(self.stop_token_ids),
                calls=client.calls,
                versions=client.versions,
            )
        except SampleFault as fault:
            self._fail(number, str(fault))
            return
        except BaseException as error:  # also SystemExit, which would end the event loop
            if self._closing:  # another failure is reported already
                return
            self._fail(number, f"{describe_error(error)}. {_CURE}")
            return
        self._rollouts[number] = rollout
        del self._waiting[number], self._tasks[number]
        if self.sender is None:
            self._check_round()
        else:
            self._messages.put(number)

    def _fail(self, number: int, message: str) -> None:
        prompt = self.prompts[number]
        text = printable(repr(prompt.text), characters=60)
        where = f"rollout function {self.function.path} failed on rollout {prompt.sample} (prompt {text})"
        self._messages.put(DataError(f"{where}: {message}"))

    async def sample(self, request: TokenRequest) -> SampledTokens:
        """Samples a request's tokens: in the next round, or at once where a sender samples."""
        self._waiting[request.rollout].append(request)
        self._working_since.pop(request.rollout, None)
        try:
            if self.sender is not None:
                return await self.sender.sample(request)
            self.loop.call_soon(self._check_round)  # after other calls that the rollout makes at the same time
            tokens, log_probs = await request.future
            return SampledTokens(tokens=tokens, log_probs=log_probs, versions=[])
        except EngineError as error:
            self._closing = True  # not the function's to handle
            self._messages.put(error)
            raise
        finally:
            self._cancel(request)

    def _cancel(self, request: TokenRequest) -> None:
        """Removes a request that its rollout no longer waits for."""
        waiting = self._waiting.get(request.rollout, [])
        if request in waiting:
            waiting.remove(request)
            if not waiting:
                self._working_since[request.rollout] = time.monotonic()

    def is_open(self, rollout: int) -> bool:
        """Whether the rollout's call has not returned."""
        return rollout in self._waiting

    def _check_round(self) -> None:
        """Hands over the requests once every unfinished rollout has one; none when all are complete."""
        if self.sender is not None or self._is_sampling or not all(self._waiting.values()):
            return
        self._is_sampling = True
        self._messages.put([request for number in sorted(self._waiting) for request in self._waiting[number]])

    def _deliver(self, requests: list[TokenRequest], results: list[tuple[list[int], list[float]]]) -> None:
        self._is_sampling = False
        for request, result in zip(requests, results, strict=True):
            self._cancel(request)
            if not request.future.done():
                request.future.set_result(result)
        self.loop.call_soon(self._check_round)

    # ---- in the main thread

    def _check_time(self) -> None:
        """Raises DataError after the time limit; reports a function that blocks the event loop."""
        now = time.monotonic()
        blocked = now - self._beat
        if now - min(self._working_since.copy().values(), default=now) > self.function.timeout:
            raise DataError(self._describe_wait(blocked > max(1.0, 5 * _BEAT_SECONDS)))
        if blocked > _BLOCKED_SECONDS and not self._is_reported:
            self._is_reported = True
            number, place = self._blocking_call()
            logger.warning(
                "rollout function %s blocks its event loop for %.0f s at %s (rollout %s), while the rank's other "
                "rollouts wait: await what takes time, or run it with await asyncio.to_thread(...)",
                *(self.function.path, blocked, place, number),
            )

    def _describe_wait(self, is_blocked: bool) -> str:
        limit = f"{self.function.timeout:g} s (rollout_function_timeout)"
        if is_blocked:
            number, place = self._blocking_call()
            return (
                f"rollout function {self.function.path} has blocked its event loop at {place} in rollout {number}, and "
                f"did not go on within {limit}: await what takes time, or run it with await asyncio.to_thread(...)"
            )
        late, working = time.monotonic() - self.function.timeout, self._working_since.copy()
        unfinished = sorted(number for number, since in working.items() if since < late)
        shown = ", ".join(
            f"rollout {self.prompts[number].sample}"
            + (f" (at {place})" if (task := self._tasks.get(number)) and (place := place_of(task)) else "")
            for number in unfinished[:3]
        )
        rest = f" and {len(unfinished) - 3} more" if len(unfinished) > 3 else ""
        return (
            f"rollout function {self.function.path} neither returned nor called its client within {limit} in {shown}"
            f"{rest}: set shorter timeouts inside the function, or raise rollout_function_timeout. Rollouts must not "
            "wait for each other"
        )

    def _blocking_call(self) -> tuple[int | str, str]:
        """Returns the rollout whose call occupies the event loop's thread, and the file and line where it is."""
        frame: FrameType | None = sys._current_frames().get(self._thread.ident or 0)
        if frame is None:
            return "unknown", "its end"
        place = f"{frame.f_code.co_filename}:{frame.f_lineno}"
        while frame is not None:
            if frame.f_code is FunctionCalls._call.__code__:
                return self.prompts[frame.f_locals["number"]].sample, place
            frame = frame.f_back
        return "unknown", place
