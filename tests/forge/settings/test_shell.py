"""Shell scripts → the commands that they run: as bash itself says, and without end for no text."""

from __future__ import annotations

import shutil
import subprocess
from typing import Any

import pytest
from hypothesis import given, strategies as st

from forge._errors import RecipeError
from forge.settings.convert.shell._shell import _Shell, commands
from forge.settings.convert.shell._values import total
from forge.settings.convert.shell._words import Token, tokens

BASH = shutil.which("bash")
SETS = [
    "A=1",
    "A='x y'",
    'A="$B z"',
    "B=${A:-two}",
    'B="${C:-a b}"',
    "C=${C-none}",
    "A+=q",
    "A=$((2 * 3 + 1))",
    "export D=4",
    "A=",
]
ARRAYS = ["L=(p 'q r' $A)", 'L+=("$B" s)', "L=()", 'L=("${L[@]}" t  # a comment\n u)']
CALLS = [
    "run $A",
    'run "$A" "$B"',
    'run "${L[@]}" "$@"',
    "run ${L[@]} \\\n  --end",
    "X=1 run '$A' \"\\$A\" a\\ b",
    'run "pre$A"post',
]
CALLS += [
    "run ${B##*/} ${B%y}",
    'if [ "$A" = 1 ]; then run yes; else run no; fi',
    '[[ $A != 1 && -n "$B" ]] && run and || run or',
]
CALLS += [
    'case "$A" in 1|2) run few;; x*) run x;; *) run else;; esac',
    'if [ -z "$C" ]; then\n run empty\nelif true; then run full\nfi',
]
CALLS += [
    "f() { run in f; }; f",
    "for n in $A z; do run first; break; done",
    "for n in $B z; do\n run $n\n for m in 1 $A 3; do [ $m = 2 ] && continue; run $n $m; [ $m = 1 ] && break; run; done\ndone",
    'for n in "$@"; do run never; done; for n in p q; do if [ $n = p ]; then continue; fi; A=$n; done',
    "! false && run turned",
    "run a; run b # run c",
    "run ${#L[@]}",
]
CALLS += [': "${E:=x y}"; run $E "$E"', "run $(expr 16 / 5 \\* 2 - 1) $(expr $((2 + 3)) % 3)"]
CALLS += ["read -r -d '' T <<EOF\nword \"$A\" \\\n  next\nEOF\nrun $T", "{ run braces; }"]


@pytest.mark.skipif(BASH is None, reason="no bash on this machine, whose word this is compared with")
@given(script=st.lists(st.sampled_from([*SETS, *ARRAYS, *CALLS]), min_size=2, max_size=9))
def test_what_bash_runs(script: list[str]) -> None:
    """Each command and each of its words, as bash gives them to a function that shows them."""
    text = "\n".join(["A=0 B=b/y C='c  d'", "L=(l)", *script])
    shows = 'run() { printf "%s\\0" "$#" "$@"; }\n'
    said = subprocess.run([str(BASH), "-c", shows + text], capture_output=True, text=True, check=False).stdout
    words, wanted = said.split("\0")[:-1], []
    while words:
        number = int(words[0])
        wanted.append(["run", *words[1 : 1 + number]])
        words = words[1 + number :]
    assert [command.words for command in commands(text, "x.sh")] == wanted


@given(text=st.text(st.sampled_from("ab$(){}[]\"'`\\ \n;|&<>=-#*!1@:?%~if fi do done case esac then"), max_size=60))
def test_any_text_ends(text: str) -> None:
    """Whatever stands in a file, it is read to its end or refused."""
    try:
        found = commands(text, "x.sh")
    except RecipeError as error:
        assert "x.sh: cannot be read as a shell script" in str(error)  # noqa: PT017 - most texts can be read
        return
    assert all(isinstance(word, str) for command in found for word in command.words)


NUMBERS = st.one_of(st.integers(0, 20), st.integers(0, 10**18 - 1)).map(str)
SUMS = st.recursive(
    NUMBERS,
    lambda inside: st.one_of(
        st.tuples(inside, st.sampled_from([" + ", "-", "*", "/", "%", "**"]), inside).map("".join),
        inside.map("({})".format),
        inside.filter(lambda text: text[0] != "-").map("-{}".format),
    ).filter(lambda text: "--" not in text),
    max_leaves=6,
)


