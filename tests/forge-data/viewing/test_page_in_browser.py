"""The page in a real Chromium: what a person sees and can do."""

import hashlib

import attrs
import pytest

from forge_data import Media
from forge_data.findings._finding import Finding
from forge_data.viewing._page import write_page

from ..browser import CHROMIUM, Browser
from ..pictured import png
from ..viewed import Store, chat, example

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine: the page is not looked at"),
]

HOSTILE = "</script><script>document.title='x'</script><img src=http://127.0.0.1:9/x onerror=document.title='x'>\u202e\x1b"
TALL = "a long line of words " * 400


@pytest.fixture(scope="module")
def browser():
    made = Browser()
    yield made
    made.close()


@pytest.fixture(scope="module")
def address(tmp_path_factory, chatml_tokenizer):
    """A page of six samples: chats, a tool, hostile text, a long one, and bytes of no character."""
    ids = chatml_tokenizer("日", add_special_tokens=False)["input_ids"]
    samples = [
        chat(chatml_tokenizer, ("system", "Be brief."), ("user", "Capital of Japan?"), ("assistant", "日本 has Tokyo.")),
        chat(chatml_tokenizer, ("user", "Weather?"), ("assistant", "call"), ("tool", "19.5"), ("assistant", "It is 19.5.")),
        chat(chatml_tokenizer, ("user", HOSTILE), ("assistant", HOSTILE)),
        chat(chatml_tokenizer, ("user", TALL), ("assistant", TALL)),
        example(chatml_tokenizer, ("user", ids[:1], False), ("assistant", ids[1:], True)),
        example(chatml_tokenizer, ("document", "a" * 500, True)),
    ]
    findings = [
        Finding("empty_turn", "stop", "train.jsonl", 2, "messages[1]", "nothing in it", "fill it"),
        Finding("broken_unicode", "warn", "train.jsonl", 3, "messages[0]", "a control", "take it out"),
    ]
    dropped = [{"file": "train.jsonl", "row": 40 + n, "reason": "longer_than_max_seq_len", "tokens": 9} for n in range(30)]
    path = tmp_path_factory.mktemp("page") / "page.html"
    return write_page(Store(samples, chatml_tokenizer, findings=findings, dropped=dropped, name="demo"), list(range(6)), path)


@pytest.fixture
def opened(browser, address):
    """opened("#find=18", width=360) is the browser at the page; afterwards nothing may be logged or loaded."""

    def go(fragment="", **window):
        browser.open(address, fragment=fragment, **window)
        return browser

    yield go
    assert (browser.errors, browser.requests) == ([], [])


SHOWN = "[...document.querySelectorAll('.card')].filter(c => !c.hidden).map(c => c.querySelector('h3').textContent)"
OPEN_TURNS = "[...document.querySelectorAll('.card:not([hidden]) .turn:not(.folded)')].map(t => t.dataset.role)"
FILL = "dispatchEvent(new Event('beforeprint'))"


def test_every_token_is_there(opened, chatml_tokenizer):
    """Learned letters on the page are the assistants', in an element that marks them; hostile text is only text."""
    page = opened()
    page.run(FILL)
    letters = page.run(
        "[...document.querySelectorAll('.card')].slice(0, 2).map(c => [...c.querySelectorAll('.t.l')].map(t => "
        "[...t.childNodes].filter(n => !n.classList || n.classList.contains('w')).map(n => n.textContent).join('')).join(''))"
    )
    assert letters == ["日本 has Tokyo.<|im_end|>", "call<|im_end|>It is 19.5.<|im_end|>"]
    assert page.run("document.title") == "demo: tokens and labels"
    assert page.run("document.querySelectorAll('#list img, #list script').length") == 0
    chips = page.run("[...document.querySelectorAll('#sample-2 .x:not(.part)')].map(x => x.textContent)")
    assert chips == ["U+202E", "U+001B"] * 2


@pytest.mark.parametrize("width", [360, 1440])
@pytest.mark.parametrize("dark", [False, True])
def test_nothing_runs_over(opened, width, dark):
    """At 360 and 1,440 px everything on the page fits the window's width, however long a word is."""
    page = opened(width=width, height=800, dark=dark)
    page.run(FILL)
    assert page.run("document.documentElement.scrollWidth") <= width
    over = page.run(
        f"[...document.querySelectorAll('.card *')].filter(e => e.getBoundingClientRect().right > {width} + 1).length"
    )
    assert over == 0


@pytest.mark.parametrize("dark", [False, True])
def test_seen_without_colour(opened, dark):
    """Learned and other text differ by an underline, not only by colour, and all text has enough contrast (WCAG AA)."""
    page = opened(dark=dark)
    page.run(FILL)
    line = "getComputedStyle(document.querySelector('.card .t{}')).boxShadow"
    assert page.run(line.format(".l")) != "none"
    assert page.run(line.format(":not(.l)")) == "none"
    worst = page.run(
        """(() => {
          const rgb = c => c.match(/[\\d.]+/g).map(Number);
          const light = c => c.slice(0, 3).map(v => v / 255).map(v => v <= .03928 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4)
            .reduce((s, v, i) => s + v * [.2126, .7152, .0722][i], 0);
          const ground = e => { for (; e; e = e.parentElement) { const c = rgb(getComputedStyle(e).backgroundColor);
            if (c.length < 4 || c[3] > 0) return c; } return [255, 255, 255]; };
          const texts = '.t, .t.l, .t.sp, .t.sp.l, .facts, .lede, .amount, .size, .name, .finding, .note, .severity, '
            + 'dt, dd, th, td, h1, h3';
          return Math.min(...[...document.querySelectorAll(texts)].map(e => {
            const [a, b] = [light(rgb(getComputedStyle(e).color)), light(ground(e))].sort((x, y) => y - x);
            return (a + .05) / (b + .05); }));
        })()"""
    )
    assert worst >= 4.5


