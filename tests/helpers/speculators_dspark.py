"""Load our export with the `speculators` package's DSpark class, and let it save the drafter itself.

.venv-speculators/bin/python tests/helpers/speculators_dspark.py FOLDER SAVED_FOLDER
"""

import sys

import torch
from speculators import SpeculatorModelConfig
from speculators.models.dspark import DSparkDraftModel

folder, saved = sys.argv[1:]
config = SpeculatorModelConfig.from_pretrained(folder)
config.transformer_layer_config._attn_implementation = "eager"
DSparkDraftModel.from_pretrained(folder, config=config, dtype=torch.float32).save_pretrained(saved)
