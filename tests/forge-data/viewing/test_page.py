"""The page as a file: complete, without network, and safe against the text in it."""

import base64
import hashlib
import re
from html.parser import HTMLParser

import pytest

import forge_data
from forge_data.viewing._page import page, write_page

from ..viewed import Store, chat

HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(1)></pre></noscript> @data@ @script@ <!-- ]]>"


class Elements(HTMLParser):
    """Every element and attribute of a page."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.attributes, self.texts, self._in = [], [], {}, ""
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += [(tag, *attribute) for attribute in attrs]
        self._in = tag + (dict(attrs).get("id") or "")

    def handle_endtag(self, tag):
        self._in = ""

    def handle_data(self, data):
        self.texts[self._in] = self.texts.get(self._in, "") + data


@pytest.fixture
def store(chatml_tokenizer):
    return Store([chat(chatml_tokenizer, ("user", HOSTILE), ("assistant", HOSTILE))], chatml_tokenizer, name="a <b> store")


def test_words_make_no_elements(store, chatml_tokenizer):
    """A page of hostile text has exactly the elements of a page of harmless text."""
    harmless = Store([chat(chatml_tokenizer, ("user", "Hi"), ("assistant", "Ho"))], chatml_tokenizer)
    assert Elements(page(store, [0])).tags == Elements(page(harmless, [0])).tags
    assert "a &lt;b&gt; store" in page(store, [0])


def test_no_network(store):
    """Nothing is loaded: no address in an attribute or the style, and a policy that forbids it."""
    text = page(store, [0])
    elements = Elements(text)
    outside = [a for a in elements.attributes if a[1] in {"src", "srcset", "data", "action", "poster"} or "//" in (a[2] or "")]
    assert outside == []
    assert {a[2] for a in elements.attributes if a[1] == "href"} <= {"data:,", "#samples", "#find=train.jsonl%3A1"}
    assert not re.search(
        r"url\(|@import|fetch\(|XMLHttp|import\(|innerHTML|outerHTML|insertAdjacent|document\.write|eval\(",
        text.replace(HOSTILE, ""),
    )
    assert not [a for a in elements.attributes if a[1].startswith("on")], "no code in attributes"


def test_policy_fits(store):
    """The policy allows this page's style and script, by their hash, and nothing else."""
    elements = Elements(page(store, [0]))
    (policy,) = [
        value for tag, name, value in elements.attributes if tag == "meta" and name == "content" and "default-src" in value
    ]
    rules = dict(rule.strip().split(" ", 1) for rule in policy.split(";"))
    assert rules["default-src"] == "'none'"
    for tag, rule in (("style", "style-src"), ("script", "script-src")):
        digest = base64.b64encode(hashlib.sha256(elements.texts[tag].encode()).digest()).decode()
        assert rules[rule] == f"'sha256-{digest}'"


def test_without_scripts(store):
    """Without scripts the page shows the samples as plain text, with marks in place of colour."""
    assert "⟦" in page(store, [0]).partition("<noscript>")[2]


def test_write(store, tmp_path):
    """The store is verified first; directories are made, an old page is replaced, nothing is left beside it."""
    path = tmp_path / "new" / "page.html"
    assert write_page(store, [0], path) == path
    assert store.verified
    path.write_text("old")
    write_page(store, [0], path)
    assert path.read_text("utf-8") == page(store, [0])
    assert [each.name for each in path.parent.iterdir()] == ["page.html"]


def test_no_place_to_write(store, tmp_path):
    """A page that cannot be written is one clear error, and leaves nothing."""
    (tmp_path / "file").write_text("")
    with pytest.raises(forge_data.StoreError, match="cannot be written"):
        write_page(store, [0], tmp_path / "file" / "page.html")
    (tmp_path / "folder").mkdir()
    with pytest.raises(forge_data.StoreError, match="cannot be written"):
        write_page(store, [0], tmp_path / "folder")
    assert sorted(each.name for each in tmp_path.iterdir()) == ["file", "folder"]


def test_a_page_is_no_part_of_the_store(chatml_tokenizer, small_chats, write_rows, tmp_path):
    """A page inside the store, or without a name, is refused."""
    store = forge_data.prepare(write_rows(small_chats), chatml_tokenizer, tmp_path / "store", progress=False)
    for path in (store.path / "input_ids.bin", store.path / "new" / "page.html", ""):
        with pytest.raises(forge_data.StoreError, match="cannot be written: it must be a file, and outside of the store"):
            forge_data.show(store, [0], html=path)
    store.verify()


def test_a_damaged_store_has_no_page(chatml_tokenizer, small_chats, write_rows, tmp_path):
    """A store whose arrays changed gets no page."""
    forge_data.prepare(write_rows(small_chats), chatml_tokenizer, tmp_path / "store", progress=False)
    assert forge_data.show(tmp_path / "store", html=tmp_path / "page.html") == tmp_path / "page.html"
    (tmp_path / "page.html").unlink()
    array = tmp_path / "store" / "input_ids.bin"
    data = bytearray(array.read_bytes())
    data[0] ^= 1
    array.write_bytes(data)
    with pytest.raises(forge_data.StoreError, match=r"input_ids\.bin"):
        forge_data.show(tmp_path / "store", html=tmp_path / "page.html")
    assert not (tmp_path / "page.html").exists()