@pytest.mark.skipif(BASH is None, reason="no bash on this machine, whose word this is compared with")
@given(sums=st.lists(SUMS, min_size=1, max_size=20))
def test_sums_are_bashs(sums: list[str]) -> None:
    """In 64 bits, with a power that is large and a minus that binds before it; nothing where bash refuses."""
    script = "\n".join(f"(echo $(({each}))) 2>/dev/null || echo none" for each in sums)
    said = subprocess.run([str(BASH), "-c", script], capture_output=True, text=True, check=True).stdout.split()
    assert [str(total(each)).lower() for each in sums] == said


def test_a_sum_that_is_too_large_hides_no_command() -> None:
    """One whose number has more than 64 bits is refused by its text, where it would be run."""
    (found,) = commands("if [ $((9**999999999)) -gt 3 ]; then run a $((2**10)); fi", "x.sh")
    assert found.words == ["run", "a", "1024"]
    large = f"$(({10**20} + 1))"
    with pytest.raises(RecipeError, match=rf"x\.sh: .*: \$\(\({10**20} \+ 1\)\) has a number beyond the 64 bits"):
        commands(f"if [ {large} -gt 3 ]; then run a; fi", "x.sh")
    (found,) = commands(f"if false; then echo {large}; fi; run a", "x.sh")
    assert found.words == ["run", "a"]


class Counting(list[Token]):
    """Tokens that count how many of them are looked at."""

    seen = 0

    def __getitem__(self, at: Any) -> Any:
        found = super().__getitem__(at)
        self.seen += len(found) if isinstance(at, slice) else 1
        return found


@pytest.mark.parametrize(
    "line", ["echo a 'b'\n", "A='b'\n", "run 'a' \\\n", "L+=('a')\n", "[ 'a' = b ] && run a\n", "cat <<E\na\nE\n"]
)
def test_a_line_costs_the_same_wherever_it_stands(line: str) -> None:
    """Each token is looked at a few times, of a long script as of a short one."""
    given = Counting(tokens(line * 500 + "run\n", "x.sh"))
    _Shell(given, {"0": "x.sh"}).listed(())
    assert given.seen < 40 * len(given)


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ("DEVICE=${DEVICE:-$(probe 2>/dev/null && echo npu || echo gpu)}\nrun $DEVICE", ["run", "gpu"]),
        ('if [ "${DEVICE:-gpu}" = gpu ] && { [ "$X" = y ] || [ -z "$X" ]; }; then run a; else run b; fi', ["run", "a"]),
        ("if command -v nvcc; then run a; else run b; fi", ["run", "b"]),
        ("run $HOME/data ${HOME}/more $UNSET/x", ["run", "~/data", "~/more", "$UNSET/x"]),
        ("run $PWD/x", ["run", "./x"]),
        ("run name_$(date +%Y)", ["run", "name_$(date +%Y)"]),
        ("mapfile -t A < <(list 'a (b')\nrun <(sort \"$B\") --c > >(tee log)", ["run", "<(sort $B)", "--c"]),
        ("P=<your_path>\nrun --a $P --b <more> < in", ["run", "--a", "<your_path>", "--b", "<more>"]),
        ('HERE=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." >/dev/null 2>&1 && pwd)\nrun "$HERE/f.py"', ["run", "a/f.py"]),
        ('sleep 1 && run $1 "$2" end > log.txt 2>&1 &', ["run", "", "end"]),
        ("cat > conf <<'EOF'\nrun not this $X\nEOF\nrun this", ["run", "this"]),
        ("srun --x bash -c \"cd /y; run --a 'b c'\"", ["run", "--a", "b c"]),
    ],
)
def test_what_only_a_running_shell_knows(script: str, words: list[str]) -> None:
    """A probe says what it says where it fails, a condition that is not known is not met, other texts stay as written."""
    assert [each.words for each in commands(script, "a/b/c/x.sh") if each.words[0] == "run"] == [words]


def test_environment() -> None:
    """Variables that are exported, and those before the command; others are the script's own."""
    (found,) = commands("A=1\nexport B=2 A\nC=3 run x", "x.sh")
    assert found.environment == {"A": "1", "B": "2", "C": "3"}


@pytest.mark.parametrize(
    "text", ["run 'open", "run ${A", "A=(x", "run $(a", "A=x\n" + 'A="$A$A"\n' * 40, "f() { f; f; f; }\n" + "f\n" * 9]
)
def test_what_cannot_be_read(text: str) -> None:
    """What is not closed, and what would grow without end, is one error."""
    with pytest.raises(RecipeError, match=r"x\.sh: cannot be read as a shell script"):
        commands(text, "x.sh")
