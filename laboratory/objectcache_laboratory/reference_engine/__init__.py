"""A small, exact prefill engine in numpy: the honest consumer of delivered KV.

A decoder-only transformer (RMSNorm, RoPE, grouped-query attention, SwiGLU) over bytes, with seeded
random weights. It says nothing worth reading, but every byte of KV decides its logits, so it shows
whether a prefix that went through the store computes what the same prefix computes locally.
"""
