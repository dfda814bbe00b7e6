"""A program by itself: runs judged code, then assertions that are sent to it only once the code has been loaded.

Messages come from standard input, each after its length in 4 bytes. The first is the code. After the answer `loaded`
comes JSON of a secret, the assertions, and the functions in them to call. The secret is the answer to assertions that
ended. The code shares the interpreter with the assertions and can find the secret while they call it: this withstands
accidents and tricks, not an attacker.
"""

from __future__ import annotations

import builtins
import json
import os
import sys
import types

LOADED = b"loaded"


def main() -> None:
    """Ends with 0 when the assertions ended, else with 1."""
    read, write, leave, run, translate = os.read, os.write, os._exit, exec, compile
    messages, answers = os.dup(0), os.dup(1)
    null = os.open(os.devnull, os.O_RDWR)
    for stream in range(3):
        os.dup2(null, stream)

    def received(size: int) -> bytes:
        data = b""
        while len(data) < size:
            part = read(messages, size - len(data))
            if not part:
                leave(1)
            data += part
        return data

    def message() -> str:
        return received(int.from_bytes(received(4), "big")).decode("utf-8", "surrogatepass")

    decode, lookup, original = json.loads, dict.__getitem__, dict(vars(builtins))
    # As under ROLL it is not "__main__": what an answer does as a script is not run.
    module = types.ModuleType("answer")
    sys.modules["answer"] = module
    names = vars(module)
    try:
        run(translate(message(), "answer", "exec"), names)
        write(answers, LOADED)
        secret, test, functions = decode(message())
        sys.settrace(None)
        sys.setprofile(None)
        dict.update(vars(builtins), original)
        run(translate(test, "tests", "exec"), names)
        for function in [lookup(names, name) for name in functions]:
            function()
    except BaseException:  # also SystemExit
        leave(1)
    write(answers, secret.encode())
    leave(0)


if __name__ == "__main__":
    main()
