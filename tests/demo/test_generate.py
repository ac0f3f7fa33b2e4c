"""`dflash-hub generate`: answers, chat turns that go on with the cache, and manners of a Unix tool."""

import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers
from dflash_hub.cli.app import main
from dflash_hub.demo.generate import Conversation, _write
from dflash_hub.demo.pair import DraftStreamer
from helpers.scripted import Instead, scripted
from helpers.tiny import DRAFTERS
from transformers import LlamaForCausalLM

ENTRY = str(Path(sys.executable).with_name("dflash-hub"))
GREEDY = {"max_new_tokens": 20, "do_sample": False, "suppress_tokens": [0, 1, 2]}
TURNS = ("How many?", "And then?", "Why?")


@pytest.fixture
def command(pair_folders, monkeypatch, capsys):
    """Run `dflash-hub generate` in this process: (exit status, standard output, standard error)."""
    target, drafter = pair_folders
    own = ["dflash-hub", "generate", "--target", target, "--drafter", drafter, "--max-new-tokens", "12"]

    def run(*arguments, stdin=""):
        monkeypatch.setattr(sys, "argv", [*own, *arguments])
        monkeypatch.setattr(sys, "stdin", io.StringIO(stdin) if isinstance(stdin, str) else stdin)
        with pytest.raises(SystemExit) as ended:
            main()
        out, err = capsys.readouterr()
        return ended.value.code or 0, out, err

    return run


def plain(pair, messages, **settings) -> torch.Tensor:
    return pair.target.generate(**pair.encode(messages), **settings)


@pytest.mark.parametrize("kind", DRAFTERS)
def test_turns_reuse_the_cache_and_equal_plain(small_pair, kind):
    pair = Instead(small_pair)
    chat, messages, accepted = Conversation(pair, "Be brief.", False, {}, GREEDY), [], []
    messages.append({"role": "system", "content": "Be brief."})
    held = 0
    for turn in TURNS:
        messages.append({"role": "user", "content": turn})
        text = plain(small_pair, messages, **GREEDY)
        pair.drafter = scripted(small_pair.drafter, kind, text)
        shown = []
        streamer = DraftStreamer(small_pair.tokenizer, lambda part, drafted, shown=shown: shown.append(part))
        answer = chat.ask(turn, streamer)
        expected = small_pair.tokenizer.decode(text[0, -20:], skip_special_tokens=True)
        assert answer.text == "".join(shown) == expected
        assert answer.reused_tokens == held and answer.finish_reason == "length" and answer.new_tokens == 20
        assert answer.prompt_tokens == text.shape[1] - 20
        # The prompt's pass and one a round: the drafter's context came with the cache, so nothing was read twice.
        passes = answer.speculation.target_passes - answer.speculation.check_passes
        assert passes == 1 + len(answer.speculation.accepted[0])
        held = text.shape[1] - 1
        accepted.append(answer.speculation.num_accepted)
        messages.append({"role": "assistant", "content": answer.text})
    assert all({"random": 0, "half-right": 3, "oracle": 13}[kind] <= count <= 19 for count in accepted)


def test_a_template_that_rewrites_the_past_is_read_again(small_pair):
    """As templates do that drop what the model thought."""
    written = small_pair.tokenizer.chat_template
    small_pair.tokenizer.chat_template = written.replace("{{ m.content }}", "{{ m.content[:9] }}")
    try:
        chat = Conversation(small_pair, None, False, {}, GREEDY)
        first = chat.ask(TURNS[0])
        messages = [{"role": "user", "content": TURNS[0]}, {"role": "assistant", "content": first.text}]
        text = plain(small_pair, [*messages, {"role": "user", "content": TURNS[1]}], **GREEDY)
        second = chat.ask(TURNS[1])
        assert second.reused_tokens == 0
        assert second.text == small_pair.tokenizer.decode(text[0, -20:], skip_special_tokens=True)
    finally:
        small_pair.tokenizer.chat_template = written


