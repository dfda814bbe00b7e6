"""What the event loop of rollout functions is made of: threads for what blocks, and where a suspended call waits."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

from roll_batching.registry import describe_error

_ASYNCIO = str(Path(asyncio.__file__).parent)


class DaemonThreads(concurrent.futures.ThreadPoolExecutor):
    """Threads of `asyncio.to_thread`, one per call, which end with the process.

    The threads of concurrent.futures are joined when the interpreter exits, so one tool that hangs would keep a failed
    job alive.
    """

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> concurrent.futures.Future[Any]:
        """Runs `fn` in a thread of its own; returns the future of its result."""
        future: concurrent.futures.Future[Any] = concurrent.futures.Future()

        def run() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                result = fn(*args, **kwargs)
            except StopIteration as error:  # asyncio passes on none, so that its caller would wait for ever
                future.set_exception(RuntimeError(f"a function in a thread raised {describe_error(error)}"))
            except BaseException as error:
                future.set_exception(error)
            else:
                future.set_result(result)

        threading.Thread(target=run, name="rollout function's tool", daemon=True).start()
        return future


def place_of(task: asyncio.Task[None]) -> str:
    """File and line where the innermost coroutine of a suspended task waits; empty if it is unknown."""
    place, coroutine = "", getattr(task.get_coro(), "cr_await", None)
    while isinstance(coroutine, Coroutine):
        frame = getattr(coroutine, "cr_frame", None)
        if frame is not None and not frame.f_code.co_filename.startswith(_ASYNCIO):
            place = f"{frame.f_code.co_filename}:{frame.f_lineno}"
        coroutine = getattr(coroutine, "cr_await", None)
    return place
