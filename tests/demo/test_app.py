"""The demo's race and page, without a browser; the page in a browser is in `test_app_browser.py`."""

import re
import runpy
import subprocess
import sys
import threading
import time

import pytest
import torch
from dflash_hub.demo import page
from dflash_hub.demo.pair import DraftedText
from dflash_hub.demo.race import MAX_PROMPT_TOKENS, Race
from helpers.scripted import Instead, scripted
from helpers.tiny import DRAFTERS, ROOT
from matplotlib.pyplot import imread

PROMPT = "Tom has 3 boxes. How many?"
GREEDY = {"max_new_tokens": 24, "do_sample": False}
SAMPLED = {"max_new_tokens": 24, "do_sample": True, "temperature": 0.8, "top_p": 0.9}


def plain_text(pair, prompt=PROMPT, seed=0, **settings) -> torch.Tensor:
    torch.manual_seed(seed)
    return pair.target.generate(**pair.encode([{"role": "user", "content": prompt}]), **settings)


def finished(race: Race) -> Race:
    for _ in race.run():
        pass
    return race


@pytest.mark.parametrize("kind", DRAFTERS)
def test_a_race_ends_with_plains_text_and_true_counts(small_pair, kind):
    plain = plain_text(small_pair, **GREEDY)
    new = plain[0, -24:].tolist()
    pair = Instead(small_pair, drafter=scripted(small_pair.drafter, kind, plain))
    race = finished(Race(pair, PROMPT, 0, GREEDY, 4))
    assert race.dflash.tokens == race.baseline.tokens == new and race.same_text and race.over
    assert race.baseline.passes == 24 and race.baseline.acceptance_length == 1
    speculation = race.dflash.speculation
    assert race.dflash.passes == speculation.target_passes == len(race.dflash.pieces) + speculation.check_passes
    assert race.dflash.acceptance_length == pytest.approx(race.dflash.speculation.tau)
    assert {"random": 0, "half-right": 3, "oracle": 15}[kind] <= sum(race.dflash.accepted) <= 24
    for lane in race.lanes:
        assert "".join(text for text, _ in lane.parts) == small_pair.tokenizer.decode(new, skip_special_tokens=True)
        assert lane.seconds > 0 and lane.rate == 24 / lane.seconds
    assert not any(drafted for _, drafted in race.baseline.parts)
    assert any(drafted for _, drafted in race.dflash.parts) == (sum(race.dflash.accepted) > 0)


def test_marks_are_the_accepted_drafts(small_pair):
    """One character a token, so that marked characters can be counted; the text ends on a drafted token."""
    settings = GREEDY | {"suppress_tokens": [0, 1, 2]}
    plain = plain_text(small_pair, **settings)
    new = plain[0, -24:].tolist()
    pair = Instead(small_pair, drafter=scripted(small_pair.drafter, "oracle", plain))
    # The anchor, then four drafts, of which the third ends the text.
    ends = Race(pair, PROMPT, 0, settings | {"eos_token_id": new[3]}, 4)
    finished(ends)
    cut = new[: new.index(new[3]) + 1]
    assert ends.dflash.tokens == cut and ends.same_text
    assert ends.dflash.accepted == [len(cut) - 1]
    assert [drafted for _, drafted in ends.dflash.parts] == [False, True]
    race = finished(Race(pair, PROMPT, 0, settings, 4))
    assert sum(len(text) for text, drafted in race.dflash.parts if drafted) == sum(race.dflash.accepted)


def test_a_sampled_race_is_reproducible_and_plain_is_plain(small_pair):
    """Whatever the order of turns: DFlash takes its seed when it begins, and torch's generator is plain's from there."""
    first, second = (finished(Race(small_pair, PROMPT, 5, SAMPLED, 4)) for _ in range(2))
    assert first.dflash.tokens == second.dflash.tokens
    assert (
        first.baseline.tokens == second.baseline.tokens == plain_text(small_pair, seed=5, **SAMPLED)[0, -24:].tolist()
    )
    torch.manual_seed(5)
    inputs = small_pair.encode([{"role": "user", "content": PROMPT}])
    alone = small_pair.target.generate(**inputs, **SAMPLED, assistant_model=small_pair.drafter, num_assistant_tokens=4)
    assert first.dflash.tokens == alone[0, -24:].tolist()
    assert finished(Race(small_pair, PROMPT, 6, SAMPLED, 4)).baseline.tokens != first.baseline.tokens


def test_only_one_computes_and_the_one_behind_goes_on(small_pair, monkeypatch):
    busy, order = threading.Lock(), []
    forward = type(small_pair.target).forward

    def guarded(self, *args, **kwargs):
        assert busy.acquire(blocking=False), "two passes at the same time"
        try:
            order.append(threading.get_ident())
            return forward(self, *args, **kwargs)
        finally:
            busy.release()

    monkeypatch.setattr(type(small_pair.target), "forward", guarded)
    race = Race(small_pair, PROMPT, 0, GREEDY, 4)
    before = [0.0, 0.0]
    for _ in race.run():
        now = [lane.seconds for lane in race.lanes]
        went = [after > then for after, then in zip(now, before)]
        assert sum(went) == 1
        if not any(lane.done for lane in race.lanes):
            assert before[went.index(True)] == min(before)
        before = now
    assert len(set(order)) == 2 and len(order) == race.dflash.passes + race.baseline.passes


