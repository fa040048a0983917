"""`monarch.save` and `monarch.load`: checkpoints that the workers write and read.

nest       what of a nest of Python objects is saved, by name
blocks     which worker writes what of each tensor
dcp, safetensors_files     the formats: where in which file a block stands, and what stands around it
places     a checkpoint appears at its path whole, or not at all
saving     the call, and what goes on behind it
catalog    what a checkpoint holds, whatever its format
filling    what a nest wants of it
loading    the call
"""
