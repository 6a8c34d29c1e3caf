"""The report page in a real browser: every control, against numbers from NumPy."""

import re
import time

import numpy as np
import pytest
from helpers.browser import launched_browser, opened_page
from helpers.limits import HANG_SECONDS
from helpers.runs import record_run

from lossscale.diagnostics import (
    Recorder,
    build_report,
    exponent_histogram,
    measure_tensors,
)
from lossscale.diagnostics.report.tensors import outcome

STEPS = 4_000


@pytest.fixture(scope="module")
def browser():
    with launched_browser() as browser:
        yield browser


@pytest.fixture(scope="module")
def known(tmp_path_factory):
    return record_run(tmp_path_factory.mktemp("run") / "run.jsonl", STEPS, every=250)


@pytest.fixture(scope="module")
def report(known):
    path = known.path.with_suffix(".html")
    path.write_text(build_report([known.path]), encoding="utf-8")
    return path


@pytest.fixture
def page(browser, report):
    with opened_page(browser, report) as page:
        yield page


def shown_range(page):
    return tuple(map(int, page.get_attribute("html", "data-shown").split("-")))


def wait_for_range(page, first, last):
    page.wait_for_selector(f'html[data-shown="{first}-{last}"]')


def wait_for(page, condition):
    """Wait in Python: the page's policy lets no other script run in it."""
    deadline = time.monotonic() + HANG_SECONDS
    while not condition():
        assert time.monotonic() < deadline
        page.wait_for_timeout(10)


def wait_for_another_range(page):
    wait_for(page, lambda: shown_range(page) != (1, STEPS))


def table_of(page, chart):
    """Return the rows of the table under a chart, as text."""
    figure = page.locator(f"figure[data-chart={chart}]")
    if figure.locator("details").get_attribute("open") is None:
        figure.locator("summary").click()
    figure.locator("details table").wait_for()
    rows = figure.locator("details tbody tr").all()
    return [row.locator("th, td").all_inner_texts() for row in rows]


def numbers(text):
    return [float(word) for word in re.findall(r"[\d.]+(?:e-?\d+)?", text)]


def assert_table_shows(rows, column, values, first_step):
    """Each row of a table has the extremes of the steps that it represents."""
    assert rows
    for row in rows:
        steps = [int(word) for word in numbers(row[0].replace(",", ""))]
        part = values[steps[0] - first_step : steps[-1] - first_step + 1]
        found = numbers(row[column].replace(",", ""))
        expected = [part.min(), part.max()]
        assert (found[0], found[-1]) == pytest.approx(expected, rel=6e-4), row


def test_the_whole_run_is_shown_at_first_with_every_extreme(page, known):
    assert (1, STEPS) == shown_range(page)
    assert_table_shows(table_of(page, "loss"), 1, known.loss, 1)


def test_zooming_decodes_single_steps(page, known):
    page.fill("#from", "1300")
    page.fill("#to", "1339")
    page.dispatch_event("#to", "change")
    wait_for_range(page, 1300, 1339)
    wait_for(page, lambda: "every step" in page.inner_text("#range-text"))
    rows = table_of(page, "loss")
    assert [f"{step:,}" for step in range(1300, 1340)] == [row[0] for row in rows]
    losses = [float(row[1]) for row in rows]
    assert known.loss[1299:1339].tolist() == pytest.approx(losses, rel=6e-4)
    assert_table_shows(table_of(page, "norm"), 1, known.norm[1299:1339], 1300)
    skips = [row[2] for row in table_of(page, "scale")]
    causes = [f"1 {cause}" if cause else "0" for cause in known.causes[1299:1339]]
    assert causes == skips


def write_run(path, losses, skipped, **header):
    """Write a run's lines at once: recording a million steps would take a minute."""
    Recorder(path, writers=(), rank=0, **header).close()
    head = path.read_text(encoding="utf-8").splitlines()[0]
    lines = [
        f"[{i},{i},1024,1,1,1,0.5,{loss}]" for i, loss in enumerate(losses.tolist(), 1)
    ]
    for step in skipped:
        lines[step - 1] = (
            f'[{step},{step},1024,0,1,1,0.5,{losses[step - 1]},null,"inf"]'
        )
    path.with_name(f"{path.name}.rollup").unlink()
    path.write_text("\n".join([head, *lines, ""]), encoding="utf-8")


