"""`dflash-hub check`: is this drafter right for this target, and if it accepts little, why?

Faults of a drafter are silent: a target layer that is off by one, another mask token or chat template load without a word
and cost only speed. Each check here can find one of them (another RoPE base is remarked on, it may be meant); all run in seconds on a
CPU.
"""

import statistics
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from transformers.utils import cached_file

from ..common.chat import encode
from ..common.files import read_json
from ..common.identity import has_thinking_modes, identify, same_target, template_fingerprint
from ..common.loading import end_tokens
from ..convert.card import RECORD
from ..drafter_candidates import DFlashProposer
from ..hub_files import nonfinite, nonfinite_sentence
from ..target_identity import compare_target
from ..target_model import check_pair, hidden_states_request, target_hidden_states
from .blocks import denoise
from .data import row_context, rows_of, single_row
from .evaluation import GreedyCall, generate, replay, right_drafts

FLOOR = 1.3  # mean acceptance length below which drafting hardly pays on any device
FALLEN = 0.5  # of the recorded acceptance, which was measured on other prompts


@dataclass
class Finding:
    """One check: `ok` is None where there is nothing to compare with."""

    name: str
    ok: bool | None
    detail: str

    def __str__(self) -> str:
        return f"{ {True: 'ok  ', False: 'FAIL', None: '--  '}[self.ok] } {self.name}: {self.detail}"


@torch.no_grad()
def check(
    drafter, target, tokenizer, prompts: list[dict], thinking: bool | None, record: dict | None,
    max_new_tokens: int = 48,
) -> list[Finding]:  # fmt: skip
    """All findings, the verdict on acceptance last.

    Args:
        prompts: rows {"messages", "tools" where there are some}; of each the first turn is answered.
        record: of the drafter's training (`training_record.json`), where it has one.
    """
    try:
        check_pair(drafter, target)
    except ValueError as error:
        return [Finding("pair", False, str(error))]
    config = drafter.config
    findings = [
        Finding(
            "pair",
            True,
            f"hidden size {config.hidden_size}, {config.num_target_layers} layers, block {config.block_size}",
        )
    ]
    if names := nonfinite(dict(drafter.named_parameters())):
        return [*findings, Finding("weights", False, nonfinite_sentence(names, "the drafter"))]
    prompt_ids = [encode(tokenizer, row, [], thinking) for row in prompts]
    findings += [states_are_layer_outputs(drafter, target, prompt_ids[0])]
    rows = answered(target, prompt_ids, max_new_tokens)
    findings += layouts_agree(drafter, target, rows[0])
    findings += settings_fit(drafter, target, tokenizer, thinking, record)
    return [*findings, *acceptance(drafter, target, rows, prompt_ids, max_new_tokens, findings, record)]


def answered(target, prompt_ids: list[list[int]], max_new_tokens: int) -> list[dict]:
    """The target's own greedy answers, as rows."""
    rows = []
    for number, ids in enumerate(prompt_ids):
        text = target.generate(input_ids=torch.tensor([ids], device=target.device), do_sample=False, max_new_tokens=max_new_tokens,
                               attention_mask=torch.ones(1, len(ids), dtype=torch.long, device=target.device))  # fmt: skip
        answer = text[0, len(ids) :].tolist()
        rows.append(
            {"id": str(number), "turn": 0, "prompt_ids": ids, "response_ids": answer, "max_new_tokens": max_new_tokens}
        )
    return rows


def decoder_layers(target) -> nn.ModuleList | None:
    """The target's stack of decoder layers, found by its length."""
    count = target.config.get_text_config(decoder=True).num_hidden_layers
    stacks = [module for module in target.modules() if isinstance(module, nn.ModuleList) and len(module) == count]
    return stacks[0] if len(stacks) == 1 else None


def states_are_layer_outputs(drafter, target, ids: list[int]) -> Finding:
    """The hidden states that generation takes are what the target layers put out, seen by hooks."""
    layers, wanted, seen = decoder_layers(target), drafter.config.target_layer_ids, {}
    if layers is None:
        return Finding(
            "target layers",
            None,
            f"the decoder layers of {type(target).__name__} were not found, so nothing was compared",
        )

    def hook(index):
        return layers[index].register_forward_hook(
            lambda module, inputs, output: seen.update({index: output[0] if isinstance(output, tuple) else output})
        )

    hooks = [hook(index) for index in wanted]
    try:
        input_ids = torch.tensor([ids], device=target.device)
        outputs = target(input_ids, output_hidden_states=hidden_states_request(wanted), use_cache=False)
    finally:
        for handle in hooks:
            handle.remove()
    states = target_hidden_states(outputs.hidden_states, target, wanted)
    wrong = [index for index, state in zip(wanted, states) if not state.equal(seen[index].view_as(state))]
    if wrong:
        return Finding("target layers", False, f"hidden states of the layers {wrong} are not what these layers put out")
    return Finding("target layers", True, f"hidden states of {wanted} are the outputs of these layers")


