"""The demo in a browser: `python -m dflash_hub.demo.app`, or `make app`; as a Space, see `space.py`.

The baseline and DFlash race on the same target, in turns (`race.py`); `page.py` is what they look like.
"""

import argparse
import os
import threading
import time
from collections.abc import Iterator

import gradio as gr
import torch
import transformers

from ..common.target_source import TargetSource
from . import page
from .pair import Pair
from .race import Race
from .terminal import PROMPTS

NAMES = ("A baker's rolls", "Boxes of pencils", "A train ticket", "The blue sky")
WAITING = "Waiting for a turn: one race at a time, so that nobody's seconds are shared."
UPDATES_PER_SECOND = 12


class App:
    """The page's functions over one pair; visitors' races wait for each other.

    Args:
        pair: loaded once, for all visitors.
    """

    def __init__(self, pair: Pair):
        self.pair = pair
        self.stops: dict[str, threading.Event] = {}  # by visitor: asks the race that waits or runs to stop
        messages = [{"role": "user", "content": "Hi"}]
        for drafter in (None, pair.drafter):  # warm-up
            pair.target.generate(
                **pair.encode(messages), assistant_model=drafter, max_new_tokens=4, do_sample=False
            )  # fmt: skip

    def begin(self, request: gr.Request):
        """A click on Race: the page shows at once that it was heard."""
        self.stops[request.session_hash] = threading.Event()
        return page.note(WAITING), gr.update(interactive=False), gr.update(interactive=True)

    def race(
        self,
        prompt: str,
        max_new_tokens: int,
        temperature: float,
        top_p: float,
        seed: float,
        drafts: int | str,
        request: gr.Request,
    ) -> Iterator[str]:
        """The stage's HTML, as the race goes on; ends early when the visitor stops it or leaves."""
        stop = self.stops.setdefault(request.session_hash, threading.Event())
        settings = {"max_new_tokens": int(max_new_tokens), "do_sample": temperature > 0}
        if temperature > 0:
            settings |= {"temperature": temperature, "top_p": top_p}
        try:
            race = Race(self.pair, prompt, int(seed or 0), settings, drafts)
        except ValueError as error:
            self.stops.pop(request.session_hash, None)
            yield page.note(str(error), wrong=True)
            return
        shown, rounds = 0.0, race.run()
        try:
            for _ in rounds:
                if stop.is_set():
                    break
                if time.perf_counter() - shown > 1 / UPDATES_PER_SECOND:
                    yield page.stage(race, self.pair.drafter.config.block_size)
                    shown = time.perf_counter()
        finally:
            rounds.close()
            self.stops.pop(request.session_hash, None)
        yield page.stage(race, self.pair.drafter.config.block_size, stopped=not race.over)

    def stop(self, request: gr.Request):
        """A click on Stop."""
        if request.session_hash in self.stops:
            self.stops[request.session_hash].set()

    def provenance(self) -> str:
        """What the numbers are measured on."""
        threads = f", {torch.get_num_threads()} thread(s)" if self.pair.device.type == "cpu" else ""
        dtype = str(self.pair.target.dtype).removeprefix("torch.")
        return (
            f"<p>Target: {self.pair.source}. {dtype} on {self.pair.device}{threads}, torch {torch.__version__}, transformers "
            f"{transformers.__version__}. The two take turns round by round, so that neither takes the other's cores; seconds "
            "are those in which each computed. Acceptance length: mean tokens that a round adds, the target's own included; it is "
            "highest on text like that which the drafter was trained on.</p>"
        )

    def blocks(self) -> gr.Blocks:
        """The page."""
        with gr.Blocks(title="DFlash: the same text, in fewer forward passes", analytics_enabled=False) as blocks:
            gr.HTML(page.INTRO, elem_classes="intro")
            prompt = gr.Textbox(PROMPTS[0], label="Prompt", lines=3, max_lines=8, elem_id="prompt")
            with gr.Row(elem_id="prompts"):
                for name, text in zip(NAMES, PROMPTS):
                    choice = gr.Button(name, size="sm", min_width=0, scale=0)
                    choice.click(lambda text=text: text, None, prompt, queue=False, show_progress="hidden")
            with gr.Accordion("Length, drafting, sampling", open=False, elem_id="settings"):
                with gr.Row():
                    length = gr.Slider(16, 256, 96, step=8, label="Tokens", info="at most", elem_id="length")
                    temperature = gr.Slider(0, 1.5, 0, step=0.1, label="Temperature", info="0 is greedy")
                    top_p = gr.Slider(0.1, 1, 1, step=0.05, label="Top-p", info="1 is all")
                with gr.Row():  # apart from the sliders, whose number stands beside the label
                    drafts = gr.Dropdown(
                        [("adaptive", "auto"), *range(1, self.pair.drafter.config.block_size)],
                        value="auto", label="Draft tokens", info="a round", elem_id="drafts",
                    )  # fmt: skip
                    seed = gr.Number(0, label="Seed", info="of sampling", precision=0, minimum=0)
            with gr.Row(elem_id="run"):
                start = gr.Button("Race", variant="primary", elem_id="start", scale=3)
                stop = gr.Button("Stop", interactive=False, elem_id="stop", scale=1, min_width=80)
            stage = gr.HTML(
                page.note("Press Race, or Ctrl+Enter in the prompt: both answer the same prompt."), elem_id="stage"
            )
            gr.HTML(self.provenance(), elem_classes="provenance")

            heard = start.click(
                self.begin, None, [stage, start, stop], queue=False, show_progress="hidden", trigger_mode="once"
            )
            raced = heard.then(
                self.race, [prompt, length, temperature, top_p, seed, drafts], stage,
                concurrency_limit=1, show_progress="hidden", api_name="race",
            )  # fmt: skip
            raced.then(
                lambda: (gr.update(interactive=True), gr.update(interactive=False)), None, [start, stop],
                queue=False, show_progress="hidden",
            )  # fmt: skip
            stop.click(self.stop, None, None, queue=False, show_progress="hidden")
        return blocks.queue(max_size=16)


