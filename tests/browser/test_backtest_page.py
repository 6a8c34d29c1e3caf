"""The page of a backtest in a real browser: its lines, its table, its names."""

import numpy as np
import pytest
from helpers.browser import launched_browser, opened_page
from helpers.runs import record_run

from lossscale import Dynamic, Fixed, Headroom
from lossscale.diagnostics import backtest, build_report, read_run
from lossscale.diagnostics.backtests.page import make_backtest_page
from lossscale.diagnostics.report.page import MOST_BYTES, make_page
from lossscale.diagnostics.report.policies import OtherPolicies
from lossscale.diagnostics.report.summary import summarize_run

STEPS = 3_000
HOSTILE = "<img src=x onerror=alert(1)></script>"
POLICIES = {"often": Dynamic(growth_interval=9), "fixed": Fixed(2.0**12)}


@pytest.fixture(scope="module")
def browser():
    with launched_browser() as browser:
        yield browser


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    path = tmp_path_factory.mktemp("run") / "run.jsonl"
    return read_run(record_run(path, STEPS, every=500).path)


@pytest.fixture(scope="module")
def found(run):
    return backtest(run, POLICIES | {HOSTILE: Headroom()})


@pytest.fixture(scope="module")
def written(run, found):
    path = run.path.with_suffix(".html")
    path.write_text(make_backtest_page(run, found), encoding="utf-8")
    return path


def show(page, first, last):
    page.fill("#from", str(first))
    page.fill("#to", str(last))
    page.dispatch_event("#to", "change")
    page.wait_for_selector(f'html[data-shown="{first}-{last}"]')


def open_table(page):
    """Open the table under the chart of the scale; return its rows."""
    figure = page.locator("figure[data-chart=scale]")
    if figure.locator("details").get_attribute("open") is None:
        figure.locator("summary").click()
    figure.locator("details table").wait_for()
    return figure.locator("details tr")


def test_every_policy_has_its_scale_in_the_table_under_the_chart(
    browser, written, found
):
    with opened_page(browser, written) as page:
        show(page, 1_000, 1_039)
        rows = open_table(page)
        rows.nth(40).wait_for()
        cells = [row.locator("th, td").all_inner_texts() for row in rows.all()]
        heads = ["steps", "as recorded", "skipped", *found.outcomes]
        assert heads == cells[0]
        for offset, row in enumerate(cells[1:]):
            for outcome, text in zip(found.outcomes.values(), row[3:], strict=True):
                exponent = np.log2(outcome.scales[999 + offset])
                assert np.exp2(exponent) == float(text.split("= ")[-1].replace(",", ""))


def test_a_policy_is_taken_out_of_the_chart(browser, written):
    with opened_page(browser, written) as page:
        open_table(page)
        heads = page.locator("figure[data-chart=scale] details thead th")
        assert 6 == heads.count()
        page.get_by_label("often").uncheck()
        heads.nth(5).wait_for(state="detached")
        shown = heads.all_inner_texts()
        assert ["steps", "as recorded", "skipped", "fixed", HOSTILE] == shown


def test_the_table_of_the_policies_says_what_the_command_says(browser, written, found):
    with opened_page(browser, written) as page:
        rows = page.locator("#policies tbody tr").all()
        names = [row.locator("th").inner_text().strip() for row in rows]
        assert ["as recorded", *found.outcomes] == names
        likely = [row.locator("td").first.inner_text().split()[0] for row in rows]
        outcomes = [found.recorded, *found.outcomes.values()]
        assert [f"{outcome.skipped.likely:,}" for outcome in outcomes] == likely
        remarks = page.locator("#policies .advice li").all_inner_texts()
        assert list(found.remarks) == remarks


def test_hostile_names_stay_text(browser, written):
    with opened_page(browser, written) as page:
        assert 0 == page.locator("img").count()
        assert 2 == page.locator("script").count()


def test_everything_that_can_be_used_has_a_name(browser, written):
    with opened_page(browser, written) as page:
        boxes = page.locator("#policies input").all()
        assert list(range(1, 4)) == [int(box.get_attribute("value")) for box in boxes]
        labels = page.evaluate(
            "[...document.querySelectorAll('#policies input')]"
            ".map((e) => e.labels[0].textContent.trim())"
        )
        assert [*POLICIES, HOSTILE] == labels


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_nothing_is_wider_than_a_phone(browser, written, scheme):
    with opened_page(browser, written, width=375, scheme=scheme) as page:
        assert page.evaluate("document.documentElement.scrollWidth") <= 375


def test_a_report_has_no_other_policies(browser, run):
    path = run.path.with_name("report.html")
    path.write_text(build_report([run.path]), encoding="utf-8")
    with opened_page(browser, path) as page:
        assert 0 == page.locator("#policies").count()
        assert "Loss scale report" == page.locator(".eyebrow").text_content()


def test_twenty_scales_that_move_in_every_step_fit_in_the_page(run):
    steps = np.arange(1, 60_001)
    noise = np.random.default_rng(0).random((20, steps.size)).astype(np.float32)
    scales = {f"p{n}": row for n, row in enumerate(noise)}
    policies = OtherPolicies(steps, scales, ["policy"], [["as recorded"]], [])
    page = make_page([run], [summarize_run(run)], policies)
    assert len(page.encode()) <= MOST_BYTES
