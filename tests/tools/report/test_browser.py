"""The page in headless Chromium: all charts drawn, no message on the console, no request, loaded in a second."""

from __future__ import annotations

import json

import pytest

from roll_batching.tools.report.page import write_report
from tests.jobs.observe.rows import rl_rows
from tests.tools.report.browser import CHROMIUM, Page, in_browser
from tests.tools.report.test_report import hostile_run, rollout, write_run

pytest.importorskip("plotly", reason="pip install plotly")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed")

SHOWN = "document.querySelectorAll('#rollouts tbody tr').length"


async def look(page: Page) -> dict:
    drawn = await page.draw_all()
    return {
        "drawn": drawn,
        "charts": await page.evaluate("document.querySelectorAll('[data-chart]').length"),
        "messages": page.messages,
        "requests": [url for url in page.requests if not url.startswith("data:")],
        "hacked": await page.evaluate("window.hacked === undefined ? null : window.hacked"),
        "responses": await page.evaluate(SHOWN),
    }


def test_a_real_run_is_drawn_without_an_error(real_run, tmp_path):
    path, _ = write_report([real_run], tmp_path / "page.html")
    (found,) = in_browser(path, look)
    assert found["drawn"] == found["charts"] > 15
    assert found["messages"] == [] and found["requests"] == [path.resolve().as_uri()]
    assert found["responses"] == min(len((real_run / "rollouts.jsonl").read_text().splitlines()), 20)


@pytest.mark.bad_input
def test_hostile_texts_run_nothing(tmp_path):
    path, _ = write_report([hostile_run(tmp_path / "evil")], tmp_path / "page.html")
    (found,) = in_browser(path, look)
    assert found["hacked"] is None and found["messages"] == [] and found["requests"] == [path.resolve().as_uri()]
    assert found["drawn"] == found["charts"] > 0 and found["responses"] == 5


def test_the_policy_stops_scripts_that_are_not_the_pages_own(tmp_path):
    """The second line of defence: what a hole in the escaping would let in is not run."""
    path, _ = write_report([write_run(tmp_path / "run", rl_rows(2))], tmp_path / "page.html")
    path.write_text(path.read_text().replace("<main>", "<main><script>window.hacked = 1</script>"))
    (found,) = in_browser(path, look)
    assert found["hacked"] is None and any("Content Security Policy" in message for message in found["messages"])


def test_rollouts_can_be_filtered_and_turned(tmp_path):
    lines = [
        rollout(step=step, reward=float(step % 2), response=f"answer {step}", finished=step != 7, kind=kind)
        for step in range(1, 31)
        for kind in ("train", "eval")
    ]
    path, _ = write_report([write_run(tmp_path / "run", rl_rows(2), lines)], tmp_path / "page.html")

    async def visit(page: Page) -> list:
        async def filtered(index: int, value: object) -> list:
            await page.evaluate(
                f"(() => {{const field = document.querySelectorAll('.filters input, .filters select')[{index}];"
                f"field.value = {json.dumps(value)}; field.dispatchEvent(new Event('input', {{bubbles: true}}));}})()"
            )
            return [await page.evaluate("document.querySelector('.filters span').textContent"), page.messages]

        turned = await page.evaluate(
            "(() => {[...document.querySelectorAll('#rollouts button')].find((b) => b.textContent === 'next').click();"
            "return document.querySelector('.filters span').textContent})()"
        )
        names = ["kind", "from", "to", "least", "most", "state", "text", "order"]
        results = [turned]
        for name, value in (
            ("kind", "eval"),
            ("from", "5"),
            ("least", "1"),
            ("state", "cut off"),
            ("text", "ANSWER 7"),
        ):
            results.append((await filtered(names.index(name), value))[0])
        results.append((await filtered(names.index("text"), "no such text"))[0])
        return [*results, page.messages]

    (found,) = in_browser(path, visit)
    assert found == [
        "21 to 40 of 60",
        "1 to 20 of 30",
        "1 to 20 of 26",
        "1 to 13 of 13",
        "1 to 1 of 1",
        "1 to 1 of 1",
        "none match",
        [],
    ]


def test_a_thousand_steps_load_in_a_second(tmp_path, report):
    lines = [rollout(step=step, id=i, response="some words " * 20) for step in range(1, 1001) for i in range(8)]
    path, _ = write_report([write_run(tmp_path / "run", rl_rows(1000), lines)], tmp_path / "page.html")

    async def visit(page: Page) -> int:
        return await page.evaluate("performance.timing.loadEventEnd - performance.timing.navigationStart")

    times = []
    for _ in range(5):  # other processes may use the machine: the best counts
        times += in_browser(path, visit, times=2)
        if min(times) < 1000:
            break
    report(f"report of 1,000 steps: loaded after {min(times)} ms (best of {len(times)})")
    assert min(times) < 1000