def zoom_to(page, first, last):
    """Zoom, and return the rows of the tables of loss and scale with their steps."""
    # The page must not change the second number while it is typed.
    page.click("#whole")
    wait_for(page, lambda: page.input_value("#to") == page.get_attribute("#to", "max"))
    page.fill("#from", str(first))
    page.fill("#to", str(last))
    page.dispatch_event("#to", "change")
    wait_for_range(page, first, last)
    wait_for(page, lambda: f"Steps {first:,} to {last:,}" in range_text(page))
    tables = []
    for chart in ("loss", "scale"):
        wait_for(page, lambda chart=chart: covers(table_of(page, chart), first, last))
        tables.append([[steps_of(row), *row[1:]] for row in table_of(page, chart)])
    return tables


def range_text(page):
    return page.inner_text("#range-text")


def steps_of(row):
    steps = [int(word) for word in numbers(row[0].replace(",", ""))]
    return steps[0], steps[-1]


def covers(rows, first, last):
    """Whether the rows are those of a range, each step in one of them."""
    steps = [steps_of(row) for row in rows]
    starts = [start for start, _ in steps[1:]]
    return (
        bool(steps)
        and steps[0][0] <= first <= steps[0][1]
        and steps[-1][0] <= last <= steps[-1][1]
        and starts == [end + 1 for _, end in steps[:-1]]
    )


ZOOMS = {
    # Beyond the steps, the merged buckets, and a million steps, at edges of chunks.
    20_000: [(4_080, 4_110), (4_090, 4_099), (1, 20_000), (4_000, 9_000)],
    300_000: [
        (150_004, 150_024),
        (150_000, 150_024),
        (32_760, 32_775),
        (4_000, 90_000),
    ],
    1_100_000: [
        (600_100, 600_130),
        (500_000, 500_030),
        (1_020, 1_030),
        (550_000, 560_000),
        (1_099_000, 1_100_000),
    ],
}


STEP_BY_STEP = [
    (4_080, 4_110, 20_000),
    (4_090, 4_099, 20_000),
    # Windows of a long run, around skips.
    (600_100, 600_130, 1_100_000),
    (500_000, 500_030, 1_100_000),
    (1_020, 1_030, 1_100_000),
]


@pytest.mark.parametrize("size", ZOOMS)
def test_a_zoom_never_moves_or_repeats_what_happened(browser, tmp_path, size):
    rng = np.random.default_rng(size)
    losses = np.round(rng.random(size) + 1, 6)
    skipped = [1_025, 4_099, 150_003, 32_769, 500_020, 600_101, 600_128, 1_099_990]
    skipped = [step for step in skipped if step <= size]
    for step in skipped:
        losses[step - 2] = 50.0
    path = tmp_path / "run.jsonl"
    write_run(path, losses, skipped)
    html = build_report([path])
    out = path.with_suffix(".html")
    out.write_text(html, encoding="utf-8")
    with opened_page(browser, out) as page:
        for first, last in ZOOMS[size]:
            loss, scale = zoom_to(page, first, last)
            for (start, end), text in loss:
                part = losses[start - 1 : end]
                found = numbers(text)
                expected = [part.min(), part.max()]
                assert (found[0], found[-1]) == pytest.approx(expected, rel=6e-4)
            for (start, end), _, text in scale:
                count = sum(start <= step <= end for step in skipped)
                assert text == (f"{count} inf" if count else "0"), (start, end)
            key = page.inner_text("figure[data-chart=scale] .causes").strip()
            beyond = re.search(r"in steps ([\d,]+) to ([\d,]+)", key)
            named = (
                (word.replace(",", "") for word in beyond.groups()) if beyond else ()
            )
            low, high = map(int, named) if beyond else (first, last)
            assert low <= first < last <= high
            count = sum(low <= step <= high for step in skipped)
            assert key.startswith(f"{count} skipped" if count else "No step in view")
            if last - first < 40:
                is_every = all(start == end for (start, end), _ in loss)
                assert is_every == ("every step" in range_text(page))
                assert is_every == ((first, last, size) in STEP_BY_STEP)


