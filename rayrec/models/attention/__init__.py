"""UniAttention: every attention of the project by one call, `uni_attention.attend`.

```
jagged           rows of tokens, one after the other
masks            which keys a query sees, as spans of places
bias             what distance and time add to a score
call             all of that together, and what a backend is
reference        backend: the definition
sdpa, flex       backends: PyTorch's kernels, on padded rows
grouped          backend for CPUs: rows of like length, in threads
triton_backend   backend for CUDA: jagged, forward and backward (its kernels are in `triton_kernels`)
ascend           backend for Ascend NPUs: the jagged kernel of torch_npu
choice           which backend: by rule, by measurement, by name
```
"""
