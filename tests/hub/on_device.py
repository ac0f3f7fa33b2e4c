"""Target and drafter away from the CPU; `test_devices.py` runs this file, in a process for each device."""

import os

import pytest
import torch
from accelerate.state import AcceleratorState, PartialState
from dflash_hub.common.identity import identify
from dflash_hub.common.loading import cut_at_end
from dflash_hub.decode_choice import GumbelNoise
from dflash_hub.demo.pair import Pair
from dflash_hub.target_model import CACHE
from dflash_hub.training.check import check
from dflash_hub.training.losses import BlockLoss
from dflash_hub.training.responses import LocalTarget
from dflash_hub.training.train import fill_cache
from helpers.families import equal_texts, tiny_family
from helpers.scripted import scripted
from helpers.tiny import prompt_of, tiny_drafter, tiny_target
from helpers.training import answers_of, losses_of, trainer_of
from transformers import TrainingArguments

NEW = 11  # three rounds of an oracle; every operation of the virtual GPU goes through Python
VIRTUAL = os.environ["DFLASH_TEST_DEVICE"] == "virtual"
if VIRTUAL:  # else it would stand in the way of the real one
    from helpers import virtual_gpu


@pytest.fixture
def device():
    if VIRTUAL:
        with virtual_gpu.VirtualGPU():
            yield virtual_gpu.DEVICE
    else:
        yield torch.device("cuda", 0)


@pytest.fixture
def gpu(device):
    if not VIRTUAL:
        pytest.skip("only the virtual GPU counts")
    return virtual_gpu.VirtualGPU.current


def test_the_virtual_gpu_is_one(gpu):
    """What a test on it would not see is not tested."""
    values = torch.arange(4).to("virtual")
    assert values.device == virtual_gpu.DEVICE and (values + 1).device == virtual_gpu.DEVICE
    with pytest.raises(RuntimeError, match="tensors of virtual:0 and cpu"):
        values + torch.ones(4)
    with pytest.raises(RuntimeError, match="tensors of virtual:0 and cpu"):
        torch.cat([values, torch.ones(4)])
    assert not gpu.reads
    assert values.tolist() == [0, 1, 2, 3] and int(values.sum()) == 6 and values.cpu().device.type == "cpu"
    assert bool(values[values > 1].equal(torch.tensor([2, 3], device="virtual")))
    assert gpu.reads["elsewhere"] == 5
    values[1:] = 7
    assert values.cpu().tolist() == [0, 7, 7, 7]
    gpu.copies.clear()
    assert (values + torch.tensor([1, 2, 3, 4], device="virtual"))[[0, 3]].tolist() == [
        1,
        11,
    ]  # the index is a copy, too
    values[:2] = torch.ones(2, dtype=torch.long)
    torch.arange(4).to("virtual", non_blocking=True)
    assert gpu.copies["elsewhere"] == 3


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen3_5"])
def test_texts_equal_plain_with_every_drafter(device, family):
    target, drafter = tiny_family(family)
    target, drafter = target.to(device), drafter.to(device)
    assert equal_texts(target, drafter, NEW, input_ids=prompt_of(12).to(device)) is None


def left_padded(device):
    ids = torch.cat([torch.zeros(1, 3, dtype=torch.long), prompt_of(9, 1)], dim=1)
    ids = torch.cat([prompt_of(12), ids]).to(device)
    return {"input_ids": ids, "attention_mask": (ids != 0).long()}


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen3_5"])
def test_rows_equal_plain_with_every_drafter(device, family):
    target, drafter = tiny_family(family)
    assert equal_texts(target.to(device), drafter.to(device), NEW, **left_padded(device)) is None


OPTIONS = {
    "chunked": {"prefill_chunk_size": 5},
    "static": {"cache_implementation": "static"},
    "penalty": {"repetition_penalty": 1.3, "no_repeat_ngram_size": 3},
    "guidance": {"guidance_scale": 1.5},
    "states": {
        "return_dict_in_generate": True,
        "output_scores": True,
        "output_hidden_states": True,
        "output_attentions": True,
    },
    "constrained": {"prefix_allowed_tokens_fn": lambda row, ids: list(range(3, 90 - len(ids) % 7))},
    "auto": {"num_assistant_tokens": "auto"},
    "end tokens": {"eos_token_id": [5, 17, 40]},
}


