"""The app as a visitor sees it, in headless Chromium: `make browser`. With SCREENSHOTS=docs it takes those of the docs."""

import base64
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time
import urllib.request

import pytest
from helpers.tiny import ROOT

pytestmark = pytest.mark.browser

LENGTH = int(os.environ.get("SCREENSHOT_TOKENS", 32))
PATIENCE = 600  # seconds: for a machine that is busy with other things
QUESTION = (
    "Ann has 4 bags with 6 apples each. She eats 5 apples. How many apples are left?\n"
    "Please reason step by step, and put your final answer within \\boxed{}."
)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.fixture(scope="module")
def url(smollm2_path):
    """Address of a running app with the shipped drafter."""
    pytest.importorskip("gradio")
    port = free_port()
    command = [sys.executable, "-m", "dflash_hub.demo.app", "--port", str(port)]
    offline = os.environ | {"HF_HUB_OFFLINE": "1"}
    app = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=offline)
    try:
        deadline = time.time() + PATIENCE
        while True:
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}", timeout=5).close()
                break
            except OSError:
                assert app.poll() is None, app.stdout.read()
                assert time.time() < deadline, "the app did not start"
                time.sleep(0.5)
        yield f"http://127.0.0.1:{port}"
    finally:
        app.terminate()
        app.wait(timeout=60)


@pytest.fixture(scope="module")
def browser():
    webdriver = pytest.importorskip("selenium.webdriver")
    chromium, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if not (chromium and driver):
        pytest.skip("needs Debian's packages chromium and chromium-driver")
    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    for argument in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars"):
        options.add_argument(argument)
    chrome = webdriver.Chrome(options=options, service=webdriver.ChromeService(driver))
    chrome.set_script_timeout(PATIENCE)
    yield chrome
    chrome.quit()


class Page:
    """A visitor's tab."""

    def __init__(self, browser, url: str, width: int = 1100, height: int = 900, theme: str = "light"):
        self.browser, self.width = browser, width
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
        browser.get(f"{url}/?__theme={theme}")
        self.until(lambda: self.all("#start") and self.all("#prompt textarea"))

    def all(self, selector: str):
        return self.browser.find_elements("css selector", selector)

    def one(self, selector: str):
        return self.all(selector)[0]

    def until(self, condition):
        from selenium.common.exceptions import StaleElementReferenceException

        deadline = time.time() + PATIENCE
        while time.time() < deadline:
            try:
                if condition():
                    return
            except (StaleElementReferenceException, IndexError):
                pass  # the page was drawn anew in between
            time.sleep(0.1)
        raise AssertionError(f"waited {PATIENCE} s; the page shows: {self.one('body').text}")

    def type(self, text: str):
        from selenium.webdriver.common.keys import Keys

        box = self.one("#prompt textarea")
        box.send_keys(Keys.CONTROL, "a")
        box.send_keys(Keys.BACKSPACE)
        if len(text) > 300:  # as a visitor pastes
            self.browser.execute_script(
                "arguments[0].value = arguments[1]; arguments[0].dispatchEvent(new Event('input'))", box, text
            )
        elif text:
            box.send_keys(text)

    def set(self, tokens: int, drafts: int = 7):
        """Length of the answers, and draft tokens a round: how many are drafted depends on how busy the machine is."""
        from selenium.webdriver.common.keys import Keys

        if not self.all("#length input[type=number]") or not self.one("#length input[type=number]").is_displayed():
            self.one("#settings button").click()
            self.until(lambda: self.one("#length input[type=number]").is_displayed())
        box = self.one("#length input[type=number]")
        box.send_keys(Keys.CONTROL, "a")
        box.send_keys(str(tokens), Keys.TAB)
        box = self.one("#drafts input")
        box.click()
        box.send_keys(Keys.CONTROL, "a")
        box.send_keys(str(drafts), Keys.ENTER)
        self.until(lambda: box.get_attribute("value") == str(drafts))
        self.one("#settings button").click()

    def race(self):
        self.one("#start").click()

    @property
    def state(self) -> str | None:
        return self.browser.execute_script("return document.querySelector('.stage')?.dataset.state")

    @property
    def note(self) -> str:
        return self.browser.execute_script("return document.querySelector('.stage .note')?.innerText || ''")

    def numbers(self, lane: str) -> dict[str, float]:
        cells = self.browser.execute_script(
            "return [...document.querySelectorAll('.lane.' + arguments[0] + ' .numbers div')]"
            ".map(cell => [cell.querySelector('dt').innerText, cell.querySelector('dd').innerText])",
            lane,
        )
        return {name: float(value.replace("-", "nan")) for name, value in cells}

    def text(self, lane: str) -> str:
        return self.browser.execute_script("return document.querySelector(arguments[0]).textContent", f".{lane} .text")

    def look(self, name: str):
        """Take a picture of the whole page, if pictures are asked for, and check that nothing sticks out of it."""
        wide = self.browser.execute_script("return document.documentElement.scrollWidth")
        assert wide <= self.width, f"the page is {wide} pixels wide on a screen of {self.width}"
        if not (folder := os.environ.get("SCREENSHOTS")):
            return
        asked = {"format": "png", "captureBeyondViewport": True}
        picture = base64.b64decode(self.browser.execute_cdp_cmd("Page.captureScreenshot", asked)["data"])
        assert len(picture) < 300_000
        (ROOT / folder / f"{name}.png").write_bytes(picture)


