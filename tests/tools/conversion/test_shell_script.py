"""Shell scripts are read, never run: what a file alone tells, and the line of everything else."""

from __future__ import annotations

from pathlib import Path

import pytest

from roll_batching.errors import ConfigError
from roll_batching.jobs.config.diagnostics import ConfigFileError
from roll_batching.tools.conversion.shell_script import read_script, training_command

pytestmark = pytest.mark.config


def arguments(tmp_path: Path, text: str) -> list[str | None]:
    """The arguments of the script's only `run` command; None for those that cannot be computed."""
    return [word.text for word in command_of(tmp_path, text)]


def command_of(tmp_path: Path, text: str) -> list:
    path = tmp_path / "run.sh"
    path.write_text(text)
    command, at = training_command(read_script(path), lambda word: word == "run", "run")
    return list(command.words[at + 1 :])


READ = {
    "plain": ("run --a 1", ["--a", "1"]),
    "quotes": ("run 'a b' \"c d\" e\\ f ''", ["a b", "c d", "e f", ""]),
    "single quotes keep": ("A=1\nrun '$A'", ["$A"]),
    "variable": ('A=1\nB=${A}2\nrun $A "$B"', ["1", "12"]),
    "default": ('run ${A:-3} ${B:-${A:-4}} "${C-x y}"', ["3", "4", "x y"]),
    "own default": ("A=${A:-5}\nrun $A", ["5"]),
    "array": (
        "A=(--a 1 # one\n  --b 'x y' \\\n  --c)\nA+=(2)\nrun \"${A[@]}\"",
        ["--a", "1", "--b", "x y", "--c", "2"],
    ),
    "empty array": ("A=(\n# nothing\n)\nrun ${A[@]} ${NEVER[@]} x", ["x"]),
    "split": ("A='--a 1'\nrun $A \"$A\"", ["--a", "1", "--a 1"]),
    "arguments": ('run a "$@" $*', ["a"]),
    "sum": ("A=2\nrun $((A * 3 + 1)) $(( (8 - $A) / 4 )) $((-7 / 2)) $((7 % 4))", ["7", "1", "-3", "3"]),
    "continued": ("run --a \\\n  1 \\\n  --b", ["--a", "1", "--b"]),
    "windows": ("A=1\r\nrun --a \\\r\n $A\r\n", ["--a", "1"]),
    "redirected": ("run a 2>&1 | tee log\nB=1 > f", ["a"]),
    "document": ("cat <<EOF > x\nrun b\n'\nEOF\nrun a", ["a"]),
    "exported": ("export A=1 B=2\nrun $A$B", ["12"]),
    "comment": ("# run b\nrun a # b", ["a"]),
    "assigned": ("run key=$HOME_LESS", [None]),
    "join": ('A=x\nrun key="$A"-y=${A}z', ["key=x-y=xz"]),
}


@pytest.mark.parametrize("case", READ)
def test_words_are_those_of_a_shell(tmp_path, case):
    text, wanted = READ[case]
    assert arguments(tmp_path, text) == wanted


UNREAD = {
    "command": ("A=$(date)\nrun $A", "runs a command"),
    "backticks": ("run `date`", "backticks"),
    "argument": ("A=$1\nrun $A", "$1 is an argument"),
    "unset": ("run $NOWHERE", "NOWHERE has no value in this file"),
    "pattern": ("A=x\nrun ${A%.sh}", "changes the value of A"),
    "indirect": ("run ${!A}", "changes the value"),
    "condition": ("A=1\nif true; then\n  A=2\nfi\nrun $A", "under a condition on line 3"),
    "short condition": ("[ -n x ] && A=2\nrun $A", "under a condition on line 1"),
    "function": ("f() {\n A=2\n}\nrun $A", "under a condition on line 2"),
    "loop": ("for A in 1 2; do\n true\ndone\nrun $A", "variable of a loop"),
    "secret": ("API_KEY=abc123\nrun $API_KEY", "looks like a secret"),
    "power": ("run $((9 ** 99999999))", "cannot be computed"),
    "call": ("run $((__import__('os').system('true')))", "cannot be computed"),
    "zero": ("run $((1 / 0))", "cannot be computed"),
    "large": ("run $((4611686018427387904 * 4))", "cannot be computed"),
    "recursive": ("A=$B\nB=$A\nrun $B", "has no value in this file"),
}


