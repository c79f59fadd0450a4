"""QK-clip: attention logits that grow too large shrink the projections that make them."""