def test_an_interrupted_turn_leaves_the_chat_as_it_was(small_pair):
    chat, other = (Conversation(small_pair, None, False, {}, GREEDY) for _ in range(2))
    first = chat.ask(TURNS[0])
    assert other.ask(TURNS[0]).text == first.text

    class Impatient(DraftStreamer):
        def put(self, value):
            if self.prompt_seen:
                raise KeyboardInterrupt
            self.prompt_seen = True

    with pytest.raises(KeyboardInterrupt):
        chat.ask("Never mind", Impatient(small_pair.tokenizer, print))
    assert chat.ask(TURNS[1]).text == other.ask(TURNS[1]).text


def test_an_answer_ends_where_the_target_ends_it_or_where_it_has_no_more_positions(small_pair):
    text = plain(small_pair, [{"role": "user", "content": TURNS[0]}], **GREEDY)
    ends = Conversation(small_pair, None, False, {}, GREEDY)
    small_pair.target.generation_config.eos_token_id = int(text[0, -10])
    try:
        answer = ends.ask(TURNS[0])
        assert answer.finish_reason == "stop" and answer.new_tokens <= 11
    finally:
        small_pair.target.generation_config.eos_token_id = None
    raw = Conversation(small_pair, None, True, {}, GREEDY)
    room = small_pair.target.config.max_position_embeddings
    answer = raw.ask("x" * (room - 7))
    assert (answer.new_tokens, answer.prompt_tokens, answer.finish_reason) == (7, room - 7, "length")
    with pytest.raises(ValueError, match=f"has {room + 3} tokens, and the target has {room} positions"):
        Conversation(small_pair, None, True, {}, GREEDY).ask("x" * (room + 3))


def test_text_goes_to_stdout_and_numbers_to_stderr(command, tmp_path):
    status, text, numbers = command("How many?")
    assert status == 0 and text.endswith("\n") and len(text) > 6 and "\x1b" not in text
    assert "12 tokens in" in numbers and "tokens/s" in numbers
    (tmp_path / "prompt.txt").write_text("How many?\n", encoding="utf-8")
    for same in (
        command("--quiet", "--file", str(tmp_path / "prompt.txt")),
        command("--quiet", "--file", "-", stdin="How many?\n"),
        command("--quiet", stdin="How many?\n"),
    ):
        assert same[:2] == (0, text) and "tokens/s" not in same[2]


def test_ctrl_c_says_where_a_short_command_stopped(command):
    class Interrupted(io.StringIO):
        def read(self, *size):
            raise KeyboardInterrupt

    status, out, err = command("--quiet", stdin=Interrupted())
    assert status == 130 and not out and "Aborted" not in err
    assert "stopped in generate; no file is left half written. Run it again with: dflash-hub generate" in err


def test_json_has_a_line_an_answer(command):
    _, turns, _ = command("--json", "How many?", "And then?")
    _, chat, _ = command("--json", "--chat", stdin="How many?\n\nAnd then?\n")
    lines = [json.loads(line) for line in turns.splitlines()]
    assert [line["prompt"] for line in lines] == ["How many?", "And then?"]
    for line, other in zip(lines, map(json.loads, chat.splitlines()), strict=True):
        assert line["new_tokens"] == 12 == sum(line["acceptance_lengths"]) + 1
        assert line["acceptance_length"] == sum(line["acceptance_lengths"]) / len(line["acceptance_lengths"])
        assert line["target_passes"] >= 1 + len(line["accepted"]) and line["seconds"] > 0
        assert line["text"] == other["text"]


