"""Layers out of host memory into a GPU's blocks and back, beside what the GPU computes.

Nothing here imports CUDA until a `CudaDevice` is opened. Read `pieces` and `device`, then `line`,
`layer_load` and `copier`.
"""
