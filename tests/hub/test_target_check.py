"""A target that counts otherwise than it is asked to is met exactly, or refused by name before the first token."""

import pytest
import torch
import transformers
from dflash_hub import target_check
from dflash_hub.target_cache import CacheRollback
from dflash_hub.target_model import CACHE
from helpers.families import equal_texts, padded_batch, tiny_config, tiny_family
from helpers.ropes import LONG
from helpers.scripted import scripted
from helpers.tiny import DRAFTERS, prompt_of, tiny_drafter, tiny_target
from transformers import LlamaForCausalLM


def greedy(target, inputs, **kwargs):
    return target.generate(**inputs, max_new_tokens=14, do_sample=False, pad_token_id=0, **kwargs)


def of_class(kind, seed: int = 0):
    """A tiny Llama of another class with the same weights."""
    base = tiny_target("llama", seed)
    target = kind(base.config).eval()
    target.load_state_dict(base.state_dict())
    return target


class Collects:
    def __init__(self):
        self.pieces = []

    def put(self, value):
        self.pieces.append(value)

    def end(self):
        pass


ONE, BATCH = {"input_ids": prompt_of(12)}, padded_batch()


# ------------------------------------------------------------------------------------------------- met exactly


class CutsByCache(LlamaForCausalLM):
    """Remote code of transformers 4.36 to 4.44: what the cache lacks of the whole text, positions by the mask."""

    def prepare_inputs_for_generation(self, input_ids, attention_mask=None, **kwargs):
        past = kwargs[CACHE].get_seq_length()
        input_ids = input_ids[:, past:] if input_ids.shape[1] > past else input_ids[:, -1:]
        positions = None
        if attention_mask is not None:
            positions = (attention_mask.long().cumsum(-1) - 1).clamp(min=0)[:, -input_ids.shape[1] :]
        kept = {name: kwargs.get(name) for name in (CACHE, "output_hidden_states")}
        return {"input_ids": input_ids, "attention_mask": attention_mask, "position_ids": positions, **kept}


class HandsOn(transformers.PreTrainedModel, transformers.GenerationMixin):
    """A wrapper whose forward has no `position_ids`, so that `generate` prepares none and the cache's columns count."""

    config_class = transformers.LlamaConfig
    _supports_sdpa = True

    def __init__(self, config):
        super().__init__(config)
        self.inner = LlamaForCausalLM(config)
        self.post_init()

    def load_state_dict(self, state):
        return self.inner.load_state_dict(state)

    def get_input_embeddings(self):
        return self.inner.get_input_embeddings()

    def get_output_embeddings(self):
        return self.inner.get_output_embeddings()

    def forward(self, input_ids=None, attention_mask=None, **kwargs):
        return self.inner(input_ids=input_ids, attention_mask=attention_mask, **kwargs)


class DropsPositions(LlamaForCausalLM):
    """Positions are taken, and do not reach the layers."""

    def forward(self, input_ids=None, attention_mask=None, position_ids=None, **kwargs):
        return super().forward(input_ids=input_ids, attention_mask=attention_mask, **kwargs)


@pytest.mark.parametrize("kind", DRAFTERS)
@pytest.mark.parametrize("inputs", ("one", "batch"))
@pytest.mark.parametrize("wrapper", (CutsByCache, HandsOn, DropsPositions))
def test_a_target_that_counts_by_its_cache_is_met_in_lockstep(wrapper, inputs, kind):
    """Its sequences stay in the columns in which plain `generate` has them."""
    target, drafter, inputs = of_class(wrapper), tiny_drafter(), {"one": ONE, "batch": BATCH}[inputs]
    plain = greedy(target, inputs)
    drafter = scripted(drafter, kind, plain)
    assert torch.equal(greedy(target, inputs, assistant_model=drafter), plain)
    speculation = drafter.last_speculation
    assert len({tuple(lengths) for lengths in speculation.acceptance_lengths}) == 1
    if kind == "oracle":
        assert speculation.accepted == speculation.drafted and speculation.num_accepted > 0
    if kind == "half-right":
        assert speculation.num_accepted > 0


@pytest.mark.parametrize("pads", (4, 8, 9))
def test_limits_hold_for_the_cache_s_columns_where_no_positions_reach_the_target(pads):
    """Padding counts in such a target's positions: LongRoPE's boundary comes earlier than the mask says."""
    _, drafter = tiny_family("llama", **LONG)
    torch.manual_seed(0)
    target = HandsOn(tiny_config("llama", **LONG)).eval()
    ids = torch.cat([torch.zeros(1, pads, dtype=torch.long), prompt_of(29)], dim=1)
    assert equal_texts(target, drafter, 16, input_ids=ids, attention_mask=(ids != 0).long()) is None


# ------------------------------------------------------------------------------------------------- refused by name


class CutsToLast(LlamaForCausalLM):
    def prepare_inputs_for_generation(self, input_ids, **kwargs):
        inputs = super().prepare_inputs_for_generation(input_ids, **kwargs)
        if kwargs[CACHE].get_seq_length() > 0:
            inputs["input_ids"] = inputs["input_ids"][:, -1:]
        return inputs


