"""`forge chat` on a terminal: typed lines, keys and signals through a pseudo-terminal."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import shutil
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow
SECONDS = 300.0
"""Until what was asked for is on the screen: a guard against a hang."""


def _take_terminal() -> None:
    """Be a shell's foreground process."""
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


class Terminal:
    """A command on a pseudo-terminal, so many columns wide."""

    def __init__(self, words: list[str], columns: int = 80) -> None:
        own, its = pty.openpty()
        fcntl.ioctl(its, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
        environment = {**os.environ, "TERM": "xterm", "LC_ALL": "C.UTF-8", "COLUMNS": "", "INPUTRC": "/dev/null"}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "forge", *words],
            stdin=its,
            stdout=its,
            stderr=its,
            env={name: value for name, value in environment.items() if value},
            start_new_session=True,
            preexec_fn=_take_terminal,
        )
        os.close(its)
        self._own, self._said = own, ""

    def until(self, wanted: str, *, pressing: str = "") -> str:
        """Read until the pattern `wanted` is on the screen; return what came up to its end.

        `pressing` is pressed until then, anew every ten seconds: a Ctrl-C between two waits of Python's line editor is not seen
        before the next key.
        """
        ends, press = time.monotonic() + SECONDS, 0.0
        while not (found := re.search(wanted, self._said)):
            if pressing and time.monotonic() >= press:
                self.type(pressing)
                press = time.monotonic() + 10
            assert time.monotonic() < ends, f"{wanted!r} did not come; on the screen: {self._said!r}"
            assert self._read(), f"it ended before {wanted!r}; on the screen: {self._said!r}"
        before, self._said = self._said[: found.end()], self._said[found.end() :]
        return before

    def type(self, text: str) -> None:
        """Press keys."""
        os.write(self._own, text.encode())

    def ended(self, *, pressing: str = "") -> tuple[int, str]:
        """Wait for its end; return its status and what was on the screen since; `pressing` is as for `until`."""
        ends, press = time.monotonic() + SECONDS, 0.0
        while self._read():
            if pressing and time.monotonic() >= press:
                self.type(pressing)
                press = time.monotonic() + 10
            assert time.monotonic() < ends, f"it does not end; on the screen: {self._said!r}"
        return self._process.wait(SECONDS), self._said

    def close(self) -> None:
        """End it, whatever it does."""
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()
        os.close(self._own)

    def signal(self, number: signal.Signals) -> None:
        """Send it a signal."""
        self._process.send_signal(number)

    def _read(self) -> bool:
        """Read what is there; False once it has ended."""
        if not select.select([self._own], [], [], 1.0)[0]:
            return self._process.poll() is None
        try:
            found = os.read(self._own, 65536)
        except OSError:  # the other end is closed
            return False
        self._said += re.sub(r"\x1b\[\?2004[hl]", "", found.decode("utf-8", "replace"))
        return bool(found)


WORDS = "éclair🍒 red"
"""What the talker says, for ever; each of its tokens has one that follows."""


@pytest.fixture(scope="module")
def talker(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose next token follows from the last one alone, so that its answers have no end of their own."""
    import torch
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    path = tmp_path_factory.mktemp("talker")
    shutil.copytree(model_dir, path, dirs_exist_ok=True)
    tokenizer = AutoTokenizer.from_pretrained(path)
    size = len(tokenizer)
    ids = tokenizer(WORDS, add_special_tokens=False)["input_ids"]
    assert len(set(ids)) == len(ids)
    config = LlamaConfig(
        max_position_embeddings=1 << 20,  # more than is asked for, of which it would warn
        vocab_size=size,
        hidden_size=size - size % 8 + 8,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=8,
    )
    model = LlamaForCausalLM(config)
    follows = dict(zip(ids, [*ids[1:], ids[0]], strict=True))
    with torch.no_grad():
        layer = model.model.layers[0]
        for weight in (layer.self_attn.o_proj.weight, layer.mlp.down_proj.weight, model.lm_head.weight):
            weight.zero_()
        model.model.embed_tokens.weight.copy_(torch.eye(size, config.hidden_size))
        for token in range(size):
            model.lm_head.weight[follows.get(token, ids[0]), token] = 1.0
    model.save_pretrained(path)
    return path


@pytest.fixture
def opened() -> Iterator[list[Terminal]]:
    """Terminals to close."""
    found: list[Terminal] = []
    yield found
    for terminal in found:
        terminal.close()


def test_two_models_on_a_narrow_terminal(talker: Path, opened: list[Terminal]) -> None:
    """Streamed side by side; Ctrl-C ends one answer, drops a typed line, and Ctrl-D ends all; no traceback, status 0."""
    opened.append(
        terminal := Terminal(["chat", str(talker), "--beside", str(talker), "--max-new-tokens", "100000"], columns=24)
    )
    terminal.until("/quit ends")
    for asked in ("what?", "héllo 🍎 and a line that is longer than the terminal is wide"):
        terminal.until("> ")
        terminal.type(f"{asked}\n")
        for _ in range(2):
            said = terminal.until(rf"\[{re.escape(str(talker))}\]\r\n.*{WORDS}{WORDS}")
            assert "Error" not in said
            terminal.until(r" \(stopped\)\r\n", pressing="\x03")
    terminal.until("> ")
    terminal.type("/no\\\nsuch\n")
    terminal.until(r"\. such")
    for _ in range(2):
        terminal.until(WORDS)
        terminal.until(r" \(stopped\)\r\n", pressing="\x03")
    terminal.until("> ")
    terminal.type("/nosuch\n")
    assert "/image" not in terminal.until("there is no command /nosuch.*/quit ends")
    terminal.until("> ")
    terminal.type("/reset\n")
    terminal.until("the conversation begins anew")
    terminal.until("> ")
    terminal.type("half a line")
    terminal.until("half a line")
    terminal.until("Ctrl-C again, Ctrl-D or /quit ends", pressing="\x03")
    terminal.until("> ")
    terminal.type("\x04")
    status, rest = terminal.ended()
    assert (status, rest.strip()) == (0, "")


@pytest.mark.lane
def test_ends_of_a_conversation(talker: Path, opened: list[Terminal]) -> None:
    """Ctrl-C twice at the prompt ends with 0, SIGTERM in an answer with 143, Ctrl-C while loading with 130."""
    opened.append(terminal := Terminal(["chat", str(talker), "--max-new-tokens", "100000"]))
    terminal.until("> ")
    terminal.until("Ctrl-C again", pressing="\x03")
    terminal.until("> ")
    assert terminal.ended(pressing="\x03")[0] == 0
    opened.append(terminal := Terminal(["chat", str(talker), "--max-new-tokens", "100000"]))
    terminal.until("> ")
    terminal.type("what?\n")
    terminal.until(WORDS)
    terminal.signal(signal.SIGTERM)
    status, rest = terminal.ended()
    assert (status, rest.splitlines()[-1]) == (143, "forge: terminated.")
    opened.append(terminal := Terminal(["generate", str(talker)]))
    terminal.until("The prompt, and Ctrl-D at its end")
    terminal.type("what?\n\x04")
    terminal.until("its own chat template")
    terminal.type("\x03")
    status, rest = terminal.ended()
    assert (status, rest.splitlines()[-1]) == (130, "forge: interrupted.")