def test_a_seed_gives_its_text_again(command):
    sampled = ("Hi", "-q", "--temperature", "1.5", "--seed")
    first, again, other = (command(*sampled, seed)[1] for seed in ("3", "3", "4"))
    assert first == again != other


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    (
        (("",), "the prompt is empty"),
        ((), "the prompt is empty"),
        (("--file", "nowhere.txt"), "nowhere.txt"),
        (("Hi", "--file", "x.txt"), "one of them"),
        (("Hi", "--dtype", "int4"), "--dtype 'int4' is none of"),
        (("Hi", "--top-p", "0.9"), "pass --temperature as well"),
        (("Hi", "you", "--raw"), "--raw continues one text"),
        (("Hi", "--max-new-tokens", "0"), "--max-new-tokens"),
        (("x" * 600,), "the target has 512 positions"),
    ),
)
def test_errors_are_a_sentence_and_a_status(command, arguments, sentence):
    status, text, error = command(*arguments)
    assert (status, text) == (2, "")
    assert sentence in " ".join(error.split())


@pytest.mark.parametrize("arguments", (("--raw",), ()))
def test_what_a_tokenizer_cannot_read_is_a_sentence(command, arguments, monkeypatch):
    def refuse(*args, **kwargs):
        raise Exception("WordLevel error: Missing [UNK] token from the vocabulary")

    monkeypatch.setattr(transformers.PreTrainedTokenizerFast, "_encode_plus", refuse)
    status, text, error = command("Hi", *arguments)
    assert (status, text) == (2, "") and "tokenizer cannot read the prompt: WordLevel error" in error


@pytest.mark.skipif(os.name == "nt", reason="needs a pseudo-terminal")
def test_at_a_terminal_it_chats(pair_folders):
    import pty

    target, drafter = pair_folders
    own = [ENTRY, "generate", "--target", target, "--drafter", drafter, "--max-new-tokens", "12"]
    master, slave = pty.openpty()
    running = subprocess.Popen(own, stdin=slave, stdout=slave, stderr=subprocess.PIPE, text=True)
    os.close(slave)
    os.write(master, b"How many?\n\x04")
    shown = b""
    try:
        while chunk := os.read(master, 4096):
            shown += chunk
    except OSError:
        pass  # the other side is closed
    _, errors = running.communicate(timeout=60)
    assert running.returncode == 0 and errors.count("> ") == 2 and len(shown.splitlines()[1]) >= 6
    assert "Ctrl-D ends" in errors and "12 tokens in" in errors and "Traceback" not in errors


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_ctrl_c_at_a_terminal_ends_the_answer_and_not_the_chat(command, monkeypatch):
    passes, forward = [], LlamaForCausalLM.forward

    def interrupted_once(*args, **kwargs):
        passes.append(1)
        if len(passes) == 1:
            raise KeyboardInterrupt
        return forward(*args, **kwargs)

    monkeypatch.setattr(LlamaForCausalLM, "forward", interrupted_once)
    status, text, error = command(stdin=Terminal("How many?\nAnd then?\n"))
    assert status == 0 and len(passes) > 2 and "stopped" in error
    assert text.count("\n") >= 1 and "> " not in text  # not among answers that go to a file
    assert error.count("> ") == 3


def test_drafted_text_has_a_colour_at_a_terminal_only(monkeypatch):
    for out, expected in ((Terminal(), "a\x1b[32mb\x1b[0m"), (io.StringIO(), "ab")):
        monkeypatch.setattr(sys, "stdout", out)
        _write("a", False)
        _write("b", True)
        assert out.getvalue() == expected


@pytest.mark.skipif(os.name == "nt", reason="needs bash")
def test_a_closed_pipe_ends_it_quietly(pair_folders):
    target, drafter = pair_folders
    line = f"{ENTRY} generate --target {target} --drafter {drafter} --raw abc --max-new-tokens 400 | head -c 1"
    done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, timeout=600)
    assert len(done.stdout) == 1 and "Traceback" not in done.stderr and "Broken pipe" not in done.stderr


def test_an_interrupt_ends_it_with_its_status(command, monkeypatch):
    def interrupted(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr(LlamaForCausalLM, "forward", interrupted)
    assert command("How many?")[0] == 130
