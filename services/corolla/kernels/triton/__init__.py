"""Triton kernels of transformer blocks on a GPU, for which a row's bits do not depend on the other rows of a call.

`device_code` has the kernels, `launches` runs them on tensors, `compilation` compiles them before a device is there.
Only these modules import triton, which comes with torch's build for CUDA; `compilation.missing` says whether it is
here.
"""
