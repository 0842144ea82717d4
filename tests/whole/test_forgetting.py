"""`forge forgetting`: figures by source that a naive loop finds too, a page of them, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import forge
from forge._errors import RunDirectoryError, SettingsError
from forge.cli._app import main

from .conftest import CHATML, FRUITS, write_rows
from .verbs import settings_of

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of rows and runs."""
    return tmp_path_factory.mktemp("forgetting")


@pytest.fixture(scope="module")
def data(folder: Path) -> list[str]:
    """Two sources: chats with markup and signs of several bytes, and documents, which are learned whole."""
    chats = [
        {
            "messages": [
                {"role": "user", "content": f"<b>say</b> {fruit} é"},
                {"role": "assistant", "content": f"<i>{fruit}</i> €"},
            ]
        }
        for fruit in FRUITS
    ]
    texts = [{"text": f"the {fruit} grows in the sun & the rain"} for fruit in FRUITS[:5]]
    return [str(write_rows(folder / "talk.jsonl", chats)), str(write_rows(folder / "texts.jsonl", texts))]


@pytest.fixture(scope="module")
def run(model_dir: Path, folder: Path) -> Any:
    """A run that has moved far."""
    given = settings_of("sft", model_dir, folder) | {"max_steps": 12, "learning_rate": 2e-2, "validation_split": None}
    given = {name: value for name, value in given.items() if value is not None}
    return forge.sft(**given, ckpt_output_dir=folder / "run")


def naive(base: str, export: Path, data: list[str]) -> dict[str, np.ndarray]:
    """File → [tokens, loss before, loss after, KL] summed over its learned tokens, one row at a time in float64."""
    import jinja2
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    models = [AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32) for path in (base, export)]
    tokenizer = AutoTokenizer.from_pretrained(base)
    found = {}
    for file in data:
        sums = np.zeros(4)
        for line in Path(file).read_text().splitlines():
            row = json.loads(line)
            if "text" in row:
                ids, first = [*tokenizer(row["text"])["input_ids"], tokenizer.eos_token_id], 1
            else:
                whole = jinja2.Template(CHATML).render(messages=row["messages"])
                asked = jinja2.Template(CHATML).render(messages=row["messages"][:1], add_generation_prompt=True)
                # What the assistant writes ends with its turn's sign; the line's end after it is the template's.
                ids = tokenizer(whole.removesuffix("\n"))["input_ids"]
                first = len(tokenizer(asked)["input_ids"])
            with torch.no_grad():
                p, q = (m(input_ids=torch.tensor([ids])).logits[0].double().log_softmax(-1) for m in models)
            for at in range(first, len(ids)):
                kl = float((p[at - 1].exp() * (p[at - 1] - q[at - 1])).sum())
                sums += [1, -float(p[at - 1, ids[at]]), -float(q[at - 1, ids[at]]), kl]
        found[Path(file).name] = sums
    return found


def test_figures_are_those_of_a_naive_loop(run: Any, model_dir: Path, data: list[str]) -> None:
    """Each source's losses before and after and its KL, and the total over all tokens."""
    found = forge.forgetting(run.output_dir, data=data)
    expected = naive(str(model_dir), run.model_dir, data)
    assert list(found.sources) == ["talk.jsonl", "texts.jsonl"]
    for name, each in [*found.sources.items(), ("", found.total)]:
        tokens, *sums = expected[name] if name else sum(expected.values())
        assert each.tokens == tokens
        assert [each.before, each.after, each.kl] == pytest.approx([value / tokens for value in sums], rel=1e-4)
        assert each.change == pytest.approx(each.after - each.before)
        assert each.error > 0
    assert found.sources["texts.jsonl"].verdict == "lost"


def test_the_page_shows_them(run: Any, data: list[str], tmp_path: Path) -> None:
    """The page has each source, rows token by token as text and not as markup, and loads nothing."""
    found = forge.forgetting(run.output_dir, data=data, output=tmp_path / "page.html", limit=3)
    text = found.page.read_text()
    assert found.total.rows == 6
    for name, each in found.sources.items():
        assert name in text
        assert f"{each.before:.4f}" in text
        assert f"{each.after:.4f}" in text
    assert "<i>" not in text
    assert "&lt;" in text
    assert "http" not in text.replace("http-equiv", "")
    assert "style=" not in text.replace("style-src", "")


