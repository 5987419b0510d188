"""What a person does in the Prefect UI, in a real browser. Screenshots go to $CI_OUTPUT, or the state folder's `screenshots`."""

from __future__ import annotations

import json
import os
import re
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Page, expect, sync_playwright

from tests.conftest import PROJECT
from tests.office import Office

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
FLAGS = [
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync",
]  # fmt: skip
SCREENSHOTS = Path(os.environ.get("CI_OUTPUT") or PROJECT / ".state") / "screenshots"

pytestmark = [
    pytest.mark.fault,
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="no chromium on this machine: apt-get install chromium"),
]


@pytest.fixture(scope="module")
def page() -> Iterator[Page]:
    SCREENSHOTS.mkdir(parents=True, exist_ok=True)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        page = browser.new_page(viewport={"width": 1300, "height": 1500})
        page.set_default_timeout(60_000)
        expect.set_options(timeout=60_000)
        yield page
        browser.close()


def picture(page: Page, name: str) -> None:
    page.wait_for_timeout(1500)  # what is still being drawn
    page.screenshot(path=SCREENSHOTS / f"{name}.png")


def field(page: Page, label: str) -> object:
    return page.locator(".schema-form-property", has=page.locator(".schema-form-property__label", has_text=label)).last


def test_fill_in_the_form_of_sft_and_watch_the_run(office: Office, page: Page) -> None:
    page.goto(f"{office.url}/deployments/deployment/{office.deployment('sft/gpu')}/run?parameters=%7B%7D")
    page.get_by_text("another file").click()
    field(page, "recipe (Optional)").locator("textarea").fill(str(office.recipe))
    field(page, "Max steps (Optional)").locator("input").fill("3")
    page.keyboard.press("Tab")  # the value counts once the field is left
    picture(page, "sft-form")
    page.get_by_role("button", name="Submit").click()
    expect(page).not_to_have_url(re.compile(r"/run\?"))
    runs_of = {"deployments": {"id": {"any_": [office.deployment("sft/gpu")]}}}
    office.until(lambda: office.ask("flow_runs/filter", runs_of), 60, "the run that the form asked for")
    [run] = [run["id"] for run in office.ask("flow_runs/filter", runs_of)]
    page.goto(f"{office.url}/runs/flow-run/{run}")
    expect(page.locator(".state-badge", has_text="Running").first).to_be_visible()
    picture(page, "sft-running")
    state = office.ended(run)
    assert state["type"] == "COMPLETED", state["message"][-3000:]
    expect(page.locator(".state-badge", has_text="Completed").first).to_be_visible()
    picture(page, "sft-completed")

    assert office.ask(f"flow_runs/{run}")["parameters"]["sft"] == {"max_steps": 3}
    [key] = {path.parent.name for path in office.store.glob("sft/*/MANIFEST.json")}
    last = json.loads((office.store / "sft" / key / "metrics.jsonl").read_text().splitlines()[-1])
    assert last["step"] == 3, "the value of the form was used"

    page.get_by_text("Artifacts", exact=True).first.click()
    for shown in ("sft-curves", "generate-acceptance", "filter"):
        expect(page.get_by_text(shown, exact=True).first).to_be_visible()
    picture(page, "sft-artifacts")
    page.goto(f"{office.url}/artifacts/artifact/{office.shown(run)['sft-curves']['id']}")
    expect(page.locator("img[src^='data:image/png']").first).to_be_visible()
    picture(page, "sft-curves")
    page.goto(f"{office.url}/artifacts/artifact/{office.shown(run)['sft']['id']}")
    expect(page.get_by_text("Made from").first).to_be_visible()
    picture(page, "sft-lineage")


def test_cancel_an_rl_run_and_nothing_is_left(office: Office, page: Page) -> None:
    run = office.start("rl/gpu")
    office.until(lambda: list(office.state.glob("work/rl/*/work/checkpoint-*/COMPLETE.json")), 300, "the first checkpoint of rl")
    assert office.programs()
    page.goto(f"{office.url}/runs/flow-run/{run}")
    expect(page.locator(".state-badge", has_text="Running").first).to_be_visible()
    page.get_by_role("button", name="Cancel").first.click()
    picture(page, "rl-cancel-dialog")
    page.get_by_role("button", name="Confirm").click()
    start = time.monotonic()
    office.until(lambda: not office.programs(), 60, "the end of all stage programs")
    print(f"programs gone after {time.monotonic() - start:.1f} s")
    expect(page.locator(".state-badge", has_text="Cancelled").first).to_be_visible()
    picture(page, "rl-cancelled")
    assert office.ended(run)["type"] == "CANCELLED"
    assert list(office.state.glob("work/rl/*/work/checkpoint-*/COMPLETE.json")), "checkpoints are kept"
    assert not list(office.store.glob("rl/*/MANIFEST.json"))
