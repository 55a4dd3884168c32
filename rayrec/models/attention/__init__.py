"""UniAttention: every attention of the project by one call, `uni_attention.attend`.

```
jagged      rows of tokens, one after the other          masks   which keys a query sees, as spans of places
bias        what distance and time add to a score        call    all of that together; what a backend is
reference   the definition                               sdpa, flex      PyTorch's kernels, on padded rows
grouped     for CPUs: rows of like length, in threads    triton_backend  for CUDA: jagged, forward and backward
npu         for Ascend: torch_npu's jagged kernel        choice  which of them: by rule, by measurement, by name
```
"""
