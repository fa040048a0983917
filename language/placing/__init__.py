"""How tensors and modules come to a mesh."""
