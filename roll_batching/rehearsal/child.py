"""The process of one rehearsal: a task on standard input, its report on standard output."""

from __future__ import annotations

import os
import pickle
import sys

from roll_batching.errors import RollBatchingError
from roll_batching.lifetime import end_with_parent
from roll_batching.rehearsal.process import PARENT


def _main() -> None:
    end_with_parent(int(os.environ[PARENT]))
    task = pickle.load(sys.stdin.buffer)
    answer = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # whatever a library prints
    from roll_batching.rehearsal.rank import rehearse_rank

    try:
        said: tuple[str, object] = ("report", rehearse_rank(task))
    except RollBatchingError as error:
        said = ("error", str(error))
    with answer:
        pickle.dump(said, answer)
    os._exit(0)  # nothing is unwound: process groups that are not there would be waited for


if __name__ == "__main__":
    _main()