class OnePosition(LlamaForCausalLM):
    def prepare_inputs_for_generation(self, input_ids, **kwargs):
        inputs = super().prepare_inputs_for_generation(input_ids, **kwargs)
        if kwargs[CACHE].get_seq_length() > 0:
            inputs["position_ids"] = inputs["position_ids"][:, -1:]
        return inputs


class LastLogits(LlamaForCausalLM):
    def forward(self, *args, position_ids=None, logits_to_keep=0, **kwargs):
        return super().forward(*args, position_ids=position_ids, logits_to_keep=1, **kwargs)


class CutsInForward(LlamaForCausalLM):
    def forward(self, input_ids=None, position_ids=None, **kwargs):
        if kwargs[CACHE].get_seq_length() > 0:
            input_ids, position_ids = input_ids[:, -1:], position_ids[:, -1:]
        return super().forward(input_ids=input_ids, position_ids=position_ids, **kwargs)


class SamePosition(LlamaForCausalLM):
    """Counts the position of one token, and gives it to all."""

    def forward(self, input_ids=None, position_ids=None, **kwargs):
        if (past := kwargs[CACHE].get_seq_length()) > 0:
            position_ids = torch.full_like(input_ids, past)
        return super().forward(input_ids=input_ids, position_ids=position_ids, **kwargs)


class SeesAhead(LlamaForCausalLM):
    """A mask for one token: all of a block see each other."""

    def forward(self, input_ids=None, attention_mask=None, **kwargs):
        if (past := kwargs[CACHE].get_seq_length()) > 0:
            length = input_ids.shape[1]
            attention_mask = torch.zeros(len(input_ids), 1, length, past + length)
        return super().forward(input_ids=input_ids, attention_mask=attention_mask, **kwargs)


class LearnsPrompt(LlamaForCausalLM):
    """Tokens of its own before the prompt."""

    def prepare_inputs_for_generation(self, input_ids, is_first_iteration=False, **kwargs):
        inputs = super().prepare_inputs_for_generation(input_ids, is_first_iteration=is_first_iteration, **kwargs)
        if is_first_iteration:
            own = self.get_input_embeddings()(torch.full((len(input_ids), 5), 7))
            inputs["inputs_embeds"] = torch.cat([own, self.get_input_embeddings()(inputs.pop("input_ids"))], dim=1)
            inputs.pop("position_ids", None), inputs.pop("attention_mask", None)
        return inputs


REFUSED = {
    CutsToLast: "CutsToLast was to read 5 tokens in one forward pass, but its `prepare_inputs_for_generation` feeds 1;",
    OnePosition: "OnePosition was to read 5 tokens .* gives 1 positions for them",
    LastLogits: "LastLogits was to read 5 tokens .* returns 1 logits",
    CutsInForward: "CutsInForward was to read 5 tokens .* returns 1 logits",
    SamePosition: "SamePosition reads several tokens in another way than one by one",
    SeesAhead: "SeesAhead reads several tokens in another way than one by one",
    LearnsPrompt: "LearnsPrompt was to read 12 tokens in one forward pass, but its cache went from 0 to 17 tokens",
}


@pytest.mark.parametrize("kind", REFUSED)
def test_another_count_is_refused_before_the_first_token(kind):
    target, drafter, streamer = of_class(kind), tiny_drafter(), Collects()
    with pytest.raises(ValueError, match=REFUSED[kind]):
        greedy(target, ONE, assistant_model=drafter, streamer=streamer)
    assert len(streamer.pieces) == 1  # the prompt
    if kind is LearnsPrompt:
        with pytest.raises(ValueError, match="went from 0 to 4 tokens|was to read 4 tokens"):
            greedy(target, ONE, assistant_model=drafter, prefill_chunk_size=4)
    else:
        with pytest.raises(ValueError, match=REFUSED[kind]):
            greedy(target, BATCH, assistant_model=drafter)
        # Without drafts the same code is what plain `generate` runs.
        assert torch.equal(greedy(target, ONE, assistant_model=drafter, num_assistant_tokens=0), greedy(target, ONE))


def test_a_target_that_changes_after_its_check_is_refused(monkeypatch):
    """What is fed is looked at in every call: an adapter can take over a target that was fine."""
    target, drafter, streamer = tiny_target("llama"), tiny_drafter(), Collects()
    greedy(target, ONE, assistant_model=drafter)
    prepare = target.prepare_inputs_for_generation

    def cut(input_ids, **kwargs):
        inputs = prepare(input_ids, **kwargs)
        return inputs | {"input_ids": inputs["input_ids"][:, -1:]} if kwargs[CACHE].get_seq_length() else inputs

    monkeypatch.setattr(target, "prepare_inputs_for_generation", cut)
    with pytest.raises(ValueError, match="was to read 5 tokens .* feeds 1"):
        greedy(target, ONE, assistant_model=drafter, streamer=streamer)
    assert len(streamer.pieces) == 1