def test_the_toolbar_zooms_pans_and_goes_back(page):
    page.click("#zoom-in")
    wait_for_another_range(page)
    first, last = shown_range(page)
    assert 2_000 == last - first + 1
    page.click("#pan-left")
    wait_for_range(page, first - 1_000, last - 1_000)
    page.click("#pan-right")
    wait_for_range(page, first, last)
    page.click("#zoom-out")
    wait_for_range(page, 1, STEPS)
    page.click("#zoom-in")
    page.click("#whole")
    wait_for_range(page, 1, STEPS)


def test_dragging_across_a_chart_zooms_and_a_double_click_goes_back(page):
    over = page.locator("figure[data-chart=loss] .u-over")
    over.scroll_into_view_if_needed()
    box = over.bounding_box()
    page.mouse.move(box["x"] + box["width"] * 0.25, box["y"] + 40)
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] * 0.5, box["y"] + 50, steps=5)
    page.mouse.up()
    wait_for_another_range(page)
    first, last = shown_range(page)
    assert (1_000, 2_000) == pytest.approx((first, last), abs=20)
    page.mouse.dblclick(box["x"] + 50, box["y"] + 50)
    wait_for_range(page, 1, STEPS)


def test_the_keyboard_moves_zooms_and_pans(page, known):
    chart = page.locator("figure[data-chart=loss] .plot")
    chart.focus()
    page.keyboard.press("End")
    readout = page.locator("figure[data-chart=loss] .readout")
    assert "step" in readout.inner_text()
    assert "polite" == readout.get_attribute("aria-live")
    page.keyboard.press("+")
    wait_for_another_range(page)
    first, last = shown_range(page)
    page.keyboard.press("Shift+ArrowRight")
    wait_for_range(page, first + 500, last + 500)
    page.keyboard.press("0")
    wait_for_range(page, 1, STEPS)
    page.keyboard.press("Home")
    page.keyboard.press("ArrowRight")
    text = readout.inner_text()
    first, last, *_, highest = numbers(text.replace(",", ""))
    part = known.loss[int(first) - 1 : int(last)]
    assert part.max() == pytest.approx(highest, rel=6e-4)


def test_the_slider_says_what_numpy_computes(page, known):
    steps = sorted(known.gradients)
    shown = page.locator("#sample option").all_inner_texts()
    assert f"step {steps[-1]:,}" == shown[-1]
    name = "blocks.2.mlp"
    page.select_option("#tensor", label=name)
    page.select_option("#sample", label=f"step {steps[-1]:,}")
    stored = known.gradients[steps[-1]][name]
    first, counts = exponent_histogram(stored)
    for shift in (0, -11, 17):
        page.fill("#shift", str(shift))
        for form in ("float16", "float8_e4m3", "float8_e5m2"):
            cells = page.locator(f"#outcomes tr[data-format={form}] td")
            expected = outcome(counts, first, stored.size, form, shift)
            zero, small, over = (numbers(text) for text in cells.all_inner_texts())
            assert expected.to_zero * 100 == pytest.approx(zero[0], abs=0.06)
            assert expected.subnormal * 100 == pytest.approx(small[0], abs=0.06)
            assert expected.overflow * 100 == pytest.approx(over[0], abs=0.06)
            assert expected.overflow_most * 100 == pytest.approx(over[-1], abs=0.06)


def test_the_histogram_counts_every_number(page, known):
    name, step = "blocks.0.attn", max(known.gradients)
    page.select_option("#tensor", label=name)
    page.locator("#histogram summary").click()
    rows = page.locator("#histogram details tbody tr")
    rows.first.wait_for()  # it is filled when the browser says that it is open
    counts = [
        int(row.locator("td").first.inner_text().replace(",", "")) for row in rows.all()
    ]
    assert known.gradients[step][name].size == sum(counts)
    bars = page.locator("#histogram .picture rect.bar").count()
    assert np.count_nonzero(exponent_histogram(known.gradients[step][name])[1]) == bars


