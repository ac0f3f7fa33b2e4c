"""Drafting from a list of tokens and those of the text: the same scores, the same text, fewer rows of the head."""

import gc
import weakref

import pytest
import torch
from dflash_hub import DFlashDraftModel
from dflash_hub.drafter_candidates import DFlashProposer
from dflash_hub.drafter_heads import Candidates, TargetHead
from dflash_hub.drafter_vocabulary import ListedRows, Places, make_head
from dflash_hub.target_model import CACHE
from helpers.families import drafter_for, equal_texts, padded_batch, tiny_family, with_some_tokens
from helpers.scripted import ScriptedDrafter, scripted
from helpers.tiny import DRAFTERS, VOCAB, prompt_of, tiny_drafter, tiny_target
from transformers import DynamicCache

LISTED = 12


def listing_drafter(**overrides) -> DFlashDraftModel:
    return with_some_tokens(tiny_drafter(draft_vocab_size=LISTED, **overrides))


def listed(drafter) -> list[int]:
    return sorted(ListedRows.of(drafter, tiny_target("llama")).tokens)


def not_listed(drafter, count: int) -> list[int]:
    return [token for token in range(3, VOCAB) if token not in listed(drafter)][:count]


@pytest.mark.parametrize("family", ("llama", "gemma3_text", "qwen3_next"))
def test_the_text_is_the_targets_whatever_is_listed(family):
    target, _ = tiny_family(family, layers=4)
    drafter = drafter_for(target, draft_vocab_size=LISTED)
    assert equal_texts(target, drafter) is None
    assert equal_texts(target, drafter, **padded_batch()) is None


@pytest.mark.parametrize("drafts", DRAFTERS)
def test_a_sampled_text_is_that_without_draft_tokens(drafts):
    target, drafter = tiny_target("llama"), listing_drafter()

    def text(num_draft):
        torch.manual_seed(3)
        inputs = padded_batch()
        return target.generate(
            **inputs, do_sample=True, temperature=0.8, top_p=0.9, repetition_penalty=1.2, max_new_tokens=24,
            assistant_model=drafter, num_assistant_tokens=num_draft,
        )  # fmt: skip

    plain = text(0)
    drafter = scripted(drafter, drafts, plain)
    assert text(4).equal(plain)
    accepted = drafter.last_speculation.num_accepted
    assert accepted > 20 if drafts != "random" else accepted < 20


@pytest.mark.parametrize("scales", ({}, {"output_multiplier": 0.5, "final_logit_softcapping": 3.0}))
@pytest.mark.parametrize("bias", (False, True))
def test_candidates_score_as_in_the_whole_head(scales, bias):
    """Listed tokens and those of the text, from buffers that grew in between; all others are no candidates."""
    target, drafter = tiny_target("llama"), listing_drafter(**scales)
    if bias:
        target.set_output_embeddings(torch.nn.Linear(32, VOCAB))
    head, whole = make_head(drafter, target, VOCAB), TargetHead(drafter.config, target.get_output_embeddings(), VOCAB)
    hidden = torch.randn(1, 5, 32, generator=torch.Generator().manual_seed(0))
    own = not_listed(drafter, 40)
    for text in ([], own[:2], [own[0], listed(drafter)[0], own[2]], own):
        head.see([text])
        found, expected = head(hidden), whole(hidden).logits
        tokens = listed(drafter) + own[: head.text.count]
        assert found.ids[0, 0].tolist() == tokens and len(set(tokens)) == len(tokens)
        torch.testing.assert_close(found.logits, expected[..., tokens])
        over = found.over_vocabulary(VOCAB)
        assert (over > -torch.inf).sum(-1).unique().item() == len(tokens)
        torch.testing.assert_close(over[..., tokens], expected[..., tokens])


