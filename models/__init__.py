"""Reference models, written against the public verbs of `yafsdp_fn` alone.

    from models import llama, qwen3                    # a family: a module of plain functions
    qwen3.loss(qwen3.CONFIGS["qwen3-8b"])

    config = models.CONFIGS["mistral-7b"]              # any family's
    models.of(config).loss(config)
    config, params = models.hf.load(directory)         # of the family that its config.json names

`params(config)` describes the parameters once, `embed`, `block(config)` and `head_loss(config)` compute, `loss(config)`
combines them. No module classes, no state, no knowledge of sharding.
"""

from models import hf
from models.families import CONFIGS, FAMILIES, Family, of

__all__ = ["CONFIGS", "FAMILIES", "Family", "hf", "of"]
