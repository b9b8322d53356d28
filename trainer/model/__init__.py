"""The policy and the critic: decoder, attention over packed rows, fused head, adapters, memory."""