def test_a_map_is_read_by_pointer_and_by_keyboard(page, known):
    canvas = page.locator("figure[data-map=headroom] canvas")
    canvas.scroll_into_view_if_needed()
    canvas.focus()
    page.keyboard.press("ArrowDown")
    page.keyboard.press("ArrowRight")
    readout = page.locator("figure[data-map=headroom] .readout")
    steps, name = sorted(known.gradients), "blocks.0.attn"
    largest = np.abs(known.gradients[steps[1]][name].astype(np.float64)).max()
    bits = f"{np.log2(65504.0 / largest):.1f} bits"
    assert f"step {steps[1]:,}{name}{bits}" == re.sub(r"\n", "", readout.inner_text())
    canvas.hover(position={"x": 3, "y": 3})
    assert f"step {steps[0]:,}" in readout.inner_text()


def test_every_picture_has_a_table(page):
    for figure in page.locator("#curves figure, #tensors figure").all():
        summary = figure.locator("summary")
        if figure.locator("details").get_attribute("open") is None:
            summary.click()
        figure.locator("details tbody tr").nth(3).wait_for()
        assert "table" in summary.inner_text()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [375, 1200])
def test_nothing_is_wider_than_the_window(browser, report, width, scheme):
    with opened_page(browser, report, width=width, scheme=scheme) as page:
        assert width >= page.evaluate("document.documentElement.scrollWidth")


LONG_NAME = (
    "base_model.model.model.language_model.layers.10.self_attn.q_proj.lora_A.default."
    "weight"
)


@pytest.mark.parametrize("count", [1, 2])
def test_long_names_are_not_wider_than_a_phone(browser, tmp_path, count):
    paths = [tmp_path / f"{i}.jsonl" for i in range(count)]
    for i, path in enumerate(paths):
        title = f"fp16_sweep_lr_3e-4_bs_512_warmup_2000_seed_1337_cosine_v2_final_{i}"
        config = {"model": f"/mnt/checkpoints/{'folder_' * 12}checkpoint-{i}"}
        names = [LONG_NAME, "b"]
        with Recorder(
            path, name=title, config=config, names=names, writers=()
        ) as recorder:
            for step in range(60):
                bad = step > 40
                nonfinite = {LONG_NAME: "inf"} if bad else {}
                recorder.record(
                    scale=8.0, applied=not bad, nonfinite=nonfinite, loss=1.0, amax=1.0
                )
                if step % 10 == 0:
                    gradients = {name: np.full(8, 0.5, np.float16) for name in names}
                    recorder.record_statistics(measure_tensors(gradients), scale=8.0)
    out = tmp_path / "report.html"
    out.write_text(build_report(paths), encoding="utf-8")
    with opened_page(browser, out, width=375) as page:
        assert 375 >= page.evaluate("document.documentElement.scrollWidth")
        for part in page.locator("p, li, label, select, h3").all():
            box = part.bounding_box()
            assert box is None or box["x"] + box["width"] <= 375


def test_a_run_without_steps_moves_neither_the_axis_nor_the_list(browser, tmp_path):
    empty, late = tmp_path / "empty.jsonl", tmp_path / "late.jsonl"
    Recorder(empty, writers=()).close()
    with Recorder(late, writers=()) as recorder:
        for step in range(100_000, 100_200):
            recorder.record(scale=8.0, applied=True, loss=1.0, step=step)
    out = tmp_path / "report.html"
    out.write_text(build_report([empty, late]), encoding="utf-8")
    with opened_page(browser, out) as page:
        assert (100_000, 100_199) == shown_range(page)
        assert "every step" in range_text(page)
        assert "1" == page.input_value("#run")


def test_a_step_without_a_value_is_one_dash(browser, tmp_path):
    steps = [{"scale": 8.0, "applied": True} for _ in range(30)]
    for i in range(0, 30, 10):
        steps[i]["loss"] = 1.0 + i
    with open_run(browser, tmp_path / "run.jsonl", steps) as page:
        found = [row[1] for row in table_of(page, "loss")]
    assert [f"{1 + i}" if i % 10 == 0 else "\u2013" for i in range(30)] == found