def test_a_sequence_drafts_what_it_would_draft_alone():
    """A token of one text is no candidate for another, in generation and at places of known texts."""
    target, drafter = tiny_target("llama"), listing_drafter()
    hidden = torch.randn(2, 3, 32, generator=torch.Generator().manual_seed(0))
    a, b, c, d = not_listed(drafter, 4)
    texts = [[a, b, a, c], [d, b, 3]]
    head = make_head(drafter, target)
    head.see([[a], [d]])
    head.see([[b, a, c], [b, 3]])
    together = head(hidden).over_vocabulary(VOCAB)
    for row, text in enumerate(texts):
        alone = make_head(drafter, target)
        alone.see([text])
        torch.testing.assert_close(together[row : row + 1], alone(hidden[row : row + 1]).over_vocabulary(VOCAB))

    places = Places(torch.tensor([0, 1, 0]), torch.tensor([1, 0, 3]))
    drafted = head(hidden[[0, 0, 1]], places)
    assert [set(ids[row > -torch.inf].tolist()) - {*listed(drafter)} for ids, row in zip(drafted.ids[:, 0], drafted.logits[:, 0])] == [
        {a, b}, {d}, {a, b, c}
    ]  # fmt: skip
    tokens = torch.tensor([[a, c, d], [d, a, d], [c, b, d]])
    columns = drafted.columns(tokens)
    assert (columns < 0).tolist() == [[False, True, True], [False, True, False], [False, False, True]]
    assert drafted.ids.gather(-1, columns.clamp(min=0)[..., None])[..., 0][columns >= 0].equal(tokens[columns >= 0])


def test_rows_are_copied_once_for_a_pair_and_anew_when_the_head_changes():
    target, drafter = tiny_target("llama"), listing_drafter()
    rows = ListedRows.of(drafter, target)
    target.generate(prompt_of(5), assistant_model=drafter, max_new_tokens=6, do_sample=False)
    assert ListedRows.of(drafter, target) is rows
    with torch.no_grad():
        target.lm_head.weight.mul_(2.0)
    assert ListedRows.of(drafter, target).weight.equal(rows.weight * 2)
    target.to(torch.bfloat16)
    assert ListedRows.of(drafter, target).weight.dtype == torch.bfloat16
    drafter.set_draft_vocabulary(torch.tensor([4, 9]))
    assert ListedRows.of(drafter, target).weight.equal(target.lm_head.weight[[4, 9]])
    gone = weakref.ref(target), weakref.ref(drafter)
    del target, drafter
    gc.collect()
    assert [one() for one in gone] == [None, None]


def seen_by(drafter) -> tuple[ScriptedDrafter, list[list[set[int]]]]:
    """The drafter, and by draft the text's own tokens of each sequence that were candidates."""
    seen = []

    class Noted(DFlashProposer):
        def candidates(self, *args, **kwargs):
            seen.append([{*own} for own in self.head.own])
            return super().candidates(*args, **kwargs)

    return ScriptedDrafter(drafter, Noted), seen


@pytest.mark.parametrize("chunk", (None, 3))
@pytest.mark.parametrize("prefix", ("kept", "read", "left out"))
def test_the_texts_own_tokens_are_those_of_prompt_prefix_and_output(prefix, chunk):
    target, drafter, ids = tiny_target("llama"), listing_drafter(), prompt_of(9)
    call = {"do_sample": False, "return_dict_in_generate": True, "prefill_chunk_size": chunk}
    cache = {CACHE: DynamicCache(config=target.config)}
    first = target.generate(
        ids, **cache, **call, max_new_tokens=6, **{"assistant_model": drafter} if prefix == "kept" else {}
    )
    drafter, seen = seen_by(drafter)
    text = torch.cat([first.sequences, prompt_of(3, seed=5)], dim=1)
    output = target.generate(
        text, **cache, **call, max_new_tokens=12, assistant_model=drafter, read_prefix=prefix != "left out"
    )
    known = len(text[0]) + 1  # the first anchor
    for own, added in zip(seen, [0, *drafter.last_speculation.acceptance_lengths[0]]):
        known += added
        assert own == [{*output.sequences[0, :known].tolist()} - {*listed(drafter)}]
    assert len(seen) > 2


