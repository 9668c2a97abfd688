"""CUDA devices: staging in host memory, GPU-aware MPI, NCCL."""