def test_numbers_that_are_not_finite_count_as_overflow(browser, tmp_path):
    path = tmp_path / "run.jsonl"
    gradient = np.full(1_000, 0.5, np.float16)
    gradient[:10] = np.inf
    with Recorder(path, names=["w"], writers=()) as recorder:
        recorder.record(scale=8.0, applied=False, nonfinite={"w": "inf"})
        recorder.record_statistics(measure_tensors({"w": gradient}), scale=8.0)
    out = path.with_suffix(".html")
    out.write_text(build_report([path]), encoding="utf-8")
    share = np.mean(~np.isfinite(gradient)) * 100
    with opened_page(browser, out) as page:
        cells = page.locator("#outcomes tr[data-format=float16] td").all_inner_texts()
        assert [share] == pytest.approx(numbers(cells[-1]))
        assert "were not finite" in page.inner_text("#zeros")
        page.locator("#histogram summary").click()
        rows = page.locator("#histogram details tbody tr")
        rows.first.wait_for()
        assert ["not finite", "10"] == rows.last.locator("th, td").all_inner_texts()[:2]
        page.locator("figure[data-map=headroom] canvas").focus()
        page.keyboard.press("ArrowDown")
        readout = page.locator("figure[data-map=headroom] .readout")
        assert "not finite" in readout.inner_text()


def test_a_phone_shows_every_column_of_the_tables_without_scrolling(browser, report):
    with opened_page(browser, report, width=375) as page:
        tables = page.locator("section .table.whole:visible, #exponents .table:visible")
        widths = tables.evaluate_all(
            "found => found.map(t => [t.scrollWidth, t.clientWidth])"
        )
        assert widths
        assert all(wanted <= shown for wanted, shown in widths)


def test_the_right_axis_is_announced_only_where_it_is_drawn(browser, tmp_path):
    for clip in (1.0, 0.5):
        path = tmp_path / f"{clip}.jsonl"
        with Recorder(path, writers=()) as recorder:
            for _ in range(9):
                recorder.record(scale=8.0, applied=True, norm=2.0, clip=clip)
        page_path = path.with_suffix(".html")
        page_path.write_text(build_report([path]), encoding="utf-8")
        with opened_page(browser, page_path) as page:
            assert (clip < 1.0) == page.get_by_text("on the right axis").is_visible()


def test_text_has_enough_contrast(browser, report):
    luminance = """(text) => {
      const [r, g, b] = text.match(/[\\d.]+/g).map((v) => v / 255)
        .map((v) => (v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4));
      return 0.2126 * r + 0.7152 * g + 0.0722 * b;
    }"""
    for scheme in ("light", "dark"):
        with opened_page(browser, report, scheme=scheme) as page:
            ground = page.evaluate(
                f"({luminance})(getComputedStyle(document.body).backgroundColor)"
            )
            for selector in (".sub", "p", "td", "summary", ".tiles .extra", "thead th"):
                ink = page.evaluate(
                    f"({luminance})(getComputedStyle("
                    f"document.querySelector('{selector}')).color)"
                )
                low, high = sorted((ground, ink))
                assert (high + 0.05) / (low + 0.05) >= 4.5, (scheme, selector)


def test_everything_that_can_be_used_has_a_name(page):
    unnamed = page.evaluate(
        """[...document.querySelectorAll('button, input, select, canvas, .plot')]
          .filter((e) => !e.closest('[aria-hidden]'))
          .filter((e) => !(e.getAttribute('aria-label') || e.textContent.trim()
            || e.labels?.length)).map((e) => e.outerHTML)"""
    )
    assert [] == unnamed
    assert 1 == page.locator("h1").count()