@pytest.mark.parametrize("name", ("PromptTuningConfig", "PromptEncoderConfig", "PrefixTuningConfig"))
def test_prompt_learning_adapters(name):
    """Refused with their names, whichever of them the installed transformers lets in; the bare target serves on."""
    peft = pytest.importorskip("peft")
    size = {"encoder_hidden_size": 16} if name == "PromptEncoderConfig" else {}
    config = getattr(peft, name)(task_type="CAUSAL_LM", num_virtual_tokens=5, **size)
    base, drafter = tiny_target("qwen2"), tiny_drafter()
    torch.manual_seed(3)
    target = peft.get_peft_model(base, config).eval()
    plain = greedy(target, ONE)
    try:
        text = greedy(target, ONE, assistant_model=drafter)
    except ValueError as error:
        assert "prompt tuning, p-tuning, prefix tuning" in str(error)
    else:  # peft's own way to put a prefix into the cache does not reach newer transformers, and nothing is added
        assert name == "PrefixTuningConfig" and torch.equal(text, plain)
    assert torch.equal(greedy(base, ONE, assistant_model=drafter), greedy(base, ONE))


# ------------------------------------------------------------------------------------------------- the check itself


def test_a_target_is_checked_once_a_kind_of_call():
    """Three forward passes; four where sequences of a batch may be apart; none where nothing is drafted."""
    target, drafter = tiny_target("llama"), tiny_drafter()
    checks = []
    for inputs, kwargs in ((ONE, {"num_assistant_tokens": 0}), (ONE, {}), (ONE, {}), (BATCH, {}), (BATCH, {})):
        greedy(target, inputs, assistant_model=drafter, **kwargs)
        checks.append(drafter.last_speculation.check_passes)
    assert checks == [0, 3, 0, 4, 0]
    assert len(target_check.checks_of(target)) == 2


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
@pytest.mark.parametrize(("kind", "ragged"), ((LlamaForCausalLM, True), (HandsOn, False), (DropsPositions, False)))
def test_half_precision_does_not_hide_what_counts_columns(kind, ragged, dtype):
    target = of_class(kind).to(dtype)
    if dtype == torch.bfloat16 and not ragged:  # positions matter so little here that only a look at them shows it
        for layer in target.modules():
            if hasattr(layer, "q_proj"):
                layer.q_proj.weight.data *= 0.02
    greedy(target, BATCH, assistant_model=tiny_drafter(dtype=dtype))
    (check,) = target_check.checks_of(target).values()
    assert check.ragged == ragged


@pytest.mark.parametrize("family", ("llama", "mistral", "gemma2", "qwen3_5", "lfm2", "olmo_hybrid"))
def test_what_was_moved_for_the_check_is_put_back(family):
    target, _ = tiny_family(family)
    cache = target(**BATCH, use_cache=True)[CACHE]
    rollback = CacheRollback(cache, target)
    before = [state.clone() for state in states_of(cache)]
    mask, more = BATCH["attention_mask"], torch.full((3, 4), 9)
    with rollback.verifying():
        target(more, attention_mask=torch.cat([mask, torch.ones(3, 4).long()], dim=1), **{CACHE: cache})
        moved = torch.tensor([0, 4, 0])
        rollback.move(moved)
        target(more[:, :1], attention_mask=torch.cat([mask, torch.ones(3, 5).long()], dim=1), **{CACHE: cache})
        rollback.move(5 - moved, back=True)
    assert len(before) == len(states_of(cache)) > 0
    for now, then in zip(states_of(cache), before):
        torch.testing.assert_close(now, then, atol=0, rtol=0)
    rollback.close()


def states_of(cache) -> list[torch.Tensor]:
    states = []
    for layer in cache.layers:
        states += [getattr(layer, name) for name in ("keys", "values") if getattr(layer, name, None) is not None]
        for name in ("conv_states", "recurrent_states"):
            states += [state for state in getattr(layer, name, {}).values() if state is not None]
    return states


@pytest.mark.parametrize(("dtype", "noise", "fine"), ((torch.float32, 1e-3, True), (torch.float32, 0.1, False),
                                                      (torch.bfloat16, 0.05, True), (torch.bfloat16, 0.5, False)))  # fmt: skip
def test_rounding_is_no_mistake(dtype, noise, fine):
    """Another order of summation is allowed for in the target's own precision; logits that are masked out do not count."""
    target = tiny_target("llama")
    single = torch.randn(3, 2, 50, generator=torch.Generator().manual_seed(0))
    block = single + noise * torch.randn(3, 2, 50, generator=torch.Generator().manual_seed(1))
    single[..., 40:], block[..., 40:] = -torch.inf, torch.finfo(torch.float32).min
    assert target_check.difference(block, single) == pytest.approx(noise, rel=0.2)
    if fine:
        target_check.check_block(target, block, single, dtype)
    else:
        with pytest.raises(ValueError, match="LlamaForCausalLM reads several tokens in another way"):
            target_check.check_block(target, block, single, dtype)
    moved = single + noise * torch.randn(3, 2, 50, generator=torch.Generator().manual_seed(2))
    assert target_check.is_same(moved, single, block if fine else single, dtype) == fine
    broken = torch.full_like(single, torch.nan)
    with pytest.raises(ValueError, match="logits are nan% off"):
        target_check.check_block(target, broken, single, dtype)
