"""The loop IR of generated kernels: nests of affine loops as data, as text, checked, and run by torch for the truth."""
