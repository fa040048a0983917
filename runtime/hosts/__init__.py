"""Meshes on several hosts. `service` drives the workers of one host, `remote` is a mesh's connection to several of
them, `attach` finds hosts that run, `attached` is what it gives; `launch` starts hosts, and `doctor` says what a
machine offers."""