def test_seconds_are_those_of_the_lane_alone(small_pair):
    """Waiting, for the other lane or for whoever draws the page, is not counted."""
    race = Race(small_pair, PROMPT, 0, GREEDY, 4)
    start = time.perf_counter()
    for number, _ in enumerate(race.run()):
        if number < 4:
            time.sleep(0.25)
    assert race.dflash.seconds + race.baseline.seconds <= time.perf_counter() - start - 1


def test_a_race_that_is_left_ends_its_threads(small_pair, monkeypatch):
    passes, forward = [], type(small_pair.target).forward
    monkeypatch.setattr(
        type(small_pair.target), "forward", lambda self, *a, **k: (passes.append(1), forward(self, *a, **k))[1]
    )
    threads = threading.active_count()
    race = Race(small_pair, PROMPT, 0, GREEDY, 4)
    rounds = race.run()
    for _ in range(5):
        next(rounds)
    rounds.close()
    made = len(passes)
    assert threading.active_count() == threads and made <= 5
    time.sleep(0.1)
    assert len(passes) == made and not race.over
    assert finished(Race(small_pair, PROMPT, 0, GREEDY, 4)).same_text  # and nothing is left behind for the next


@pytest.mark.parametrize(
    ("prompt", "sentence"),
    (
        ("", "prompt is empty"),
        (" \n", "prompt is empty"),
        (
            "x" * (MAX_PROMPT_TOKENS + 1),
            rf"has {MAX_PROMPT_TOKENS + 6} tokens, and this page takes {MAX_PROMPT_TOKENS}",
        ),
        ("x" * (MAX_PROMPT_TOKENS - 5), "has 512 tokens, and the target has 512 positions"),
    ),
)
def test_a_bad_prompt_gets_a_sentence(small_pair, prompt, sentence):
    threads = threading.active_count()
    with pytest.raises(ValueError, match=sentence):
        Race(small_pair, prompt, 0, GREEDY, 4)
    assert threading.active_count() == threads


def test_an_answer_is_no_longer_than_the_target_has_positions(small_pair):
    race = Race(small_pair, "x" * (MAX_PROMPT_TOKENS - 8), 0, GREEDY, 4)
    assert race.settings["max_new_tokens"] == 3
    assert len(finished(race).baseline.tokens) == 3 and race.same_text


def test_what_a_call_raises_comes_out_of_the_race(small_pair):
    race = Race(small_pair, PROMPT, 0, GREEDY | {"num_beams": 2}, 4)
    with pytest.raises(ValueError, match="num_beams"):
        finished(race)


def test_the_page_shows_the_races_numbers(small_pair):
    drafter = scripted(small_pair.drafter, "oracle", plain_text(small_pair, **GREEDY))
    race = Race(Instead(small_pair, drafter=drafter), PROMPT, 0, GREEDY, 4)
    states = [page.stage(race, 5) for _ in race.run()]
    assert all('data-state="running"' in html and "caret" in html for html in states[:-1])
    last = states[-1]
    assert 'data-state="over"' in last and "caret" not in last and "The texts are the same." in last
    assert f"<b>{race.dflash.passes}</b> forward passes of the target instead of <b>24</b>" in last
    assert f"<dt>acceptance length</dt><dd>{race.dflash.acceptance_length:.2f}</dd>" in last
    assert f"<dt>tokens/s</dt><dd>{race.baseline.rate:.1f}</dd>" in last
    assert [int(n) for n in re.findall(r"--accepted:(\d+)", last)] == race.dflash.accepted
    shown = re.findall(r'<div class="text">(.*?)</div>', last, re.S)
    texts = [re.sub(r"<[^>]+>", "", html) for html in shown]
    assert (
        texts[0] == texts[1] == page.escape(small_pair.tokenizer.decode(race.baseline.tokens, skip_special_tokens=True))
    )


def test_a_stopped_race_says_so(small_pair):
    race = Race(small_pair, PROMPT, 0, GREEDY, 4)
    rounds = race.run()
    for _ in range(3):
        next(rounds)
    rounds.close()
    html = page.stage(race, 5, stopped=True)
    assert "Stopped." in html and 'data-state="stopped"' in html and "caret" not in html and "writing" not in html


def test_different_texts_are_not_called_the_same(small_pair):
    race = finished(Race(small_pair, PROMPT, 0, GREEDY, 4))
    race.baseline.pieces[7] = [race.baseline.pieces[7][0] + 1]
    assert not race.same_text and "The texts differ: from token 8 on." in page.stage(race, 5)