def layouts_agree(drafter, target, row: dict) -> list[Finding]:
    """Training's layout (many blocks beside the whole text) and generation's give the same logits, and no block sees ahead."""
    config = drafter.config
    batch = single_row(row, target.device)
    rows, length = rows_of(batch), batch["input_ids"].shape[1]
    anchor = len(row["prompt_ids"]) + (len(row["response_ids"]) - 1) // 2
    anchors = torch.tensor([[len(row["prompt_ids"]), anchor]], device=target.device).unique(dim=1)
    valid = torch.ones_like(anchors, dtype=torch.bool)
    context = row_context(target, batch, config.target_layer_ids)

    def blocks(features):
        return denoise(drafter, config, target, rows, features, anchors, valid)[0]  # (blocks, K, H)

    trained = blocks(context)
    proposer = DFlashProposer(drafter, target)
    states = list(context[:, :anchor].split(config.hidden_size, dim=-1))
    generated = proposer.draft_logits(rows.input_ids[:, anchor : anchor + 1], states, config.drafts_per_block)[0]
    logits = proposer.head(trained[-1:, -config.drafts_per_block :].to(target.dtype)).over_vocabulary(
        generated.shape[-1]
    )[0]
    if not generated.amax(-1).isfinite().all():
        dtype = str(drafter.dtype).removeprefix("torch.")
        return [
            Finding(
                "layouts",
                False,
                f"the drafter's logits are not finite in {dtype}: load target and drafter in another dtype",
            )
        ]
    spread = float(generated[generated.isfinite()].std())
    difference = float((logits - generated).masked_fill(generated == -torch.inf, 0).abs().max())
    limit = (1e-3 if target.dtype == torch.float32 else 0.2) * max(spread, 1e-6)
    same = Finding(
        "layouts", difference <= limit,
        f"logits of training's and generation's layout differ by {difference:.1e}, of a spread of {spread:.1f}",
    )  # fmt: skip

    def changed(at: int) -> bool:
        perturbed = context.clone()
        perturbed[:, at:] = perturbed[:, at:].roll(1, dims=-1) + 1
        return not blocks(perturbed)[-1].equal(trained[-1])

    ahead, before = anchor < length and changed(anchor), changed(anchor - 1)
    detail = {
        (False, True): "a block depends on the hidden states before its anchor, and on none from it on",
        (True, True): "a block depends on hidden states at or after its anchor, which do not exist when it is drafted",
        (True, False): "a block depends on hidden states after its anchor and not on those before it",
        (False, False): "a block does not depend on the hidden states just before its anchor",
    }[ahead, before]
    return [same, Finding("leak", (ahead, before) == (False, True), detail)]


def settings_fit(drafter, target, tokenizer, thinking: bool | None, record: dict | None) -> list[Finding]:
    """Template, thinking mode and target are those that the drafter was trained with."""
    config, data = drafter.config, (record or {}).get("data", {})
    findings = []
    if not has_thinking_modes(tokenizer):
        findings.append(Finding("thinking", None, "the template has no thinking mode"))
    elif config.target_thinking is None:
        findings.append(Finding("thinking", None, f"not recorded in the drafter; {thinking} here"))
    else:
        detail = f"made for {config.target_thinking}, {thinking} here"
        findings.append(Finding("thinking", config.target_thinking == thinking, detail))
    if data.get("chat_template_sha256"):
        here = template_fingerprint(tokenizer)
        detail = f"made with {data['chat_template_sha256']}, {here} here"
        findings.append(Finding("chat template and vocabulary", data["chat_template_sha256"] == here, detail))
    else:
        findings.append(Finding("chat template and vocabulary", None, "not recorded in the drafter"))
    if data.get("identity"):
        made, here = data["identity"], identify(target)
        # Weights that were rounded have another fingerprint, and may be the same model.
        same = same_target(made, here) if made["dtype"] == here["dtype"] else None
        detail = f"made with weights {made['weights']} in {made['dtype']}, {here['weights']} in {here['dtype']} here"
        findings.append(Finding("target's weights", same, detail))
    else:
        findings.append(Finding("target's weights", None, "not recorded in the drafter"))
    if (compared := compare_target(config, target)) is not None:
        (embedding, head), same = compared
        detail = f"cosines of {embedding:.4f} and {head:.4f} with the rows that the drafter keeps"
        findings.append(Finding("target's embedding and head", same, detail))
    text = target.config.get_text_config(decoder=True)
    rope = getattr(text, "rope_parameters", None) or {}
    if isinstance(rope.get("rope_theta"), (int, float)):
        same = rope["rope_theta"] == config.rope_parameters["rope_theta"]
        detail = f"RoPE base {config.rope_parameters['rope_theta']:g}, the target's {rope['rope_theta']:g}"
        findings.append(
            Finding("RoPE", True if same else None, detail + ("" if same else " (drafters may have their own)"))
        )
    taken = end_tokens(target) | {tokenizer.pad_token_id, tokenizer.bos_token_id}
    detail = f"{config.mask_token_id} ({tokenizer.convert_ids_to_tokens(config.mask_token_id)!r})"
    findings.append(Finding("mask token", config.mask_token_id not in taken, detail))
    return findings


