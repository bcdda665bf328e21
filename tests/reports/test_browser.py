from __future__ import annotations

from pathlib import Path

import pytest

from reports.page import write_index, write_report
from tests import browser
from tests.synthetic import run_of

pytestmark = pytest.mark.browser


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    browser.chromium()
    root = tmp_path_factory.mktemp("site")
    run, records = run_of(("direct", "pot", "exactcache", "minicache"), ("formula", "codetatqa"), n=20)
    write_report(root, run, records)
    write_index(root, [(root, run, records, [])])
    return root


@pytest.mark.parametrize("width", [390, 1280])
@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("name", ["report/index.html", "index.html"])
async def test_a_page_is_quiet_offline_and_fits(site: Path, name: str, width: int, dark: bool) -> None:
    async with browser.page() as page:
        await page.open(site / name, width=width, dark=dark)
        await page.evaluate("document.querySelectorAll('details').forEach(one => { one.open = true })")
        assert await page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        assert await page.evaluate("[...document.images].every(one => one.complete && one.naturalWidth > 0)")
        assert page.problems == []
        assert [url for url in page.requests if not url.startswith("data:")] == [(site / name).as_uri()]


async def test_the_main_table_sorts_by_keyboard(site: Path) -> None:
    async with browser.page() as page:
        await page.open(site / "report/index.html")
        await page.evaluate("document.querySelectorAll('table.sortable th button')[3].focus()")
        rows = "[...document.querySelectorAll('table.sortable tbody tr')]"
        for descending in (False, True):
            for kind in ("keyDown", "keyUp"):
                await page.send(
                    "Input.dispatchKeyEvent",
                    type=kind,
                    key="Enter",
                    code="Enter",
                    text="\r",
                    windowsVirtualKeyCode=13,
                )
            values = await page.evaluate(f"{rows}.map(row => Number(row.children[3].dataset.sort))")
            assert values == sorted(values, reverse=descending)
        assert await page.evaluate("document.querySelectorAll('[aria-sort]').length") == 1
        assert page.problems == []
