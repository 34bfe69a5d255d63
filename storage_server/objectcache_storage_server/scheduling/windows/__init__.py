"""How long the GPU computes on a layer: asked, profiled or learned."""
