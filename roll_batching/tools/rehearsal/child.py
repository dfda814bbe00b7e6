"""Process of one rehearsal: reads a pickled task from stdin, writes its report to stdout."""

from __future__ import annotations

import os
import pickle
import sys

from roll_batching.errors import RollBatchingError
from roll_batching.lifetime import end_with_parent
from roll_batching.tools.rehearsal.process import PARENT


def _main() -> None:
    end_with_parent(int(os.environ[PARENT]))
    task = pickle.load(sys.stdin.buffer)
    answer = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # prints of libraries must not mix with the report
    from roll_batching.tools.rehearsal.rank import rehearse_rank

    try:
        result: tuple[str, object] = ("report", rehearse_rank(task))
    except RollBatchingError as error:
        result = ("error", str(error))
    with answer:
        pickle.dump(result, answer)
    os._exit(0)  # no clean-up: destroying fake process groups would wait for ranks that do not exist


if __name__ == "__main__":
    _main()
