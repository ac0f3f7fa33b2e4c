"""The one rule under sampling: the target's distribution, whatever is drafted."""

import weakref

import pytest
import torch
from dflash_hub.decode_choice import GumbelNoise, Sampler, gumbel_argmax
from dflash_hub.decode_state import TokenBuffer
from dflash_hub.drafter_heads import Candidates
from helpers.scripted import scripted
from helpers.tiny import DRAFTERS, prompt_of, tiny_drafter, tiny_target
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import LogitsProcessor, LogitsProcessorList
from transformers.generation import logits_process as lp

WARPERS = {
    "plain": [],
    "temperature": [lp.TemperatureLogitsWarper(0.6)],
    "top-k": [lp.TopKLogitsWarper(4)],
    "top-p": [lp.TemperatureLogitsWarper(1.5), lp.TopPLogitsWarper(0.8)],
    "min-p": [lp.MinPLogitsWarper(0.2)],
    "typical": [lp.TypicalLogitsWarper(0.7)],
    "top-h": [lp.TopHLogitsWarper(0.5)],
    "epsilon": [lp.EpsilonLogitsWarper(0.08)],
    "eta": [lp.EtaLogitsWarper(0.08)],
    "repetition penalty": [lp.RepetitionPenaltyLogitsProcessor(1.8)],
}


def chi_square(counts: torch.Tensor, exact: torch.Tensor) -> float:
    """How far counts are off their exact law, in standard deviations of a chi-square (Wilson-Hilferty)."""
    expected = (exact.double() * counts.sum()).flatten()
    statistic = float(((counts.flatten() - expected) ** 2 / expected).sum())
    spread = 2 / (9 * (expected.numel() - 1))
    return ((statistic / (expected.numel() - 1)) ** (1 / 3) - (1 - spread)) / spread**0.5


def sampler_of(text, processors, noises, lengths=None, vocab_size=9):
    """A sampler behind the first `lengths` tokens of each sequence of a text; ragged where these differ."""
    buffer = TokenBuffer(text, None)
    buffer.lengths = [*(lengths or [text.shape[1]] * len(text))]
    return Sampler(LogitsProcessorList(processors), buffer, noises, vocab_size, len({*buffer.lengths}) > 1)


def chosen(sampler, logits):
    """Choices and scores of logits (B, n, V) at the positions from the end of the sampler's text on."""
    text = sampler.text
    draft = torch.stack([ids[n : n + logits.shape[1] - 1] for ids, n in zip(text.ids, text.lengths)])
    return sampler.choose_block(draft, logits, keep_scores=True)


@pytest.mark.parametrize("name", WARPERS)
def test_choices_have_the_targets_distribution(name):
    """Against enumeration on nine tokens: total variation at most 0.02 with 60,000 draws."""
    draws, vocabulary = 60_000, 9
    logits = torch.randn(1, vocabulary, generator=torch.Generator().manual_seed(5)) * 1.5
    noise = GumbelNoise(0, 0, draws, torch.device("cpu"))
    scores = chosen(sampler_of(torch.tensor([[2, 5, 5]]), WARPERS[name], [noise]), logits[None])[1]
    exact = scores.double().softmax(-1)[0, 0]
    choices = gumbel_argmax(scores[0], noise.at(0, draws, vocabulary))
    drawn = torch.bincount(choices, minlength=vocabulary) / draws
    assert 0.5 * (drawn - exact).abs().sum() < 0.02
    assert (drawn[exact == 0] == 0).all()


def test_noise_depends_on_seed_and_position_only():
    """In whatever pieces it is looked at, and however often."""
    whole = GumbelNoise(7, 3, 20, torch.device("cpu")).at(3, 20, 11)
    pieces, position = GumbelNoise(7, 3, 4, torch.device("cpu")), 3
    for looked_at, emitted in ((4, 1), (4, 3), (1, 1), (4, 2), (3, 3), (4, 4)):
        assert torch.equal(pieces.at(position, looked_at, 11), whole[position - 3 : position - 3 + looked_at])
        position += emitted
    assert not torch.equal(GumbelNoise(8, 3, 20, torch.device("cpu")).at(3, 20, 11), whole)
    # Positions and neighboring seeds are independent: no correlation beyond chance.
    a, b = (GumbelNoise(seed, 0, 500, torch.device("cpu")).at(0, 500, 40).flatten() for seed in (1, 2))
    assert torch.corrcoef(torch.stack([a, b]))[0, 1].abs() < 0.03
    assert torch.corrcoef(torch.stack([a[:-40], a[40:]]))[0, 1].abs() < 0.03
    assert abs(a.mean() - 0.5772) < 0.03 and abs(a.var() - 1.6449) < 0.1  # Gumbel


