"""z-lab's spelling of a drafter's configuration, the only foreign one that `DFlashConfig.from_pretrained` reads.

It is a Qwen3 configuration with a nested `dflash_config`, `block_size` in either place, RoPE flat or nested, and windows and
in-block causality in several forms. SpecForge and Model-Optimizer write it too.
"""

from .configuration_checks import (
    DSPARK,
    DSPARK_SPELLINGS,
    FULL,
    GUESSING,
    PARTS,
    SCALES,
    SLIDING,
    UNSEEN,
    UNSUPPORTED_PARTS,
    checked_rope,
    refuse_unsupported_parts,
    require,
    require_stated,
)

# Switches of other readers, and the one value under which they change nothing.
UNSUPPORTED_SWITCHES = {
    "gating": (False, "gates on the attention (Laguna)"),
    "is_neox_style": (True, "interleaved rotary embeddings"),
    "rope_is_neox_style": (True, "interleaved rotary embeddings"),
    "use_gemma_norm": (False, "norms that multiply by 1 + weight"),
    "use_aux_hidden_state": (True, "no target hidden states"),
    "logit_scale": (1.0, "another scale on the draft logits"),
    "has_embed_tokens": (False, "embeddings of its own"),
    "has_own_lm_head": (False, "an LM head of its own"),
    "quantization_config": (None, "quantized weights"),
}
# The class names under which stacks save a drafter of DFlash or DFlash 2; what it has is stated field by field.
ARCHITECTURES = (
    "DFlashDraftModel", "Qwen3DFlashDraftModel", "DFlashLagunaForCausalLM", "DFlash2DraftModel", "Qwen3DFlash2DraftModel",
)  # fmt: skip