@pytest.mark.parametrize("option", OPTIONS)
def test_settings(device, option):
    target, drafter = tiny_target("llama").to(device), tiny_drafter().to(device)
    target.set_attn_implementation("eager")  # which returns attentions
    kwargs, ids = {"max_new_tokens": NEW, "do_sample": False} | OPTIONS[option], prompt_of(12).to(device)
    plain = target.generate(ids, **{name: value for name, value in kwargs.items() if name != "num_assistant_tokens"})
    text = plain if torch.is_tensor(plain) else plain.sequences
    drafter = scripted(drafter, "half-right", text)
    drafted = target.generate(ids, assistant_model=drafter, **kwargs)
    assert (drafted if torch.is_tensor(drafted) else drafted.sequences).equal(text)
    if not torch.is_tensor(plain):
        for one, other in zip(plain.scores, drafted.scores, strict=True):
            torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-4)
    assert drafter.last_speculation.num_accepted > 0


@pytest.mark.parametrize("rows", [1, 2])
def test_a_sampled_text_does_not_depend_on_the_drafter(device, rows):
    target, drafter, inputs = tiny_target("llama").to(device), tiny_drafter().to(device), left_padded(device)
    inputs = inputs if rows == 2 else {"input_ids": prompt_of(12).to(device)}

    def sampled():
        torch.manual_seed(3)
        return target.generate(
            **inputs, assistant_model=drafter, max_new_tokens=NEW, do_sample=True, temperature=0.8, top_k=0
        )

    text = sampled()
    assert drafter.last_speculation.num_accepted < 6
    drafter = scripted(drafter, "oracle", text)
    assert sampled().equal(text)
    assert drafter.last_speculation.accepted == drafter.last_speculation.drafted


def test_noise_resolves_its_largest_values(device):
    """Noise decides for a rare token by its largest values. Drawn in float32 they have ties on a GPU, some 60 here."""
    noise = GumbelNoise(0, 0, 20, device).at(0, 20, 100_000).flatten()
    assert len(noise.cpu().sort(descending=True).values[:1000].unique()) > 990


@pytest.mark.parametrize("family", ["llama", "qwen3_5"])
def test_a_chat_turn_reuses_the_cache(device, family):
    target, drafter = tiny_family(family)
    target, drafter, kwargs = target.to(device), drafter.to(device), {"max_new_tokens": 9, "do_sample": False}
    first = target.generate(prompt_of(8).to(device), assistant_model=drafter, return_dict_in_generate=True, **kwargs)
    ids = torch.cat([first.sequences, prompt_of(5, 4).to(device)], dim=1)
    again = target.generate(ids, assistant_model=drafter, **{CACHE: first[CACHE]}, **kwargs)
    assert again.equal(target.generate(ids, **kwargs))


@pytest.mark.parametrize("moved", ["target", "drafter"])
@pytest.mark.parametrize("family", ["llama", "qwen3_5"])
def test_target_and_drafter_on_two_devices(device, family, moved):
    target, drafter = tiny_family(family)
    (target if moved == "target" else drafter).to(device)
    assert equal_texts(target, drafter, NEW, input_ids=prompt_of(12).to(target.device)) is None
    if family == "llama":
        inputs = {name: value.to(target.device) for name, value in left_padded(device).items()}
        assert equal_texts(target, drafter, NEW, **inputs) is None


ROUNDS = {
    "greedy": {},
    "sampled": {"do_sample": True},
    "greedy, a batch": {"rows": 2},
    "sampled, a batch": {"rows": 2, "do_sample": True},
    # Two where transformers itself looks at something: whether a recurrent mask hides anything, whether a static cache is empty.
    "recurrent, a batch": {"family": "qwen3_5", "rows": 2, "waits": 2},
    "static": {"cache_implementation": "static", "waits": 2},
}


