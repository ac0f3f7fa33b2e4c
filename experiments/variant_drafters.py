"""Drafters that the paper compares DFlash with, of the same weights: they exist for `ablations` and `claims` only.

Both look at tokens of the text, which a DFlash drafter never does: `show` hands them the rows of a batch. They draft in training and in
replayed rounds, where the text is known, and not in `generate`.

Legend of shapes: B rows, S tokens of a row, N blocks of a row, K block, H hidden.
"""

import torch

from ..modeling_dflash import DFlashDraftModel, DFlashDraftModelOutput
from ..target_masks import backend_mask
from ..target_model import raw_embeddings


class ReadsText(DFlashDraftModel):
    """A drafter that is shown the text of the rows that it drafts in.

    Attributes:
        causal: whether a draft position sees only those before it.
        passes_a_round: forward passes of the drafter that a round of K - 1 draft tokens takes in generation.
    """

    causal = False

    @property
    def passes_a_round(self) -> int:
        return 1

    def show(self, input_ids: torch.LongTensor, target):
        """Take the tokens (B, S) of the rows of the next passes, one document each."""
        self.__dict__["embeds"] = raw_embeddings(target.get_input_embeddings(), input_ids).detach()  # (B, S, H)


class FusedAtInput(ReadsText):
    """Reads target hidden states at its input only, as EAGLE-3 does: fused with the embedding of their token (paper, table 6).

    Each layer makes keys and values from its own states of the context, which see earlier ones, not from the target's.
    """

    def forward(self, noise_embeds, context_hidden_states, attention_mask=None, position_ids=None, **kwargs):
        dtype, backend = self.norm.weight.dtype, self.config._attn_implementation
        length = context_hidden_states.shape[1]
        hidden, embeds = noise_embeds.to(dtype), self.embeds[:, :length].to(dtype)
        context = self.hidden_norm(self.fc(context_hidden_states.to(dtype)) + embeds)  # (B, S, H)
        rotation = self.rotary_emb(hidden, position_ids)  # cos and sin, each (B, S + N * K, D)
        earlier = torch.ones(length, length, dtype=torch.bool, device=context.device).tril()[None, None]
        earlier, own = backend_mask(earlier, backend, dtype), tuple(part[:, :length] for part in rotation)
        for layer, mask in zip(self.layers, self._layer_masks(attention_mask, 0, hidden, length)):
            hidden = layer(hidden, layer.input_layernorm(context), rotation, attention_mask=mask)
            context = layer(context, context[:, :0], own, attention_mask=earlier)
        return DFlashDraftModelOutput(last_hidden_state=self.norm(hidden))


class OneByOne(ReadsText):
    """DFlash-AR: the same weights and target hidden states, causal, one token a pass (paper, table 7).

    A position reads the draft token before it in the place of a mask token. Along a text whose tokens were all drafted right, as in
    training and in replayed rounds, the passes of a round are one pass over the text's own tokens.
    """

    causal = True

    @property
    def passes_a_round(self) -> int:
        return self.config.block_size - 1

    def forward(self, noise_embeds, context_hidden_states, attention_mask=None, position_ids=None, **kwargs):
        length = context_hidden_states.shape[1]
        index = position_ids[:, length:].clamp(
            max=self.embeds.shape[1] - 1
        )  # of the blocks' tokens; one document a row
        known = self.embeds.gather(1, index[..., None].expand(-1, -1, self.embeds.shape[-1]))
        hidden = super().forward(known, context_hidden_states, attention_mask, position_ids, **kwargs).last_hidden_state
        # What stands at a token drafts the next one. The first position of a block drafts nothing.
        return DFlashDraftModelOutput(last_hidden_state=hidden.roll(1, dims=1))
