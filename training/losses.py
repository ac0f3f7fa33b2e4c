"""What a block is scored by, and the target's head applied in chunks.

A draft position's cross-entropy is weighted, since the first error ends a round: by `exp(-(k - 1) / gamma)` for position k (paper,
section 4.2, equation 4), or by D-PACE (arXiv 2605.18810), which takes the drafter's own probabilities of reaching a position.
`kl` and `tv` learn the target's distribution instead of its token (total variation is what sampling rejects).

Legend of shapes: M blocks, L = K - 1 draft positions, V vocabulary, H hidden.
"""

from collections.abc import Callable

import torch
from torch.nn import functional as F

from ..drafter_heads import Candidates

LOSSES = ("ce", "dpace", "kl", "tv")
# What becomes of positions whose right token is not among the candidates of a selector.
MISSING = ("leave-out", "insert")
PAPER_GAMMA = {16: 7.0, 10: 5.0, 8: 4.0}


def default_gamma(block_size: int) -> float:
    """The paper's decay for its block sizes, and a half of the block for others."""
    return PAPER_GAMMA.get(block_size, block_size / 2)


def gamma_of(kind: str, gamma: float | None, block_size: int) -> float | None:
    """The decay of a loss where `gamma` is not stated: the default, and none for D-PACE, which has weights of its own."""
    return default_gamma(block_size) if gamma is None and kind != "dpace" else gamma


def position_weights(num_positions: int, gamma: float | None, device) -> torch.Tensor:
    """(L,) weights `exp(-(k - 1) / gamma)`, k = 1..L; uniform where gamma is None."""
    if gamma is None:
        return torch.ones(num_positions, device=device)
    return torch.exp(-torch.arange(num_positions, device=device) / gamma)


def dpace_weights(probabilities: torch.Tensor, supervised: torch.Tensor, alpha: float = 0.5) -> torch.Tensor:
    """(M, L) weights from the drafter's probabilities (M, L) of the right tokens, without gradient.

    With s = (1 - alpha) q + alpha, the weight of position k is the sum over j >= k of s_1 ... s_j: what is still to be won at k.
    """
    smoothed = ((1 - alpha) * probabilities.detach() + alpha).masked_fill(~supervised, 1.0)
    prefix = smoothed.cumprod(dim=1) * supervised
    return prefix.flip(1).cumsum(1).flip(1)


class BlockLoss:
    """Loss of drafted blocks.

    Args:
        kind: one of `LOSSES`.
        gamma: decay of the positions' weights; None for uniform ones. D-PACE has its own.
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
        """What the sum over all blocks is divided by: weights of the supervised positions (..., L), known before any logit."""
        if self.kind == "dpace":
            return supervised.sum()
        return (supervised * position_weights(supervised.shape[-1], self.gamma, supervised.device)).sum()

    def __call__(self, logits, labels, supervised, teacher_logits=None) -> torch.Tensor:
        """Weighted sum over positions: logits (M, L, V) in float32, labels and supervised (M, L), teacher (M, L, V)."""
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
        weights = position_weights(labels.shape[1], self.gamma, labels.device)
        return (weights * loss * supervised).sum()


class SelectorLoss:
    """Loss of DFlash 2's selector: cross-entropy over the candidates of a position, behind the true token before it.

    Weights by position are those of the block's loss, and so is what the sum is divided by.

    Args:
        block_loss: of the drafter that the selector belongs to.
        factor: of this loss, beside the block's.
        missing: what becomes of a position whose right token is no candidate: "leave-out", as there is nothing to select, or
            "insert" it in the place of the least likely candidate.
    """

    def __init__(self, block_loss: BlockLoss, factor: float = 1.0, missing: str = MISSING[0]):
        if missing not in MISSING:
            raise ValueError(f"--missing-gold {missing!r} is none of {', '.join(MISSING)}.")
        self.block_loss, self.factor, self.missing = block_loss, factor, missing

    def __call__(
        self, head, hidden, logits, labels, previous_tokens, supervised, token_ids=None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the weighted sum, and by position (M, L) whether the right token is a candidate, and whether it is picked.

        Args:
            head: a `PathHead`.
            hidden: (M, L, H).
            logits: (M, L, V) of its base, in float32.
            labels: (M, L) columns of the right tokens in them.
            previous_tokens: (M, L) the true token before each position, the anchor first.
            token_ids: (V,) or (M, L, V) tokens of the columns, where these are a part of the vocabulary.
        """
        best, columns = logits.topk(min(head.num_candidates, logits.shape[-1]), dim=-1)  # (M, L, C)
        found = columns == labels[..., None]
        present = found.any(-1)
        if self.missing == "insert":
            least = torch.zeros_like(found)
            least[..., -1] = ~present
            columns = torch.where(least, labels[..., None], columns)
            best = torch.where(least, logits.gather(-1, labels[..., None]), best)
            found = found | least
        ids = columns if token_ids is None else token_ids.expand(logits.shape).gather(-1, columns)
        scores = head.follow(Candidates(best, ids), hidden, previous_tokens[..., None]).logits[..., 0, :]
        right = found.int().argmax(-1)
        ce = F.cross_entropy(scores.flatten(0, 1).float(), right.flatten(), reduction="none").view_as(right)
        taking_part = supervised & found.any(-1)
        if self.block_loss.kind == "dpace":
            weights = dpace_weights(torch.exp(-ce), taking_part)
        else:
            weights = position_weights(labels.shape[1], self.block_loss.gamma, labels.device)
        picked = (scores.argmax(-1) == right) & present
        return self.factor * (weights * ce * taking_part).sum(), present, picked


class _Chunked(torch.autograd.Function):
    """A sum over chunks of hidden states whose gradient is taken chunk by chunk, so that one chunk's logits exist at a time.

    The target's head is frozen: besides the hidden states only parameters of the drafter that its loss is made with, if any,
    have gradients, which are as small as they are.
    """

    @staticmethod
    def forward(ctx, hidden, loss_of: Callable, chunk: int, *parameters):
        gradient = torch.empty_like(hidden)
        of_parameters = [torch.zeros_like(parameter) for parameter in parameters]
        total = hidden.new_zeros((), dtype=torch.float32)
        for start in range(0, len(hidden), chunk):
            part = hidden[start : start + chunk].detach().requires_grad_()
            with torch.enable_grad():
                loss = loss_of(part, slice(start, start + chunk))
            gradient[start : start + chunk], *more = torch.autograd.grad(loss, [part, *parameters])
            for summed, added in zip(of_parameters, more):
                summed += added
            total += loss.detach()
        ctx.save_for_backward(gradient, *of_parameters)
        return total

    @staticmethod
    def backward(ctx, grad_output):
        gradient, *of_parameters = ctx.saved_tensors
        return gradient * grad_output, None, None, *(summed * grad_output for summed in of_parameters)


def chunked_sum(hidden: torch.Tensor, loss_of: Callable, chunk: int, parameters=()) -> torch.Tensor:
    """Sum `loss_of(hidden[part], part)` over parts of at most `chunk` blocks of `hidden` (M, L, H).

    Args:
        parameters: what else the loss has gradients of.
    """
    if torch.is_grad_enabled():
        return _Chunked.apply(hidden, loss_of, chunk, *parameters)
    parts = [slice(start, start + chunk) for start in range(0, len(hidden), chunk)]
    return sum((loss_of(hidden[part], part) for part in parts), hidden.new_zeros((), dtype=torch.float32))