@pytest.mark.parametrize("case", ROUNDS)
def test_a_round_waits_for_the_device_once(gpu, case):
    """Real waits, of target and drafter as well: what 14 further tokens cost is one read a round, and no copy that blocks."""
    kwargs = {"family": "llama", "rows": 1, "waits": 1} | ROUNDS[case]
    (target, drafter), rows, waits = tiny_family(kwargs.pop("family")), kwargs.pop("rows"), kwargs.pop("waits")
    target, drafter = target.to("virtual"), drafter.to("virtual")
    inputs = left_padded("virtual") if rows == 2 else {"input_ids": prompt_of(12).to("virtual")}

    def generate(new):
        torch.manual_seed(0)
        return target.generate(
            **inputs, assistant_model=drafter, max_new_tokens=new, num_assistant_tokens=4, **kwargs
        )  # the same rounds whatever they take

    drafter = scripted(drafter, "half-right", generate(20).cpu())  # rows of a batch accept different counts
    counts, rounds = [], []
    generate(6)  # what the first call of a pair does once is done
    for new in (6, 20):
        gpu.reads.clear(), gpu.copies.clear()
        generate(new)
        counts.append(gpu.reads.total() + gpu.copies.total())
        rounds.append(max(map(len, drafter.last_speculation.accepted)))
    assert rounds[1] - rounds[0] > 4
    # At most: the shorter text ends with a round without draft tokens, where the target itself looks at its mask.
    assert counts[1] - counts[0] <= waits * (rounds[1] - rounds[0]), (gpu.reads, gpu.copies)


# ------------------------------------------------------------------------------------------------------------------
# Training, and what is around it


def test_check_and_regenerate(device, pair_folders):
    pair = Pair(*pair_folders, "float32")
    target, drafter = pair.target.to(device), pair.drafter.to(device)
    findings = check(
        drafter, target, pair.tokenizer, [{"messages": [{"role": "user", "content": "How many?"}]}], None, None
    )
    # An untrained drafter: all but its acceptance is right.
    assert [finding.name for finding in findings if finding.ok is False] == ["acceptance", "likely cause"]
    answers = LocalTarget(target, pair.tokenizer, 8, {}, 2).answer([[5, 6, 7], [8, 9]], seed=0)
    assert answers[0] == cut_at_end(
        target.generate(torch.tensor([[5, 6, 7]], device=device), max_new_tokens=8)[0, 3:].tolist(), {2}
    )


@pytest.fixture
def train_on(monkeypatch):
    """`train_on(device)`: trainers that are made from then on train there, as accelerate would have it for a real device."""
    made, chosen = TrainingArguments.__post_init__, []

    def on_device(arguments):
        AcceleratorState._reset_state(reset_partial_state=True)
        made(arguments)
        assert arguments.device.type == "cpu"  # as they asked; this sets up accelerate's state
        PartialState._shared_state["device"] = arguments.__dict__["_setup_devices"] = chosen[-1]

    monkeypatch.setattr(TrainingArguments, "__post_init__", on_device)
    yield chosen.append
    AcceleratorState._reset_state(reset_partial_state=True)


TRAINING = {
    "D-PACE, Muon, a part of the vocabulary": {"loss": "dpace", "muon": True, "part": True},
    "KL, packed, two batches a step": {
        "loss": "kl", "pack_length": 64, "gradient_accumulation_steps": 2, "per_device_train_batch_size": 1
    },
    "TV, cached features": {"loss": "tv", "cached": True},
}  # fmt: skip


@pytest.mark.parametrize("case", TRAINING)
def test_training_gives_the_losses_of_the_cpu(tmp_path, device, train_on, case):
    figures, rows = [], answers_of(tiny_target("llama"), 10)
    for place in (torch.device("cpu"), device):
        train_on(place)
        options = dict(TRAINING[case])
        target, drafter = tiny_target("llama").to(place), tiny_drafter(initializer_range=0.05).to(place)
        if options.pop("cached", False):
            loss = BlockLoss(options["loss"], 4.0)
            options["cache"] = fill_cache(str(tmp_path / place.type), identify(target), target, drafter, loss, rows[:8])
        if options.pop("part", False):
            drafter.set_draft_vocabulary(torch.arange(0, 97, 2))
        trainer = trainer_of(
            tmp_path, target, drafter, rows[:8], rows[8:], max_steps=2, save_strategy="no", dataloader_pin_memory=False,
            **options,
        )  # fmt: skip
        trainer.train()
        assert trainer.args.device == place == drafter.device
        figures.append((losses_of(trainer), trainer.evaluate()))
    (losses, evaluation), (expected_losses, expected) = figures[1], figures[0]
    assert losses == pytest.approx(expected_losses, rel=1e-4)
    for name in ("eval_acceptance_length", "eval_replayed_acceptance_length", "eval_teacher_forced_acceptance_length"):
        assert evaluation[name] == expected[name]
