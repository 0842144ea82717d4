"""mkdocs hooks: generated pages join the site, links between the repository's files become links between pages."""

from __future__ import annotations

import itertools
import posixpath
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from api_pages import Sources, api_pages, public_names
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File
from repository_pages import page_text, repository_pages

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[2]
_LINK = re.compile(r"(?<!!)\[(?P<text>[^\]]*)\]\((?P<target>[^)\s#]*)(?P<anchor>#[^)\s]*)?\)")
_CODE = re.compile(r"<pre.*?</pre>|<a .*?</a>|<h[1-6].*?</h[1-6]>|<code>(?P<code>[^<]*)</code>", re.DOTALL)
_TABLE = re.compile(r"<table>.*?</table>", re.DOTALL)
_LOADED = re.compile(
    r"""<(?:script|img|iframe|source)\b[^>]*\bsrc=["']?(?:https?:)?//[^>]*>"""
    r"""|<link\b(?=[^>]*\brel=["']?(?:stylesheet|icon|pre))[^>]*\bhref=["']?(?:https?:)?//[^>]*>"""
)
_names: dict[str, str] = {}
"""Qualified public name → its page."""
_settings: dict[str, str] = {}
"""Setting, or command such as `forge sft` → its anchor on the settings page."""


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the API reference, and the pages of packages, benchmarks and examples."""
    api = Sources(ROOT)
    for uri, text in api_pages(api).items():
        files.append(File.generated(config, uri, content=text))
    for source, uri in repository_pages(ROOT).items():
        files.append(File.generated(config, uri, content=page_text(ROOT, source)))
    for path in ROOT.glob("benchmarks/results/*.svg"):
        files.append(File.generated(config, f"benchmarks/{path.name}", abs_src_path=str(path)))
    _names.clear()
    _names.update(public_names(api))
    _settings.clear()
    _settings.update(_setting_anchors((ROOT / "docs" / "settings.md").read_text("utf-8"))[1])
    return files


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """Lead links to files of the repository to their pages; unlink what the site does not show."""
    sources = repository_pages(ROOT)
    here = next((source for source, uri in sources.items() if uri == page.file.src_uri), f"docs/{page.file.src_uri}")

    def lead(link: re.Match[str]) -> str:
        target = link["target"]
        if not target or ":" in target or page.file.src_uri.startswith("api/"):
            return link[0]
        path = posixpath.normpath(posixpath.join(posixpath.dirname(here), target))
        uri = path.removeprefix("docs/") if path.startswith("docs/") else sources.get(path) or sources.get(f"{path}/README.md")
        if uri is not None:
            return (
                f"[{link['text']}]({posixpath.relpath(uri, posixpath.dirname(page.file.src_uri) or '.')}{link['anchor'] or ''})"
            )
        return link["text"] if (ROOT / path).exists() else link[0]

    # What explains comes before what lists, in the results of a search.
    folder = page.file.src_uri.partition("/")[0]
    page.meta["search"] = {
        "boost": {"settings.md": 4, "api": 1, "benchmarks": 0.5, "examples": 0.5, "migrating": 0.5}.get(folder, 2)
    }
    markdown = _LINK.sub(lead, markdown)
    return _setting_anchors(markdown)[0] if here == "docs/settings.md" else markdown


def on_page_content(html: str, page: Page, files: Files, **_: Any) -> str:
    """Link public names and settings to their explanation; make tables of text readable on narrow screens."""
    here = page.file.src_uri

    def url(uri: str, anchor: str) -> str:
        return f"{'' if uri == here else files.get_file_from_path(uri).url_relative_to(page.file)}#{anchor}"

    def link(match: re.Match[str]) -> str:
        code = match["code"]
        if code is None:
            return match[0]
        # A short name with a hyphen, such as a flag, is not broken at the end of a line.
        shown = match[0] if "-" not in code or len(code) > 32 else match[0].replace("<code>", '<code class="unbroken">')
        module = here.removeprefix("api/").removesuffix(".md") if here.startswith("api/") else ""
        for name in (code.partition("(")[0], f"{module}.{code}" if module and code[:1].isupper() else ""):
            if name in _names and name != "forge" and (_names[name] != here or name != code):
                return f'<a href="{url(_names[name], name)}">{shown}</a>'
        anchor = _settings.get(code.partition("=")[0]) if here.startswith("migrating/") else None
        return shown if anchor is None else f'<a href="{url("settings.md", anchor)}">{shown}</a>'

    # A migration table's first column has the other trainer's names.
    skipped = rf"<tr>\s*<td>.*?</td>|{_CODE.pattern}" if here.startswith("migrating/") else _CODE.pattern
    html = re.sub(skipped, link, html, flags=re.DOTALL)
    # A search for a setting leads to the settings page, not to the field of its class.
    html = re.sub(r'<h4 (?=id="[\w.]+Settings\.\w+")', "<h4 data-search-exclude ", html)
    return _TABLE.sub(_labelled, html)


def on_post_build(config: MkDocsConfig) -> None:
    """Refuse a site that would load something from the network when it is viewed."""
    found = {
        f"{path.relative_to(config.site_dir)}: {tag}"
        for path in Path(config.site_dir).rglob("*.html")
        for tag in _LOADED.findall(path.read_text("utf-8"))
    }
    if found:
        raise PluginError("pages load from the network:\n  " + "\n  ".join(sorted(found)))


def _labelled(table: re.Match[str]) -> str:
    """Name the column of each cell of a table of text, so that narrow screens can show its rows as blocks."""
    cells = re.findall(r"<td[^>]*>(.*?)</td>", table[0], re.DOTALL)
    if max((len(re.sub("<.*?>", "", cell)) for cell in cells), default=0) < 40:
        return table[0]
    heads = [re.sub("<.*?>", "", head) for head in re.findall(r"<th[^>]*>(.*?)</th>", table[0], re.DOTALL)]
    columns = itertools.cycle(heads)
    body = re.sub("<td", lambda _: f'<td data-label="{next(columns)}"', table[0])
    return f'<div class="text-table">{body}</div>'


def _setting_anchors(text: str) -> tuple[str, dict[str, str]]:
    """Give each row of the settings page an anchor; the first of a name is the one that links lead to."""
    anchors: dict[str, str] = {}
    section = ""

    def mark(row: re.Match[str]) -> str:
        nonlocal section
        if row["verb"]:
            section = row["verb"]
            anchors[f"forge {section}"] = f"forge-{section}"
            return row[0]
        anchor = f"{section}-{row['name']}" if section else row["name"]
        anchors.setdefault(row["name"], anchor)
        return f"| `{row['name']}`{{ #{anchor} }} |"

    return re.sub(r"^## forge (?P<verb>\w+)$|^\| `(?P<name>\w+)` \|", mark, text, flags=re.MULTILINE), anchors