def errors_of(browser) -> list[dict]:
    """What the browser complained about, less what it could not fetch from elsewhere."""
    return [e for e in browser.get_log("browser") if e["level"] == "SEVERE" and "127.0.0.1" in json.dumps(e)]


def test_a_visitor_types_races_and_reads_the_numbers(browser, url):
    page = Page(browser, url)
    page.set(LENGTH)
    page.type(QUESTION)
    page.race()
    page.until(lambda: page.state == "running" and page.numbers("first")["tokens"] >= 3)
    partial = page.text("first")
    page.until(lambda: page.state == "over")
    drafter, plain = page.numbers("first"), page.numbers("second")
    assert drafter["tokens"] == plain["tokens"] == plain["forward passes"] <= LENGTH
    assert page.text("first") == page.text("second") and page.text("first").startswith(partial.strip("\n")[:10])
    assert "apples" in page.text("first")
    assert (
        drafter["forward passes"] < drafter["tokens"]
        and drafter["acceptance length"] > 1
        and plain["acceptance length"] == 1
    )
    rounds = [int(n) for n in re.findall(r"--accepted:\s*(\d+)", page.one(".bars").get_attribute("innerHTML"))]
    assert len(rounds) == drafter["forward passes"] - 1
    assert sum(rounds) + len(rounds) + 1 == drafter["tokens"]
    assert drafter["acceptance length"] == pytest.approx(1 + sum(rounds) / len(rounds), abs=0.006)
    assert page.all(".first mark") and not page.all(".second mark")
    assert "The texts are the same." in page.one(".verdict").text
    page.look("app")
    page.until(lambda: page.one("#start").is_enabled() and not page.one("#stop").is_enabled())
    assert not errors_of(browser)


TEXTS = """
const seen = [], body = document.querySelector('.gradio-container');
for (const node of body.querySelectorAll('*')) {
  const text = [...node.childNodes].filter(n => n.nodeType === 3).map(n => n.textContent.trim()).join('') || node.value;
  if (!text || !node.checkVisibility({checkVisibilityCSS: true, checkOpacity: true}) || node.closest(':disabled')) continue;
  let under = node;
  while (under && /, 0\\)$|transparent/.test(getComputedStyle(under).backgroundColor)) under = under.parentElement;
  seen.push([text, getComputedStyle(node).color, under ? getComputedStyle(under).backgroundColor : 'rgb(255, 255, 255)']);
}
return seen;
"""


def contrast(first: str, second: str) -> float:
    """WCAG's contrast of two colors as a browser computes them."""

    def brightness(color: str) -> float:
        parts = [float(part) / 255 for part in re.findall(r"[\d.]+", color)[:3]]
        linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
        return sum(weight * part for weight, part in zip((0.2126, 0.7152, 0.0722), linear))

    bright, dim = sorted((brightness(first), brightness(second)), reverse=True)
    return (bright + 0.05) / (dim + 0.05)


