"""`make docs`: a broken link, a missing heading or a file from elsewhere fails the build."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = '<html><body><h2 id="here">x</h2>{}</body></html>'


@pytest.fixture
def build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    spec = importlib.util.spec_from_file_location("build_site", ROOT / "docs/build_site.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "COLLECTED", tmp_path / "collected")
    monkeypatch.setattr(module, "SITE", tmp_path / "site")
    (tmp_path / "site" / "docs").mkdir(parents=True)
    return module


@pytest.mark.parametrize(
    ("body", "fault"),
    [
        ('<a href="docs/b.html">b</a>', None),
        ('<a href="docs/b.html#here">b</a> <a href="#here">a</a>', None),
        ('<a href="https://example.org/page">elsewhere</a>', None),
        ('<a href="docs/c.html">c</a>', "index.html: docs/c.html is not there"),
        ('<a href="docs/b.html#gone">b</a>', "index.html: docs/b.html#gone has no such heading"),
        ('<img src="figure.svg">', "index.html: figure.svg is not there"),
        (
            '<script src="https://example.org/x.js"></script>',
            "index.html loads https://example.org/x.js",
        ),
        (
            '<link rel="stylesheet" href="//example.org/x.css">',
            "index.html loads //example.org/x.css",
        ),
    ],
)
def test_what_is_found(build: ModuleType, body: str, fault: str | None) -> None:
    (build.SITE / "index.html").write_text(PAGE.format(body))
    (build.SITE / "docs/b.html").write_text(PAGE.format('<a href="../index.html">a</a>'))
    assert build.faults() == ([fault] if fault else [])


def test_every_page_and_all_that_it_links_to_is_collected(build: ModuleType) -> None:
    n_pages = build.collect()
    assert n_pages == len(list(build.COLLECTED.rglob("*.md")))
    for name in ("README.md", "docs/sql.md", "docs/figures/loop.svg", "configs/key_room.yaml"):
        assert (build.COLLECTED / name).read_bytes() == (ROOT / name).read_bytes()


def test_no_page_links_to_a_folder() -> None:
    """A checkout shows its files; a site has no page for it."""
    spec = importlib.util.spec_from_file_location("build_site", ROOT / "docs/build_site.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    for page in (ROOT / "docs").glob("*.md"):
        for link in module.LINK.findall(module.CODE.sub("", page.read_text())):
            assert not (page.parent / link).is_dir(), f"{page.name}: {link}"