@pytest.mark.parametrize("case", UNREAD)
def test_what_only_a_shell_computes_has_a_reason(tmp_path, case):
    text, why = UNREAD[case]
    word = next(word for word in command_of(tmp_path, text))
    assert word.text is None and why in word.why and "abc123" not in word.why


def test_nothing_is_run(tmp_path):
    mark = tmp_path / "mark"
    for text in (f"$(touch {mark})", f"`touch {mark}`", f"A=$(touch {mark})", f"touch {mark}", f"eval 'touch {mark}'"):
        command_of(tmp_path, f"{text}\nrun a")
    assert not mark.exists()


def test_conditional_words_of_an_array_are_marked(tmp_path):
    words = command_of(tmp_path, "A=(a)\nif x; then\n  A+=(b)\nelse\n  A=(c)\nfi\nrun ${A[@]}")
    assert [(word.text, word.conditional) for word in words] == [("a", False), ("b", True), ("c", True)]
    assert [word.place.line for word in words[1:]] == [3, 5]


def test_sourced_files_give_their_assignments(tmp_path):
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "small.sh").write_text("N=3\nrun other\nMODEL=(--layers $((N + 1)))\n")
    folder = '"$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" &>/dev/null && pwd)"'
    text = f'D={folder}\nsource "$D/models/small.sh"\nrun ${{MODEL[@]}}'
    assert arguments(tmp_path, text) == ["--layers", "4"]
    assert arguments(tmp_path, ". models/small.sh\nrun ${MODEL[@]}") == ["--layers", "4"]


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("../../etc/passwd", "only files that end in .sh"),
        ("/etc/passwd", "only files that end in .sh"),
        ("missing.sh", "is not there"),
        ("run.sh", "sourced by itself"),
        ("$(pwd)/a.sh", "runs a command"),
    ],
)
def test_other_sources_are_named(tmp_path, name, why):
    path = tmp_path / "run.sh"
    path.write_text(f'true\nsource "{name}"\nrun a\n')
    ((place, reason),) = read_script(path).unread_sources
    assert place.line == 2 and why in reason


BROKEN = {
    "quote": ("run a\nrun 'b\n", ":2:", "never closed"),
    "double quote": ('A="b\nc\n', ":1:", "never closed"),
    "backtick": ("run `a\n", ":1:", "never closed"),
    "array": ("true\nA=(b\n", ":2:", "never closed"),
    "braces": ("run ${A:-b\n", ":1:", "never closed"),
    "parenthesis": ("run $(a 'b' \n", ":1:", "never closed"),
    "document": ("cat <<END\na\n", ":1:", "END"),
    "operator": ("A=(a; b)", ":1:", "in an array"),
    "deep": ("run " + "${A:-" * 50 + "}" * 50, ":1:", "inside each other"),
    "deep quotes": ("run " + '$(a "' * 80, ":1:", ""),
    "doubled": ("A=xxxxxxxxxxxxxxxx\n" + "A=$A$A\n" * 40 + "run $A", ".sh:", "characters"),
    "doubled array": ("A=(x y)\n" + 'A=("${A[@]}" "${A[@]}")\n' * 40 + "run a", ".sh:", "words"),
    "binary": ("run \0\1\2", "run.sh", "binary"),
    "nothing": ("", "run.sh", "no command"),
    "twice": ("run a\nrun b", ":2:", "keep one"),
}


@pytest.mark.bad_input
@pytest.mark.parametrize("case", BROKEN)
def test_broken_scripts_are_one_error_with_their_line(tmp_path, case):
    text, place, why = BROKEN[case]
    with pytest.raises(ConfigError) as error:
        command_of(tmp_path, text)
    assert place in str(error.value) and why in str(error.value) and len(str(error.value)) < 1000


@pytest.mark.bad_input
def test_files_that_are_no_scripts_are_named(tmp_path):
    with pytest.raises(ConfigFileError, match="is a folder"):
        read_script(tmp_path)
    with pytest.raises(ConfigFileError, match="no such file"):
        read_script(tmp_path / "none.sh")
    path = tmp_path / "run.sh"
    path.write_bytes(b"\xff\xfe\x00rubbish\x80")
    with pytest.raises(ConfigFileError, match="UTF-8"):
        read_script(path)
    path.write_text("# x\n" * 2_500_000)
    with pytest.raises(ConfigFileError, match="bytes"):
        read_script(path)