def test_a_position_without_a_possible_token_has_no_choice():
    scores = torch.tensor([[0.0, -torch.inf], [-torch.inf, -torch.inf], [torch.nan, 0.0]])
    noise = torch.zeros(3, 2)
    assert gumbel_argmax(scores, noise).tolist() == [0, -1, -1]
    noises = [GumbelNoise(0, 0, 3, torch.device("cpu"))]
    _, finite = sampler_of(torch.zeros(1, 7, dtype=torch.long), [], noises, [4]).propose(Candidates(scores[None]))
    assert finite.tolist() == [[True, False, False]]


def test_pitfall_10_same_distributions_propose_the_same():
    """Shared noise: the drafter agrees with the target whenever their distributions do."""
    logits = torch.randn(6, 40, generator=torch.Generator().manual_seed(1))
    processors = [lp.TemperatureLogitsWarper(0.9), lp.RepetitionPenaltyLogitsProcessor(1.4)]
    text, noises = torch.zeros(1, 10, dtype=torch.long), [GumbelNoise(0, 0, 6, torch.device("cpu"))]
    sampler = sampler_of(text, processors, noises, [4], vocab_size=40)
    drafts, _ = sampler.propose(Candidates(logits[None]))
    choices, scores = sampler.choose_block(drafts[:, :-1], logits[None])
    assert torch.equal(choices, drafts) and scores is None


def test_rare_tokens_have_their_probability():
    """Chi-square of two million draws, with tokens of probability 1e-2 to 1e-5."""
    rare = torch.tensor([1e-2, 1e-3, 3e-4, 1e-4, 3e-5, 1e-5])
    exact = torch.cat([rare, (1 - rare.sum())[None]])
    noise = GumbelNoise(3, 0, 20, torch.device("cpu")).at(0, 20, 7 * 100_000)
    choices = gumbel_argmax(exact.log(), noise.view(-1, 7))
    counts = torch.bincount(choices, minlength=7)
    assert abs(chi_square(counts, exact)) < 3
    assert chi_square(counts, exact * torch.tensor([1, 1, 1, 1, 1, 3, 1]) / (1 + 2e-5)) > 3  # the test sees another law


def test_noise_resolves_its_largest_values():
    """Noise decides for a rare token by its largest values: of two million, the largest 1000 are those of a Gumbel law.

    Drawn from uniform numbers in float32 they would come in steps, with many ties.
    """
    noise = GumbelNoise(0, 0, 20, torch.device("cpu")).at(0, 20, 100_000).flatten()
    largest = noise.sort(descending=True).values[:1000].double()
    exceedance = -torch.expm1(-(-largest).exp()) * noise.numel()  # expected: 1, 2, 3, ...
    rank = torch.arange(1, 1001)
    assert ((exceedance - rank).abs() < 4 * rank.sqrt()).all()
    assert len(largest.unique()) > 990


@pytest.mark.parametrize("apart", (False, True))
@pytest.mark.parametrize("name", ["plain", "top-p", "repetition penalty"])
@pytest.mark.parametrize("seeds", [None, (1, 2, 3)])
def test_a_block_is_chosen_as_its_positions_alone(name, apart, seeds):
    """Chunk by chunk: the choices and scores of a batch of blocks are those of each position of each sequence alone."""
    cpu = torch.device("cpu")
    logits = torch.randn(3, 5, 9, generator=torch.Generator().manual_seed(4)) * 2
    text = torch.randint(9, (3, 20), generator=torch.Generator().manual_seed(5))
    starts = [7, 9, 4] if apart else [7, 7, 7]

    def noises(rows=slice(None)):
        return None if seeds is None else [GumbelNoise(seed, 4, 16, cpu) for seed in seeds[rows]]

    choices, scores = chosen(sampler_of(text, WARPERS[name], noises(), starts), logits)
    for row in range(3):
        alone_noise = noises(slice(row, row + 1))
        for i in range(5):
            alone = sampler_of(text[row : row + 1], WARPERS[name], alone_noise, [starts[row] + i])
            choice, score = chosen(alone, logits[row : row + 1, i : i + 1])
            assert torch.equal(choice[0, 0], choices[row, i])
            torch.testing.assert_close(score[0, 0], scores[row, i])


