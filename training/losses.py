"""What a block is scored by, and the target's head applied in chunks.

A slot's cross-entropy is weighted, since the first error ends a round: by `exp(-(k - 1) / gamma)` for slot k (paper,
section 4.2, equation 4), or by D-PACE (arXiv 2605.18810), which takes the drafter's own probabilities of reaching a slot.
`kl` and `tv` learn the target's distribution instead of its token (total variation is what sampling rejects).

Legend of shapes: M blocks, L = K - 1 drafted slots, V vocabulary, H hidden.
"""

from collections.abc import Callable

import torch

LOSSES = ("ce", "dpace", "kl", "tv")
PAPER_GAMMA = {16: 7.0, 10: 5.0, 8: 4.0}


def default_gamma(block_size: int) -> float:
    """The paper's decay for its block sizes, and a half of the block for others."""
    return PAPER_GAMMA.get(block_size, block_size / 2)


def gamma_of(kind: str, gamma: float | None, block_size: int) -> float | None:
    """The decay of a loss where `gamma` is not stated: the default, and none for D-PACE, which has weights of its own."""
    return default_gamma(block_size) if gamma is None and kind != "dpace" else gamma


def slot_weights(num_slots: int, gamma: float | None, device) -> torch.Tensor:
    """(L,) weights `exp(-(k - 1) / gamma)`, k = 1..L; uniform where gamma is None."""
    if gamma is None:
        return torch.ones(num_slots, device=device)
    return torch.exp(-torch.arange(num_slots, device=device) / gamma)


def dpace_weights(probabilities: torch.Tensor, supervised: torch.Tensor, alpha: float = 0.5) -> torch.Tensor:
    """(M, L) weights from the drafter's probabilities (M, L) of the right tokens, without gradient.

    With s = (1 - alpha) q + alpha, the weight of slot k is the sum over j >= k of s_1 ... s_j: what is still to be won at k.
    """
    smoothed = ((1 - alpha) * probabilities.detach() + alpha).masked_fill(~supervised, 1.0)
    prefix = smoothed.cumprod(dim=1) * supervised
    return prefix.flip(1).cumsum(1).flip(1)


class BlockLoss:
    """Loss of drafted blocks.

    Args:
        kind: one of `LOSSES`.
        gamma: decay of the slots' weights; None for uniform ones. D-PACE has its own.
        ce_share: what cross-entropy keeps beside `tv` (its gradient dies where the drafter gives the token no chance).
    """

    def __init__(self, kind: str, gamma: float | None, ce_share: float = 0.1):
        if kind not in LOSSES:
            raise ValueError(f"no loss {kind!r}; there are {', '.join(LOSSES)}.")
        self.kind, self.gamma, self.ce_share = kind, gamma, ce_share

    @property
    def needs_teacher(self) -> bool:
        return self.kind in ("kl", "tv")

    def normalizer(self, supervised: torch.Tensor) -> torch.Tensor:
        """What the sum over all blocks is divided by: weights of the supervised slots (..., L), known before any logit."""
        if self.kind == "dpace":
            return supervised.sum()
        return (supervised * slot_weights(supervised.shape[-1], self.gamma, supervised.device)).sum()

    def __call__(self, logits, labels, supervised, teacher_logits=None) -> torch.Tensor:
        """Weighted sum over slots: logits (M, L, V) in float32, labels and supervised (M, L), teacher (M, L, V)."""
        log_probabilities = logits.log_softmax(dim=-1)
        ce = -log_probabilities.gather(-1, labels[..., None])[..., 0]  # (M, L)
        if self.kind == "dpace":
            return (dpace_weights(torch.exp(-ce), supervised) * ce * supervised).sum()
        loss = ce
        if self.kind == "kl":
            teacher = teacher_logits.log_softmax(dim=-1)
            loss = (teacher.exp() * (teacher - log_probabilities)).sum(-1)
        elif self.kind == "tv":
            distance = 0.5 * (teacher_logits.softmax(dim=-1) - log_probabilities.exp()).abs().sum(-1)
            loss = self.ce_share * ce + (1 - self.ce_share) * distance
        weights = slot_weights(labels.shape[1], self.gamma, labels.device)
        return (weights * loss * supervised).sum()


class _Chunked(torch.autograd.Function):
    """A sum over chunks of hidden states whose gradient is taken chunk by chunk, so that one chunk's logits exist at a time.

    The head is frozen: the gradient of the hidden states is all that is needed, and it is as small as they are.
    """

    @staticmethod
    def forward(ctx, hidden, loss_of: Callable, chunk: int):
        gradient = torch.empty_like(hidden)
        total = hidden.new_zeros((), dtype=torch.float32)
        for start in range(0, len(hidden), chunk):
            part = hidden[start : start + chunk].detach().requires_grad_()
            with torch.enable_grad():
                loss = loss_of(part, slice(start, start + chunk))
            gradient[start : start + chunk] = torch.autograd.grad(loss, part)[0]
            total += loss.detach()
        ctx.save_for_backward(gradient)
        return total

    @staticmethod
    def backward(ctx, grad_output):
        (gradient,) = ctx.saved_tensors
        return gradient * grad_output, None, None


def chunked_sum(hidden: torch.Tensor, loss_of: Callable, chunk: int) -> torch.Tensor:
    """Sum of `loss_of(hidden[part], part)` over parts of at most `chunk` blocks of `hidden` (M, L, H)."""
    if torch.is_grad_enabled():
        return _Chunked.apply(hidden, loss_of, chunk)
    parts = [slice(start, start + chunk) for start in range(0, len(hidden), chunk)]
    return sum((loss_of(hidden[part], part) for part in parts), hidden.new_zeros((), dtype=torch.float32))
