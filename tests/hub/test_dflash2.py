"""DFlash 2: the convolution along the block, and the selector that chooses a path among candidates."""

import pytest
import torch
from dflash_hub import DFlashDraftModel
from helpers.tiny import CONVOLUTION, SELECTOR, tiny_config, tiny_drafter

PARTS = {"none": {}, "convolution": CONVOLUTION, "selector": SELECTOR, "both": CONVOLUTION | SELECTOR}


def block_and_context(drafter, length: int = 9, seed: int = 0, blocks: int = 1):
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(1, blocks * drafter.config.block_size, 32, generator=generator)
    return noise, torch.randn(1, length, 3 * 32, generator=generator)


def test_fresh_parts_change_nothing_and_learn():
    """A fresh DFlash 2 is its DFlash twin, bit for bit; after two steps every tensor has moved."""
    plain, fresh = tiny_drafter(), DFlashDraftModel(tiny_config(**PARTS["both"])).eval()
    fresh.load_state_dict(plain.state_dict(), strict=False)
    inputs = block_and_context(plain)
    assert torch.equal(plain(*inputs).last_hidden_state, fresh(*inputs).last_hidden_state)
    previous, hidden = torch.tensor([[3, 4]]), plain(*inputs).last_hidden_state[:, 0]
    assert not fresh.candidate_selector(hidden, previous, torch.tensor([[5, 6, 7]])).any()

    before = {name: value.clone() for name, value in fresh.state_dict().items()}
    optimizer = torch.optim.SGD(fresh.parameters(), lr=0.1)
    for _ in range(2):
        hidden = fresh(*inputs).last_hidden_state
        pairs = fresh.candidate_selector(hidden, torch.arange(97)[None, None].expand(1, 5, -1), None)
        (hidden.pow(2).mean() + (pairs - 1).pow(2).mean()).backward()
        optimizer.step()
        optimizer.zero_grad()
    still = [name for name, value in fresh.state_dict().items() if torch.equal(value, before[name])]
    assert not still


@pytest.mark.parametrize("parts", ("convolution", "both"))
def test_two_blocks_in_one_pass_equal_two_passes(parts):
    """The convolution restarts at each block, where zeros enter."""
    drafter, size = tiny_drafter(**PARTS[parts]), 5
    noise, context = block_and_context(drafter, blocks=2)
    length = context.shape[1]
    mask = torch.zeros(1, 1, 2 * size, length + 2 * size, dtype=torch.bool)
    mask[..., :length] = True
    for block in range(2):
        own = slice(block * size, (block + 1) * size)
        mask[:, :, own, length + own.start : length + own.stop] = True
    positions = torch.cat([torch.arange(length), length + torch.arange(size), length + torch.arange(size)])[None]
    together = drafter(noise, context, mask, position_ids=positions).last_hidden_state
    apart = [drafter(noise[:, :size], context), drafter(noise[:, size:], context)]
    torch.testing.assert_close(together, torch.cat([part.last_hidden_state for part in apart], dim=1))


def test_a_position_reads_those_right_before_it_and_no_others():
    """With attention switched off a layer's two convolutions of two taps each move a change by two positions."""
    drafter = tiny_drafter(num_hidden_layers=1, **CONVOLUTION)
    with torch.no_grad():
        drafter.layers[0].self_attn.o_proj.weight.zero_()
    noise, context = block_and_context(drafter)
    for position in range(5):
        changed = noise.clone()
        changed[:, position] += 1.0
        moved = (drafter(noise, context).last_hidden_state != drafter(changed, context).last_hidden_state).any(-1)[0]
        assert moved.nonzero()[:, 0].tolist() == [p for p in range(position, position + 3) if p < 5]
