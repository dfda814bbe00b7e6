"""Stand-alone program: loads the model's code, then runs assertions that it receives only after that.

It reads messages from standard input, each after its length in 4 bytes. The first is the code, to which it replies
`loaded`. The second is JSON: a secret, the name of a marker function, the text of the assertions, and the names of the
functions in it to call. The text calls the marker where it decides whether to fail. Once all assertions have passed,
the reply is the secret, or the secret backwards if the marker was never called. The code shares the interpreter with
the assertions and can find the secret while they call it: this protects against accidents and tricks, not against an
attacker.
"""

from __future__ import annotations

import builtins
import json
import os
import sys
import types

LOADED = b"loaded"


def main() -> None:
    """Exits with 0 when all assertions passed, else with 1."""
    # All that is used below is taken before the code runs, which could replace it.
    read, write, leave, run, translate = os.read, os.write, os._exit, exec, compile
    messages, replies = os.dup(0), os.dup(1)  # the code's own input and output are /dev/null
    null = os.open(os.devnull, os.O_RDWR)
    for stream in range(3):
        os.dup2(null, stream)

    def read_bytes(size: int) -> bytes:
        data = b""
        while len(data) < size:
            part = read(messages, size - len(data))
            if not part:
                leave(1)
            data += part
        return data

    def read_message() -> str:
        return read_bytes(int.from_bytes(read_bytes(4), "big")).decode("utf-8", "surrogatepass")

    decode, lookup, original = json.loads, dict.__getitem__, dict(vars(builtins))
    # Not "__main__", as in ROLL: code under `if __name__ == "__main__"` does not run.
    module = types.ModuleType("answer")
    sys.modules["answer"] = module
    names = vars(module)
    try:
        run(translate(read_message(), "answer", "exec"), names)
        write(replies, LOADED)
        secret, reached, test, functions = decode(read_message())
        calls: set[bool] = set()
        names[reached] = lambda: calls.add(True)
        # Undo what the code may have set to skip the assertions.
        sys.settrace(None)
        sys.setprofile(None)
        dict.update(vars(builtins), original)
        run(translate(test, "tests", "exec"), names)
        for function in [lookup(names, name) for name in functions]:
            function()
    except BaseException:  # also SystemExit
        leave(1)
    write(replies, secret.encode() if calls else secret[::-1].encode())
    leave(0)


if __name__ == "__main__":
    main()
