"""Where a forward pass of the target spends its time on a CPU: matrices, attention, Python and dispatch, and the rest.

    python -m dflash_hub.experiments.cpu_forward --dtype float32

Times are the least CPU seconds of one thread over turns, so that other processes on the machine count little. Matrices and attention run the same
operations on the same weights outside of the model. Python and dispatch are a pass of the same model with layers a few numbers
wide, whose kernels take next to nothing. The rest is small kernels: norms, RoPE, activations, copies into the KV cache.
"""

import time
from collections.abc import Callable
from typing import Annotated

import torch
import torch.nn.functional as F
import typer
from transformers import AutoModelForCausalLM

from ..common.console import run_plainly
from ..common.loading import dtype_of
from ..common.provenance import origin
from ..common.smollm2 import smollm2
from ..common.tables import table
from ..target_model import CACHE


def cpu_seconds(calls: list[Callable], repeats: int) -> list[float]:
    """Least seconds of this thread in each call; they take turns, so that a slow moment of the machine hits all."""
    spans = [[] for _ in calls]
    for _ in range(repeats + 1):
        for call, times in zip(calls, spans):
            start = time.thread_time()
            call()
            times.append(time.thread_time() - start)
    return [min(times[1:]) for times in spans]


def linears(model) -> list[torch.nn.Linear]:
    return [module for module in model.modules() if isinstance(module, torch.nn.Linear)]


def applied(layers: list[torch.nn.Linear], tokens: int, transposed: bool = False) -> Callable:
    """Apply each matrix to an input of its own width: as a linear layer, or as a product with the matrix on the left.

    Both compute the same; torch hands them to different kernels.
    """
    inputs = [torch.randn(tokens, layer.in_features, dtype=layer.weight.dtype) for layer in layers]
    columns = [x.t().contiguous() for x in inputs]

    def as_layers():
        for layer, x in zip(layers, inputs):
            F.linear(x, layer.weight, layer.bias)

    def on_the_left():
        for layer, x in zip(layers, columns):
            layer.weight @ (x[:, 0] if tokens == 1 else x)

    return on_the_left if transposed else as_layers


def attentions(model, tokens: int, context: int) -> Callable:
    """Attend as each layer does: `tokens` queries to `context` keys more, every layer from memory of its own."""
    config = model.config.get_text_config(decoder=True)
    heads, kv, width = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    layers = range(config.num_hidden_layers)
    query = torch.randn(1, heads, tokens, width, dtype=model.dtype)
    keys = [torch.randn(1, kv, context + tokens, width, dtype=model.dtype) for _ in layers]

    def run():
        for key in keys:
            F.scaled_dot_product_attention(query, key, key, enable_gqa=True)

    return run


def narrow(model):
    """The same layers, a few numbers wide: every operation is there, and computes almost nothing."""
    config = model.config.to_dict()
    sizes = {"hidden_size": 4 * config["num_attention_heads"], "head_dim": 4, "intermediate_size": 16, "vocab_size": 64}
    small = type(model.config).from_dict(config | sizes)
    return AutoModelForCausalLM.from_config(small, dtype=model.dtype).eval()


def forward_of(model, tokens: int, context: int) -> Callable:
    """A forward pass after `context` tokens, whose cache is rolled back."""
    cache = model(torch.randint(3, 60, (1, context)), use_cache=True)[CACHE]
    ids = torch.randint(3, 60, (1, tokens))

    def forward():
        model(ids, **{CACHE: cache}, use_cache=True)
        cache.crop(-tokens)

    return forward


def operations(run: Callable) -> int:
    """Number of operations that torch dispatches in a call."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        run()
    return sum(event.count for event in profile.key_averages() if event.key.startswith("aten::"))


@torch.no_grad()
def main(
    target: Annotated[str | None, typer.Option(help="Repository or folder. Default: SmolLM2-135M-Instruct.")] = None,
    dtype: Annotated[str, typer.Option(help="float32 or bfloat16.")] = "float32",
    context: Annotated[int, typer.Option(help="Tokens in the KV cache.")] = 128,
    lengths: Annotated[str, typer.Option(help="Tokens of a pass.")] = "1,8",
    repeats: Annotated[int, typer.Option(help="Calls of each.")] = 30,
):
    """Time forward passes of the target, and their parts alone."""
    torch.set_num_threads(1)  # the clock is of one thread
    model = AutoModelForCausalLM.from_pretrained(target or smollm2()[0], dtype=dtype_of(dtype)).eval()
    layers, small, rows = linears(model), narrow(model), []
    size = sum(layer.weight.numel() * layer.weight.element_size() for layer in layers)
    for tokens in map(int, lengths.split(",")):
        forward = forward_of(model, tokens, context)
        calls = [
            forward,
            applied(layers, tokens),
            attentions(model, tokens, context),
            forward_of(small, tokens, context),
            applied(layers, tokens, transposed=True),
        ]
        whole, *parts, left = cpu_seconds(calls, repeats)
        rows.append(
            [
                tokens, f"{whole * 1e3:.1f}", *(f"{part * 1e3:.1f}" for part in parts), f"{(whole - sum(parts)) * 1e3:.1f}",
                operations(forward), f"{left * 1e3:.1f}", f"{size / parts[0] / 1e9:.1f}",
            ]
        )  # fmt: skip
    heads = (
        "tokens", "forward pass", "matrices", "attention", "Python, dispatch", "rest", "operations", "matrices, on the left",
        "GB/s of weights",
    )  # fmt: skip
    typer.echo(table(heads, rows) + f"\nMilliseconds of CPU time, one thread, {context} tokens of context.\n")
    typer.echo(origin(f"python -m dflash_hub.experiments.cpu_forward --dtype {dtype}"))


if __name__ == "__main__":
    app = typer.Typer(add_completion=False)
    app.command()(main)
    run_plainly(app)