def test_runs_are_hidden_and_shown(browser, tmp_path, known):
    other = record_run(tmp_path / "other.jsonl", 500, seed=1, name="other run")
    path = tmp_path / "report.html"
    path.write_text(build_report([known.path, other.path]), encoding="utf-8")
    with opened_page(browser, path) as page:
        heads = "figure[data-chart=loss] details thead th"
        table_of(page, "loss")
        assert ["steps", "run", "other run"] == page.locator(heads).all_inner_texts()
        page.locator(".toggle-run").nth(0).uncheck()
        wait_for(page, lambda: page.locator(heads).count() == 2)
        assert ["steps", "other run"] == page.locator(heads).all_inner_texts()
        page.locator(".toggle-run").nth(0).check()
        wait_for(page, lambda: page.locator(heads).count() == 3)
        page.select_option("#run", label="run")
        last = f"step {max(known.gradients):,}"
        samples = page.locator("#sample option")
        wait_for(page, lambda: samples.all_inner_texts()[-1:] == [last])
        assert page.locator("#differences tbody tr").count() > 3


def open_run(browser, path, steps, **settings):
    """Record steps given as keywords, and open their report."""
    with Recorder(path, writers=(), **settings) as recorder:
        for step in steps:
            recorder.record(**step)
    out = path.with_suffix(".html")
    out.write_text(build_report([path]), encoding="utf-8")
    return opened_page(browser, out)


PIXELS = r"""([chart, ...names]) => {
  const canvas = document.querySelector(`figure[data-chart=${chart}] canvas`);
  const style = getComputedStyle(document.documentElement);
  const inks = names.map((name) => style.getPropertyValue(name).trim().match(/\w\w/g)
    .map((pair) => parseInt(pair, 16)));
  const { width, height } = canvas;
  const data = canvas.getContext("2d").getImageData(0, 0, width, height).data;
  return inks.map((ink) => {
    const found = [];
    for (let i = 0; i < width * height; i++) {
      const near = ink.every((part, k) => Math.abs(data[4 * i + k] - part) < 8);
      if (near && data[4 * i + 3] > 200) {
        found.push([i % width / width, Math.floor(i / width) / height]);
      }
    }
    return found;
  });
}"""


def pixels(page, chart, *colours):
    """Return where a chart has colours of the style sheet.

    One list for each, of shares of the width and the height.
    """
    return page.evaluate(PIXELS, [chart, *colours])


def test_a_skip_is_marked_at_the_scale_that_it_had(browser, tmp_path):
    """In a bucket of several steps the scale has been lowered by its end."""
    steps = [{"scale": 2.0**16 if i < 1000 else 2.0**15} for i in range(3000)]
    steps = [step | {"applied": i != 999} for i, step in enumerate(steps)]
    with open_run(browser, tmp_path / "run.jsonl", steps) as page:
        assert "steps a point" in page.inner_text("#range-text")
        (marks,) = pixels(page, "scale", "--alarm")
    assert marks
    # The axis goes from 2**14 to 2**17, and the mark belongs to 2**16.
    assert np.mean([y for _, y in marks]) < 0.4


def test_a_loss_that_is_not_finite_is_a_gap_with_a_mark(browser, tmp_path):
    steps = [{"scale": 8.0, "applied": True, "loss": 1.0 + i % 2} for i in range(100)]
    for i in range(40, 60):
        steps[i]["loss"] = np.nan if i % 2 else np.inf
    path = tmp_path / "run.jsonl"
    with open_run(browser, path, steps, alarms=None) as page:
        line, marks = pixels(page, "loss", "--run-0", "--alarm")
        key = page.inner_text("figure[data-chart=loss] .causes")
        rows = table_of(page, "loss")
    assert "20 steps with a loss that was not finite" in key
    across = [x for x, _ in line]
    low, size = min(across), max(across) - min(across)
    assert not [x for x in across if 0.43 < (x - low) / size < 0.57]
    assert len(across) > 100
    assert max(y for _, y in marks) < 0.2
    assert any("not finite" in row[1] for row in rows)


