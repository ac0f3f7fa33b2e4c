"""The text that a target and its drafter write, decoded as it comes: `demo/pair.py`."""

import copy
import itertools
import random

import pytest
import tokenizers
import torch
import transformers
from dflash_hub.decode_statistics import Speculation
from dflash_hub.demo.generate import Conversation
from dflash_hub.demo.pair import DraftedText, DraftStreamer
from dflash_hub.demo.race import Race
from helpers.tiny import VOCAB
from tokenizers import decoders, models

WORDS = ("is", "right", "don", "never", "日本", "Thé", "e", "s", "t", "v")
MARKS = (".", "?", "!", ",", "'", "n't", "'s", "'ve", "'re", "'m", "n", "v", "r")


def byte_fallback() -> tokenizers.Tokenizer:
    """Llama 2's kind: words with a space before them, rare characters by single bytes, the text's first space dropped."""
    names = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "▁▁", *(f"▁{word}" for word in WORDS), *WORDS]
    made = tokenizers.Tokenizer(models.BPE({name: i for i, name in enumerate(names)}, [], byte_fallback=True))
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    made.decoder = decoders.Sequence(parts)
    return made


def metaspace() -> tokenizers.Tokenizer:
    made = tokenizers.Tokenizer(
        models.Unigram([(name, 0.0) for name in ("<unk>", "▁", *(f"▁{w}" for w in WORDS), *WORDS)])
    )
    made.decoder = decoders.Metaspace()
    return made


def word_pieces() -> tokenizers.Tokenizer:
    names = ["<unk>", *WORDS, *MARKS, *(f"##{word}" for word in WORDS)]
    made = tokenizers.Tokenizer(models.WordPiece({name: i for i, name in enumerate(names)}, unk_token="<unk>"))
    made.decoder = decoders.WordPiece(cleanup=True)
    return made


def loose_marks() -> tokenizers.Tokenizer:
    """Spaces and marks in tokens of their own, for transformers to clean up."""
    names = ["<unk>", " ", "  ", *MARKS, *(f" {mark}" for mark in MARKS), *WORDS]
    made = tokenizers.Tokenizer(models.WordLevel({name: i for i, name in enumerate(names)}, unk_token="<unk>"))
    made.decoder = decoders.Fuse()
    return made


MADE = {"byte-fallback": byte_fallback, "metaspace": metaspace, "word-pieces": word_pieces, "loose-marks": loose_marks}


@pytest.fixture
def tokenizer_of(smollm2_path):
    """A tokenizer by name, one that counts the tokens it decodes: (tokenizer, count)."""

    def load(kind: str):
        if kind == "byte-level":
            loaded = transformers.AutoTokenizer.from_pretrained(smollm2_path)
        else:
            cleans = kind in ("word-pieces", "loose-marks")
            loaded = transformers.PreTrainedTokenizerFast(
                tokenizer_object=MADE[kind](), unk_token="<unk>", clean_up_tokenization_spaces=cleans
            )
            loaded.add_special_tokens({"additional_special_tokens": ["<end>"]})
        decode, count = loaded.decode, [0]

        def counting(tokens, **kwargs):
            count[0] += len(tokens)
            return decode(tokens, **kwargs)

        loaded.decode = counting
        return loaded, count

    return load


def random_ids(tokenizer, kind: str, draw: random.Random, count: int) -> list[int]:
    """Any tokens, some beyond the vocabulary; of bytes mostly such that belong together, and pieces of characters."""
    if kind not in ("byte-level", "byte-fallback"):
        return [draw.randrange(len(tokenizer) + 4) for _ in range(count)]
    characters = "🎉🙂é日 a\n👩‍👩‍👧𝄞"
    pieces = []
    while len(pieces) < count:
        if draw.random() < 0.3:
            pieces.append(draw.randrange(len(tokenizer) + 100))
        else:
            text = "".join(draw.choices(characters, k=draw.randint(1, 4)))
            if kind == "byte-level":
                ids = tokenizer(text, add_special_tokens=False).input_ids
            else:
                ids = tokenizer.convert_tokens_to_ids([f"<0x{byte:02X}>" for byte in text.encode()])
            pieces += ids[: draw.randint(1, len(ids))] if draw.random() < 0.3 else ids
    return pieces[:count]


