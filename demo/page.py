"""HTML of the app's stage: two lanes, what they wrote, and the rounds. Colors follow Gradio's light and dark themes."""

import re
from html import escape
from itertools import groupby

from .race import Lane, Race

CSS = """
:root { --drafted: #0d7d6c; --drafted-back: #c9efe5; --own: #8b93a1; --lane: #ffffff; --lane-edge: #dfe3ea;
        --quiet: #576173; --ink: #1f2937; --page: #ffffff; --start: #0d7d6c; --start-hover: #0a6658; --on-start: #ffffff; }
.dark { --drafted: #4fd6bd; --drafted-back: #14514a; --own: #7d8799; --lane: #181b22; --lane-edge: #2d323d; --quiet: #a4aebf;
        --ink: #e5e9f0; --page: #0b0f19; }
.gradio-container { max-width: 1080px !important; margin: 0 auto !important; }
.html-container { padding: 0 !important; }
/* Labels have the color of text: the theme's own is too pale. */
.gradio-container [data-testid="block-info"] { color: var(--ink) !important; background: none !important; padding: 0; }
.gradio-container [data-testid="block-info"] ~ div, .gradio-container .min_value, .gradio-container .max_value { color: var(--quiet) !important; }
.intro h1 { font-size: 1.7rem; line-height: 1.2; margin: 0.6rem 0 0.4rem; font-weight: 700; letter-spacing: -0.01em; }
.intro mark { color: var(--ink) !important; }
.intro p, .provenance p { color: var(--quiet); margin: 0 0 0.3rem; max-width: 46rem; line-height: 1.5; }
.provenance p { font-size: 0.8rem; max-width: none; }
#prompts { gap: 0.4rem; flex-wrap: wrap; }
#prompts button { flex: 0 0 auto; border-radius: 999px; padding: 0.25rem 0.8rem; font-weight: 500; }
#run { gap: 0.6rem; }
.stage { display: grid; grid-template-columns: 1fr 1fr; gap: 0.9rem; color: var(--ink); }
.stage .note, .stage .verdict { grid-column: 1 / -1; margin: 0; padding: 0.7rem 1rem; border-radius: 10px; }
.stage .note { border: 1px solid var(--lane-edge); background: var(--lane); }
.stage .note.wrong { border-left: 4px solid #d9573f; }
.stage .verdict { background: var(--drafted-back); font-size: 1.02rem; line-height: 1.45; }
.stage .verdict b { font-weight: 700; }
.lane { background: var(--lane); border: 1px solid var(--lane-edge); border-radius: 10px; padding: 0.9rem 1rem; min-width: 0;
        display: flex; flex-direction: column; gap: 0.7rem; }
.lane.first { border-top: 3px solid var(--drafted); }
.lane.second { border-top: 3px solid var(--own); }
.lane header { display: flex; align-items: baseline; justify-content: space-between; gap: 0.6rem; }
.lane h2 { font-size: 1rem; font-weight: 650; margin: 0; color: inherit; }
.lane header span { font-size: 0.8rem; color: var(--quiet); white-space: nowrap; }
.numbers { display: grid; grid-template-columns: repeat(4, auto); justify-content: space-between; gap: 0.3rem 0.8rem; margin: 0; }
.numbers div { display: flex; flex-direction: column-reverse; justify-content: flex-end; }
.numbers dt { font-size: 0.75rem; color: var(--quiet); }
.numbers dd { margin: 0; font-size: 1.35rem; line-height: 1.2; font-weight: 650; font-variant-numeric: tabular-nums; }
.track { height: 5px; border-radius: 3px; background: var(--lane-edge); overflow: hidden; }
.track i { display: block; height: 100%; background: var(--own); }
.first .track i { background: var(--drafted); }
.text { white-space: pre-wrap; overflow-wrap: anywhere; line-height: 1.6; min-height: 8rem; font-size: 0.95rem; }
.text mark, .intro mark { background: var(--drafted-back); color: inherit; border-radius: 3px; padding: 0.08em 0; }
.text code { font-family: ui-monospace, "DejaVu Sans Mono", monospace; font-size: 0.9em; }
.text .caret { display: inline-block; width: 0.5em; height: 1.05em; vertical-align: -0.18em; background: var(--own); opacity: 0.7; }
.rounds figcaption { font-size: 0.8rem; color: var(--quiet); margin-top: 0.35rem; }
.rounds { margin: 0; }
.bars { display: flex; align-items: flex-end; gap: 1px; height: 64px; border-bottom: 1px solid var(--lane-edge);
        background: repeating-linear-gradient(to top, transparent 0 7px, var(--lane-edge) 7px 8px); }
.bars i { flex: 1 1 0; max-width: 12px; min-width: 1px; display: flex; flex-direction: column; }
.bars i::before { content: ""; height: calc(var(--accepted) * 8px); background: var(--drafted); }
.bars i::after { content: ""; height: 8px; background: var(--own); }
.key { display: inline-block; width: 0.75em; height: 0.75em; border-radius: 2px; margin: 0 0.25em 0 0; }
.key.drafted { background: var(--drafted); } .key.own { background: var(--own); }
@media (max-width: 640px) {
  .stage { grid-template-columns: 1fr; }
  .intro h1 { font-size: 1.4rem; }
  .numbers dd { font-size: 1.2rem; }
  .text { min-height: 4rem; }
}
"""

