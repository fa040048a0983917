"""Memory of NVIDIA's GPUs between processes of one host, by CUDA IPC.

    driver       the calls of libcuda that are needed, and whether there are any here
    staging      memory of GPUs for links that reach host memory only: copied there and back
    lane         the thread that makes a link's copies, in order
    link         the link: shared memory's, and one-sided copies to and from memory of GPUs
    transport    joining processes, and registering their memory

Tested on a stand-in of the driver (`tests/runtime/transport/cuda`); **not run on a GPU yet**.
"""
