"""The playground in headless Chromium, on the application over scripted engines.

`CITER_SCREENSHOTS=docs/images` renews the pictures of the documentation.
"""

from __future__ import annotations

import os
import shutil
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pytest
import uvicorn
from playwright.sync_api import Browser, Page, expect, sync_playwright

from citer_ray.config_serve import ServeConfig
from citer_ray.engines.scripted import ScriptedEngine
from citer_ray.prompts import PromptFormat
from citer_ray.serving.app import Service, build_app
from citer_ray.serving.jobs import RouterRef
from citer_ray.serving.local import LocalBackend
from citer_ray.serving.planning import ServedPair
from citer_ray.serving.prompting import PromptEncoder
from citer_ray.serving.routers import RoutersInService, ServedRouter
from tests.unit.serving_world import CALIBRATION, pair_cost

TIMEOUT_MS = 120_000  # a busy machine is slow, not broken
PROMPT_ID, EOS = 0, 1
# Each row: the SLM's token, the LLM's token, p_slm.
ANSWER = [
    ("Ana", "Ana", 0.97),
    (" has", " has", 0.99),
    (" 3", " 3", 0.93),
    (" apples", " apples", 0.98),
    (".", ".", 0.95),
    (" She", " She", 0.91),
    (" buys", " buys", 0.96),
    (" 4", " 4", 0.88),
    (" more", " more", 0.94),
    (",", ",", 0.72),
    (" so", " so", 0.61),
    (" she", " she", 0.97),
    (" has", " has", 0.92),
    (" 3", " 3", 0.58),
    (" +", " +", 0.35),
    (" 4", " 4", 0.83),
    (" =", " =", 0.96),
    (" 8", " 7", 0.12),
    (" apples", " apples", 0.95),
    (".", ".", 0.98),
    ("\n", "\n", 0.9),
    ("The", "The", 0.99),
    (" answer", " answer", 0.99),
    (" is", " is", 0.98),
    (" 8", " 7", 0.31),
    (" apples", " apples", 0.86),
    (".", ".", 0.97),
]
WORDS = sorted({word for slm, llm, _ in ANSWER for word in (slm, llm)})
SLM_TEXT, LLM_TEXT = ("".join(column) for column in list(zip(*ANSWER, strict=True))[:2])


class WordTokenizer:
    """One id a word of the answer; prompts are so many equal ids as they have words."""

    bos_token_id = None
    chat_template = "yes"

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        return [PROMPT_ID] * len(text.split())

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        return "".join(WORDS[token - 2] for token in token_ids if token >= 2)

    def apply_chat_template(
        self, conversation: Sequence[Mapping[str, str]], *, tokenize: bool, add_generation_prompt: bool
    ) -> str:
        return " ".join(message["content"] for message in conversation)


def written(ids: Sequence[int]) -> int:
    """Tokens of the response in a context."""
    return sum(token != PROMPT_ID for token in ids)


def service() -> Service:
    def writes(column: int) -> ScriptedEngine:
        ids = [WORDS.index(str(row[column])) + 2 for row in ANSWER] + [EOS]
        return ScriptedEngine(
            lambda context: ids[written(context)],
            lambda context: ANSWER[written(context)][2] if written(context) < len(ANSWER) else 1.0,
            eos_id=EOS,
            max_model_len=300,
        )

    tokenizer = WordTokenizer()
    encoder = PromptEncoder(tokenizer, PromptFormat(bos="auto"), len(WORDS) + 2)
    pair = ServedPair(tokenizer, encoder, frozenset([EOS]), 300, pair_cost())
    router = ServedRouter(RouterRef("round-2", "nowhere"), 0.5, CALIBRATION)
    return Service(ServeConfig(), pair, LocalBackend(writes(0), writes(1)), RoutersInService(router))


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    config = uvicorn.Config(build_app(service()), host="127.0.0.1", port=0, log_level="warning")
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    deadline = time.monotonic() + 60
    while not server.started:
        assert thread.is_alive() and time.monotonic() < deadline, "the server did not start"
        thread.join(0.02)
    port = server.servers[0].sockets[0].getsockname()[1]
    yield f"http://127.0.0.1:{port}/"
    server.should_exit = True
    thread.join(10)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    found = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if found is None:
        pytest.fail("this test needs Chromium: apt-get install chromium", pytrace=False)
    with sync_playwright() as playwright:
        # Without a sandbox of its own: CI runs as root in a container.
        browser = playwright.chromium.launch(executable_path=found, args=["--no-sandbox"], timeout=TIMEOUT_MS)
        yield browser
        browser.close()


@pytest.fixture
def page(browser: Browser, address: str, request: pytest.FixtureRequest) -> Iterator[Page]:
    scheme = getattr(request, "param", "light")
    context = browser.new_context(color_scheme=scheme, viewport={"width": 1180, "height": 760}, device_scale_factor=1.5)
    context.set_default_timeout(TIMEOUT_MS)
    expect.set_options(timeout=TIMEOUT_MS)
    page = context.new_page()
    asked: list[str] = []
    problems: list[str] = []
    page.on("request", lambda one: asked.append(one.url))
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.goto(address)
    expect(page.locator("#router")).to_have_text("Router round-2, threshold 0.50")
    yield page
    context.close()
    assert problems == []
    assert [url for url in asked if not url.startswith((address, "data:"))] == []


def run(page: Page) -> None:
    page.get_by_role("button", name="Run").click()
    expect(page.get_by_role("status")).to_contain_text("Done.")


def set_level(page: Page, value: float) -> None:
    page.get_by_role("slider").fill(str(value))


