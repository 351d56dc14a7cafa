"""Reference models, written against the public verbs of `yafsdp_fn` alone.

A model is a package of plain functions: `params(config)` describes the parameters once, `embed`, `block(config)` and
`head_loss(config)` compute, `loss(config)` puts them together. No module classes, no state, no knowledge of sharding.
"""
