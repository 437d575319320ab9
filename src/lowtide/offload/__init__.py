"""Host offload that moves bytes: activations, parameters, optimizer state, and updates inside the backward pass."""

__all__: list[str] = []
