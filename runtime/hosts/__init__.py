"""Meshes on several hosts. `service` drives the workers of one host, `remote` is a mesh's connection to several of
them, `attach` finds hosts that run, `attached` are its results; `launch` starts hosts, and `doctor` lists what a
machine offers."""
