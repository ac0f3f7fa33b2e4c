"""Speculative decoding with a DFlash drafter, as a custom generate method. The loop is the drafter's own."""


def generate(model, assistant_model=None, **kwargs):
    """`target.generate(custom_generate=<this repository>, trust_remote_code=True, assistant_model=drafter, ...)`.

    Hands over to the drafter that it is given; arguments and result are those of `generate`.
    """
    if getattr(getattr(assistant_model, "config", None), "model_type", None) != "dflash":
        raise ValueError(
            "custom_generate of a DFlash repository needs a DFlash drafter as `assistant_model`, got "
            f"{type(assistant_model).__name__}. Load it with AutoModel.from_pretrained(..., trust_remote_code=True)."
        )
    return model.generate(assistant_model=assistant_model, **kwargs)