SAMPLING = {
    "temperature": {"temperature": 0.8},
    "top-k": {"temperature": 1.3, "top_k": 12},
    "top-p": {"top_p": 0.7, "top_k": 0},
    "min-p": {"min_p": 0.1},
    "top-h": {"top_h": 0.6, "temperature": 1.5},
    "typical": {"typical_p": 0.8},
    "epsilon": {"epsilon_cutoff": 0.02},
    "eta": {"eta_cutoff": 0.02},
    "repetition penalty": {"repetition_penalty": 1.5, "temperature": 0.7},
}


def sample(target, ids, seed, max_new_tokens=24, **kwargs):
    torch.manual_seed(seed)
    return target.generate(ids, do_sample=True, max_new_tokens=max_new_tokens, **kwargs)


@pytest.mark.parametrize("name", SAMPLING)
def test_a_seeds_text_does_not_depend_on_the_drafter(name):
    """The same with a random, a half-right and an oracle drafter, any draft length, and without a drafter at all."""
    target, drafter, ids = tiny_target("qwen3", initializer_range=0.15), tiny_drafter(), prompt_of(10)
    texts = []
    for seed in range(3):
        alone = sample(target, ids, seed, assistant_model=drafter, num_assistant_tokens=0, **SAMPLING[name])
        assert drafter.last_speculation.drafter_passes == 0
        texts.append(alone[0].tolist())
        for kind in DRAFTERS:
            drafter = scripted(drafter, kind, alone)
            for drafted in (1, 2, 4):
                text = sample(
                    target, ids, seed, assistant_model=drafter, num_assistant_tokens=drafted, **SAMPLING[name]
                )
                assert torch.equal(text, alone), (seed, kind, drafted)
                speculation = drafter.last_speculation
                if kind == "oracle":
                    assert speculation.num_accepted == speculation.num_drafted
                if kind == "half-right":
                    assert 0 < speculation.num_accepted < speculation.num_drafted
    assert texts[0] != texts[1] != texts[2]


def test_a_seeds_text_with_a_stateful_processor():
    class Alternates(LogitsProcessor):
        def __init__(self):
            self.calls = 0

        def __call__(self, input_ids, scores):
            self.calls += 1
            return scores * (0.5 if self.calls % 2 else 2.0)

    target, drafter, ids = tiny_target("qwen3", initializer_range=0.15), tiny_drafter(), prompt_of(10)
    texts = set()
    for kind in DRAFTERS:
        if texts:
            drafter = scripted(drafter, kind, torch.tensor([next(iter(texts))]))
        processors = LogitsProcessorList([Alternates()])
        texts.add(tuple(sample(target, ids, 0, assistant_model=drafter, logits_processor=processors)[0].tolist()))
        assert processors[0].calls == 24
    assert len(texts) == 1
    assert drafter.last_speculation.num_accepted > 0


@pytest.mark.parametrize("streamed", (False, True))
@pytest.mark.parametrize("name", ("temperature", "top-p", "repetition penalty"))
def test_a_seeds_batch_does_not_depend_on_the_drafter(name, streamed):
    """Ragged and in lockstep (with a streamer): the text is that of the call without drafts, which is in lockstep."""
    target, drafter = tiny_target("qwen3", initializer_range=0.15), tiny_drafter()
    ids = torch.cat([prompt_of(10, seed) for seed in range(3)])
    ids[1, :4] = 0
    kwargs = {"attention_mask": (ids != 0).long(), "eos_token_id": [*range(3, 9)], **SAMPLING[name]}
    if streamed:
        kwargs["streamer"] = Pieces()
    alone = sample(target, ids, 5, assistant_model=drafter, num_assistant_tokens=0, **kwargs)
    for kind in DRAFTERS:
        drafter = scripted(drafter, kind, alone)
        for drafted in (1, 4):
            text = sample(target, ids, 5, assistant_model=drafter, num_assistant_tokens=drafted, **kwargs)
            assert torch.equal(text, alone), (kind, drafted)
            speculation = drafter.last_speculation
            assert (speculation.num_accepted > 0) or kind == "random"
            assert (speculation.num_accepted < speculation.num_drafted) or kind == "oracle"