def rounds(ids: list[int], draw: random.Random):
    """`ids` in pieces, each with the number of its tokens that were drafted."""
    start = 0
    while start < len(ids):
        piece = ids[start : start + draw.randint(1, 6)]
        yield piece, draw.randint(0, len(piece))
        start += len(piece)


@pytest.mark.parametrize("kind", ("byte-level", *MADE))
def test_the_parts_joined_are_the_whole_text_wherever_it_is_cut(tokenizer_of, kind):
    tokenizer, _ = tokenizer_of(kind)
    draw, broken = random.Random(0), 0
    for _ in range(150):
        ids = random_ids(tokenizer, kind, draw, draw.randint(1, 40))
        text = DraftedText(tokenizer)
        parts = [part for piece, drafted in rounds(ids, draw) for part in text.add(piece, drafted)] + text.finish()
        whole = tokenizer.decode(ids, skip_special_tokens=True)
        assert "".join(part for part, _ in parts) == whole, ids
        assert all(part for part, _ in parts)
        broken += whole.endswith("\ufffd")
    assert broken > 20 or not kind.startswith("byte")  # cut in the middle of a character


def test_only_the_broken_character_waits_for_the_end(tokenizer_of):
    tokenizer, _ = tokenizer_of("byte-level")
    ids = tokenizer("The answer is 15 and it is right 🎉", add_special_tokens=False).input_ids
    text = DraftedText(tokenizer)
    shown = "".join(
        part for start in range(0, 12, 4) for part, _ in text.add(ids[start : min(start + 4, len(ids) - 1)], 3)
    )
    assert shown == "The answer is 15 and it is right "
    assert text.finish() == [("\ufffd", False)] and text.finish() == []


def test_each_part_is_marked_as_who_chose_it():
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=byte_fallback(), unk_token="<unk>")
    ids = tokenizer.convert_tokens_to_ids
    smile = ids([f"<0x{byte:02X}>" for byte in "🙂".encode()])
    text = DraftedText(tokenizer)
    assert text.add(ids(["▁is", "▁right", "▁never"]), 2) == [("is right", True), (" never", False)]
    # A character belongs to who chose its last byte, and a run of bytes waits for its end.
    assert text.add([*smile, *smile[:2]], 5) == []
    assert text.add(smile[2:], 2) == []
    assert text.add(ids(["▁is"]), 0) == [("🙂🙂", True), (" is", False)]
    assert text.add(smile[:1], 1) == [] and text.finish() == [("\ufffd", True)]


@pytest.mark.parametrize("kind", ("byte-level", *MADE))
def test_decoding_is_linear_in_the_text(tokenizer_of, kind):
    """Words, and what a broken model may repeat for ever: half a character, single bytes, special tokens."""
    tokenizer, count = tokenizer_of(kind)
    draw = random.Random(0)
    units = [random_ids(tokenizer, kind, draw, 50), [len(tokenizer) - 1]]
    if kind == "byte-level":
        smile = tokenizer("🙂", add_special_tokens=False).input_ids
        units += [smile, smile[:1], smile[1:], [0]]
    if kind == "byte-fallback":
        units += [tokenizer.convert_tokens_to_ids(names) for names in (["<0xF0>"], ["<0xC3>", "<0xA9>"] * 9 + ["▁"])]
    for unit in units:
        ids = list(itertools.islice(itertools.cycle(unit), 600))
        text = DraftedText(tokenizer)
        count[0] = 0
        for start in range(0, len(ids), 3):
            text.add(ids[start : start + 3], 2)
        text.finish()
        assert count[0] <= 30 * len(ids), unit