def test_tokens_join_to_the_text() -> None:
    """Pieces of a row's tokens are its text, signs of several tokens whole; each learned one has its mark and numbers."""
    from forge.reports._forgetting import Row, shown_tokens

    text = "aé€b"
    ids = np.frombuffer(text.encode(), np.uint8).astype(int)
    places = np.arange(2, len(ids))
    zero = np.zeros(len(places))
    row = Row(source="s", row="1", ids=ids, places=places, before=zero, after=zero + [0, 0.2, 0, 0, -4.0], kl=zero)
    pieces = shown_tokens(row, lambda ids: bytes(ids).decode(errors="replace"))
    assert [piece["text"] for piece in pieces] == ["a", "é", "€", "b"]
    assert [piece["mark"] for piece in pieces] == ["", "", "up1", "down4"]
    assert pieces[0]["measured"] == ""
    assert pieces[3]["title"] == "loss 0.000 → -4.000, kl 0.000"


def test_the_command(run: Any, data: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`forge forgetting RUN --data FILES` prints a line a source and the page's path, with exit status 0."""
    assert main(["forgetting", str(run.output_dir), "--data", *data, "--output", str(tmp_path / "page.html")]) == 0
    *lines, last = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["talk.jsonl", "texts.jsonl", "all"]
    assert last == f"page  {tmp_path / 'page.html'}"


def test_columns_of_other_names(run: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The option that a message names is one of this command, and with it the same rows have the same figures."""
    rows = [{"instruction": "name a fruit", "output": answer} for answer in ("a plum", "a red apple")]
    (tmp_path / "own.jsonl").write_text("".join(json.dumps({"q": r["instruction"], "a": r["output"]}) + "\n" for r in rows))
    (tmp_path / "known.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = ["forgetting", str(run.output_dir), "--output", str(tmp_path / "page.html"), "--data", str(tmp_path / "own.jsonl")]
    assert main(words) == 2
    assert "give them with --rename-columns" in capsys.readouterr().err
    assert main([*words, "--rename-columns", "q=instruction", "a=output"]) == 0
    assert "own.jsonl" in capsys.readouterr().out
    own = forge.forgetting(
        run.output_dir,
        data=str(tmp_path / "own.jsonl"),
        rename_columns={"q": "instruction", "a": "output"},
        output=tmp_path / "page.html",
    )
    known = forge.forgetting(run.output_dir, data=str(tmp_path / "known.jsonl"), output=tmp_path / "page.html")
    assert own.total == known.total


def test_an_untouched_model_lost_nothing(model_dir: Path, folder: Path, data: list[str], tmp_path: Path) -> None:
    """A run whose adapter never moved has no divergence and keeps every source."""
    given = settings_of("sft", model_dir, folder) | {"max_steps": 1, "learning_rate": 1e-30, "adapter": "lora", "lora_r": 2}
    found = forge.forgetting(forge.sft(**given, ckpt_output_dir=tmp_path / "run").output_dir, data=data[1])
    assert found.total.kl == pytest.approx(0, abs=1e-9)
    assert found.total.change == pytest.approx(0, abs=1e-9)
    assert {each.verdict for each in found.sources.values()} == {"kept"}


def test_what_cannot_be_measured_is_refused(run: Any, data: list[str], tmp_path: Path) -> None:
    """No run, a number out of range, and a place that cannot be written are named; nothing is left."""
    with pytest.raises(RunDirectoryError, match="is no run directory"):
        forge.forgetting(tmp_path, data=data)
    with pytest.raises(SettingsError, match="limit must be at least 1"):
        forge.forgetting(run.output_dir, data=data, limit=0)
    (tmp_path / "file").write_text("")
    with pytest.raises(SettingsError, match="output="):
        forge.forgetting(run.output_dir, data=data, output=tmp_path / "file" / "page.html")
