"""RoPE whose frequencies depend on the length of a text."""

DYNAMIC = {
    "rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0},
    "max_position_embeddings": 40,
}


LONG = {
    "rope_parameters": {
        "rope_type": "longrope", "rope_theta": 10000.0, "short_factor": [1.0, 1.1, 1.2, 1.3],
        "long_factor": [2.0, 3.0, 5.0, 7.0], "original_max_position_embeddings": 40,
    },
    "original_max_position_embeddings": 40, "max_position_embeddings": 256,
}  # fmt: skip