class ZlabReader:
    """Reads one z-lab style dictionary; `top` and `nested` are the two places where a value may stand.

    Args:
        config: the dictionary.
        fields: names of all fields of `DFlashConfig`; those before `rope_parameters` must be stated.
    """

    NESTED_NAMES = {
        "block_size", "mask_token_id", "target_layer_ids", "num_target_layers", "use_swa", "swa_window_size", "causal",
        "causal_head", "input_embedding_scale", "output_multiplier", "final_logit_softcapping", *PARTS,
    }  # fmt: skip

    def __init__(self, config: dict, fields: tuple[str, ...]):
        self.top, self.fields = config, fields
        self.nested = config.get("dflash_config") or {}
        require(
            isinstance(self.nested, dict), f"`dflash_config` must be a dictionary, it is {type(self.nested).__name__}."
        )

    def read(self) -> dict:
        """Return the fields of `DFlashConfig`.

        Raises:
            ValueError: see `read_config_dict`.
        """
        architectures = self.top.get("architectures") or ["DFlashDraftModel"]
        require(
            len(architectures) == 1 and architectures[0] in ARCHITECTURES,
            f"expected one of the architectures {list(ARCHITECTURES)}, found {architectures}. Drafters of other methods are "
            "not supported.",
        )
        for place in (self.top, self.nested):
            self.refuse_dspark(place)
            refuse_unsupported_parts(place)
            for name, (harmless, part) in UNSUPPORTED_SWITCHES.items():
                require(
                    place.get(name) in (None, harmless),
                    f"`{name}` is {place.get(name)!r}: this drafter has {part}, which is not supported. Loading it without "
                    "that part would run, and draft badly.",
                )
        unknown = sorted(set(self.nested) - self.NESTED_NAMES - {*UNSUPPORTED_PARTS, *DSPARK_SPELLINGS})
        require(not unknown, f"`dflash_config` holds {unknown}, which this version does not know.")

        require_stated(self.top, (*self.fields[: self.fields.index("rope_parameters")], *UNSEEN))
        # What says the same in both spellings keeps its name; the rest of a Qwen3 configuration does not touch a drafter.
        read = {name: self.top[name] for name in self.fields if name in self.top and name not in DSPARK}
        read |= {name: self.top[name] for name in ("dtype", "torch_dtype") if name in self.top}
        read |= {"model_type": "dflash", "architectures": ["DFlashDraftModel"], "tie_word_embeddings": False}
        for name in ("block_size", "mask_token_id", "num_target_layers", "target_layer_ids"):
            value = self.one(name, self.top.get(name), self.nested.get(name))
            require(
                value is not None, f"`{name}` is stated neither at the top level nor in `dflash_config`. {GUESSING}"
            )
            read[name] = value
        for name in (*SCALES, *PARTS):
            value = self.one(name, self.top.get(name), self.nested.get(name))
            if value is not None:
                read[name] = value
        read["rope_parameters"] = self.rope()
        read["layer_types"], read["sliding_window"] = self.layer_types()
        read["block_causal"] = self.block_causal(read["layer_types"])
        return read

    @staticmethod
    def refuse_dspark(place: dict):
        """Refuse a DSpark drafter in its writers' spelling: its layout is not in the file, but in who wrote it."""
        found = {name: place[name] for name in DSPARK_SPELLINGS if place.get(name)}
        if place.get("projector_type") == "dspark":
            found["projector_type"] = "dspark"
        require(not found, f"this is a DSpark drafter in another spelling ({found}): `dflash-hub import` reads it.")

    @staticmethod
    def one(name: str, *values):
        """The single value that is stated, or None; two different ones are an error."""
        stated = [value for value in values if value is not None]
        require(all(value == stated[0] for value in stated), f"`{name}` is stated twice and differs: {stated}.")
        return stated[0] if stated else None

    def rope(self) -> dict:
        rope = dict(self.top.get("rope_parameters") or {})
        scaled = "rope_scaling" in self.top or "rope_type" in rope or "type" in rope
        scaling = dict(self.top.get("rope_scaling") or {})
        for name in sorted(set(rope) & set(scaling)):
            self.one(f"rope {name}", rope[name], scaling[name])
        rope |= scaling
        if (partial := self.top.get("partial_rotary_factor")) is not None:
            rope["partial_rotary_factor"] = self.one(
                "partial_rotary_factor", partial, rope.get("partial_rotary_factor")
            )
        theta = self.one("rope_theta", rope.get("rope_theta"), self.top.get("rope_theta"))
        require(
            theta is not None,
            f"the RoPE base is not stated: expected `rope_theta`, or `rope_parameters` with it. {GUESSING}",
        )
        require(
            scaled,
            "how RoPE is scaled is not stated: expected `rope_scaling` (null for not at all), or `rope_parameters` with a "
            f"`rope_type`. {GUESSING}",
        )
        return checked_rope(rope | {"rope_theta": theta})

    def layer_types(self) -> tuple[list[str], int | None]:
        """(layer_types, sliding_window): `layer_types`, or a switch for all layers, Model-Optimizer's `use_swa` or Qwen3's."""
        depth = self.top["num_hidden_layers"]
        layer_types = self.top.get("layer_types")
        use_swa = self.one("use_swa", self.top.get("use_swa"), self.nested.get("use_swa"))
        if use_swa:
            require(
                layer_types is None or set(layer_types) <= {FULL} or set(layer_types) <= {SLIDING},
                f"`use_swa` makes all layers sliding, but `layer_types` is mixed: {layer_types}.",
            )
            layer_types = [SLIDING] * depth
        elif layer_types is None:
            # Qwen3's own rule for what `max_window_layers` leaves to slide is wrong where the last layer is the full one.
            require(
                self.top.get("use_sliding_window") is False,
                f"which layers slide is not stated: expected `layer_types`, or `use_sliding_window: false`. {GUESSING}",
            )
            layer_types = [FULL] * depth
        if SLIDING not in layer_types:
            return list(layer_types), None
        require(
            use_swa or self.top.get("use_sliding_window") is not False,
            "`layer_types` has sliding layers, but `use_sliding_window` is false.",
        )
        swa_window = self.one("swa_window_size", self.nested.get("swa_window_size"), self.top.get("swa_window_size"))
        if use_swa and swa_window is not None:
            return list(layer_types), swa_window
        return list(layer_types), self.one("sliding_window", self.top.get("sliding_window"), swa_window)

    def block_causal(self, layer_types: list[str]) -> list[bool]:
        """One switch for all layers where it is stated; else sliding layers are causal and full ones are not."""
        if self.top.get("block_causal") is not None:
            return self.top["block_causal"]  # our own word, layer by layer
        places = (self.top.get("is_causal"), self.nested.get("causal"), self.nested.get("causal_head"))
        causal = self.one("in-block causality", *places)
        if causal is not None:
            require(
                isinstance(causal, bool), f"in-block causality must be true or false for all layers, got {causal!r}."
            )
            return [causal] * len(layer_types)
        require(
            not self.nested.get("use_swa") and not self.top.get("use_swa"),
            "`use_swa` without `dflash_config.causal`: producers disagree on whether the block is causal then. State it.",
        )
        return [layer_type == SLIDING for layer_type in layer_types]