def look() -> dict:
    """Keyword arguments of `launch` that make the page look as it does; fonts are the visitor's own."""
    theme = gr.themes.Soft(
        primary_hue="teal", neutral_hue="slate", font=["system-ui", "sans-serif"], font_mono=["monospace"]
    ).set(
        body_background_fill="var(--page)", body_background_fill_dark="var(--page)",
        body_text_color="var(--ink)", body_text_color_dark="var(--ink)",
        block_background_fill="var(--lane)", block_background_fill_dark="var(--lane)",
        button_primary_text_color="var(--on-start)", button_primary_text_color_dark="var(--on-start)",
        button_primary_background_fill="var(--start)", button_primary_background_fill_dark="var(--start)",
        button_primary_background_fill_hover="var(--start-hover)", button_primary_background_fill_hover_dark="var(--start-hover)",
    )  # fmt: skip
    return {"theme": theme, "css": page.CSS, "head": page.SCRIPT, "footer_links": []}


def main():
    """Serve the page; in a Space, on its port."""
    parser = argparse.ArgumentParser(description="The DFlash demo in a browser.")
    parser.add_argument("--target", help="repository or folder; default: SmolLM2-135M-Instruct")
    parser.add_argument(
        "--target-revision", help="revision of --target; default: the one that the drafter was made for"
    )
    parser.add_argument("--trust-remote-code", action="store_true", help="run the code that --target brings")
    parser.add_argument("--drafter", help="repository or folder; default: the shipped one")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--port", type=int, default=int(os.environ.get("GRADIO_SERVER_PORT", 7860)))
    options = parser.parse_args()
    target = options.target
    if target is not None:
        target = TargetSource(target, options.target_revision, options.trust_remote_code)
    app = App(Pair(target, options.drafter, options.dtype))
    app.blocks().launch(server_port=options.port, **look())


if __name__ == "__main__":
    main()