def test_filters(opened):
    """By role, finding, source row, text and learned turns; each is in the address and can be shared."""
    page = opened()
    assert len(page.run(SHOWN)) == 6
    assert page.run("document.getElementById('count').textContent") == "6 samples"
    for fragment, rows in {
        "#role=tool": [2],
        "#rule=empty_turn": [2],
        "#find=train.jsonl:3": [3],
        "#find=4": [4],
        "#find=tokyo": [1],
        "#find=nowhere": [],
        "#role=document": [6],
        "#role=user&learned=1": [],
    }.items():
        opened(fragment)
        assert page.run(SHOWN) == [f"train.jsonl:{row}" for row in rows], fragment
        assert page.run("document.getElementById('none').hidden") is bool(rows)
    opened("#role=assistant&find=2")
    assert page.run(OPEN_TURNS) == ["assistant", "assistant"], "turns of other roles are folded away"
    page.run("document.querySelector('#choices [value=tool]').click()")
    assert page.run(OPEN_TURNS) == ["assistant", "tool", "assistant"]
    assert "role=assistant%2Ctool" in page.run("location.hash")
    page.run("document.querySelector('#choices [type=reset]').click()")
    assert len(page.run(SHOWN)) == 6
    assert page.run("location.hash") == ""


def test_links(opened):
    """A finding links to its row; a link to a sample goes there and keeps the filters."""
    page = opened("#role=assistant")
    page.run("document.querySelector('#sample-1 a.anchor').click()")
    assert page.run("location.hash") == "#role=assistant&sample=1"
    assert page.run("document.activeElement.id") == "sample-1"
    assert set(page.run(OPEN_TURNS)) == {"assistant"}
    page = opened(height=500)
    page.run("document.querySelector('.books a').click()")
    page.run("new Promise(done => setTimeout(done, 100))")
    assert page.run(SHOWN) == ["train.jsonl:2"]
    top = page.run("document.querySelector('.card:not([hidden])').getBoundingClientRect().top")
    assert 0 <= top < 500


def test_a_token_is_told(opened, chatml_tokenizer):
    """A click on a token shows mask, place, id, role and bytes; a link leads to the same token again."""
    page = opened()
    page.run(FILL)
    page.run("document.querySelector('#sample-0 .t.l').click()")
    message = page.run("document.getElementById('token-line').textContent")
    first = chatml_tokenizer("日", add_special_tokens=False)["input_ids"][0]
    for said in ("learned", f"id {first}", "turn assistant", "bytes E6"):
        assert said in message
    assert "not learned" not in message
    link = page.run("location.hash")
    opened(link)
    assert page.run("document.getElementById('token-line').textContent") == message
    assert page.run("document.querySelectorAll('.at').length") == 1


def test_keys(opened):
    """Everything can be reached by keys: search, samples, tokens, edges of what is learned, and back."""
    page = opened()
    page.press("/", "/")
    assert page.run("document.activeElement.id") == "find"
    page.run("document.activeElement.blur()")
    page.press("j", "j")
    page.press("j", "j")
    assert page.run("document.activeElement.id") == "sample-1"
    page.press("k", "k")
    assert page.run("document.activeElement.id") == "sample-0"
    page.press("ArrowRight")
    page.press("ArrowRight")
    assert "token=1" in page.run("location.hash")
    page.press("n", "n")
    assert page.run("document.querySelector('.at').classList.contains('l')")
    page.press("n", "n")
    assert not page.run("document.querySelector('.at').classList.contains('l')")
    page.press("Escape")
    assert page.run("document.getElementById('token').hidden")


def test_a_long_page_opens_at_once(opened):
    """Tokens out of sight are not built; a link to one builds what it needs."""
    page = opened()
    built = page.run("document.querySelectorAll('#sample-3 .t').length")
    page.run(FILL)
    assert built < page.run("document.querySelectorAll('#sample-3 .t').length")
    opened("#sample=3&token=4000")
    assert page.run("document.querySelector('.at').dataset.t") == "4000"


def test_a_cut_character(opened):
    """A character that the mask cuts is whole in its first token, and the others are marked as inside it."""
    page = opened("#sample=4")
    marks = page.run("[...document.querySelectorAll('#sample-4 .t')].map(t => [t.classList.contains('l'), t.textContent])")
    assert marks == [[False, "日"], [True, "⋯"], [True, "⋯"]]
    seen = page.run("[...document.querySelectorAll('#sample-4 .x')].map(x => getComputedStyle(x).display)")
    assert seen == ["inline", "none"]


def test_an_image(browser, chatml_tokenizer, tmp_path):
    """A sample shows its image where it stands, as one piece, and nothing is loaded for it."""
    data = png()
    image = Media("images[0]", data=data, sha256=hashlib.sha256(data).hexdigest(), start=4, stop=9)
    made = attrs.evolve(chat(chatml_tokenizer, ("user", "what is it?"), ("assistant", "fine")), media=(image,))
    browser.open(write_page(Store([made], chatml_tokenizer, name="demo"), [0], tmp_path / "page.html"))
    shown = "i => [i.naturalWidth, i.parentElement.dataset.t, i.parentElement.innerText]"
    found = browser.run(f"[...document.querySelectorAll('.card img')].map({shown})")
    assert found == [[30, "4", "<image images[0], 5 tokens>"]]
    assert (browser.errors, browser.requests) == ([], [])