def picture(page: Page, name: str) -> None:
    folder = os.environ.get("CITER_SCREENSHOTS")
    if folder is not None:
        page.screenshot(path=Path(folder) / name, full_page=True)


def llm_tokens(page: Page) -> list[str]:
    return page.locator("[data-model=routed] .token.llm").all_text_contents()


CONTRAST = """() => {
  const parse = (text) => (text.match(/[\\d.]+/g) ?? []).map(Number);
  const linear = (value) => value <= 0.03928 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4;
  const light = ([r, g, b]) => 0.2126 * linear(r / 255) + 0.7152 * linear(g / 255) + 0.0722 * linear(b / 255);
  const behind = (node) => {
    for (; node; node = node.parentElement) {
      const rgb = parse(getComputedStyle(node).backgroundColor);
      if (rgb.length === 3 || rgb[3] > 0) return rgb;
    }
    return [255, 255, 255];
  };
  const ratio = (node) => {
    const pair = [light(parse(getComputedStyle(node).color)), light(behind(node))];
    return (Math.max(...pair) + 0.05) / (Math.min(...pair) + 0.05);
  };
  const texts = document.querySelectorAll(".token, label, legend, p, dt, dd, h2, button:enabled, .value");
  return Math.min(...[...texts].filter((node) => node.offsetParent && node.textContent.trim()).map(ratio));
}"""


@pytest.mark.parametrize("page", ["light", "dark"], indirect=True)
def test_an_answer_coloured_by_its_writers(page: Page, request: pytest.FixtureRequest) -> None:
    set_level(page, 0.2)  # by the calibration table: threshold 0.4
    run(page)
    panel = page.locator("[data-model=routed]")
    assert panel.locator(".text").text_content() == LLM_TEXT
    assert llm_tokens(page) == [" +", " 7", " 7"]
    assert panel.locator("[data-stat=share]").text_content() == "11 %"
    assert panel.locator("[data-stat=tokens]").text_content() == str(len(ANSWER) + 1)
    assert "≈" not in (panel.locator("[data-stat=saved]").text_content() or "")

    panel.locator(".token").nth(17).hover()
    tip = page.get_by_role("tooltip")
    expect(tip).to_have_text("LLM · p_slm 0.120")
    assert page.evaluate(CONTRAST) >= 4.5
    picture(
        page, f"playground-{page.evaluate('matchMedia(`(prefers-color-scheme: dark)`).matches ? `dark` : `light`')}.png"
    )


def test_the_keyboard_reaches_everything(page: Page) -> None:
    page.get_by_label("Prompt").press("Control+Enter")
    expect(page.get_by_role("status")).to_contain_text("Done. Routed: 28 tokens, 11 % by the LLM")
    assert page.locator(".token[tabindex='0']").count() == 1  # one stop of Tab for the whole answer
    page.locator(".token").first.focus()
    tip = page.get_by_role("tooltip")
    expect(tip).to_have_text("SLM · p_slm 0.970")
    page.keyboard.press("ArrowRight")
    expect(tip).to_have_text("SLM · p_slm 0.990")
    page.keyboard.press("End")
    page.keyboard.press("ArrowLeft")
    expect(tip).to_have_text("SLM · p_slm 0.860")
    page.keyboard.press("Escape")
    expect(tip).to_be_hidden()
    for role, name in (("textbox", "Prompt"), ("slider", "LLM share to aim at"), ("spinbutton", "Max tokens")):
        assert page.get_by_role(role, name=name).count() == 1
    assert page.get_by_role("group", name="Answer: Routed").count() == 1


def test_the_slider_sets_a_share_or_a_threshold(page: Page) -> None:
    set_level(page, 0.6)  # threshold 0.8
    run(page)
    assert len(llm_tokens(page)) == 6
    page.get_by_label("Threshold", exact=True).check()
    expect(page.locator("#level-value")).to_have_text("0.50")  # the router's own
    set_level(page, 0)
    run(page)
    assert llm_tokens(page) == []
    assert page.locator("[data-model=routed] .text").text_content() == SLM_TEXT
    set_level(page, 0.3)
    run(page)
    assert llm_tokens(page) == [" 7"]


def test_compare_shows_three_answers_side_by_side(page: Page) -> None:
    page.get_by_label("Compare").check()
    run(page)
    texts = [page.locator(f"[data-model={model}] .text").text_content() for model in ("slm", "routed", "llm")]
    assert texts == [SLM_TEXT, LLM_TEXT, LLM_TEXT]
    shares = page.locator("[data-stat=share]").all_text_contents()
    assert shares == ["0 %", "11 %", "100 %"]
    lefts = [page.locator(f"[data-model={model}]").bounding_box() for model in ("slm", "routed", "llm")]
    assert len({box["y"] for box in lefts if box}) == 1
    page.locator("[data-model=llm] .token").nth(2).hover()
    expect(page.get_by_role("tooltip")).to_have_text("LLM · router not asked")
    picture(page, "playground-compare.png")
    page.set_viewport_size({"width": 360, "height": 740})
    assert page.evaluate("document.documentElement.scrollWidth") <= 360


def test_errors_are_said(page: Page) -> None:
    page.get_by_label("Max tokens").fill("9999")
    page.get_by_role("button", name="Run").click()
    expect(page.get_by_role("alert")).to_contain_text("maximum context length is 300")
    expect(page.get_by_role("status")).to_contain_text("Failed.")
    page.get_by_label("Max tokens").fill("5")
    run(page)
    expect(page.locator("#problem")).to_be_empty()
    assert page.locator("[data-stat=tokens]").text_content() == "5"
