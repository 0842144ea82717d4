"""The page of a run: what its files say, in a page that nothing in them can break."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from forge import SettingsError
from forge.cli._app import main
from forge.reports._compare import compare
from forge.reports._record import device_seconds
from forge.reports._report import LiveReport, report

PAGES = Path(__import__("forge").__file__).parent / "reports" / "pages"
HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(1)> {{ 7 * 7 }} '\"&"
CONFIG = """model_path: {model}  # flag
learning_rate: 0.0002  # chosen: the default with adapter=lora
adapter: lora  # flag
seed: {seed}  # default
"""


class Elements(HTMLParser):
    """Every element and attribute of a page, and its words outside of style and scripts."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str, str | None]] = []
        self.inside: dict[str, str] = {}
        self.words = ""
        self._in = ""
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(tag, *attribute) for attribute in attrs]
        self._in = tag + (dict(attrs).get("id") or "") if tag in ("style", "script") else ""

    def handle_endtag(self, tag: str) -> None:
        self._in = ""

    def handle_data(self, data: str) -> None:
        if self._in:
            self.inside[self._in] = self.inside.get(self._in, "") + data
        else:
            self.words += f"{data} "


def make_run(root: Path, words: str = "plain", *, steps: int = 3, seed: int = 42, ending: str = "finished") -> Path:
    """A run directory as a run leaves it, every text of it `words`."""
    root.mkdir(parents=True)
    for folder in ("evals", "osft"):
        (root / folder).mkdir()
    (root / "config.yaml").write_text(CONFIG.format(model=json.dumps(words), seed=seed))
    (root / "run.json").write_text(json.dumps({"verb": "sft"}))
    at = "2026-11-23T10:00:{:02d}.000Z"
    metrics: list[dict[str, Any]] = [{"time": at.format(1), "step": 0, "eval_loss": 3.1057}]
    metrics += [{"time": at.format(n), "step": n, "eval_loss": loss} for n, loss in ((2, 1.5101), (3, 1.7523))]
    metrics += [
        {"time": at.format(1 + n), "step": n, "samples": 4 * n, "loss": 3.0 / n, "grad_norm": None, "lr": 1e-3, "tokens": 100,
         "tokens_per_second": 50.0, "memory": 2**30, words: 1.0} for n in range(1, steps + 1)
    ]  # fmt: skip
    metrics = sorted(metrics, key=lambda line: line["step"])
    (root / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in metrics))
    read = {
        "read": 9,
        "kept": 6,
        "dropped": {"too_long": 3},
        "samples": 6,
        "tokens_read": 90,
        "tokens_kept": 60,
        "tokens_lost": {},
    }
    events: list[dict[str, Any]] = [
        {"event": "read", "rows": "data_path", "kind": "supervised", "text": words, **read},
        {"event": "data", "part": "data_path", "items": words, "text": words},
        {"event": "planned", "text": words, "samples": 12, "samples_in_data": 6, "tokens_in_data": 60, "steps": 3,
         "batch_size": 4, "ranks": 2, "max_tokens": 64, "fill": 0.47, "stretches": [[n, n, 0.47, 0.4, 0.5] for n in range(3)]},
        {"event": "adapted", "text": f"{words}\ntrains 1 of 2\n  layers 1 of 2"},
        {"event": "started", "text": words},
        {"event": "warning", "text": words},
        {"event": "exported", "text": words, "export": words, "measure": "loss", "on": 4, "reloaded": 1.25, "in_memory": 1.5},
        *([{"event": ending, "text": words}] if ending else []),
    ]  # fmt: skip
    lines = [{"time": at.format(n), "step": n % 4, **event} for n, event in enumerate(events)]
    parts = {"event": "parts", "text": words, "weights": {"language_model": 0, "vision_tower": 11496}}
    lines.insert(4, {"time": at.format(3), "step": 0, **parts})
    (root / "events.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    answers = [
        {"step": step, "prompt": [{"role": "user", "content": words}], "answer": f"{step} {words}"} for step in (0, 2, 3)
    ]
    (root / "answers.jsonl").write_text("".join(json.dumps(line) + "\n" for line in answers))
    phases = [{"name": words, "planned": 2**30, "measured": 2**29, "parts": {words: 1024}}, {"name": "x"}, 3]
    phases.append({"name": "close", "planned": 2**30 - 1, "measured": 2**30})
    (root / "memory.json").write_text(json.dumps({"machine": words, "limit": 2**34, "fits": True, "phases": phases}))
    for name, value in (("after", 0.75), ("before", 0.25)):
        scores = {"results": {words: {"acc,none": value, "acc_stderr,none": 0.1, "alias": "x"}}}
        (root / "evals" / f"{name}.json").write_text(json.dumps(scores))
    (root / "osft" / "plan.json").write_text(json.dumps({words: {"free": 2, "shape": [8, 6]}}))
    if ending == "finished":
        (root / "result.json").write_text(json.dumps({"seconds": 125.0}))
    return root


