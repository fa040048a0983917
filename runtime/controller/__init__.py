"""The controller's side of a mesh. `state` decides, without I/O; `placing` cuts tensors for the workers, `replies`
keeps what workers send up, `connection` writes commands to the workers of this host, and `executor` is what `language`
calls."""