@pytest.mark.parametrize("number", (0, 4))
def test_pitfall_9_11_two_tokens_have_the_targets_law(number):
    """Pitfalls 9, 11: 4000 sequences, 49 pairs of tokens, against the target's processed softmax.

    Without drafts, the reference for seeds; and with half-right drafts, of which some become text.
    """
    target = tiny_target("llama", vocab_size=7, initializer_range=0.2, pad_token_id=0, bos_token_id=1)
    drafter, ids = tiny_drafter(vocab_size=7, mask_token_id=6), torch.tensor([[3, 4, 5]])
    with torch.no_grad():
        first = (target(ids).logits[0, -1].double() / 1.4).softmax(-1)
        continued = torch.cat([ids.expand(7, -1), torch.arange(7)[:, None]], dim=1)
        exact = first[:, None] * (target(continued).logits[:, -1].double() / 1.4).softmax(-1)
    drafter = scripted(drafter, "half-right", (torch.arange(40) % 6 + 1).expand(4000, -1))
    texts = sample(
        target, ids, 0, assistant_model=drafter, num_assistant_tokens=number, temperature=1.4, top_k=0, max_new_tokens=3,
        num_return_sequences=4000,
    )  # fmt: skip
    speculation = drafter.last_speculation
    assert (speculation.num_accepted > 0) == (speculation.num_accepted < speculation.num_drafted) == (number > 0)
    counts = torch.bincount(texts[:, 3] * 7 + texts[:, 4], minlength=49)
    assert abs(chi_square(counts, exact)) < 3
    assert chi_square(counts, exact.flip(1)) > 10  # the test sees another law


class Pieces:
    def put(self, value):
        pass

    def end(self):
        pass


class PeakMemory(TorchDispatchMode):
    """Counts the bytes of the tensors that operations made and that are still alive; `peak` is the most so far."""

    def __init__(self):
        super().__init__()
        self.alive, self.held, self.peak = weakref.WeakSet(), 0, 0

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        result = operation(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and (storage := tensor.untyped_storage()) not in self.alive:
                self.alive.add(storage)
                self.held += storage.nbytes()
                weakref.finalize(storage, self.release, storage.nbytes())
        self.peak = max(self.peak, self.held)
        return result

    def release(self, count: int):
        self.held -= count


SAMPLED_MEMORY = {
    "plain": {"top_k": 0},
    "top-k, top-p": {"temperature": 0.8, "top_k": 50, "top_p": 0.9},
    "repetition penalty": {"top_k": 0, "temperature": 0.8, "repetition_penalty": 1.3},
}


@pytest.mark.parametrize("streamed", (False, True))
def test_sampling_takes_at_most_twice_the_memory_of_greedy_decoding(streamed):
    """In a batch, ragged and in lockstep: beside the logits only the noise has the size of all blocks."""
    target, drafter = tiny_target("llama", vocab_size=5000), tiny_drafter(block_size=8, vocab_size=5000)
    ids = torch.cat([prompt_of(6, row) for row in range(8)])
    kwargs = {"max_new_tokens": 12, "assistant_model": drafter, "streamer": Pieces() if streamed else None}
    peaks = {}
    for name, options in ({"greedy": {"do_sample": False}} | SAMPLED_MEMORY).items():
        with PeakMemory() as memory:
            target.generate(ids, **kwargs, **{"do_sample": True} | options)
        assert drafter.last_speculation.drafted[0][0] == 7
        peaks[name] = memory.peak
    assert peaks["greedy"] > 2 * 8 * 8 * 5000 * 4  # two rounds' logits: the measure sees them
    assert max(peaks.values()) <= 2 * peaks["greedy"], peaks


def test_sampling_without_any_possible_token_is_an_error():
    class Nothing(LogitsProcessor):
        def __call__(self, input_ids, scores):
            return torch.full_like(scores, -torch.inf) if input_ids.shape[1] >= 14 else scores

    with pytest.raises(ValueError, match="no token is possible at position 14"):
        sample(
            tiny_target("llama"),
            prompt_of(10),
            0,
            assistant_model=tiny_drafter(),
            logits_processor=LogitsProcessorList([Nothing()]),
        )
