"""Models: ordinary `torch.nn` modules, written so that they shard well."""
