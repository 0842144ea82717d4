"""A shell script → the commands that it runs, with what it sets filled in.

Nothing is run. Conditions are followed where they are known: without arguments, and without variables but those that the script
sets itself. Where one is not known, its `else` is taken. What only a running shell knows stays as it is written, with its `$`.
"""

from __future__ import annotations

import fnmatch
import os
import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from forge._errors import RecipeError
from forge.settings.convert.shell._values import tested, total, trimmed
from forge.settings.convert.shell._words import PLAIN, Token, pieces, tokens

_SET = re.compile(r"([A-Za-z_]\w*)(\+?)=(.*)", re.DOTALL)
_NAME = re.compile(r"[A-Za-z_]\w*|[0-9@*#?$!-]")
_DEFAULT = re.compile(r"(:?)([-=+?])(.*)", re.DOTALL)
_FALLBACK = re.compile(r"\|\|\s*echo\s+['\"]?([\w./-]+)['\"]?\s*\)?\s*$")
_EXPR = re.compile(r"\$\(\s*expr\s+(.*)\)", re.DOTALL)
_FOLDER = re.compile(
    r"(dirname|cd|realpath)\s+(?:--\s+)?(.+?)(?:\s*(?:>/dev/null|2>&1|2>/dev/null))*(?:\s*(?:&&|;)\s*pwd(?: -P)?)?"
)
"""A command that names a folder."""
_UNTIL = {
    "if": ("then",),
    "then": ("elif", "else", "fi"),
    "else": ("fi",),
    "do": ("done",),
    "case": (";;", ";&", ";;&", "esac"),
}
_DECLARES = ("export", "declare", "local", "readonly", "typeset")
_WITHOUT_PROGRAM = "true : set shift echo printf cd source unset exit return break continue".split()
"""Words of the shell itself, which are true and call nothing."""
_DEEPEST = 8
_SHOWN = 60
"""Letters of a sum that an error shows."""
_MOST = 100_000
"""Most commands that are followed, and letters that a word may have."""
_MOST_KEPT = 1_000_000
"""Most variables in the environments of all commands together."""


class Command(NamedTuple):
    """A command that a script runs."""

    words: list[str]
    environment: dict[str, str]
    """What it exports, and what stands before the command."""


def commands(text: str, name: str, depth: int = 0, variables: Mapping[str, str] | None = None) -> list[Command]:
    r"""List the commands of a script in order, those of a `bash -c` among them.

    Raises:
        RecipeError: a quote or a bracket is not closed, or it grows without end.

    >>> commands('''N=${N:-4}\nARGS=(--a "$N" --b)\nrun "${ARGS[@]}" "$@"''', "x.sh")[0].words
    ['run', '--a', '4', '--b']
    """
    try:
        shell = _Shell(tokens(text, name), {"0": name, "BASH_SOURCE": name, **(variables or {})})
        shell.listed(())
    except (RecursionError, OverflowError):
        raise RecipeError(f"{name}: cannot be read as a shell script: it is nested too deep, or grows too large.") from None
    found: list[Command] = []
    for command in shell.found:
        words = command.words
        at = next((n for n, word in enumerate(words[:-2]) if word.rpartition("/")[2] in ("bash", "sh")), None)
        nested = words[at + 2] if at is not None and words[at + 1] in ("-c", "-lc") else None
        found += [command] if nested is None or depth > _DEEPEST else commands(nested, name, depth + 1, command.environment)
    return found