def test_a_line_goes_on_where_nothing_was_measured(browser, tmp_path):
    """A loss that is logged every tenth step is one line, and not ten points."""
    steps = [{"scale": 8.0, "applied": True} for _ in range(100)]
    for i in range(0, 100, 10):
        steps[i]["loss"] = 1.0 + i % 20
    with open_run(browser, tmp_path / "run.jsonl", steps) as page:
        (line,) = pixels(page, "loss", "--run-0")
    across = {round(x, 2) for x, _ in line}
    assert len(across) > 50


def test_a_loss_between_two_that_are_not_finite_is_a_point(browser, tmp_path):
    steps = [{"scale": 8.0, "applied": True, "loss": np.nan} for _ in range(31)]
    steps[15]["loss"] = 1.0
    path = tmp_path / "run.jsonl"
    with open_run(browser, path, steps, alarms=None) as page:
        assert pixels(page, "loss", "--run-0")[0]


def test_alarms_are_marked_and_named(browser, tmp_path):
    steps = [{"scale": 1.0, "applied": i < 50} for i in range(100)]
    with open_run(browser, tmp_path / "run.jsonl", steps) as page:
        key = page.inner_text("figure[data-chart=scale] .causes")
        assert "alarm: floor at step 53" in key
        assert pixels(page, "scale", "--alarm")[0]
        page.fill("#from", "50")
        page.fill("#to", "60")
        page.dispatch_event("#to", "change")
        wait_for_range(page, 50, 60)
        page.locator("figure[data-chart=scale] .plot").focus()
        readout = page.locator("figure[data-chart=scale] .readout")
        found = []
        for _ in range(4):
            page.keyboard.press("ArrowRight")
            found.append("alarm: floor" in readout.inner_text())
        assert "step 53" in readout.inner_text()
        assert [False, False, False, True] == found


def test_a_map_has_the_steps_under_its_columns(page, known):
    steps = sorted(known.gradients)
    labels = page.locator("figure[data-map=headroom] .steps span")
    texts = labels.all_inner_texts()
    assert (f"step {steps[0]:,}", f"{steps[-1]:,}") == (texts[0], texts[-1])
    canvas = page.locator("figure[data-map=headroom] canvas").bounding_box()
    last = labels.last.bounding_box()
    right = canvas["x"] + canvas["width"]
    assert last["x"] + last["width"] == pytest.approx(right, abs=60)


def test_a_wide_table_of_a_phone_says_that_it_scrolls(browser, tmp_path, known):
    path = tmp_path / "report.html"
    path.write_text(build_report([known.path] * 2), encoding="utf-8")
    for width, is_wide in ((375, True), (1200, False)):
        with opened_page(browser, path, width=width) as page:
            table = page.locator("#content > .table").first
            assert is_wide == (table.get_attribute("tabindex") == "0")
            hint = page.locator("#content > .scroll-hint")
            assert is_wide == (hint.count() == 1 and hint.is_visible())


HOSTILE = [
    "</script><script>alert(1)</script>",
    "<img src=x onerror=alert(1)>",
    "'\"&amp;${alert(1)}",
    "\u202ereversed",
]


def test_hostile_names_stay_text(browser, tmp_path):
    path = tmp_path / "run.jsonl"
    record_run(path, 200, names=HOSTILE, name=HOSTILE[1], every=50)
    out = tmp_path / "report.html"
    out.write_text(build_report([path]), encoding="utf-8")
    with opened_page(browser, out) as page:
        assert HOSTILE[1] == page.locator("h1").inner_text()
        labels = page.locator("figure[data-map=lost] .labels li")
        assert HOSTILE == labels.all_inner_texts()
        assert HOSTILE == page.locator("#tensor option").all_inner_texts()[1:]
        assert 0 == page.locator("img").count()
        assert 2 == page.locator("script").count()


@pytest.mark.parametrize("steps", [0, 1, 2])
def test_the_shortest_runs_have_a_page(browser, tmp_path, steps):
    path = tmp_path / "run.jsonl"
    with Recorder(path, writers=()) as recorder:
        for _ in range(steps):
            recorder.record(scale=8.0, applied=True)
    out = tmp_path / "report.html"
    out.write_text(build_report([path]), encoding="utf-8")
    with opened_page(browser, out) as page:
        assert "run" == page.locator("h1").inner_text()
