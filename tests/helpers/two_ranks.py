"""One of two processes that share a tensor-parallel target; `test_target_ranks.py` starts both and compares what they write.

python tests/helpers/two_ranks.py FOLDER RANK
"""

import datetime
import json
import os
import sys
import time
import warnings
from pathlib import Path

import torch
from dflash_hub.target_model import raw_embeddings
from dflash_hub.training.trainer import DFlashTrainer
from torch import distributed
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM, LogitsProcessor, MaxTimeCriteria, StoppingCriteria, TrainingArguments
from transformers.distributed import DistributedConfig
from transformers.integrations.deepspeed import set_hf_deepspeed_config, unset_hf_deepspeed_config

from helpers.scripted import scripted
from helpers.tiny import prompt_of, tiny_drafter

RANK = int(sys.argv[2])
NEW = 16
NO_DATA = {
    "train_dataset": [], "data_collator": None, "loss": None, "num_anchors": 4, "validation": [], "eval_prompts": 0,
    "eval_new_tokens": 8,
}  # fmt: skip


class Ticks:
    """A clock by which drafting pays on the first rank. On the second it never does, which would draft nothing."""

    now = 0.0

    def read(self) -> float:
        self.now += 1e-3  # no clock stands still
        return self.now

    def forward(self, *args):
        """Let a forward pass of the target take a second; a hook."""
        self.now += 1.0

    def draft(self, *args):
        """Let a forward pass of the drafter take far less, or far more; a hook."""
        self.now += (0.01, 50.0)[RANK]


class StopAfter(StoppingCriteria):
    def __init__(self, length: int):
        self.length = length

    def __call__(self, input_ids, scores, **kwargs):
        return torch.full((len(input_ids),), input_ids.shape[1] >= self.length)


class Noisy(LogitsProcessor):
    """Keeps state, for all that anyone knows; on the second rank it draws tokens of its own."""

    def __call__(self, input_ids, scores):
        return scores + RANK * 100 * torch.randn_like(scores)


class Raises:
    """A streamer, or a criterion, that raises at one token."""

    def __init__(self, at: int):
        self.left = at

    def put(self, value):
        self.left -= value.numel() if value.ndim == 1 else 0  # the prompt has two dimensions
        if self.left <= 0:
            raise ConnectionError("the reader has gone")

    def end(self):
        pass


class RaisingCriterion(Raises, StoppingCriteria):
    def __call__(self, input_ids, scores, **kwargs):
        self.put(input_ids[0, -1:])
        return torch.zeros(len(input_ids), dtype=torch.bool)


class Zero3:
    def is_zero3(self) -> bool:
        return True