class _Shell:
    """Follows a script from its first token on."""

    def __init__(self, given: Sequence[Token], variables: dict[str, str]) -> None:
        self.given = given
        self.tests = _in_tests(given)
        self.at = 0
        self.variables: dict[str, list[str]] = {name: [value] for name, value in variables.items()}
        self.exported = set(variables) - {"0", "BASH_SOURCE"}
        self.functions: dict[str, int] = {}
        self.calls = 0
        self.steps = 0
        self.kept = 0
        """Variables of all environments of commands."""
        self.found: list[Command] = []
        self.live = True
        self.left = ""
        """`break` or `continue`, from where a loop's body meets it to the body's end."""

    # Reading ---------------------------------------------------------------------------------------------------------------

    def _word(self) -> str | None:
        """Return the word or sign that is next, as it is written; None at the end."""
        return self.given[self.at].text if self.at < len(self.given) else None

    def listed(self, until: tuple[str, ...]) -> bool | None:
        """Follow commands up to one of these words; return whether the last was true, or None."""
        truth: bool | None = True
        while (word := self._word()) is not None and word not in until:
            if self.given[self.at].kind == "sign" and word in ("\n", ";", "&", "|"):
                self.at += 1
            elif self.given[self.at].kind == "sign" and word in ("&&", "||"):
                self.at += 1
                live, skips = self.live, truth is False if word == "&&" else truth is not False
                self.live = live and not skips
                self._newlines()
                after = self.one()
                self.live = live
                truth = truth if skips else _and(truth, after) if word == "&&" else after
            else:
                before = self.at
                truth = self.one()
                self.at += self.at == before  # what cannot be read is passed over
        return truth

    def _newlines(self) -> None:
        while self._word() == "\n":
            self.at += 1

    def one(self) -> bool | None:
        """Follow one command, simple or compound. Raises OverflowError where there are too many."""
        self.steps += 1
        if self.steps > _MOST:
            raise OverflowError
        token = self.given[self.at] if self.at < len(self.given) else None
        word = token.text if token is not None and token.kind in ("word", "sign") else ""
        if word == "!":
            self.at += 1
            truth = self.one()
            return None if truth is None else not truth
        if word in ("{", "("):
            self.at += 1
            truth = self.listed(("}" if word == "{" else ")",))
            self.at += 1
            return truth
        follow = {"if": self._if, "case": self._case, "for": self._for, "while": self._while, "until": self._while}.get(word)
        if follow is not None:
            self.at += 1
            return follow()
        if word == "[[":
            return self._tests()
        if word == "function" or self._opens_function():
            return self._function(word)
        return self._simple()

    def _runs(self) -> bool:
        """Tell whether a shell would run what is read now."""
        return self.live and not self.left

    def _opens_function(self) -> bool:
        return [each.text for each in self.given[self.at + 1 : self.at + 3]] == ["(", ")"]

    def _function(self, word: str) -> bool:
        self.at += word == "function"
        name = self._word() or ""
        self.at += 1
        while self._word() in ("(", ")", "\n"):
            self.at += 1
        live, start = self.live, self.at
        self.live = False
        self.one()
        self.live = live
        self.functions[name] = start
        return True

    def _tests(self) -> bool | None:
        """Evaluate `[[ ... ]]`, and what `&&` and `||` join in it."""
        truth: bool | None = True
        joined, part = "&&", list[str]()
        while (word := self._word()) is not None:
            sign = self.given[self.at].kind == "sign"
            part += [] if sign else self.expanded(word)
            self.at += 1
            if (sign and word in ("&&", "||")) or word == "]]":
                found = tested(part)
                truth = _and(truth, found) if joined == "&&" else _or(truth, found)
                joined, part = word, ["[["]
            if word == "]]":
                break
        return truth

    def _if(self) -> None:
        """Follow the first branch whose condition is true; the last where one is not known."""
        live, done = self.live, False
        while True:
            self.live = live and not done
            truth = self.listed(_UNTIL["if"])
            self.at += 1
            self.live = live and not done and truth is True
            self.listed(_UNTIL["then"])
            done = done or truth is True
            word = self._word()
            self.at += 1
            if word == "elif":
                continue
            if word == "else":
                self.live = live and not done
                self.listed(_UNTIL["else"])
                self.at += 1
            self.live = live
            return

    def _case(self) -> None:
        live, done = self.live, False
        subject = " ".join(self.expanded(self._word() or "", empty=True))
        while self._word() not in ("in", None):
            self.at += 1
        self.at += 1
        while self._word() not in ("esac", None):
            patterns = []
            while self._word() not in (")", None):
                patterns.append(self._word() or "")
                self.at += 1
            self.at += 1
            known = "$" not in subject
            fits = any(fnmatch.fnmatchcase(subject, each) for word in patterns for each in self.expanded(word))
            self.live = live and not done and known and fits
            done = done or (known and fits)
            self.listed(_UNTIL["case"])
            self.at += self._word() != "esac"
            self._newlines()
        self.at += 1
        self.live = live

    def _for(self) -> None:
        """Follow the body with each word, up to a `break`."""
        name, words = self._word() or "", list[str]()
        self.at += 1
        while self._word() not in ("do", None):
            if self.given[self.at].kind == "word" and self._word() != "in":
                words += self.expanded(self._word() or "")
            self.at += 1
        self.at += 1
        live, start = self.live, self.at
        runs = self._runs() and bool(words)
        for word in words if runs else [""]:
            self.at, self.live = start, runs
            if runs:
                self.variables[name] = [word]
            self.listed(_UNTIL["do"])
            left, self.left = self.left, ""
            if left == "break":
                break
        self.live = live
        self.at += 1

    def _while(self) -> None:
        """Pass over a loop: how often it is run is not known."""
        live, self.live = self.live, False
        self.listed(("do",))
        self.at += 1
        self.listed(_UNTIL["do"])
        self.at += 1
        self.live = live

    def _simple(self) -> bool | None:
        """Follow assignments and a command with its words."""
        own: dict[str, str] = {}
        words: list[str] = []
        arrays = False
        while self.at < len(self.given) and self.given[self.at].kind != "sign":
            token = self.given[self.at]
            self.at += 1
            assigned = _SET.fullmatch(token.text) if not words or words[0] in _DECLARES else None
            if token.kind == "array":
                arrays = True
                self._keep_array(token)
            elif token.kind == "word" and assigned is not None:
                before = self._one(assigned[1]) if assigned[2] else ""
                own[assigned[1]] = before + "".join(self.expanded(assigned[3], split=False))
            elif token.kind == "word":
                words += self.expanded(token.text)
        body = self._document(words)
        if not self._runs():
            return None
        if words and words[0] in _DECLARES:
            self.exported |= {*own, *words[1:]} if words[0] == "export" or "-x" in words else set()
        if not words or words[0] in _DECLARES:
            self.variables |= {name: [value] for name, value in own.items()}
            return True
        if words[0] == "read" and body is not None:
            self.variables[words[-1]] = [body]
            return True
        if words[0] in ("[", "test"):
            return tested(words)
        if words[0] in self.functions and self.calls < _DEEPEST:
            return self._call(words[0])
        self.left = words[0] if words[0] in ("break", "continue") else ""
        if words[0] in _WITHOUT_PROGRAM:
            return True
        if words[0] == "false":
            return False
        exported = {name: self._one(name) for name in self.exported if name in self.variables}
        self.kept += len(exported)
        if self.kept > _MOST_KEPT:
            raise OverflowError
        self.found.append(Command(words, {**exported, **own}))
        return None if not arrays else True

    def _document(self, words: list[str]) -> str | None:
        """Return the text that a command reads behind its line."""
        ahead = self.given[self.at + 1] if self.at + 1 < len(self.given) else None
        if not words or self._word() != "\n" or ahead is None or ahead.kind != "here":
            return None
        self.at += 2
        text = ahead.words[0]
        return text if ahead.text == "plain" else self._filled(text.replace("\\\n", " "))

    def _keep_array(self, token: Token) -> None:
        name = token.text.rstrip("+=")
        words = [each for word in token.words for each in self.expanded(word)]
        if self._runs():
            self.variables[name] = (self.variables.get(name, []) if token.text.endswith("+=") else []) + words

    def _call(self, name: str) -> bool | None:
        """Follow a function's body."""
        back, self.at = self.at, self.functions[name]
        self.calls += 1
        truth = self.one()
        self.calls -= 1
        self.at = back
        return truth

    # Filling in ------------------------------------------------------------------------------------------------------------

    def _one(self, name: str) -> str:
        return " ".join(self.variables.get(name, [""]))

    def expanded(self, word: str, *, empty: bool = False, split: bool = True) -> list[str]:
        """Fill in a word's variables and take its quotes away: one word, several, or none.

        Args:
            word: as it is written.
            empty: whether a variable that the script does not set is empty; else it stays as it is written.
            split: whether what a variable without quotes stands for is cut at blanks.

        """
        if len(word) <= _MOST and PLAIN.fullmatch(word):
            return [word]
        tests = empty or self.tests[self.at]
        found: list[list[str]] = [[]]
        quoted = False
        for piece, quote in pieces(word):
            quoted = quoted or bool(quote)
            if quote == "'":
                found[-1].append(piece)
                continue
            values = self._values(piece, empty=tests)
            if values is None:
                found[-1].append(piece if quote or not piece.startswith("\\") else piece[1:])
            elif not split or (quote and not _all_of(piece)):
                found[-1].append(" ".join(values))
            else:
                parts = values if quote else [part for value in values for part in value.split()]
                for number, part in enumerate(parts):
                    found += [[]] if number else []
                    found[-1].append(part)
        words = ["".join(parts) for parts in found]
        if sum(map(len, words)) + len(words) > _MOST:
            raise OverflowError
        several = any(_all_of(piece) for piece, quote in pieces(word) if quote != "'")
        keep = tests or (quoted and not several)
        return [each for each in words if each or keep] if len(words) == 1 else words

    def _filled(self, text: str) -> str:
        """Fill in the variables of a text that has no quotes."""
        return "".join(
            piece if (values := self._values(piece, empty=False)) is None else " ".join(values)
            for piece, _ in pieces(text, quotes=False)
        )

    def _values(self, piece: str, *, empty: bool) -> list[str] | None:
        """Return what a variable, a sum or a command stands for; None if it is none or unknown."""
        if not piece.startswith("$"):
            return None
        if piece.startswith("$(("):
            return self._sum(piece[3:-2])
        if piece.startswith("$("):
            if (sums := _EXPR.fullmatch(piece)) is not None:
                return self._sum(re.sub(r"\\\*|'\*'|\"\*\"", "*", sums[1]))
            fallback = _FALLBACK.search(piece)  # what a probe says where it fails, as on a machine like any other
            return self._folder(piece[2:-1]) if fallback is None else [fallback[1]]
        inside = piece[2:-1] if piece.startswith("${") else piece[1:]
        if inside.startswith("#"):
            return [str(len(self.variables.get(inside[1:].partition("[")[0], [])))] if len(inside) > 1 else ["0"]
        named = _NAME.match(inside)
        if named is None:
            return None
        name, rest = named[0], inside[named.end() :]
        if rest.startswith("["):
            rest = rest.partition("]")[2]
        if name in "123456789@*":
            known: list[str] | None = []
        else:
            known = {"HOME": ["~"], "PWD": ["."]}.get(name) or self.variables.get(name)
        default = _DEFAULT.fullmatch(rest)
        if default is not None:
            there = bool(known) and (not default[1] or any(known or ()))
            if default[2] == "+":
                return self.expanded(default[3]) if there else []
            if default[2] != "?" and not there:
                if default[2] == "=" and self._runs():
                    self.variables[name] = self.expanded(default[3], split=False)
                return self.expanded(default[3])
        elif rest and known is not None:
            return trimmed(" ".join(known), rest)
        return [] if known is None and empty else known

    def _folder(self, command: str) -> list[str] | None:
        """Return the folder that a command names, such as the script's own."""
        if command.strip() == "pwd":
            return ["."]
        named = _FOLDER.fullmatch(command.strip())
        if named is None:
            return None
        place = " ".join(self.expanded(named[2]))
        found = os.path.dirname(place) or "." if named[1] == "dirname" else os.path.normpath(place)
        return None if "$" in place else [found]

    def _sum(self, text: str) -> list[str] | None:
        """Count an arithmetic expression of whole numbers."""
        plain = re.sub(r"[A-Za-z_]\w*", lambda name: self._one(name[0]) or name[0], self._filled(text))
        try:
            found = total(plain)
        except OverflowError:
            if not self._runs():
                return None
            shown = text.strip() if len(text) <= _SHOWN else f"{text.strip()[:_SHOWN]}…"
            raise RecipeError(
                f"{self._one('0')}: cannot be read as a shell script: $(({shown})) has a number beyond the 64 bits of a shell: "
                "write a smaller one."
            ) from None
        return None if found is None else [str(found)]


def _in_tests(given: Sequence[Token]) -> list[bool]:
    """Tell for each token, and for the end, whether a test of its line begins before it."""
    found, inside = [False], False
    for token in given:
        inside = token.kind != "sign" and (inside or token.text in ("[", "[[", "test"))
        found.append(inside)
    return found


def _and(first: bool | None, second: bool | None) -> bool | None:
    return False if False in (first, second) else None if None in (first, second) else True


def _or(first: bool | None, second: bool | None) -> bool | None:
    return True if True in (first, second) else None if None in (first, second) else False


def _all_of(piece: str) -> bool:
    """Tell whether a piece stands for all words of an array, each by itself within quotes."""
    return piece == "$@" or re.match(r"\$\{(@|\w+\[@\])", piece) is not None
