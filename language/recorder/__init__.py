"""The recorder turns PyTorch's calls on distributed tensors into a tape, with the user's source lines."""
