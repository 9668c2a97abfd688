"""What is done on CUDA devices: staging, kernels, libraries."""
