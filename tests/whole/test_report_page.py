"""The pages of runs in a real browser: a run's own, and several runs beside each other."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

import pytest

from forge.reports._compare import compare
from forge.reports._report import report
from forge.reports._rollouts import rollouts

from .verbs import run_verb, settings_of

if TYPE_CHECKING:
    from pathlib import Path

HOSTILE = "</script><script>document.title='x'</script><img src=http://127.0.0.1:9/x onerror=document.title='x'>"


def wide(browser: Any) -> list[str]:
    """Elements that run over the window, but those that scroll by themselves."""
    return browser.run(
        "[...document.querySelectorAll('body *')].filter(e => !e.closest('.scroll, .inside, .u-wrap, .sr, .skip')"
        " && e.getBoundingClientRect().right > innerWidth + 1).map(e => e.className || e.tagName)"
    )


@pytest.mark.slow
def test_a_run_is_watched(model_dir: Path, tmp_path: Path, browser: Any) -> None:
    """A real run's pages fit a telephone and a desk, light and dark; zoom, log axis and smoothing work; nothing is logged."""
    given = {**settings_of("grpo", model_dir, tmp_path), "max_steps": 2}
    run = tmp_path / "a<b>run"
    run_verb("grpo", {**given, "ckpt_output_dir": run}, str(tmp_path))
    lines = (run / "metrics.jsonl").read_text().splitlines()
    (run / "metrics.jsonl").write_text("\n".join([*lines, json.dumps({"step": 2, HOSTILE: 1.0, "nothing": None}), ""]))
    (run / "answers.jsonl").write_text(json.dumps({"step": 0, "prompt": HOSTILE, "answer": HOSTILE}) + "\n")
    assert "WARNING: report.html" not in (run / "log.txt").read_text()
    assert "Finished" in (run / "report.html").read_text()
    pages = [report(run), rollouts(run), tmp_path / "compare.html"]
    compare([run, run], output=pages[2])
    for page in pages:
        for width, dark in ((400, False), (400, True), (1440, False), (1440, True)):
            browser.open(page, width=width, dark=dark)
            assert wide(browser) == []
            assert browser.run("document.documentElement.scrollWidth") <= width
            assert browser.run("document.querySelectorAll('.chart canvas').length") > 5
            assert browser.run("document.title") != "x"
            # A table of numbers keeps its columns: each of its rows is one row, with the headings above.
            assert browser.run(
                "[...document.querySelectorAll('.columns tr')].every(r => getComputedStyle(r).display == 'table-row')"
            )
    browser.open(pages[0], fragment="#smooth=0.5&log=grad_norm")
    assert browser.run("document.querySelectorAll('.chart [aria-pressed=true].quiet').length") == 1
    assert re.fullmatch(r"training-?[\d.e-]+ at step 2", browser.run("document.querySelector('.key').textContent"))
    browser.run("document.getElementById('from').value = 1; document.getElementById('from').dispatchEvent(new Event('change'))")
    assert "from=1" in browser.run("location.hash")
    assert not browser.run("document.getElementById('reset').hidden")
    browser.run("document.getElementById('reset').click()")
    assert "from" not in browser.run("location.hash")
    browser.run("document.getElementById('theme').click(); document.querySelector('.key').click()")
    assert browser.run("document.querySelector('.key').getAttribute('aria-pressed')") == "false"
    assert (browser.errors, browser.requests) == ([], [])