class Checks:
    """Results by name. Each is compared between the ranks, and with what is expected."""

    def __init__(self, folder: Path):
        self.results = {}
        self.whole = AutoModelForCausalLM.from_pretrained(folder / "target", dtype=torch.float32).eval()
        config = DistributedConfig(tp_plan="auto")
        self.target = AutoModelForCausalLM.from_pretrained(folder / "target", distributed_config=config).eval()
        self.drafter = tiny_drafter(num_draft_tokens="auto")
        ticks = Ticks()
        self.target.register_forward_hook(ticks.forward)
        self.drafter.register_forward_hook(ticks.draft)
        time.perf_counter = ticks.read
        self.prompt = prompt_of(12)
        self.plain = self.target.generate(self.prompt, max_new_tokens=NEW, do_sample=False)

    def run(self, drafter=None, target=None, **kwargs) -> list:
        drafter = drafter or self.drafter
        kwargs = {"inputs": self.prompt, "max_new_tokens": NEW, "do_sample": False} | kwargs
        return (target or self.target).generate(**kwargs, assistant_model=drafter).tolist()

    def error(self, run, **kwargs) -> str:
        try:
            run(**kwargs)
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        return "none"

    def note(self, name: str, value):
        self.results[name] = value

    def greedy(self):
        self.note(
            "plain",
            [self.whole.generate(self.prompt, max_new_tokens=NEW, do_sample=False).tolist(), self.plain.tolist()],
        )
        for kind, number in (("random", "auto"), ("half-right", "auto"), ("oracle", "auto"), ("half-right", 4)):
            drafter = scripted(self.drafter, kind, self.plain)
            text, speculation = self.run(drafter, num_assistant_tokens=number), drafter.last_speculation
            self.note(f"greedy {kind} {number}", [text, speculation.drafted, speculation.accepted])

    def batch(self):
        ids = torch.cat([prompt_of(12, seed) for seed in (1, 2, 3)])
        mask = torch.ones_like(ids)
        ids[0, :5] = mask[0, :5] = 0
        plain = self.whole.generate(ids, attention_mask=mask, max_new_tokens=NEW, do_sample=False)
        for name, kwargs in {
            "ragged": {},
            "lockstep": {"return_dict_in_generate": True},
            "static": {"cache_implementation": "static"},
        }.items():
            drafter = scripted(self.drafter, "half-right", plain)
            kwargs |= {"attention_mask": mask, "max_new_tokens": NEW, "do_sample": False}
            output = self.target.generate(ids, assistant_model=drafter, **kwargs)
            text = (output if isinstance(output, torch.Tensor) else output.sequences).tolist()
            self.note(f"batch {name}", [plain.tolist(), text, drafter.last_speculation.drafted])

    def sampling(self):
        for number in ("auto", 4):
            kwargs = {"do_sample": True, "num_return_sequences": 2, "num_assistant_tokens": number, "top_k": 20}
            torch.manual_seed(10)
            alone = self.run(target=self.whole, **kwargs)
            torch.manual_seed(10 + RANK)
            self.note(f"sampling {number}", [alone, self.run(**kwargs)])

    def bits(self):
        """Ranks whose numbers differ, far more than in the last bit."""
        drafter = scripted(self.drafter, ("oracle", "random")[RANK], self.plain)
        self.note("other drafts", self.run(drafter, num_assistant_tokens=4))
        self.note("accepted of other drafts", drafter.last_speculation.accepted)
        head = self.target.get_output_embeddings()
        hook = head.register_forward_hook(lambda module, inputs, logits: logits * (1 - 2 * RANK))
        self.note("other logits", self.run())
        hook.remove()
        self.note("other scores", self.run(logits_processor=[Noisy()]))

    def stops(self):
        self.note("criterion", self.run(stopping_criteria=[StopAfter(19 - 4 * RANK)]))
        # By the second rank's clock the time is over before the first token.
        self.note("time", self.run(stopping_criteria=[MaxTimeCriteria(1000, time.time() - 2000 * RANK)]))

    def errors(self):
        for at in (6, NEW):
            call = {"drafter": scripted(self.drafter, "oracle", self.plain)}
            streamer = Raises(at) if RANK == 0 else None
            self.note(f"streamer {at}", self.error(self.run, **call, streamer=streamer, num_assistant_tokens=4))
            criterion = RaisingCriterion(at if RANK == 1 else 10**6)
            self.note(f"criterion raises {at}", self.error(self.run, **call, stopping_criteria=[criterion]))
        self.note("prompts", self.error(self.run, inputs=prompt_of(12 - RANK)))
        self.note("tokens", self.error(self.run, inputs=prompt_of(12, RANK)))
        self.note("limits", self.error(self.run, max_new_tokens=NEW - RANK))
        self.note("after errors", self.run())

    def scaled_embedding(self, folder: Path):
        """Gemma's embedding scales what is stored; the drafter takes the rows as they are stored."""
        loaded = AutoModelForCausalLM.from_pretrained(
            folder / "scaled", distributed_config=DistributedConfig(tp_plan="auto"), dtype=torch.float32
        )
        rows = raw_embeddings(loaded.get_input_embeddings(), self.prompt)
        whole = AutoModelForCausalLM.from_pretrained(folder / "scaled", dtype=torch.float32)
        self.note("scaled embedding", torch.equal(rows, whole.get_input_embeddings().weight[self.prompt]))

    def sharded(self, folder: Path):
        sharded = fully_shard(AutoModelForCausalLM.from_pretrained(folder / "target", dtype=torch.float32))
        arguments = TrainingArguments(output_dir=str(folder / f"run{RANK}"), use_cpu=True, report_to="none")
        self.note("FSDP generates", self.error(self.run, target=sharded, synced_gpus=False))
        for name, target in {"FSDP": sharded, "TP": self.target}.items():
            error = self.error(DFlashTrainer, drafter=self.drafter, target=target, args=arguments, **NO_DATA)
            self.note(f"{name} trains", error)
        zero3 = Zero3()
        set_hf_deepspeed_config(zero3)
        self.note("ZeRO-3 generates", self.error(self.run, target=self.whole))
        error = self.error(DFlashTrainer, drafter=self.drafter, target=self.whole, args=arguments, **NO_DATA)
        self.note("ZeRO-3 trains", error)
        unset_hf_deepspeed_config()


def main():
    folder = Path(sys.argv[1])
    os.environ.update(RANK=str(RANK), LOCAL_RANK=str(RANK), WORLD_SIZE="2", MASTER_ADDR="localhost")
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    store = distributed.FileStore(str(folder / "store"), 2)
    timeout = datetime.timedelta(seconds=60)  # a rank that waits for the other in vain
    distributed.init_process_group("gloo", store=store, rank=RANK, world_size=2, timeout=timeout)
    checks = Checks(folder)
    for check in (checks.greedy, checks.batch, checks.sampling, checks.bits, checks.stops, checks.errors):
        started = time.time()
        check()
        print(RANK, check.__name__, f"{time.time() - started:.1f} s", flush=True)
    checks.scaled_embedding(folder)
    checks.sharded(folder)
    (folder / f"rank{RANK}.json").write_text(json.dumps(checks.results))
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