def test_padding_and_other_sequences_are_no_text_of_a_sequence():
    target, drafter, inputs = tiny_target("llama"), listing_drafter(), padded_batch()
    drafter, seen = seen_by(drafter)
    output = target.generate(
        **inputs, assistant_model=drafter, max_new_tokens=2, do_sample=False, num_assistant_tokens=1
    )
    assert not seen  # there is room for one token only
    output = target.generate(**inputs, assistant_model=drafter, max_new_tokens=3, do_sample=False)
    mask = torch.nn.functional.pad(inputs["attention_mask"], (0, 1), value=1)
    texts = [row[:13][real == 1].tolist() for row, real in zip(output, mask)]
    assert seen[0] == [{*text} - {*listed(drafter)} for text in texts]


def test_greedy_drafts_need_no_scores_of_the_whole_vocabulary(monkeypatch):
    target, drafter = tiny_target("llama"), listing_drafter()
    monkeypatch.setattr(Candidates, "over_vocabulary", lambda *args: pytest.fail("scattered"))
    target.generate(**padded_batch(), assistant_model=drafter, max_new_tokens=12, do_sample=False)
    assert drafter.last_speculation.num_drafted > 20 and not drafter.last_speculation.notes


class HeadOfItsOwn(torch.nn.Linear):
    """Computes as a linear layer does, but may hold anything as its weight."""


def test_a_head_without_dense_rows_is_used_whole_and_the_statistics_say_so():
    target, drafter = tiny_target("llama"), listing_drafter()
    head = HeadOfItsOwn(32, VOCAB, bias=False)
    head.weight = target.lm_head.weight
    target.set_output_embeddings(head)
    plain = target.generate(prompt_of(5), max_new_tokens=12, do_sample=False)
    text = target.generate(prompt_of(5), assistant_model=drafter, max_new_tokens=12, do_sample=False)
    assert text.equal(plain)
    summary = drafter.last_speculation.summary()
    assert "the whole LM head was read in each draft, although the drafter lists 12 tokens" in summary
    assert "HeadOfItsOwn" in summary


def test_a_list_is_saved_and_loaded_with_the_weights(tmp_path):
    drafter = listing_drafter()
    drafter.save_pretrained(tmp_path)
    loaded = DFlashDraftModel.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert loaded.d2t.equal(drafter.d2t) and loaded.d2t.dtype == torch.long and loaded.dtype == torch.bfloat16
    assert loaded.config.draft_vocab_size == LISTED
    loaded.set_draft_vocabulary(None)
    loaded.save_pretrained(tmp_path)
    assert DFlashDraftModel.from_pretrained(tmp_path).d2t is None
    with pytest.raises(ValueError, match="missing: d2t"):
        DFlashDraftModel.from_pretrained(tmp_path, draft_vocab_size=5)
    with torch.no_grad():
        drafter.d2t[3] += 60
    drafter.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"must ascend, got \d+ behind \d+"):
        DFlashDraftModel.from_pretrained(tmp_path)


@pytest.mark.parametrize(
    ("token_ids", "sentence"),
    (
        (torch.tensor([3, 3]), "must ascend, got 3 behind 3"),
        (torch.tensor([-1, 3]), r"must be in \[0, 97\), got -1 to 3"),
        (torch.tensor([3, 97]), r"must be in \[0, 97\), got 3 to 97"),
        (torch.tensor([3.0]), "a list of 1 to 96 token ids .*got torch.float32"),
        (torch.arange(97), "a list of 1 to 96 token ids"),
    ),
)
def test_a_list_that_is_none_is_refused(token_ids, sentence):
    with pytest.raises(ValueError, match=sentence):
        tiny_drafter().set_draft_vocabulary(token_ids)