def acceptance(drafter, target, rows, prompt_ids, max_new_tokens, findings, record) -> list[Finding]:
    """Acceptance in real generation, with a verdict, and the likely cause when it is low."""
    speculation = generate(target, drafter, prompt_ids, max_new_tokens)
    if not any(speculation.acceptance_lengths):
        return [Finding("acceptance", None, "every answer ended at once; pass other --prompts")]
    recorded = ((record or {}).get("result", {}).get("evaluation") or {}).get("acceptance_length")
    shares = " ".join(f"{share:.2f}" for share in speculation.position_acceptance)
    detail = f"acceptance length {speculation.tau:.2f} over {len(prompt_ids)} prompts; by position {shares}"
    if recorded:
        detail += f"; {recorded:.2f} when it was trained"
    low = speculation.tau < FLOOR or (recorded is not None and speculation.tau < FALLEN * recorded)
    result = [Finding("acceptance", not low, detail)]
    if drafter.candidate_selector is not None:
        chosen, likeliest = (replay(target, drafter, rows, walked=walked)[0].tau for walked in (True, False))
        detail = f"replayed acceptance length {chosen:.2f}; {likeliest:.2f} without it, by the likeliest token of each position"
        result.append(Finding("selector", None, detail))
    if low:
        result.append(Finding("likely cause", False, likely_cause(drafter, target, rows, findings)))
    return result


def likely_cause(drafter, target, rows: list[dict], findings: list[Finding]) -> str:
    """From the other findings, and by trying the faults that can be tried."""
    failed = [finding for finding in findings if finding.ok is False]
    if failed:
        return "; ".join(f"{finding.name} ({finding.detail})" for finding in failed)
    layers, last = drafter.config.target_layer_ids, drafter.config.num_target_layers - 1
    rate = {"as configured": first_right(drafter, target, rows, layers)}
    for shift in (-1, 1):
        moved = [index + shift for index in layers]
        if all(0 <= index < last for index in moved):
            rate[f"target layers {moved}"] = first_right(drafter, target, rows, moved)
    rate["reversed order of target layers"] = first_right(drafter, target, rows, layers[::-1])
    best = max(rate, key=rate.get)
    if rate[best] > rate["as configured"] + 0.1:
        return (
            f"wrong target layers: with {best} the first draft token is right at {rate[best]:.0%} of the places, as configured at "
            f"{rate['as configured']:.0%}"
        )
    return (
        "nothing that can be tried here explains it. The drafter may be untrained or trained on other examples than these "
        "prompts, on answers that the target did not write, or for another revision of the target; `dflash-hub align` "
        "adapts a drafter to a changed target"
    )


def first_right(drafter, target, rows: list[dict], layer_ids: list[int]) -> float:
    """Share of places in the answers where the first draft token is right, with hidden states of `layer_ids`."""
    counts = []
    for row in rows:
        if len(row["response_ids"]) > 1:
            counts += right_drafts(target, drafter, row, GreedyCall.of(target, row), 64, layer_ids)
    return statistics.mean(count > 0 for count in counts) if counts else 0.0


def read_record(drafter: str) -> dict | None:
    """The training record of a drafter's folder or repository, where it has one.

    Raises:
        ValueError: it is none; names the file.
    """
    path = cached_file(drafter, RECORD, _raise_exceptions_for_missing_entries=False)
    if path is None:
        return None
    record = read_json(Path(path))
    for outer, inner in (("data", "identity"), ("result", "evaluation")):
        part = record.get(outer) or {}
        if not isinstance(part, dict) or not isinstance(part.get(inner) or {}, dict):
            raise ValueError(f"{path} must hold an object `{outer}`, with an object or nothing as its `{inner}`.")
    return record