@contextmanager
def running(run: Path) -> Iterator[None]:
    """Hold the lock of a run, as one that goes on."""
    import fcntl

    lock = os.open(run, os.O_RDONLY)
    fcntl.flock(lock, fcntl.LOCK_EX)
    try:
        yield
    finally:
        os.close(lock)


def test_the_page_says_what_the_run_wrote(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each file of the run is on the page in words: counts and drops, reasons, plan, samples, proof, events, cost."""
    run = make_run(tmp_path / "first")
    assert main(["report", str(run)]) == 0
    assert capsys.readouterr().out.strip() == str(run / "report.html")
    words = " ".join(Elements((run / "report.html").read_text(encoding="utf-8")).words.split())
    for said in (
        "Finished : step 3 of 3, 12 samples",
        "9 read, 6 kept, 3 dropped (too long); 60 tokens",
        "learning_rate 0.0002 forge: the default with adapter=lora",
        "Held-out loss 1.7523 from 3.1057, least 1.5101 after step 2",
        "trains 1 of 2; layers 1 of 2",
        "Weights that train language model frozen, vision tower 11,496",
        "47.0 % of the places",
        "divided over 2 ranks",
        "at step 0",
        "1 between",
        "plain acc 0.25 0.75",
        "Planned for plain, which has 16 GiB: it fits",
        "1 GiB 512 MiB +100.0 % plain 1 KiB",
        "close 1024 MiB 1 GiB +0.0 %",
        "6 items to train on, taken 12 times in all: 3 steps",
        "4 of 6 directions of 1 matrices",
        "1.25 1.5 loss of 4 samples",
        "1 warning plain",
        "2 min 05 s, of all starts together",
        "grad_norm – – – – 0, 3 not finite",
    ):
        assert said in words, said


def test_words_make_no_elements(tmp_path: Path) -> None:
    """A run of hostile names, prompts, figures and events has exactly the elements of a harmless one; NaN is no fault."""
    pages = {
        words: Elements(report(make_run(tmp_path / str(n), words)).read_text()) for n, words in enumerate(["plain", HOSTILE])
    }
    plain, hostile = pages.values()
    assert hostile.tags == plain.tags
    assert HOSTILE in hostile.words
    data = json.loads(hostile.inside["scriptdata"], parse_constant=pytest.fail)
    assert any(HOSTILE in chart["name"] for chart in data["charts"])


def test_what_controls_a_screen_is_written_as_its_number(tmp_path: Path) -> None:
    """In prompts and answers, which nobody would see; what turns the direction of a text moved the words behind it too."""
    page = report(make_run(tmp_path / "run", "plum\x1b[2J\u202e \u200d")).read_text()
    assert '">plum⟨U+001B⟩[2J⟨U+202E⟩ \u200d' in page
    assert '">plum\x1b' not in page.partition('aria-labelledby="h-answers"')[2].partition("</section>")[0]


def test_the_page_asks_for_nothing(tmp_path: Path) -> None:
    """No address but in the script's own comment, a policy that only this style and this script pass."""
    page = Elements(report(make_run(tmp_path / "run")).read_text())
    assert {value for _, name, value in page.attributes if name in ("href", "src", "action")} <= {"data:,", "#main"}
    (policy,) = [value or "" for _, name, value in page.attributes if name == "content" and "default-src" in (value or "")]
    rules = dict(rule.strip().split(" ", 1) for rule in policy.split(";"))
    assert rules["default-src"] == "'none'"
    for tag, rule in (("style", "style-src"), ("script", "script-src")):
        digest = base64.b64encode(hashlib.sha256(page.inside[tag].encode()).digest()).decode()
        assert rules[rule] == f"'sha256-{digest}'"
    # A language that Intl refuses is replaced before uPlot reads it.
    assert page.inside["script"].index('defineProperty(navigator, "language"') < page.inside["script"].index("uPlot=")
    own = page.inside["script"].replace((PAGES / "vendor" / "uPlot.iife.min.js").read_text(), "")
    assert not re.search(r"fetch\(|XMLHttp|import\(|innerHTML|outerHTML|insertAdjacent|document\.write|eval\(", own)


def test_third_parties_are_what_their_page_says() -> None:
    """The bundled script and style are those whose hashes and licence stand beside them."""
    said = (PAGES / "vendor" / "README.md").read_text()
    for name in ("uPlot.iife.min.js", "uPlot.min.css"):
        assert f"{hashlib.sha256((PAGES / 'vendor' / name).read_bytes()).hexdigest()}  {name}" in said
    assert "The MIT License" in (PAGES / "vendor" / "uPlot.LICENSE").read_text()


@pytest.mark.parametrize("kept", [(), ("metrics.jsonl",), ("events.jsonl",)])
def test_a_run_without_files_has_a_page(tmp_path: Path, kept: tuple[str, ...]) -> None:
    """A run that made no step, an older version's, or a damaged one: what is missing is left out."""
    run = make_run(tmp_path / "run", ending="")
    for file in [file for file in run.rglob("*") if file.is_file() and file.name not in ("config.yaml", *kept)]:
        file.write_text("{torn" if file.suffix == ".json" else "\x00\n[]\n")
    words = Elements(report(run).read_text()).words
    assert "Ended without a word" in words
    assert ("No step was made yet" in words) == (kept != ("metrics.jsonl",))


@pytest.mark.parametrize(
    ("ending", "said"), [("failed", "Failed"), ("preempted", "Stopped by a signal"), ("", "Ended without")]
)
def test_the_page_says_how_it_ended(tmp_path: Path, ending: str, said: str) -> None:
    """Finished, failed, preempted, or killed without a word; a run that holds its lock goes on."""
    run = make_run(tmp_path / "run", ending=ending)
    assert said in Elements(report(run).read_text()).words
    with running(run):
        text = report(run, output=tmp_path / "elsewhere" / "page.html").read_text()
    assert "It goes on" in Elements(text).words
    assert "Renew every 30 s" in text


def test_the_time_left_is_that_of_steps_after_the_first(tmp_path: Path) -> None:
    """Of a run that goes on: what is compiled in the first step of its last start is no part of those to come."""
    run = make_run(tmp_path / "run", ending="")
    at = "2026-11-23T{}.000Z"
    metrics = [("10:00:50", 1), ("12:01:00", 2), ("12:01:03", 3), ("12:01:06", 4)]
    lines = [{"time": at.format(time), "step": step, "loss": 1.0, "tokens": 9} for time, step in metrics]
    events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    events = [{**event, "steps": 10} if event["event"] == "planned" else event for event in events]
    events.append({"time": at.format("12:00:00"), "event": "resumed", "step": 1, "text": ""})
    (run / "events.jsonl").write_text("".join(json.dumps(line) + "\n" for line in events))
    with running(run):
        for shown, said in ((4, "About 18.0 s left"), (2, "")):
            (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines[:shown]))
            words = " ".join(Elements(report(run).read_text()).words.split())
            assert (said in words) if said else ("left" not in words.partition("Written")[0])


