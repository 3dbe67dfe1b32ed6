"""Streaming: engines, device slots, the streamer, binding of weights, landing of gradients."""
