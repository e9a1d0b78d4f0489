"""Build the documentation site: python docs/build_site.py, or `make docs`. No network is used.

1. Collect the pages in build/docs, under the paths that they have in the repository. So a link
   works on the site as it does in a checkout. Files that a page links to, such as a config, come
   along.
2. Let zensical build them into site/.
3. Turn formulas into MathML, which browsers draw without a script.
4. Check every link and anchor of the result, and that no page loads anything from elsewhere.
"""

from __future__ import annotations

import html
import os
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urldefrag, urlsplit

ROOT = Path(__file__).resolve().parents[1]
COLLECTED = ROOT / "build" / "docs"
SITE = ROOT / "site"
PAGES = ("README.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md", "docs/**/*.md")
LINK = re.compile(r"\]\(([^)\s]+)\)")
CODE = re.compile(r"```.*?```|`[^`\n]*`", re.DOTALL)
FORMULA = re.compile(r'<(span|div) class="arithmatex">\\([(\[])(.*?)\\[)\]]</\1>', re.DOTALL)
LOADED = {
    ("script", "src"),
    ("link", "href"),
    ("img", "src"),
    ("iframe", "src"),
    ("object", "data"),
}
ELSEWHERE = ("http:", "https:", "//")


def collect() -> int:
    """Copy the pages and the files that they link to. Return the number of pages."""
    shutil.rmtree(COLLECTED, ignore_errors=True)
    pages = sorted({page for pattern in PAGES for page in ROOT.glob(pattern)})
    for page in pages:
        _copy(page)
        for link in LINK.findall(CODE.sub("", page.read_text())):
            target = (page.parent / urldefrag(unquote(link)).url).resolve()
            if urlsplit(link).scheme or link.startswith("#") or not target.is_file():
                continue  # a link to nothing is found at the end, where it leads nowhere
            _copy(target)
    return len(pages)


def _copy(path: Path) -> None:
    copy = COLLECTED / path.relative_to(ROOT)
    copy.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(path, copy)


def build() -> None:
    """Build the collected pages, and end with zensical's own words if it finds a fault."""
    shutil.rmtree(SITE, ignore_errors=True)
    shutil.rmtree(ROOT / ".cache", ignore_errors=True)
    plain = {**os.environ, "NO_COLOR": "1"}
    command = [sys.executable, "-m", "zensical", "build", "--strict"]
    answer = subprocess.run(command, cwd=ROOT, env=plain, capture_output=True, text=True)
    if answer.returncode:
        raise SystemExit(f"{answer.stdout}{answer.stderr}\nerror: zensical did not build the site")


def draw_formulas() -> int:
    """Replace TeX by MathML on every page. Return the number of formulas."""
    from latex2mathml.converter import convert

    count = 0
    for page in SITE.rglob("*.html"):
        text = page.read_text()
        drawn, n_formulas = FORMULA.subn(
            lambda found: convert(
                html.unescape(found[3]).strip(), display="block" if found[2] == "[" else "inline"
            ),
            text,
        )
        if n_formulas:
            page.write_text(drawn)
        count += n_formulas
    return count


class Page(HTMLParser):
    """The links, the anchors and the loaded files of a page."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.links: list[str] = []
        self.loaded: list[str] = []
        self.anchors: set[str] = set()
        self.feed(path.read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name in ("id", "name") and value:
                self.anchors.add(value)
            if value and (tag, name) in LOADED and dict(attrs).get("rel") != "canonical":
                self.loaded.append(value)
            elif value and name in ("href", "src"):
                self.links.append(value)


def faults() -> list[str]:
    """Return each link that leads nowhere, and each file that would be loaded from elsewhere."""
    # The page for addresses that do not exist is made for a server's root.
    pages = {path: Page(path) for path in SITE.rglob("*.html") if path.name != "404.html"}
    found = []
    for path, page in pages.items():
        where = path.relative_to(SITE)
        found += [f"{where} loads {each}" for each in page.loaded if each.startswith(ELSEWHERE)]
        for link in [*page.links, *page.loaded]:
            if urlsplit(link).scheme or link.startswith("//"):
                continue
            address, anchor = urldefrag(unquote(link))
            target = (path.parent / address.partition("?")[0]).resolve() if address else path
            if target.is_dir():
                target /= "index.html"
            if not target.is_file():
                found.append(f"{where}: {link} is not there")
            elif anchor and target in pages and anchor not in pages[target].anchors:
                found.append(f"{where}: {link} has no such heading")
    return sorted(set(found))


def main() -> None:
    n_pages = collect()
    build()
    n_formulas = draw_formulas()
    if found := faults():
        raise SystemExit("\n".join([*found, f"error: {len(found)} faults in the site"]))
    print(f"site/index.html: {n_pages} pages, {n_formulas} formulas, every link leads somewhere")
    print("to search in it: python -m http.server -d site")


if __name__ == "__main__":
    main()
