"""PyTorch's optimizers, averaged models and gradient scalers on a mesh."""
