"""Muon for the drafter's matrices, AdamW for its norms, as the one optimizer that `Trainer` knows."""

import torch


class MuonAdamW(torch.optim.Optimizer):
    """Muon orthogonalizes the momentum of a matrix, so all directions of it learn alike (torch.optim.Muon; Jordan et al.).

    Its steps are scaled to the size of AdamW's, so one learning rate serves both.

    Args:
        parameters: of the drafter; those with two dimensions go to Muon.
        tables: those of them that are lists of rows by token, and no matrices; they go to AdamW.
        lr, weight_decay: of both.
        betas, eps: of AdamW.
    """

    def __init__(self, parameters, lr: float, weight_decay: float, betas: tuple[float, float], eps: float, tables=()):
        parameters = [p for p in parameters if p.requires_grad]
        apart = {id(table) for table in tables}
        matrices = [p for p in parameters if p.ndim == 2 and id(p) not in apart]
        others = [p for p in parameters if p.ndim != 2 or id(p) in apart]
        self.parts = [
            torch.optim.Muon(matrices, lr, weight_decay, adjust_lr_fn="match_rms_adamw"),
            torch.optim.AdamW(others, lr, betas, eps, weight_decay),
        ]
        super().__init__([group for part in self.parts for group in part.param_groups], {})
        self._share()

    def _share(self):
        """Parameter groups and state are the same objects here and in the parts, for schedulers and checkpoints."""
        for part, group in zip(self.parts, self.param_groups):
            part.state, part.param_groups = self.state, [group]

    @torch.no_grad()
    def step(self, closure=None):
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for part in self.parts:
            part.step()
        return loss

    def load_state_dict(self, state_dict: dict):
        super().load_state_dict(state_dict)
        self._share()