def test_time_between_two_starts_is_no_time_of_the_run(tmp_path: Path) -> None:
    """Of a run that was killed and resumed, each start counts from its beginning to the last that it wrote."""
    run = make_run(tmp_path / "run", ending="")
    at = "2026-11-23T{}.000Z"
    metrics = [("10:00:05", 1), ("10:00:25", 2), ("12:00:04", 3)]
    lines = [{"time": at.format(time), "step": step, "loss": 1.0} for time, step in metrics]
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    events = [("10:00:00", 0, "started"), ("11:59:50", 0, "adapted"), ("12:00:00", 2, "resumed"), ("12:00:15", 3, "warning")]
    lines = [{"time": at.format(time), "step": step, "event": event, "text": ""} for time, step, event in events]
    (run / "events.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert "From the first step on 40.0 s, of all starts together" in " ".join(Elements(report(run).read_text()).words.split())


def test_what_is_no_run_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One message, status 2, no page: no directory, no run, a damaged config.yaml, a place that cannot be written."""
    (tmp_path / "empty").mkdir()
    torn = make_run(tmp_path / "torn")
    (torn / "config.yaml").write_text("a: [")
    run = make_run(tmp_path / "run")
    (tmp_path / "file").write_text("")
    for words, message in (
        (["report", str(tmp_path / "none")], "there is no such directory"),
        (["report", str(tmp_path / "empty")], "it has no config.yaml"),
        (["report", str(torn)], "config.yaml: cannot be read"),
        (["report", str(run), "--output", str(tmp_path / "file" / "x.html")], "--output"),
        # Of a directory the text of what writes, which names the file, is not said twice.
        (["report", str(run), "--output", str(tmp_path / "empty")], f"--output {tmp_path / 'empty'}: cannot be written: ["),
        (["compare", str(run)], "takes 2 to 24 run directories, and got 1"),
        (["compare", str(run), str(tmp_path / "none"), "--output", str(tmp_path / "c.html")], "there is no such directory"),
    ):
        assert main(words) == 2
        assert message in capsys.readouterr().err
    assert not list(tmp_path.rglob("*.html"))


def test_compare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Curves of several runs share charts; settings that differ and last figures are printed, places are not settings."""
    runs = [make_run(tmp_path / name / "run", seed=seed, steps=3 + seed) for name, seed in (("a", 1), ("b", 2))]
    monkeypatch.chdir(tmp_path)
    assert main(["compare", *map(str, runs)]) == 0
    said = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert said[0] == ["setting", "a/run", "b/run"]
    assert said[1] == ["seed", "1", "2"]
    assert ["loss", "0.75", "0.6"] in said
    assert ["eval_loss", *["3.1057", "→", "1.7523", "(least", "1.5101", "after", "step", "2)"] * 2] in said
    memory = next(line for line in said if line[:1] == ["memory"])
    assert memory[2::2] == ["GiB", "GiB"]
    assert said[-1] == ["compare.html"]
    page = Elements((tmp_path / "compare.html").read_text())
    data = json.loads(page.inside["scriptdata"])
    names = [line["name"] for line in data["charts"][0]["lines"]]
    assert names == ["a/run", "a/run: held out", "b/run", "b/run: held out"]
    assert compare([runs[0], runs[0]], output=tmp_path / "same.html").startswith("no setting differs")


def test_compare_tells_other_held_out_samples(tmp_path: Path) -> None:
    """By the fingerprints of their stores or splits; each held-out figure stands behind that before the first step."""
    runs = [make_run(tmp_path / name) for name in ("a", "b", "c", "d")]
    split = {"store": "1", "samples": [3, 4]}
    for run, stores, held_out in zip(runs, ("1", "1", "2", "3"), (split, split, {**split, "store": "2"}, None), strict=True):
        (run / "run.json").write_text(json.dumps({"verb": "sft", "stores": {"train": stores}}))
        (run / "data").mkdir()
        if held_out:
            (run / "data" / "train.held_out.json").write_text(json.dumps(held_out))
        with (run / "metrics.jsonl").open("a") as file:
            file.write(json.dumps({"step": 3, "eval_loss": 1.5, "eval_loss_tokens": 9}) + "\n")
    same = compare(runs[:2], output=tmp_path / "same.html")
    assert "not the same" not in same
    assert ["eval_loss", *["3.1057", "→", "1.5"] * 2] in [line.split() for line in same.splitlines()]
    note = "Held-out samples are not the same (a, b; c): compare the eval_ figures of a run with its own"
    assert note in compare(runs, output=tmp_path / "page.html")
    assert note in " ".join(Elements((tmp_path / "page.html").read_text()).words.split())
    (runs[0] / "run.json").write_text(json.dumps({"verb": "sft", "stores": {"train": "1", "eval": "7"}}))
    assert "not the same (a; b): " in compare(runs[:2], output=tmp_path / "other.html")


@pytest.mark.parametrize("name", ["config.yaml", "log.txt", "config.yaml/x"])
def test_a_file_of_a_run_is_answered_with_the_run(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`forge report RUN/config.yaml` says which directory is meant, and nothing of putting files back."""
    run = make_run(tmp_path / "run")
    (run / "log.txt").touch()
    assert main(["report", str(run / name)]) == 2
    said = capsys.readouterr().err
    assert f"{run / name}: is a file, and not the directory of a run. Give its run, {run}." in said


def test_a_renewal_never_ends_or_slows_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The page is written at once and then twice a minute, sooner after a measurement; a fault is one warning."""
    now, written, warned = [1000.0], [], []
    monkeypatch.setattr("forge.reports._report.time.monotonic", lambda: now[0])

    def write(file: Path, text: str, setting: str) -> Path:
        written.append(now[0])
        now[0] += 0.05
        return file

    monkeypatch.setattr("forge.reports._report.write_page", write)
    live = LiveReport(make_run(tmp_path / "run", ending=""), warned.append)
    for _ in range(720):
        now[0] += 0.1
        live.renew(measured=now[0] > 1065)
    assert [round(at - 1000) for at in written] == [0, 30, 60, 65, 70]
    monkeypatch.setattr("forge.reports._report.write_page", lambda *_: 1 / 0)
    for _ in range(2):
        live.renew(ended=True)
    assert len(warned) == 1
    assert "the run goes on without it" in warned[0]


@pytest.mark.parametrize(
    ("name", "text", "refused"),
    [
        ("result.json", '{"seconds": "x"}', True),
        ("events.jsonl", '{"event": "planned", "steps": "x"}', True),
        ("evals/samples_1.json", '{"results": {"t": {"acc": 1' + "0" * 400 + "}}}", True),
        ("events.jsonl", "[" * 100_000, False),
        ("metrics.jsonl", "[" * 100_000 + "\n", False),
        ("answers.jsonl", '{"step": 0, "prompt": "a", "answer": "\\ud800"}', False),
    ],
)
def test_what_no_run_writes(name: str, text: str, refused: bool, tmp_path: Path) -> None:
    """A value of another type is refused with the run's name; what cannot be read is left out."""
    run = make_run(tmp_path / "run")
    (run / name).write_text(text)
    for call in (partial(report, run), partial(compare, [run, run], output=tmp_path / "c.html")):
        if refused and (call.func is report or name == "result.json"):
            with pytest.raises(SettingsError, match="holds what no run writes"):
                call()
        else:
            call()


def test_hours_of_devices_and_their_price(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each start counts with its own ranks, from its first line to its last; money is there where a price is given."""
    run = make_run(tmp_path / "run")
    at = "2026-11-23T{}Z"
    events = [
        {"time": at.format("10:00:00"), "event": "machine", "ranks": 2, "device": "cuda"},
        {"time": at.format("10:00:10"), "event": "started"},
        {"time": at.format("10:30:00"), "event": "preempted"},
        {"time": at.format("12:00:00"), "event": "machine", "ranks": 4, "device": "cuda"},
        {"time": at.format("12:15:00"), "event": "finished"},
        {"time": at.format("13:00:00"), "event": "machine", "ranks": True, "device": None},
    ]
    assert device_seconds(events, []) == {"cuda": 2 * 1800.0 + 4 * 900.0}
    assert device_seconds(events, [(at.format("12:00:05"), at.format("12:30:00"))]) == {"cuda": 2 * 1800.0 + 4 * 1800.0}
    assert device_seconds(events[1:3], []) == {}
    (run / "events.jsonl").write_text("".join(json.dumps({"step": 0, "text": "", **event}) + "\n" for event in events))
    assert main(["report", str(run), "--price-per-hour", "2.5"]) == 0
    text = " ".join(Elements((run / "report.html").read_text(encoding="utf-8")).words.split())
    assert "2 of cuda, from the start of each command" in text
    assert "5.00 at 2.5 for an hour of a device" in text
    assert main(["report", str(run)]) == 0
    text = (run / "report.html").read_text(encoding="utf-8")
    assert "2 of cuda" in text
    assert "for an hour of a device" not in text
    capsys.readouterr()
    for price in ("-1", "nan", "inf"):
        assert main(["report", str(run), "--price-per-hour", price]) == 2
        assert "--price-per-hour must be a number from 0" in capsys.readouterr().err
