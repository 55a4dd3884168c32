"""UniAttention: attention by one call, `uni_attention.attend`; only a decoder's steps have one of their own.

```
jagged           rows of tokens, one after the other
masks            which keys a query sees, as spans of places
bias             what distance and time add to a score
call             all of that together, and what a backend is
reference        backend: the definition
sdpa, flex       backends: PyTorch's kernels, on padded rows
bucketed         backend for CPUs: PyTorch's kernel on rows of like length; softmax over one's own past
grouped          backend for CPUs: everything, by rows of like length, in threads
triton_backend   backend for CUDA: jagged, forward and backward (its kernels are in `triton_kernels`)
ascend           backend for Ascend NPUs: the jagged kernel of torch_npu
choice           which backend: by rule, by measurement, by name
shared_context   a decoder's step: a context shared by sequences, and codes of their own
counting         operations that a call stands for
```
"""
