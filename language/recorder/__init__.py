"""What turns PyTorch's calls into a tape: each ATen call on a distributed tensor, with the user's source line."""
