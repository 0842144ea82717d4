"""The head of the page."""

from forge_data.findings._finding import Finding
from forge_data.findings._report import LintReport
from forge_data.viewing._page_summary import details, figures, lede

from ..viewed import SHA256, Store, chat

HOSTILE = "<img src=x onerror=alert(1)>\"'&\udce2"


def test_figures_add_up(chatml_tokenizer):
    """Samples, tokens, tokens in the loss and rows kept are the store's."""
    samples = [chat(chatml_tokenizer, ("user", "Hi"), ("assistant", "one two three"))] * 3
    store = Store(samples, chatml_tokenizer, dropped=[{"file": "f", "row": 1, "reason": "r", "tokens": 1}])
    text = figures(store)
    tokens, learned = 3 * len(samples[0]), 3 * samples[0].loss_count
    for said in (f"<dd>{tokens} ", f"<dd>{learned} <small>{100 * learned / tokens:.1f} % of all", "<dd>3 <small>of 4"):
        assert said in text


def test_lede_says_which(chatml_tokenizer):
    """The page names which samples it shows: all, the first ones, or chosen ones."""
    store = Store([chat(chatml_tokenizer, ("user", "Hi"))] * 3, chatml_tokenizer)
    assert lede(store, [0, 1, 2]).startswith("All 3 samples")
    assert lede(store, [0, 1]) == "The first 2 of 3 samples, token by token, as they are trained on; the range 0: shows all."
    assert lede(store, [2, 0]).startswith("2 chosen of 3 samples")


def test_books(chatml_tokenizer):
    """Findings with exact counts, links to rows that are shown, rows left out with the reason, every file's hash."""
    findings = [Finding("empty_turn", "stop", "train.jsonl", row, "messages[0]", f"what {row}", "mend it") for row in (1, 9)]
    dropped = [{"file": "train.jsonl", "row": n, "reason": "longer_than_max_seq_len", "tokens": n} for n in range(1, 1203)]
    store = Store([chat(chatml_tokenizer, ("user", "Hi"))], chatml_tokenizer, dropped=dropped)
    store.lint = LintReport(findings, {"empty_turn": 7}, {"empty_turn": 7}, 8)
    text = details(store, {"train.jsonl:1"})
    assert "7 stops, 0 warnings" in text
    assert "<details open><summary><b>Findings" in text
    assert "And 5 more." in text
    assert '<a href="#find=train.jsonl%3A1">train.jsonl:1</a>' in text
    assert ">train.jsonl:9</th>" in text
    assert text.count("Mend it.") == 1, "a remedy that all findings share is said once"
    assert text.count("longer_than_max_seq_len</td>") == 1000
    assert "And 202 more" in text
    for name, digest in SHA256.items():
        assert name in text
        assert digest in text


def test_hostile_words(chatml_tokenizer):
    """File names, fields, messages and reasons are escaped, and half a surrogate pair can be written."""
    finding = Finding("empty_turn", "warn", HOSTILE, 1, HOSTILE, HOSTILE, HOSTILE)
    other = Finding("empty_turn", "warn", HOSTILE, 2, HOSTILE, HOSTILE, HOSTILE + "2")
    dropped = [{"file": HOSTILE, "row": 1, "reason": HOSTILE, "tokens": 1}]
    store = Store([chat(chatml_tokenizer, ("user", "Hi"))], findings=[finding, other], dropped=dropped, source=HOSTILE)
    text = details(store, {f"{HOSTILE}:1"})
    text.encode("utf-8")
    assert "<img" not in text
    assert 'onerror=alert(1)&gt;"' not in text
