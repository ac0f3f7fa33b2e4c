"""The drafter as explicit loops over rows, heads, queries and keys, in float64, without a cache: slow and plain.

Written from the paper and `DFlashConfig`'s documentation, and sharing no code with the model.
"""

import math

import torch


def rms_norm(x, weight, eps):
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps) * weight


def frequencies(config):
    """(inverse frequencies, factor on cos and sin) of the default and the YaRN embedding (arXiv 2309.00071)."""
    rope, size = config.rope_parameters, config.head_dim
    base = rope["rope_theta"]
    plain = torch.tensor([base ** (-2 * i / size) for i in range(size // 2)], dtype=torch.float64)
    if rope["rope_type"] == "default":
        return plain, 1.0
    assert rope["rope_type"] == "yarn"
    scale, original = rope["factor"], rope["original_max_position_embeddings"]

    def dimension(rotations):
        return size * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(base))

    low = max(math.floor(dimension(rope.get("beta_fast", 32))), 0)
    high = min(math.ceil(dimension(rope.get("beta_slow", 1))), size - 1)
    ramp = torch.tensor([min(max((i - low) / max(high - low, 0.001), 0), 1) for i in range(size // 2)])
    return plain / scale * ramp + plain * (1 - ramp), 0.1 * math.log(scale) + 1


def rotate(x, position, inverse, factor):
    half = len(x) // 2
    out = torch.empty_like(x)
    for i in range(half):
        c, s = math.cos(position * inverse[i]) * factor, math.sin(position * inverse[i]) * factor
        out[i] = x[i] * c - x[i + half] * s
        out[i + half] = x[i + half] * c + x[i] * s
    return out


def sees(config, layer, query, key):
    """Whether a query token sees a key token; a token is (position, block or None for the context, anchor position)."""
    (query_position, query_block, anchor), (key_position, key_block, _) = query, key
    if key_block is None:
        visible = key_position < anchor
    else:
        visible = key_block == query_block
        if config.block_causal[layer]:
            visible = visible and key_position <= query_position
    if config.layer_types[layer] == "sliding_attention":
        visible = visible and abs(query_position - key_position) < config.sliding_window
    return visible


def forward(model, noise_embeds, context_hidden_states, context_positions, anchors, hidden_rows=()):
    """last_hidden_state (B, blocks * block_size, H) of blocks that start at `anchors`.

    Args:
        context_positions: of the C context tokens.
        anchors: position of each block's anchor.
        hidden_rows: (row, context index) pairs that no query may see (padding).
    """
    config = model.config
    weights = {name: tensor.double() for name, tensor in model.state_dict().items()}
    inverse, factor = frequencies(config)
    heads, kv_heads, size = config.num_attention_heads, config.num_key_value_heads, config.head_dim

    def linear(x, name):
        y = x @ weights[f"{name}.weight"].T
        return y + weights[f"{name}.bias"] if f"{name}.bias" in weights else y

    slots = [
        (anchor + slot, block, anchor) for block, anchor in enumerate(anchors) for slot in range(config.block_size)
    ]
    keys = [(position, None, None) for position in context_positions] + slots
    outputs = []
    for row in range(noise_embeds.shape[0]):
        context = linear(context_hidden_states[row].double(), "fc")
        context = rms_norm(context, weights["hidden_norm.weight"], config.rms_norm_eps)
        x = noise_embeds[row].double() * config.input_embedding_scale
        for layer in range(config.num_hidden_layers):
            at = f"layers.{layer}."
            normed = rms_norm(x, weights[at + "input_layernorm.weight"], config.rms_norm_eps)
            sources = torch.cat([context, normed])
            q = linear(normed, at + "self_attn.q_proj").view(len(slots), heads, size)
            k = linear(sources, at + "self_attn.k_proj").view(len(keys), kv_heads, size)
            v = linear(sources, at + "self_attn.v_proj").view(len(keys), kv_heads, size)
            q = rms_norm(q, weights[at + "self_attn.q_norm.weight"], config.rms_norm_eps)
            k = rms_norm(k, weights[at + "self_attn.k_norm.weight"], config.rms_norm_eps)
            attended = torch.zeros(len(slots), heads, size, dtype=torch.float64)
            for head in range(heads):
                kv = head // (heads // kv_heads)
                for i, query in enumerate(slots):
                    rotated = rotate(q[i, head], query[0], inverse, factor)
                    seen = [
                        j
                        for j, key in enumerate(keys)
                        if sees(config, layer, query, key) and (row, j) not in hidden_rows
                    ]
                    scores = torch.stack(
                        [rotated @ rotate(k[j, kv], keys[j][0], inverse, factor) / math.sqrt(size) for j in seen]
                    )
                    for j, weight in zip(seen, torch.softmax(scores, 0)):
                        attended[i, head] += weight * v[j, kv]
            x = x + linear(attended.reshape(len(slots), heads * size), at + "self_attn.o_proj")
            normed = rms_norm(x, weights[at + "post_attention_layernorm.weight"], config.rms_norm_eps)
            gate = linear(normed, at + "mlp.gate_proj")
            x = x + linear(gate * torch.sigmoid(gate) * linear(normed, at + "mlp.up_proj"), at + "mlp.down_proj")
        outputs.append(rms_norm(x, weights["norm.weight"], config.rms_norm_eps))
    return torch.stack(outputs)


def training_visibility(rows, anchors, valid, block_size: int, window: int | None, causal: bool) -> torch.Tensor:
    """(B, N * K, S + N * K): which keys each slot of each block may see in training, by the rules in words."""
    batch, length = rows.input_ids.shape
    blocks = anchors.shape[1]
    visible = torch.zeros(batch, blocks * block_size, length + blocks * block_size, dtype=torch.bool)
    for b in range(batch):
        for n in range(blocks):
            anchor = int(anchors[b, n])
            for slot in range(block_size):
                query = n * block_size + slot
                for key in range(anchor if valid[b, n] else 0):
                    same = rows.document_ids[b, key] == rows.document_ids[b, anchor]
                    distance = anchor + slot - key
                    visible[b, query, key] = bool(same) and (window is None or distance < window)
                for other in range(block_size):
                    seen = other <= slot if causal else True
                    seen = seen and (window is None or abs(slot - other) < window)
                    visible[b, query, length + n * block_size + other] = seen
    return visible