# Ctrl+Enter (or Command) in the prompt starts, as a click does; Enter alone is a new line.
SCRIPT = """
<script>
addEventListener('keydown', event => {
  if (event.key === 'Enter' && (event.ctrlKey || event.metaKey) && event.target.closest('#prompt')) {
    event.preventDefault();
    document.querySelector('#start').click();
  }
});
</script>
"""

INTRO = """
<h1>The same text, in fewer forward passes</h1>
<p>A language model writes one token in each forward pass. Here a small draft model proposes several tokens at once. The model verifies
them in one forward pass and keeps those that it would have written itself. <mark>Marked text</mark> was drafted and accepted.</p>
"""


def note(text: str, wrong: bool = False) -> str:
    """A sentence in the place of the race."""
    return f'<div class="stage"><p class="note{" wrong" if wrong else ""}" role="status">{escape(text)}</p></div>'


def stage(race: Race, block_size: int, stopped: bool = False) -> str:
    """The race as it stands."""
    limit = race.settings["max_new_tokens"]
    verdict = _verdict(race) if race.over else ""
    if stopped:
        verdict = '<p class="note" role="status">Stopped. The numbers are those until then.</p>'
    ended = race.over or stopped
    return (
        f'<div class="stage" data-state="{"stopped" if stopped else "over" if race.over else "running"}">'
        + verdict
        + _lane("With the drafter", race.dflash, limit, "first", ended, _rounds(race.dflash, block_size))
        + _lane("Baseline", race.baseline, limit, "second", ended, "")
        + "</div>"
    )


def _verdict(race: Race) -> str:
    dflash, baseline = race.lanes
    if not race.settings["do_sample"]:
        same = "The texts are the same." if race.same_text else f"The texts differ: {_difference(race)}."
        passes = f"<b>{dflash.passes}</b> forward passes of the target instead of <b>{baseline.passes}</b>"
    else:
        same = "Sampled texts have the same distribution with and without a drafter, but other random numbers."
        passes = f"<b>{dflash.passes}</b> forward passes of the target for {dflash.num_tokens} tokens"
    ratio = dflash.rate / baseline.rate
    speed = f"<b>{ratio:.2f} times</b> the baseline's tokens per second"
    if ratio < 1:
        speed += ": here a round costs more than its accepted tokens save"
    return f'<p class="verdict" role="status">{passes}, {speed}. {same}</p>'


def _difference(race: Race) -> str:
    outputs = [lane.tokens for lane in race.lanes]
    at = next((i for i, pair in enumerate(zip(*outputs)) if pair[0] != pair[1]), min(map(len, outputs)))
    return f"from token {at + 1} on"


def _lane(name: str, lane: Lane, limit: int, css: str, ended: bool, rounds: str) -> str:
    state = "done" if lane.done else "" if ended else "writing"
    numbers = [("tokens/s", f"{lane.rate:.1f}"), ("tokens", lane.num_tokens), ("forward passes", lane.passes)]
    numbers.append(("acceptance length", "-" if lane.acceptance_length is None else f"{lane.acceptance_length:.2f}"))
    cells = "".join(f"<div><dt>{label}</dt><dd>{value}</dd></div>" for label, value in numbers)
    caret = "" if lane.done or ended else '<span class="caret"></span>'
    return (
        f'<section class="lane {css}"><header><h2>{name}</h2><span>{state} {lane.seconds:.2f} s</span></header>'
        f'<dl class="numbers">{cells}</dl>'
        f'<div class="track"><i style="width:{100 * lane.num_tokens / limit:.1f}%"></i></div>'
        f'<div class="text">{text_html(lane.parts)}{caret}</div>{rounds}</section>'
    )


# Code between fences or, in a line, between single backticks; of a text that is still written the last fence may be open.
CODE = re.compile(r"^```.*?(?:^```[^\n]*$|\Z)|(?<!`)`[^`\n]+`(?!`)", re.M | re.S)


def text_html(parts: list[tuple[str, bool]]) -> str:
    """Return the text with accepted draft tokens marked and code in fixed width."""
    text = "".join(part for part, _ in parts)
    drafted = [by_drafter for part, by_drafter in parts for _ in part]
    code = [False] * len(text)
    for found in CODE.finditer(text):
        code[found.start() : found.end()] = [True] * len(found[0])
    html = ""
    for is_code, places in groupby(range(len(text)), key=code.__getitem__):
        inner = ""
        for marked, run in groupby(places, key=drafted.__getitem__):
            piece = escape("".join(text[place] for place in run))
            inner += f"<mark>{piece}</mark>" if marked else piece
        html += f"<code>{inner}</code>" if is_code else inner
    return html


def _rounds(lane: Lane, block_size: int) -> str:
    accepted = lane.accepted
    bars = "".join(
        f'<i style="--accepted:{count}" title="round {number}: {count} accepted"></i>'
        for number, count in enumerate(accepted, start=1)
    )
    label = f"{sum(accepted)} draft tokens accepted in {len(accepted)} rounds"
    return (
        f'<figure class="rounds"><div class="bars" role="img" aria-label="{label}" style="height:{8 * block_size}px">{bars}'
        '</div><figcaption>By round: <span class="key drafted"></span>accepted draft tokens, <span class="key own"></span>'
        f"the target's own. {label[0].upper() + label[1:]}.</figcaption></figure>"
    )
