"""Pipelines: the stages of a model on groups of workers of their own, which work on microbatches side by side."""

from monarch.stdlib.pipeline.running import Pipeline, pipeline
from monarch.stdlib.pipeline.schedules import order

__all__ = ["Pipeline", "order", "pipeline"]