@pytest.mark.parametrize("theme", ("light", "dark"))
def test_all_text_can_be_read_and_settings_are_aligned(browser, url, theme):
    page = Page(browser, url, theme=theme)
    page.one("#settings button").click()
    page.until(lambda: page.one("#length input[type=number]").is_displayed())
    seen = browser.execute_script(TEXTS)
    assert {"Prompt", "Temperature", "Draft tokens", "0 is greedy"} <= {text for text, _, _ in seen}
    pale = [(text, color, under) for text, color, under in seen if contrast(color, under) < 4.5]
    assert not pale
    boxes = [
        box.rect for box in page.all("#settings input") if box.is_displayed() and box.get_attribute("type") != "range"
    ]
    middles = sorted(round(box["y"] + box["height"] / 2) for box in boxes)
    assert len(boxes) == 5 and middles[2] - middles[0] <= 2 and middles[4] - middles[3] <= 2, middles


def test_ctrl_enter_in_the_prompt_starts_and_enter_does_not(browser, url):
    from selenium.webdriver.common.keys import Keys

    page = Page(browser, url)
    page.set(16)
    page.type("Hi")
    box = page.one("#prompt textarea")
    box.send_keys(Keys.ENTER)
    assert box.get_attribute("value") == "Hi\n" and page.state is None
    box.send_keys(Keys.CONTROL, Keys.ENTER)
    page.until(lambda: page.state == "over")
    assert page.numbers("first")["tokens"] > 0 and box.get_attribute("value") == "Hi\n"


def test_it_fits_a_phone_in_dark_mode(browser, url):
    Page(browser, url, 390, 844).look("app-phone-start")
    page = Page(browser, url, 390, 844, "dark")
    page.set(LENGTH)
    page.race()
    page.until(lambda: page.state == "over")
    page.look("app-phone")
    lanes = [lane.rect for lane in page.all(".lane")]
    assert lanes[0]["x"] == lanes[1]["x"] and lanes[1]["y"] >= lanes[0]["y"] + lanes[0]["height"]
    shades = browser.execute_script(
        "return ['.gradio-container', '.lane', '.lane .text'].map((s, i) =>"
        " getComputedStyle(document.querySelector(s))[i < 2 ? 'backgroundColor' : 'color'])"
    )
    brightness = [sum(map(float, re.findall(r"[\d.]+", shade)[:3])) / 3 for shade in shades]
    assert max(brightness[:2]) < 60 and brightness[2] > 180


def test_bad_prompts_get_a_sentence(browser, url):
    page = Page(browser, url)
    for text, sentence in (("", "The prompt is empty"), ("apples and pears " * 400, "and this page takes 512")):
        page.type(text)
        page.race()
        page.until(lambda sentence=sentence: sentence in page.note)
        page.until(lambda: page.one("#start").is_enabled())
    page.one("#prompts button:nth-of-type(2)").click()
    page.until(lambda: page.one("#prompt textarea").get_attribute("value").startswith("Tom has 3 boxes"))


def test_two_visitors_wait_for_each_other_and_a_stopped_race_ends(browser, url):
    first = Page(browser, url)
    first.set(256)
    first.race()
    first.until(lambda: first.state == "running")
    one = browser.current_window_handle
    browser.switch_to.new_window("tab")
    two = browser.current_window_handle
    second = Page(browser, url)
    second.set(256)
    second.race()
    second.until(lambda: "Waiting for a turn" in second.note)
    browser.switch_to.window(one)
    first.one("#stop").click()
    first.until(lambda: first.state == "stopped")
    assert "Stopped." in first.note and 0 < first.numbers("second")["tokens"] < 256
    first.until(lambda: first.one("#start").is_enabled())
    browser.switch_to.window(two)
    second.until(lambda: second.numbers("second").get("tokens", 0) >= 8)
    numbers = second.numbers("second")
    rest = (256 - numbers["tokens"]) / numbers["tokens/s"]

    # The second visitor leaves in the middle; the first need not wait for that race to end.
    browser.close()
    left = time.time()
    browser.switch_to.window(one)
    first.race()
    first.until(lambda: first.state == "running")
    assert time.time() - left < rest / 2
    first.one("#stop").click()
    first.until(lambda: first.state == "stopped")
