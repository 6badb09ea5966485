"""Triton kernels of transformer blocks on a GPU, for which a row's bits do not depend on the other rows of a call.

`device_code` has the kernels, `launches` runs them on tensors, `compilation` compiles them before a device is there.
Only these modules import triton, which comes with torch's build for CUDA; `compilation.missing` says whether it is
here.
"""

import os

# Triton gives tiles of 64 rows or more another kind of tensor core instruction than smaller ones on compute capability
# 10.0, and it is not known whether both round alike. So all tiles of a kernel get the instructions of small ones.
os.environ.setdefault("DISABLE_MMA_V5", "1")