def test_a_streamer_shows_an_answer_that_was_cut_in_a_character(tokenizer_of):
    tokenizer, _ = tokenizer_of("byte-level")
    ids = tokenizer("Right 🎉", add_special_tokens=False).input_ids[:-1]
    parts = []
    streamer = DraftStreamer(tokenizer, lambda *part: parts.append(part))
    streamer.put(torch.tensor([[1, 2]]))
    for piece in (ids[:1], ids[1:]):
        streamer.put(torch.tensor(piece))
    streamer.end()
    streamer.finish(Speculation(accepted=[[len(ids) - 1]]))
    assert "".join(text for text, _ in parts) == tokenizer.decode(ids) and parts[-1] == ("\ufffd", True)


@pytest.fixture
def pair_of_bytes(small_pair):
    """The tiny pair with a tokenizer of single bytes, so that nearly every answer ends in a broken character."""
    spelled = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False).pre_tokenize_str
    letters = sorted(set("".join(name for name, _ in spelled("🎉🙂👩é日本語中文字𝄞 \nabcdefgh"))))
    names = ["<pad>", "<s>", "</s>", *letters, *map("".join, itertools.product(letters[-8:], repeat=2))][:VOCAB]
    made = tokenizers.Tokenizer(models.BPE({name: i for i, name in enumerate(names)}, [], unk_token="<pad>"))
    made.decoder = decoders.ByteLevel()
    pair = copy.copy(small_pair)
    special = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<pad>"}
    pair.tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=made, **special)
    pair.tokenizer.chat_template = small_pair.tokenizer.chat_template
    return pair


@pytest.mark.parametrize("limit", (17, 18))
def test_whatever_shows_an_answer_shows_all_of_it(pair_of_bytes, limit):
    """The command line's chat, both lanes of a race, and transformers' own streamer, at a limit on length."""
    pair, settings = pair_of_bytes, {"max_new_tokens": limit, "do_sample": False}

    def whole(tokens) -> str:
        return pair.tokenizer.decode(tokens, skip_special_tokens=True)

    chat = Conversation(pair, None, False, {}, settings)
    for turn in ("bad", "face"):
        parts = []
        answer = chat.ask(turn, DraftStreamer(pair.tokenizer, lambda *part, parts=parts: parts.append(part)))
        assert answer.text == "".join(text for text, _ in parts) and answer.new_tokens == limit

    race = Race(pair, "bad", 0, settings, 4)
    for _ in race.run():
        pass
    for lane in race.lanes:
        assert "".join(text for text, _ in lane.parts) == whole(lane.tokens)
    assert whole(race.baseline.tokens).endswith("\ufffd") == (limit == 18)

    inputs = pair.encode([{"role": "user", "content": "bad"}])
    streamer = transformers.TextIteratorStreamer(pair.tokenizer, skip_prompt=True, skip_special_tokens=True)
    output = pair.target.generate(**inputs, **settings, assistant_model=pair.drafter, streamer=streamer)
    assert "".join(streamer) == whole(output[0, inputs["input_ids"].shape[1] :])


def test_a_race_that_is_stopped_shows_what_was_written(pair_of_bytes):
    race = Race(pair_of_bytes, "bad", 0, {"max_new_tokens": 17, "do_sample": False}, 4)
    steps, broken = race.run(), 0
    for _ in steps:
        broken += any(
            pair_of_bytes.tokenizer.decode(lane.tokens, skip_special_tokens=True).endswith("\ufffd")
            for lane in race.lanes
        )
        if broken:
            break
    steps.close()
    assert broken and not race.over
    for lane in race.lanes:
        shown = "".join(text for text, _ in lane.parts)
        assert shown == pair_of_bytes.tokenizer.decode(lane.tokens, skip_special_tokens=True)
