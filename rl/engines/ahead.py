"""A sampling that goes on in a thread of its own while the policy computes its next step."""

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait

from rl.engines.base import Sampled
from rl.work import Stop, check_stop

_LOOK_SECONDS = 0.05

Groups = list[list[Sampled]]


class Ahead:
    """Begins at once. Whoever has begun it closes it, whatever comes of it."""

    def __init__(self, sample: Callable[[Stop], Groups]) -> None:
        """`sample` is given a `Stop` that it asks between its steps."""
        self._asked = threading.Event()
        self._unwanted = threading.Event()
        self._sample = sample
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="sampling")
        self._result = self._thread.submit(self._run)

    def _run(self) -> tuple[Groups, float]:
        began = time.monotonic()
        return self._sample(self._ask), time.monotonic() - began

    def _ask(self) -> bool:
        self._asked.set()
        return self._unwanted.is_set()

    def result(self, stop: Stop) -> tuple[Groups, float]:
        """Wait for what is sampled; and how many seconds it took. Raises what the sampling raises, and Stopped.

        `stop` is asked no more often than the sampling asks in its turn: who listens can tell that one hangs.
        """
        while not wait([self._result], _LOOK_SECONDS).done:
            if self._asked.is_set():
                self._asked.clear()
                check_stop(stop)
        return self._result.result()

    def close(self) -> None:
        """Have it stop, if it goes on, and wait for that."""
        self._unwanted.set()
        self._thread.shutdown()
