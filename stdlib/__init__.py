"""The library written in the language: models, layouts for them, and data."""
