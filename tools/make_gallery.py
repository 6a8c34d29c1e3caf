"""Make the pictures of docs/gallery.md: real trainings, real pages, a real browser.

    python tools/make_gallery.py docs/gallery

Needs Playwright, Debian's chromium and Pillow. The runs are the demonstration's four
and the training of benchmarks/alarm_runs.py whose fourth layer breaks.
"""

import io
import shutil
import sys
import tempfile
from pathlib import Path

from PIL import Image
from playwright.sync_api import sync_playwright

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

from alarm_runs import faulty_layer

from lossscale.cli.demo_runs import DemoRuns
from lossscale.demo import compare
from lossscale.diagnostics import Recorder, build_report, measure_tensors

EVERY = 10
SHOTS = (
    # name, page, width, scheme, first element, how much of the page below it
    ("summary", "faulty", 1120, "light", "header", 1130),
    ("curves", "faulty", 1120, "light", "#curves", 1180),
    ("tensors", "faulty", 1120, "dark", "#tensors", 1330),
    ("phone", "faulty", 375, "light", "#curves", 1300),
    ("compare", "demo", 1120, "light", "header", 1500),
)


def record_faulty(folder):
    """Train and record the run whose fourth layer breaks."""
    run = faulty_layer(keep=EVERY, steps=360)
    path = folder / "faulty.jsonl"
    names = [f"layer{i}.weight" for i in range(8)]
    with Recorder(
        path,
        name="A gain that is never reset",
        policy=run.policy,
        names=names,
        statistics_every=EVERY,
        writers=(),
        rank=0,
    ) as recorder:
        for record in run.records:
            fields = ("norm", "clip", "amax", "loss", "lr", "cause", "nonfinite")
            values = {name: getattr(record, name) for name in fields}
            recorder.record(
                step=record.step, scale=record.scale, applied=record.applied, **values
            )
            if record.step in run.gradients:
                statistics = measure_tensors(run.gradients[record.step])
                recorder.record_statistics(statistics, scale=record.scale)
    return [path]


def record_demo(folder):
    """Train and record the four runs of the demonstration."""
    with DemoRuns(folder, lambda: None) as runs:
        compare(on_step=runs.add)
    return runs.paths


def take(page, selector, height):
    """Return a picture of a page from an element on."""
    page.wait_for_selector("html[data-ready=yes]")
    page.wait_for_timeout(300)
    top = page.locator(selector).first.bounding_box()["y"]
    width = page.viewport_size["width"]
    clip = {"x": 0, "y": max(0, top), "width": width, "height": height}
    return Image.open(io.BytesIO(page.screenshot(full_page=True, clip=clip)))


def main(target):
    target.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as name, sync_playwright() as started:
        folder = Path(name)
        pages = {}
        for kind, record in (("faulty", record_faulty), ("demo", record_demo)):
            pages[kind] = folder / f"{kind}.html"
            pages[kind].write_text(build_report(record(folder)), encoding="utf-8")
        browser = started.chromium.launch(
            executable_path=shutil.which("chromium"), args=["--no-sandbox"]
        )
        for shot, kind, width, scheme, selector, height in SHOTS:
            page = browser.new_page(
                viewport={"width": width, "height": 900}, color_scheme=scheme
            )
            page.goto(pages[kind].as_uri())
            file = target / f"{shot}.webp"
            take(page, selector, height).save(file, quality=82, method=6)
            print(file, f"{file.stat().st_size / 1000:.0f} kB")
            page.close()
        browser.close()


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "docs/gallery"))