def test_text_is_escaped_and_marks_are_joined():
    parts = [("a<b>", False), ("&c", True), ("d", True), (" e", False), ("f", True)]
    assert page.text_html(parts) == "a&lt;b&gt;<mark>&amp;cd</mark> e<mark>f</mark>"
    assert "<script>" not in page.note("<script>alert(1)</script>")


def test_code_has_a_fixed_width_and_keeps_its_marks():
    """Between fences and single backticks; a fence that is still open holds all that follows, and one in a line is text."""
    parts = [("Use `a<b", True), ("` or:\n```py\nx = `1", False), ("`\n```", True), ("\nnot ` this", False)]
    assert page.text_html(parts) == (
        "<mark>Use </mark><code><mark>`a&lt;b</mark>`</code> or:\n"
        "<code>```py\nx = `1<mark>`\n```</mark></code>\nnot ` this"
    )
    assert page.text_html([("So:\n```py\nx", False), (" = 1", True)]) == "So:\n<code>```py\nx<mark> = 1</mark></code>"
    assert "monospace" in re.search(r"\.text code \{(.*?)\}", page.CSS)[1]


def brightness(color: str) -> float:
    """Relative luminance of a #rrggbb color, as WCAG 2 defines it."""
    parts = [int(color[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return sum(weight * part for weight, part in zip((0.2126, 0.7152, 0.0722), linear))


def test_text_has_enough_contrast_in_both_themes():
    """4.5 is WCAG's AA; the app in a browser is measured in `test_app_browser.py`."""
    grounds = {"ink": ("page", "lane", "drafted-back"), "quiet": ("page", "lane"), "on-start": ("start", "start-hover")}
    written = {name for name in re.findall(r"(?<![-\w])color: var\(--([\w-]+)\)", page.CSS)}
    assert written <= grounds.keys(), "a color of text that is not measured here"
    light, dark = (
        dict(re.findall(r"--([\w-]+): (#\w{6})", block)) for block in re.findall(r"\{(.*?)\}", page.CSS, re.S)[:2]
    )
    for colors in (light, light | dark):
        for text, under in ((text, under) for text, names in grounds.items() for under in names):
            bright, dim = sorted((brightness(colors[text]), brightness(colors[under])), reverse=True)
            assert (bright + 0.05) / (dim + 0.05) >= 4.5, (text, under, colors[text], colors[under])


def test_half_a_character_waits(smollm2_path):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(smollm2_path)
    text = DraftedText(tokenizer)
    ids = tokenizer("a🙂b").input_ids
    parts = [part for i in ids for part in text.add([i], 1)]
    assert len(ids) > 3 and "".join(p for p, _ in parts) == "a🙂b" and all("\ufffd" not in p for p, _ in parts)


def test_the_pictures_of_the_docs_are_there():
    names = re.findall(r"!\[[^\]]*\]\(([\w-]+\.png)\)", (ROOT / "docs" / "app.md").read_text(encoding="utf-8"))
    assert names
    for name in names:
        assert 0 < (ROOT / "docs" / name).stat().st_size < 300_000


def test_the_picture_of_the_method_is_drawn_by_its_script(tmp_path):
    runpy.run_path(str(ROOT / "experiments" / "method_picture.py"))["draw"](tmp_path / "method.png")
    drawn, kept = (imread(folder / "method.png") for folder in (tmp_path, ROOT / "docs"))
    # Edges of letters differ by version.
    assert drawn.shape == kept.shape and (abs(drawn - kept) > 0.5).mean() < 0.002


def test_the_space_is_complete_by_itself(tmp_path):
    """It imports its own copy of the package, and its card and requirements are such as a Space needs."""
    pytest.importorskip("gradio")
    from dflash_hub.demo.space import write_space
    from huggingface_hub import SpaceCard

    folder = tmp_path / "space"
    write_space(folder)
    settings = SpaceCard.load(folder / "README.md").data.to_dict()
    assert settings["sdk"] == "gradio" and settings["app_file"] == "app.py"
    assert len(settings["short_description"]) <= 60  # the Hub refuses longer ones
    requirements = (folder / "requirements.txt").read_text().split()
    assert [line.split("==")[0] for line in requirements] == ["torch", "transformers", "accelerate", "safetensors"]
    code = "import dflash_hub.demo.app as app, dflash_hub; print(dflash_hub.__file__); app.Pair(None, None, 'none')"
    done = subprocess.run([sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, timeout=300)
    assert done.stdout.strip() == str(folder / "dflash_hub" / "__init__.py")
    assert "'none' is none of float32" in done.stderr
    assert (folder / "dflash_hub" / "model.safetensors").stat().st_size > 1_000_000
    with pytest.raises(FileExistsError, match="is not empty"):
        write_space(folder)
    assert [path.name for path in tmp_path.iterdir()] == ["space"]
